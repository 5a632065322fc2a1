//! A plan as input for the programs that would apply it, and commands of `ip`.

use crate::{
    options::NativeForm,
    plan::RulePlan,
    values::{Family, MaskedMark, RouteTable},
};
use alloc::{format, string::String, vec::Vec};

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
            let rule = routes.table().rule_command("add", *family, routes.mark());
            all.push(format!("{rule}{priority}"));
            all.push(routes.table().route_command("add", *family));
        }
    }
    all.extend(plan.loopback_address().map(|_| RulePlan::address_command("add")));
    all
}

impl RouteTable {
    /// The command of this verb for a policy rule that leads here.
    #[must_use]
    pub fn rule_command(self, verb: &str, family: Family, mark: MaskedMark) -> String {
        format!("ip {} rule {verb} fwmark {mark} lookup {self}", option(family))
    }

    /// The command of this verb for a plan's route.
    #[must_use]
    pub fn route_command(self, verb: &str, family: Family) -> String {
        format!("ip {} route {verb} local default dev lo table {self}", option(family))
    }
}

impl RulePlan {
    /// The command of this verb for the address of the proxy's connections to the application.
    #[must_use]
    pub fn address_command(verb: &str) -> String {
        let address = Family::PASSTHROUGH_V6;
        format!("ip -6 addr {verb} {address}/128 dev lo")
    }
}

const fn option(family: Family) -> &'static str {
    match family {
        Family::V4 => "-4",
        Family::V6 => "-6",
    }
}
