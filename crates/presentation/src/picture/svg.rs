//! Pictures as SVG. Boxes lie in layers: each behind all those that lead to it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Direction, Graph, Node, entities};

/// The size of a character of the font, and of a line, in pixels.
const CHARACTER: usize = 7;
const LINE: usize = 15;
/// Between a box and its text.
const PADDING: usize = 8;
/// Between boxes of a layer, and between layers.
const GAP: usize = 20;
const BETWEEN: usize = 60;
/// No way is longer: the kernel allows sixteen jumps, and a packet's way has fewer boxes.
const MOST_LAYERS: usize = 64;

/// Where a box lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Area {
    x: usize,
    y: usize,
    width: usize,
    height: usize,
}

impl Area {
    fn of(node: &Node) -> Self {
        let longest =
            node.lines.iter().chain([&node.title]).map(|line| line.chars().count()).max().unwrap_or(0);
        let lines = node.lines.len().saturating_add(1);
        Self { x: 0, y: 0, width: longest * CHARACTER + 2 * PADDING, height: lines * LINE + 2 * PADDING }
    }
}

/// The picture.
pub(super) fn drawn(graph: &Graph) -> String {
    let areas = laid_out(graph);
    let far = |of: fn(&Area) -> usize| areas.values().map(of).max().unwrap_or(0) + GAP;
    let (width, height) = (far(|area| area.x + area.width), far(|area| area.y + area.height));
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"monospace\" font-size=\"11\">\n<defs><marker id=\"end\" markerWidth=\"8\" markerHeight=\"8\" refX=\"7\" refY=\"4\" \
         orient=\"auto\"><path d=\"M0,0 L8,4 L0,8 z\"/></marker></defs>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (from, to) in &graph.edges {
        if let (Some(from), Some(to)) = (areas.get(from.as_str()), areas.get(to.as_str())) {
            line(graph.direction, *from, *to, &mut text);
        }
    }
    for node in &graph.nodes {
        if let Some(area) = areas.get(node.id.as_str()) {
            boxed(node, *area, &mut text);
        }
    }
    text + "</svg>\n"
}

/// Every box at its place.
fn laid_out(graph: &Graph) -> BTreeMap<&str, Area> {
    let layers = layers(graph);
    let mut areas = BTreeMap::new();
    let mut along = GAP;
    for layer in 0..MOST_LAYERS {
        let nodes = graph.nodes.iter().filter(|node| layers.get(node.id.as_str()) == Some(&layer));
        let (mut across, mut deepest) = (GAP, 0);
        for node in nodes {
            let mut area = Area::of(node);
            let (deep, wide) = match graph.direction {
                Direction::Right => {
                    (area.x, area.y) = (along, across);
                    (area.width, area.height)
                }
                Direction::Down => {
                    (area.x, area.y) = (across, along);
                    (area.height, area.width)
                }
            };
            deepest = deepest.max(deep);
            across += wide + GAP;
            areas.insert(node.id.as_str(), area);
        }
        if deepest > 0 {
            along += deepest + BETWEEN / if graph.direction == Direction::Down { 2 } else { 1 };
        }
    }
    areas
}

/// The layer of each box: one more than that of the last one that leads to it.
fn layers(graph: &Graph) -> BTreeMap<&str, usize> {
    let mut layers: BTreeMap<&str, usize> = graph.nodes.iter().map(|node| (node.id.as_str(), 0)).collect();
    for _ in 0..graph.nodes.len().min(MOST_LAYERS) {
        for (from, to) in &graph.edges {
            let before = layers.get(from.as_str()).copied().unwrap_or(0);
            if let Some(layer) = layers.get_mut(to.as_str()) {
                *layer = (*layer).max(before + 1).min(MOST_LAYERS - 1);
            }
        }
    }
    layers
}

fn boxed(node: &Node, area: Area, text: &mut String) {
    let Area { x, y, width, height } = area;
    let border = if node.is_hook { 2 } else { 1 };
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"3\" fill=\"#f7f7f7\" stroke=\"black\" stroke-width=\"{border}\"/>"
    );
    let lines = [(&node.title, "bold")].into_iter().chain(node.lines.iter().map(|line| (line, "normal")));
    for (number, (line, weight)) in lines.enumerate() {
        let (x, y) = (x + PADDING, y + PADDING + (number + 1) * LINE - 4);
        let _ = writeln!(
            text,
            "<text x=\"{x}\" y=\"{y}\" font-weight=\"{weight}\" xml:space=\"preserve\">{}</text>",
            entities(line)
        );
    }
}

fn line(direction: Direction, from: Area, to: Area, text: &mut String) {
    let (start, end, bend) = match direction {
        Direction::Right => {
            let start = (from.x + from.width, from.y + from.height / 2);
            let end = (to.x, to.y + to.height / 2);
            let middle = usize::midpoint(start.0, end.0);
            (start, end, [(middle, start.1), (middle, end.1)])
        }
        Direction::Down => {
            let (start, end) = ((from.x + GAP, from.y + from.height), (to.x + GAP, to.y));
            (start, end, [start, end])
        }
    };
    let [one, two] = bend;
    let _ = writeln!(
        text,
        "<path d=\"M{},{} C{},{} {},{} {},{}\" fill=\"none\" stroke=\"black\" marker-end=\"url(#end)\"/>",
        start.0, start.1, one.0, one.1, two.0, two.1, end.0, end.1
    );
}

#[cfg(test)]
mod tests {
    use super::super::Graph;
    use super::*;
    use redirect_core::Redirect;

    #[test]
    fn no_box_lies_on_another_and_every_way_leads_on() {
        let tproxy = Redirect::sidecar(redirect_core::Families::V4).tproxy(redirect_core::Tproxy::default());
        for redirect in [Redirect::sidecar(redirect_core::Families::V4), tproxy] {
            let graph = Graph::of(&redirect.build().expect("is valid").plan());
            let areas = laid_out(&graph);
            assert_eq!(areas.len(), graph.nodes.len());
            for (name, one) in &areas {
                for (other, two) in areas.iter().filter(|(other, _)| *other != name) {
                    let apart = one.x + one.width < two.x
                        || two.x + two.width < one.x
                        || one.y + one.height < two.y
                        || two.y + two.height < one.y;
                    assert!(apart, "{name} {one:?} and {other} {two:?}");
                }
            }
            for (from, to) in &graph.edges {
                assert!(areas[from.as_str()].x < areas[to.as_str()].x, "{from} leads to {to}");
            }
        }
    }
}
