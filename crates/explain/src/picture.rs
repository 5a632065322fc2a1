//! Pictures: of a plan's chains, which of them sends packets to which; and of the way of one packet, hook by hook.

mod svg;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use packet_trace::{Detail, Trace};
use redirect_core::plan::PlannedRule;
use redirect_core::render::rule_text;
use redirect_core::rule::{Chain, Scope, Table, Target};
use redirect_core::{Family, RulePlan};

use crate::printable::harmless;

/// A language of pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// For Graphviz.
    Dot,
    /// For Markdown pages.
    Mermaid,
    /// For everything that shows pictures; no other program is needed.
    Svg,
}

/// Which way a picture leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Right,
    Down,
}

/// A chain with its rules, or a hook with what a packet meets there, drawn as a box.
struct Node {
    id: String,
    title: String,
    lines: Vec<String>,
    is_hook: bool,
}

/// Chains and the jumps between them, or hooks one after the other.
struct Graph {
    direction: Direction,
    nodes: Vec<Node>,
    edges: BTreeSet<(String, String)>,
}

impl Graph {
    fn of(plan: &RulePlan) -> Self {
        let mut graph = Self { direction: Direction::Right, nodes: Vec::new(), edges: BTreeSet::new() };
        for (table, chains) in plan.merged_rules() {
            graph.table(table, &chains);
        }
        graph
    }

    /// A box for each line of the trace that is not indented, with what is indented below it: so the picture shows what the text does.
    fn of_trace(trace: &Trace, detail: Detail) -> Self {
        let mut nodes: Vec<Node> = Vec::new();
        for line in trace.text(detail).lines() {
            let is_below = line.starts_with(' ') || line.starts_with("because ");
            match nodes.last_mut().filter(|_| is_below) {
                Some(node) => node.lines.push(line.strip_prefix("  ").unwrap_or(line).to_owned()),
                None => nodes.push(Node {
                    id: format!("step_{}", nodes.len()),
                    title: line.to_owned(),
                    lines: Vec::new(),
                    is_hook: nodes.is_empty() || line.starts_with("ends at"),
                }),
            }
        }
        let edges = nodes.iter().zip(nodes.iter().skip(1)).map(|(from, to)| (from.id.clone(), to.id.clone()));
        Self { direction: Direction::Down, edges: edges.collect(), nodes }
    }

    fn written(&self, language: Language) -> String {
        match language {
            Language::Dot => self.dot(),
            Language::Mermaid => self.mermaid(),
            Language::Svg => svg::drawn(self),
        }
    }

    fn table(&mut self, table: Table, chains: &BTreeMap<Chain, Vec<&PlannedRule>>) {
        for (chain, rules) in chains {
            let id = id(table, chain);
            let title = format!("{} {}", table.name(), chain.name());
            let lines = rules.iter().map(|planned| line(planned)).collect();
            self.nodes.push(Node { id: id.clone(), title, lines, is_hook: matches!(chain, Chain::Hook(_)) });
            let jumps = rules.iter().filter_map(|planned| {
                if let Target::Jump(to) = &planned.rule().target { Some(to) } else { None }
            });
            self.edges.extend(jumps.map(|to| (id.clone(), self::id(table, to))));
        }
    }
}

fn id(table: Table, chain: &Chain) -> String {
    let name = format!("{}_{}", table.name(), chain.name());
    name.chars().map(|character| if character.is_ascii_alphanumeric() { character } else { '_' }).collect()
}

fn line(planned: &PlannedRule) -> String {
    let family = match planned.scope() {
        Scope::Every => "",
        Scope::Only(Family::V4) => "IPv4: ",
        Scope::Only(Family::V6) => "IPv6: ",
    };
    format!("{family}{}", rule_text(planned.rule()))
}

/// A plan's chains.
#[must_use]
pub fn of_plan(plan: &RulePlan, language: Language) -> String {
    Graph::of(plan).written(language)
}

/// The way of a packet. What others call their rules is made harmless.
#[must_use]
pub fn of_trace(trace: &Trace, detail: Detail, language: Language) -> String {
    let mut graph = Graph::of_trace(trace, detail);
    for node in &mut graph.nodes {
        node.title = harmless(&node.title);
        node.lines.iter_mut().for_each(|line| *line = harmless(line));
    }
    graph.written(language)
}

impl Graph {
    /// For Graphviz: `redirectctl plan --format dot | dot -Tsvg`.
    fn dot(&self) -> String {
        let direction = match self.direction {
            Direction::Right => "LR",
            Direction::Down => "TB",
        };
        let mut text = format!(
            "digraph redirection {{\n  rankdir={direction};\n  node [shape=box, fontname=monospace, fontsize=10];\n"
        );
        for node in &self.nodes {
            // A label's lines end in \l, which aligns them on the left.
            let lines: String = node.lines.iter().map(|line| format!("{}\\l", escaped(line))).collect();
            let style = if node.is_hook { ", style=bold" } else { "" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {} [label=\"{}\\n{lines}\"{style}];", node.id, escaped(&node.title));
        }
        for (from, to) in &self.edges {
            let _ = writeln!(text, "  {from} -> {to};");
        }
        text.push_str("}\n");
        text
    }

    /// For Mermaid, as Markdown pages show it.
    fn mermaid(&self) -> String {
        let direction = match self.direction {
            Direction::Right => "LR",
            Direction::Down => "TB",
        };
        let mut text = format!("flowchart {direction}\n");
        for node in &self.nodes {
            let lines: String = node.lines.iter().map(|line| format!("<br/>{}", entities(line))).collect();
            let (open, close) = if node.is_hook { ("([", "])") } else { ("[", "]") };
            let _ = writeln!(text, "  {}{open}\"{}{lines}\"{close}", node.id, entities(&node.title));
        }
        for (from, to) in &self.edges {
            let _ = writeln!(text, "  {from} --> {to}");
        }
        text
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

fn entities(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}
