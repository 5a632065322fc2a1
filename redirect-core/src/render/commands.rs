//! A plan as input for the programs that would apply it, and commands of `ip`.

use crate::{
    options::NativeForm,
    plan::RulePlan,
    values::{Family, PASSTHROUGH_V6},
};
use alloc::{format, string::String, vec::Vec};
use core::fmt::Display;

impl RulePlan {
    /// Input for nft where a form is given, otherwise for iptables-restore, one family after the other; the commands for routing are
    /// comments.
    #[must_use]
    pub fn program_text(&self, native: Option<NativeForm>) -> String {
        let of = |family: &Family| format!("# {family}\n{}", self.rules(*family).restore_text());
        let rules = native
            .map_or_else(|| self.families().iter().map(of).collect(), |form: NativeForm| self.nft_text(form));
        routing_commands(self).iter().fold(rules, |text, command| format!("{text}# {command}\n"))
    }
}

/// The commands for what no table holds.
pub(super) fn routing_commands(plan: &RulePlan) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(routes) = plan.policy_routes() {
        for family in routes.families() {
            let priority = routes.priority().map(|priority| format!(" pref {priority}")).unwrap_or_default();
            let rule = ip_rule("add", *family, routes.mark(), routes.table());
            all.push(format!("{rule}{priority}"));
            all.push(ip_route("add", *family, routes.table()));
        }
    }
    all.extend(plan.loopback_address().map(|_| ip_address("add")));
    all
}

/// The command of this verb for a policy rule.
#[must_use]
pub fn ip_rule(verb: &str, family: Family, mark: impl Display, table: impl Display) -> String {
    format!("ip {} rule {verb} fwmark {mark} lookup {table}", option(family))
}

/// The command of this verb for a plan's route.
#[must_use]
pub fn ip_route(verb: &str, family: Family, table: impl Display) -> String {
    format!("ip {} route {verb} local default dev lo table {table}", option(family))
}

/// The command of this verb for the address of the proxy's connections to the application.
#[must_use]
pub fn ip_address(verb: &str) -> String {
    format!("ip -6 addr {verb} {PASSTHROUGH_V6}/128 dev lo")
}

const fn option(family: Family) -> &'static str {
    match family {
        Family::V4 => "-4",
        Family::V6 => "-6",
    }
}
