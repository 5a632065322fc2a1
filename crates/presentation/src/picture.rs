//! Pictures: of a plan's chains, which of them sends packets to which; and of the way of one packet, hook by hook. In SVG, which everything shows that shows pictures.

mod svg;

use std::collections::{BTreeMap, BTreeSet};

use packet_trace::{Detail, Trace};
use redirect_core::RulePlan;
use redirect_core::plan::PlannedRule;
use redirect_core::rule::{Chain, Table, Target};

use crate::printable::harmless;

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

    fn table(&mut self, table: Table, chains: &BTreeMap<Chain, Vec<&PlannedRule>>) {
        for (chain, rules) in chains {
            let id = id(table, chain);
            let title = format!("{} {}", table.name(), chain.name());
            let lines = rules.iter().map(|planned| planned.scoped_text()).collect();
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

/// A plan's chains.
#[must_use]
pub fn of_plan(plan: &RulePlan) -> String {
    svg::drawn(&Graph::of(plan))
}

/// The way of a packet. What others call their rules is made harmless.
#[must_use]
pub fn of_trace(trace: &Trace, detail: Detail) -> String {
    let mut graph = Graph::of_trace(trace, detail);
    for node in &mut graph.nodes {
        node.title = harmless(&node.title);
        node.lines.iter_mut().for_each(|line| *line = harmless(line));
    }
    svg::drawn(&graph)
}

fn entities(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_shows_where_chains_lead() {
        let plan =
            redirect_core::Redirect::sidecar(redirect_core::Families::V4).build().expect("is valid").plan();
        let graph = Graph::of(&plan);
        for (from, to) in [
            ("nat_OUTPUT", "nat_ISTIO_OUTPUT"),
            ("nat_PREROUTING", "nat_ISTIO_INBOUND"),
            ("nat_ISTIO_OUTPUT", "nat_ISTIO_REDIRECT"),
        ] {
            assert!(graph.edges.contains(&(from.to_owned(), to.to_owned())), "{from} leads to {to}");
        }
    }
}
