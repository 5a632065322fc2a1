//! All tables of a namespace, whoever made them, read from the kernel's answers.

use super::{
    abi::{self, attribute, family, kind},
    seen,
    wire::{Attribute, Message},
};
use crate::{
    interference::ruleset::{Api, Base, Ruleset, TableFamily, TableName, TableState},
    rule::Hook,
};
use alloc::borrow::ToOwned;

/// The policy to drop (`NF_DROP`).
const POLICY_DROP: u32 = 0;
/// A table is dormant (`NFT_TABLE_F_DORMANT`).
const DORMANT: u32 = 1;
impl Ruleset {
    /// Takes in one message of an answer: a table, a chain or a rule of iptables' families or inet.
    pub fn take(&mut self, message: &Message<'_>) {
        // What cannot be read is of no table, or of none that packets of IP meet.
        let _ = match message.kind {
            kind::NEW_TABLE => self.take_table(message),
            kind::NEW_CHAIN => self.take_chain(message),
            kind::NEW_RULE => self.take_rule(message),
            _ => None,
        };
    }

    fn table_of(&mut self, message: &Message<'_>, name: u16) -> Option<&mut TableState> {
        let family = match message.family {
            family::IPV4 => TableFamily::Ip,
            family::IPV6 => TableFamily::Ip6,
            family::INET => TableFamily::Inet,
            _ => return None,
        };
        let name = message.attributes().find(name)?.text()?.to_owned();
        Some(self.table(TableName { api: Api::NfTables, family, name }))
    }

    fn take_table(&mut self, message: &Message<'_>) -> Option<()> {
        let flags = message.attributes().find(attribute::table::FLAGS).and_then(Attribute::u32);
        let table = self.table_of(message, attribute::table::NAME)?;
        table.dormant = flags.is_some_and(|flags| flags & DORMANT != 0);
        Some(())
    }

    fn take_chain(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let name = attributes.find(attribute::chain::NAME)?.text()?.to_owned();
        let base = attributes.find(attribute::chain::HOOK).and_then(|hook| {
            let hook = hook.attributes();
            let number = hook.find(attribute::hook::NUMBER)?.u32()?;
            let policy = attributes.find(attribute::chain::POLICY).and_then(Attribute::u32);
            let kind = attributes.find(attribute::chain::TYPE)?.text()?;
            Some(Base {
                hook: Hook::ALL.iter().copied().find(|hook| abi::hook_number(*hook) == number)?,
                priority: hook.find(attribute::hook::PRIORITY)?.u32()?.cast_signed(),
                is_nat: kind == "nat",
                drops: policy == Some(POLICY_DROP),
                reroutes: kind == "route",
            })
        });
        let table = self.table_of(message, attribute::chain::TABLE)?;
        table.chains.entry(name).or_default().base = base;
        Some(())
    }

    fn take_rule(&mut self, message: &Message<'_>) -> Option<()> {
        let attributes = message.attributes();
        let chain = attributes.find(attribute::rule::CHAIN)?.text()?.to_owned();
        let list = attributes.find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
        let rule = seen::rule(list.attributes());
        let table = self.table_of(message, attribute::rule::TABLE)?;
        table.chains.entry(chain).or_default().rules.push(rule);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Family, Redirect, RulePlan,
        change::Change,
        interference::{
            Effect, Pod, find,
            ruleset::{Condition, Counter},
        },
        netlink::{Batch, Messages, NativeForm, NativeState, Observed},
        rule::{Chain, Target},
        settings::{Key, NamespaceFacts, RawSettings, Source},
        state::RuleState,
    };
    use std::{net::IpAddr, string::ToString, vec::Vec};

    fn plan(settings: &[(Key, &'static str)]) -> RulePlan {
        let mut raw = RawSettings::new();
        let all = [
            (Key::InboundPorts, "*"),
            (Key::OutboundRanges, "*"),
            (Key::RedirectDns, "true"),
            (Key::CaptureAllDns, "true"),
            (Key::DropInvalid, "true"),
            (Key::OutboundExcludePorts, "3306,5432,8000:8099"),
            (Key::OutboundExcludeRanges, "10.96.0.0/12,fd00:96::/64"),
            (Key::ExcludeInterfaces, "eth1"),
            (Key::DualStack, "true"),
        ];
        for (key, text) in all.iter().chain(settings) {
            raw.set(*key, *text, Source::Flag("x"));
        }
        Redirect::parse(&raw, &NamespaceFacts::new(&addresses())).unwrap().plan()
    }

    fn addresses() -> [IpAddr; 2] {
        ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()]
    }

    /// What the kernel holds once a transaction is in force, as far as that needs no kernel.
    fn in_force(bytes: &[u8]) -> Ruleset {
        let mut ruleset = Ruleset::default();
        Messages::new(bytes).for_each(|message| ruleset.take(&message));
        ruleset
    }

    fn iptables(plan: &RulePlan) -> Ruleset {
        let observed = Observed::default();
        let changes =
            Family::BOTH.map(|family| (family, Change::between(&RuleState::new(), &plan.rules(family))));
        let mut batch = Batch::new(&observed);
        for (family, change) in &changes {
            batch.change(*family, change).unwrap();
        }
        in_force(batch.finish().unwrap().bytes())
    }

    fn native(plan: &RulePlan, form: NativeForm) -> Ruleset {
        let (observed, wanted) = (Observed::default(), NativeState::wanted(plan, form));
        let mut batch = Batch::new(&observed);
        batch.native_change(observed.native(), &wanted);
        in_force(batch.finish().unwrap().bytes())
    }

    #[test]
    fn what_this_library_writes_it_understands_and_finds_nothing_in_its_own_way() {
        let interfaces = ["eth0".to_string()];
        for mode in ["REDIRECT", "TPROXY"] {
            let plan = plan(&[(Key::InterceptionMode, mode)]);
            for ruleset in
                [iptables(&plan), native(&plan, NativeForm::Plain), native(&plan, NativeForm::Sets)]
            {
                let is_native = ruleset.tables.keys().any(|name| name.family == TableFamily::Inet);
                let chains = ruleset.tables.values().flat_map(|table| table.chains.values());
                let rules: Vec<_> = chains.flat_map(|chain| &chain.rules).collect();
                let strange = rules.iter().flat_map(|rule| &rule.conditions).filter(|condition| {
                    matches!(condition, Condition::Unknown(name) if !(is_native && name.ends_with(" in a set")))
                });
                assert!(rules.len() > 30 && strange.count() == 0, "{rules:#?}");
                let pod = Pod { addresses: &addresses(), interfaces: &interfaces };
                assert_eq!(find(&ruleset, &plan, &pod), [], "{mode}");
            }
        }
    }

    #[test]
    fn a_chain_of_the_mesh_with_another_policy_is_found_in_native_tables_too() {
        let plan = plan(&[]);
        let mut ruleset = native(&plan, NativeForm::Plain);
        for table in ruleset.tables.values_mut() {
            for base in table.chains.values_mut().filter_map(|chain| chain.base.as_mut()) {
                base.drops = true;
            }
        }
        let findings = find(&ruleset, &plan, &Pod::default());
        assert!(findings.len() >= 4 && findings.iter().all(|finding| finding.effect == Effect::PolicyDrops));
    }

    #[test]
    fn the_rules_of_the_mesh_are_known_in_every_backend() {
        let plan = plan(&[]);
        let count = |ruleset: &Ruleset, family, known| {
            let rules = crate::trace::Rules::of_ruleset(ruleset, &[], family, known);
            let of_mesh: Vec<_> = rules.of_mesh().collect();
            assert!(of_mesh.iter().all(|one| one.rule.counter == Some(Counter::default())), "{of_mesh:?}");
            of_mesh.len()
        };
        let ruleset = iptables(&plan);
        for family in Family::BOTH {
            let chains = plan.explained_rules(family);
            let planned: usize = chains.values().flat_map(|chains| chains.values()).map(Vec::len).sum();
            assert_eq!(count(&ruleset, family, Some(&plan)), planned, "{family}");
            // Without a plan nobody knows whose a rule in a built-in chain is that leads to no chain of the mesh.
            let hooks = chains.values().flatten().filter(|(chain, _)| matches!(chain, Chain::Hook(_)));
            let alone: Vec<_> = hooks
                .flat_map(|(_, rules)| rules)
                .filter(|one| !matches!(one.rule().target, Target::Jump(_)))
                .collect();
            assert!(!alone.is_empty());
            assert_eq!(count(&ruleset, family, None), planned - alone.len(), "{family}");
        }
        for form in [NativeForm::Plain, NativeForm::Sets] {
            let ruleset = native(&plan, form);
            let in_tables: usize = ruleset
                .tables
                .values()
                .flat_map(|table| table.chains.values())
                .map(|chain| chain.rules.len())
                .sum();
            assert_eq!(count(&ruleset, Family::V4, None), in_tables, "{form:?}");
        }
    }

    #[test]
    fn what_the_kernel_counted_is_read() {
        let mut writer = super::super::wire::Writer::default();
        writer.nested(attribute::list::ELEMENT, |element| {
            element.text(attribute::expression::NAME, "counter");
            element.nested(attribute::expression::DATA, |data| {
                data.u64(attribute::counter::BYTES, 180);
                data.u64(attribute::counter::PACKETS, 3);
            });
        });
        assert_eq!(seen::rule(writer.attributes()).counter, Some(Counter { packets: 3, bytes: 180 }));
        assert_eq!(seen::rule(super::super::wire::Writer::default().attributes()).counter, None);
    }
}
