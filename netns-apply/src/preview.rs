//! What cleaning up would remove, as text: nothing is locked or changed.

use crate::{ApplyError, ApplyOptions, handles::Handles, observe::NamespaceState, pause::deadline};
use netfilter_state::{
    change::IptablesChange,
    netlink::kept::KeptTable,
    routing::RoutingItem,
    steps::{Goal, RulesIn, Step},
};
use redirect_core::{Family, RulePlan, options::Variant, plan::DataPlane};
use std::fmt::Write;

/// What [`cleanup`](crate::cleanup) would remove from the calling thread's network namespace: input for the programs that
/// would remove it, and the commands that would remove routing. Empty if nothing needs removal.
///
/// # Errors
/// The namespace cannot be inspected.
pub fn cleanup_preview(options: &ApplyOptions) -> Result<String, ApplyError> {
    let plan = RulePlan::empty();
    let mut handles = Handles::open(options, &plan)?;
    let mut seen = NamespaceState::now(&mut handles, deadline(options.patience))?;
    seen.state.routing = handles.routes.place(&plan, seen.state.routing)?.found;
    let goal = Goal {
        tproxy: options.tproxy,
        nft_in_transaction: handles.nft_in_transaction,
        ..Goal::new(&plan, RulesIn::Iptables(Variant::Nft))
    };
    let mut text: String = goal.steps_from(&seen.state).iter().map(text).collect();
    if seen.keeps_connections() {
        text += &format!("# connections that are kept\ndelete table inet {}\n", KeptTable::NAME);
    }
    Ok(text)
}

fn text(step: &Step) -> String {
    match step {
        Step::Restore(variant, family, change) => changes(*variant, *family, change),
        Step::Transaction(transaction) => {
            let rules = transaction.iptables.iter();
            let mut text: String =
                rules.map(|(family, change)| changes(Variant::Nft, *family, change)).collect();
            if transaction.native.is_some() {
                text += "# native nftables\n";
                text += &DataPlane::nft_removal();
            }
            text
        }
        Step::RemoveRouting(found) => format!("# {}\n", command(found.item)),
        // What is marked for removal is removed below; cleaning up adds nothing and has nothing to wait for.
        Step::MarkForRemoval(_) | Step::AddRouting(_) | Step::Grace | Step::ForgetClosed => String::new(),
    }
}

fn changes(variant: Variant, family: Family, change: &IptablesChange) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# {family} (iptables-{})", variant.name());
    text + &change.restore_text()
}

/// The command that removes an item.
fn command(item: RoutingItem) -> String {
    match item {
        RoutingItem::Rule(family, mark, table) => table.rule_command("del", family, mark),
        RoutingItem::Route(family, table) => table.route_command("del", family),
        RoutingItem::LoopbackAddress => RulePlan::address_command("del"),
    }
}
