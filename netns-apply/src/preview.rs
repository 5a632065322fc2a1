//! What cleaning up would remove, as text: nothing is locked or changed.

use crate::{
    ApplyError, ApplyOptions,
    backend::{Means, Observed},
    routes::{RouteStep, Routing},
};
use redirect_core::{Family, change::Change, options::Variant, plan::FamilyRules, render};
use std::fmt::Write;

/// What [`cleanup`](crate::cleanup) would remove from the calling thread's network namespace: input for the programs that
/// would remove it, and the commands that would remove routing. Empty where there is nothing to remove.
///
/// # Errors
/// The namespace cannot be looked at.
pub fn cleanup_preview(options: &ApplyOptions) -> Result<String, ApplyError> {
    let mut means = Means::open(&options.programs, options.backend)?;
    Ok(text(&Observed::now(&mut means)?, options))
}

fn text(observed: &Observed, options: &ApplyOptions) -> String {
    let mut text = String::new();
    for variant in [Variant::Legacy, Variant::Nft] {
        for family in Family::BOTH {
            let change = Change::between(observed.rules(variant).of(family), &FamilyRules::default());
            if !change.is_empty() {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "# {family} (iptables-{})", variant.name());
                text += &render::change_text(&change);
            }
        }
    }
    if !observed.native.is_empty() {
        text += "# native nftables\n";
        text += &render::nft_remove();
    }
    // Rules go before the routes they use.
    for step in stale_routing(observed, options).beyond(&Routing::default()).into_iter().rev() {
        let _ = writeln!(text, "# {}", command(step));
    }
    text
}

/// As a run of cleaning up has it: without rules of the mesh, only the routing that the settings name is its own.
fn stale_routing(observed: &Observed, options: &ApplyOptions) -> Routing {
    let mut ours = observed.routing.clone();
    if !observed.is_redirected() {
        let named = options.tproxy;
        ours.rules.retain(|(_, mark, table)| named.is_some_and(|t| (t.mark, t.table) == (*mark, *table)));
        ours.routes.retain(|(_, table)| named.is_some_and(|t| t.table == *table));
    }
    ours
}

/// The step as a command that takes it back.
fn command(step: RouteStep) -> String {
    let option = |family| match family {
        Family::V4 => "-4",
        Family::V6 => "-6",
    };
    match step {
        RouteStep::Rule(family, mark, table) => {
            format!("ip {} rule del fwmark {mark} lookup {table}", option(family))
        }
        RouteStep::Route(family, table) => {
            format!("ip {} route del local default dev lo table {table}", option(family))
        }
        RouteStep::LoopbackAddress => {
            format!("ip -6 addr del {}/128 dev lo", redirect_core::values::PASSTHROUGH_V6)
        }
    }
}
