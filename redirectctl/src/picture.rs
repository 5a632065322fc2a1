//! A plan as a picture of its chains: which chain sends packets to which, and where they end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use redirect_core::plan::PlannedRule;
use redirect_core::render::rule_text;
use redirect_core::rule::{Chain, Scope, Table, Target};
use redirect_core::{Family, RulePlan};

/// A chain, drawn as a box with its rules.
struct Node {
    id: String,
    title: String,
    lines: Vec<String>,
    is_hook: bool,
}

/// Chains and the jumps between them.
struct Graph {
    nodes: Vec<Node>,
    edges: BTreeSet<(String, String)>,
}

impl Graph {
    fn of(plan: &RulePlan) -> Self {
        let mut graph = Self { nodes: Vec::new(), edges: BTreeSet::new() };
        for (table, chains) in plan.merged_rules() {
            graph.table(table, &chains);
        }
        graph
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

/// For Graphviz: `redirectctl plan --format dot | dot -Tsvg`.
#[must_use]
pub fn dot(plan: &RulePlan) -> String {
    let graph = Graph::of(plan);
    let mut text = String::from(
        "digraph redirection {\n  rankdir=LR;\n  node [shape=box, fontname=monospace, fontsize=10];\n",
    );
    for node in &graph.nodes {
        // A label's lines end in \l, which aligns them on the left.
        let lines: String = node.lines.iter().map(|line| format!("{}\\l", escaped(line))).collect();
        let style = if node.is_hook { ", style=bold" } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {} [label=\"{}\\n{lines}\"{style}];", node.id, escaped(&node.title));
    }
    for (from, to) in &graph.edges {
        let _ = writeln!(text, "  {from} -> {to};");
    }
    text.push_str("}\n");
    text
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

/// For Mermaid, as Markdown pages show it.
#[must_use]
pub fn mermaid(plan: &RulePlan) -> String {
    let graph = Graph::of(plan);
    let mut text = String::from("flowchart LR\n");
    for node in &graph.nodes {
        let lines: String = node.lines.iter().map(|line| format!("<br/>{}", entities(line))).collect();
        let (open, close) = if node.is_hook { ("([", "])") } else { ("[", "]") };
        let _ = writeln!(text, "  {}{open}\"{}{lines}\"{close}", node.id, entities(&node.title));
    }
    for (from, to) in &graph.edges {
        let _ = writeln!(text, "  {from} --> {to}");
    }
    text
}

fn entities(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}
