//! Which modules depend on which, between siblings, and in what circles.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{ModulePath, Modules};

/// Sibling modules of which each depends on each, directly or indirectly.
#[derive(Debug, PartialEq, Eq)]
pub struct Circle {
    /// Their paths, in order.
    pub modules: Vec<String>,
    /// The dependencies between them, as files have them.
    pub reasons: Vec<String>,
}

/// A dependency between two siblings, and which modules below them it comes from.
type Edges = BTreeMap<(ModulePath, ModulePath), BTreeSet<(ModulePath, ModulePath)>>;

/// All circles of a crate.
pub fn circles(modules: &Modules) -> Vec<Circle> {
    let edges = edges(modules);
    let mut next: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> = BTreeMap::new();
    for (from, to) in edges.keys() {
        next.entry(from).or_default().insert(to);
    }
    let reached: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
        next.keys().map(|from| (*from, reached(from, &next))).collect();
    let is_mutual = |one: &ModulePath, other: &ModulePath| {
        [(one, other), (other, one)]
            .iter()
            .all(|(from, to)| reached.get(from).is_some_and(|all| all.contains(to)))
    };
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for start in next.keys().filter(|start| is_mutual(start, start)) {
        if seen.contains(start) {
            continue;
        }
        let members: BTreeSet<&ModulePath> =
            next.keys().filter(|other| is_mutual(start, other)).copied().collect();
        seen.extend(members.iter().copied());
        let within = edges.iter().filter(|((from, to), _)| members.contains(from) && members.contains(to));
        let reasons = within
            .flat_map(|(_, causes)| causes)
            .map(|(from, to)| format!("  {} uses {}", name(from), name(to)));
        circles.push(Circle {
            reasons: reasons.collect(),
            modules: members.into_iter().map(|path| name(path)).collect(),
        });
    }
    circles
}

fn name(path: &[String]) -> String {
    path.join("::")
}

fn reached<'a>(
    from: &'a ModulePath,
    next: &BTreeMap<&'a ModulePath, BTreeSet<&'a ModulePath>>,
) -> BTreeSet<&'a ModulePath> {
    let mut found = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        for after in next.get(module).into_iter().flatten() {
            if found.insert(*after) {
                open.push(after);
            }
        }
    }
    found
}

fn edges(modules: &Modules) -> Edges {
    let mut edges = Edges::new();
    for (from, module) in modules {
        for path in &module.uses {
            let to = owner(path, modules);
            if let Some(siblings) = lifted(from, &to) {
                edges.entry(siblings).or_default().insert((from.clone(), to));
            }
        }
    }
    edges
}

/// The module that has what a path names. A re-export is followed; no chain of them is longer than the bound.
fn owner(path: &[String], modules: &Modules) -> ModulePath {
    let mut path = path.to_vec();
    for _ in 0..8 {
        let depth = (0..=path.len()).rev().find(|depth| modules.contains_key(&path[..*depth])).unwrap_or(0);
        let (module, rest) = path.split_at(depth);
        let import = rest.first().and_then(|name| modules.get(module)?.imports.get(name));
        match import {
            Some(target) if *target != path => path = [target.as_slice(), &rest[1..]].concat(),
            Some(_) | None => return module.to_vec(),
        }
    }
    path
}

/// The two children of the closest common ancestor; none where one module is the other's ancestor.
fn lifted(from: &[String], to: &[String]) -> Option<(ModulePath, ModulePath)> {
    let common = from.iter().zip(to).take_while(|(one, other)| one == other).count();
    (common < from.len() && common < to.len()).then(|| (from[..=common].to_vec(), to[..=common].to_vec()))
}
