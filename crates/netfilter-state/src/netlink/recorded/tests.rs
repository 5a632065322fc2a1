//! Dumps read, compared, changed and put back.

use super::{
    super::{Batch, Extension, Message, Messages, NativeState, Observed, Question},
    dumps::{self, dump, read_saved},
};
use crate::expressions::{
    abi::{attribute, family, kind},
    decode,
    wire::{Attribute, Head, MessageWriter},
    xt,
};
use crate::{
    change::IptablesChange,
    ruleset::{Api, HookEntry, HookList, HookOwner, HookedRules, TableFamily, TableName},
    state::{Entry, IptablesTables},
};
use redirect_core::{
    Family, RulePlan,
    options::NativeForm,
    rule::{Chain, Equality, Hook, Match, Table},
};
use std::{collections::BTreeSet, fmt::Write as _};

fn observed(dump: &[u8]) -> Observed {
    let mut observed = Observed::at(1);
    Messages::new(dump).for_each(|message| observed.take(&message));
    observed
}

#[test]
fn of_rules_of_others_is_seen_what_they_say() {
    dumps::assert_recorded("others.seen", &dumps::seen(&dumps::dumped(&dump(dumps::OF_OTHERS))));
}

#[test]
fn a_set_that_was_not_read_is_not_understood_and_hides_nothing_else() {
    const UNREAD: &str = "[ip saddr in a set that was not read whole]";
    let dump = dump(dumps::OF_OTHERS);
    let mut ruleset = HookedRules::default();
    for message in Messages::new(&dump) {
        if message.kind == kind::NEW_CHAIN {
            ruleset.leave_unread(TableFamily::Inet, "others", "listed");
        }
        ruleset.take(&message);
    }
    let (seen, whole) = (dumps::seen(&ruleset), dumps::seen(&dumps::dumped(&dump)));
    assert!(!seen.contains("@listed") && seen.matches(UNREAD).count() == whole.matches("@listed").count());
    let others = |text: &str| {
        let lines = text.lines().filter(|line| !line.contains("@listed") && !line.contains(UNREAD));
        lines.map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(others(&seen), others(&whole));
}

#[test]
fn chains_of_interfaces_are_read_with_their_rules() {
    let ruleset = dumps::dumped(&dump(dumps::ON_DEVICES));
    dumps::assert_recorded("devices.seen", &dumps::seen(&ruleset));
    // Readers of iptables' or the mesh's tables skip them.
    let observed = observed(&dump(dumps::ON_DEVICES));
    assert!(Family::BOTH.iter().all(|family| observed.state(*family) == &IptablesTables::new()));
    assert!(observed.native().is_empty());
}

#[test]
fn what_was_observed_is_everything_unless_others_have_tables_or_chains() {
    for (name, is_all) in [
        ("redirect-iptables", true),
        ("redirect-plain", true),
        ("redirect-sets", true),
        (dumps::OF_OTHERS, false),
        (dumps::ON_DEVICES, false),
    ] {
        let mut whole = dumps::dumped(&dump(name));
        whole.forget_elements();
        let rules: usize = whole
            .tables
            .values()
            .flat_map(|table| table.chains.values())
            .map(|chain| chain.rules.len())
            .sum();
        let everything = |most| observed(&dump(name)).into_everything(most);
        assert_eq!(everything(rules), is_all.then_some(whole), "{name}");
        assert_eq!(everything(rules.saturating_sub(1)), None, "{name}");
    }
    let mut writer = MessageWriter::default();
    let head = Head { kind: kind::NEW_CHAIN, flags: 0, sequence: 1, family: family::IPV4, resource: 0 };
    writer.message(head, |body| {
        body.text(attribute::TABLE, "nat");
        body.text(attribute::chain::NAME, "DOCKER");
    });
    let with_theirs = [dump("redirect-iptables"), writer.finish().unwrap()].concat();
    assert_eq!(observed(&with_theirs).into_everything(usize::MAX), None);
}

#[test]
fn chains_have_the_numbers_that_order_them() {
    let ruleset = dumps::dumped(&dump(dumps::ON_DEVICES));
    let theirs = ruleset.tables.iter().find(|(name, _)| name.family == TableFamily::Netdev).unwrap().1;
    let mut chains: Vec<(u64, &str)> =
        theirs.chains.iter().map(|(name, chain)| (chain.handle, &**name)).collect();
    chains.sort_unstable();
    assert_eq!(chains, [(1, "sub"), (2, "in"), (3, "both"), (4, "out")]);
}

/// What hangs on the hooks, by dumps of Debian's kernels of these versions. Each had chains of nft and of iptables-nft, several at one
/// priority, one of them where connection tracking begins, and all legacy tables.
const HOOKS: [&str; 2] = ["hooks-6.12", "hooks-7.3"];

fn hooked(name: &str) -> HookList {
    let mut hooks = HookList::default();
    Messages::new(&dump(name)).for_each(|message| hooks.take(&message));
    hooks
}

#[test]
fn what_hangs_on_hooks_is_read_in_the_kernels_order() {
    for name in HOOKS {
        let hooks = hooked(name);
        let mut text = String::new();
        for (family, hook) in
            Family::BOTH.into_iter().flat_map(|family| Hook::ALL.iter().map(move |hook| (family, hook)))
        {
            writeln!(text, "{family} {hook:?}").unwrap();
            for HookEntry { priority, owner } in hooks.on(family, *hook) {
                writeln!(text, "\t{priority} {owner:?}").unwrap();
            }
        }
        dumps::assert_recorded(&format!("{name}.told"), &text);
        let is_unknown = |entry: &&HookEntry| matches!(entry.owner, HookOwner::Unknown(_));
        let unknown: Vec<_> = hooks.entries.values().flatten().filter(is_unknown).collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
    }
}

#[test]
fn of_one_priority_the_chain_that_was_hung_last_is_asked_first() {
    let chain = |family, table: &str, chain: &str| {
        let name = TableName { api: Api::NfTables, family, name: table.into() };
        HookOwner::Chain(name, chain.into())
    };
    let legacy = |table: &str| HookOwner::Legacy(table.into());
    let order = |name, hook, priority| {
        let hooks = hooked(name);
        let entries = hooks.on(Family::V4, hook).iter().filter(|entry| entry.priority == priority);
        entries.map(|entry| entry.owner.clone()).collect::<Vec<_>>()
    };
    let nat = [
        HookOwner::Nat,
        chain(TableFamily::Ip, "aa", "before"),
        legacy("nat"),
        chain(TableFamily::Ip, "aa", "out"),
        chain(TableFamily::Inet, "zz", "out"),
        chain(TableFamily::Ip, "nat", "OUTPUT"),
    ];
    assert_eq!(order("hooks-7.3", Hook::Output, -100), nat);
    // An older kernel says only that address translation is asked.
    assert_eq!(order("hooks-6.12", Hook::Output, -100), [HookOwner::Nat]);
    for name in HOOKS {
        let filters = [
            legacy("filter"),
            chain(TableFamily::Ip, "aa", "second"),
            chain(TableFamily::Ip, "aa", "first"),
            chain(TableFamily::Inet, "zz", "late"),
        ];
        assert_eq!(order(name, Hook::Output, 0), filters, "{name}");
        let tracking = [chain(TableFamily::Ip, "aa", "attracking"), HookOwner::Tracking];
        assert_eq!(order(name, Hook::Output, -200), tracking, "{name}");
    }
}

#[test]
fn hooks_with_damaged_bytes_are_read_or_passed_over() {
    let whole = dump("hooks-7.3");
    let entries = |hooks: &HookList| hooks.entries.values().flatten().count();
    let all = entries(&hooked("hooks-7.3"));
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0xff;
        let mut hooks = HookList::default();
        Messages::new(&damaged).for_each(|message| hooks.take(&message));
        // One more where address translation is reported twice, on two hooks.
        assert!(entries(&hooks) <= all + 1, "{at}");
    }
}

/// A message about what hangs on the output hook of IPv4.
fn hooked_message(body: impl FnOnce(&mut MessageWriter)) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    let head = Head { kind: kind::HOOKS, flags: 2, sequence: 1, family: family::IPV4, resource: 0 };
    writer.message(head, |out| {
        out.u32(attribute::hooked::HOOK, 3);
        out.u32(attribute::hooked::PRIORITY, (-225_i32).cast_unsigned());
        body(out);
    });
    writer.finish().unwrap()
}

#[test]
fn what_hangs_on_a_hook_and_is_not_known_has_a_name() {
    use attribute::{HOOKED_PROGRAM, hooked as of, hooked_info as info};
    let owner = |body: fn(&mut MessageWriter)| {
        let mut hooks = HookList::default();
        Messages::new(&hooked_message(body)).for_each(|message| hooks.take(&message));
        let [HookEntry { priority: -225, owner }] = hooks.on(Family::V4, Hook::Output) else {
            panic!("{hooks:?}")
        };
        owner.clone()
    };
    let unknown = |name: &str| HookOwner::Unknown(name.into());
    assert_eq!(owner(|_| {}), unknown("a function without a name"));
    assert_eq!(owner(|out| out.text(of::MODULE, "ipvlan")), unknown("a function of ipvlan"));
    assert_eq!(owner(|out| out.text(of::FUNCTION, "ip_vs_out_hook")), unknown("ip_vs_out_hook"));
    let both = owner(|out| {
        out.text(of::FUNCTION, "ip_vs_out_hook");
        out.text(of::MODULE, "ip_vs");
    });
    assert_eq!(both, unknown("ip_vs_out_hook of ip_vs"));
    let of_program = owner(|out| {
        out.text(of::FUNCTION, "nf_hook_run_bpf");
        out.nested(of::INFO, |out| {
            out.nested(info::DESCRIPTION, |out| out.u32(HOOKED_PROGRAM, 42));
            out.u32(info::TYPE, 2);
        });
    });
    assert_eq!(of_program, unknown("BPF program 42"));
    // A legacy table at a priority that no table has.
    assert_eq!(owner(|out| out.text(of::FUNCTION, "ipt_do_table")), unknown("ipt_do_table"));
    for (function, table) in [
        ("iptable_raw_hook", "raw"),
        ("ip6table_filter_hook", "filter"),
        ("iptable_security_hook", "security"),
        ("iptable_mangle_hook", "mangle"),
    ] {
        let named = hooked_message(|out| out.text(of::FUNCTION, function));
        let mut hooks = HookList::default();
        Messages::new(&named).for_each(|message| hooks.take(&message));
        assert_eq!(hooks.on(Family::V4, Hook::Output)[0].owner, HookOwner::Legacy(table.into()));
    }
    assert_eq!(owner(|out| out.text(of::FUNCTION, "iptable_rawhide")), unknown("iptable_rawhide"));
    let harmless = owner(|out| out.text(of::FUNCTION, "selinux_ip_postroute"));
    assert_eq!(harmless, HookOwner::Harmless("selinux_ip_postroute".into()));
}

#[test]
fn of_rules_that_iptables_legacy_saves_is_seen_what_they_say() {
    dumps::assert_recorded("others-saved.seen", &dumps::seen(&read_saved(dumps::OF_OTHERS)));
}

#[test]
fn what_iptables_made_of_a_plan_is_read_as_that_plan() {
    for (name, plan) in dumps::plans() {
        let observed = observed(&dump(&dumps::of_iptables(name)));
        assert_eq!(observed.obstacles().count(), 0, "{name}");
        for family in Family::BOTH {
            assert_eq!(*observed.state(family), IptablesTables::from(&plan.rules(family)), "{name} {family}");
        }
    }
}

#[test]
fn a_native_table_is_read_as_the_plan_it_was_made_of() {
    for (name, plan) in dumps::plans() {
        for form in [NativeForm::Plain, NativeForm::Sets] {
            let name = dumps::of_native(name, form);
            assert_eq!(observed(&dump(&name)).native(), &NativeState::wanted(&plan, form), "{name}");
        }
    }
}

/// What the native tables are after a change, as far as that needs no kernel.
fn changed(now: &Observed, to: &NativeState) -> (Vec<u8>, Observed) {
    let mut batch = Batch::new(now);
    batch.native_change(now.native(), to);
    let sent = batch.finish().unwrap().bytes().to_vec();
    let after = observed(&sent);
    (sent, after)
}

#[test]
fn native_tables_that_somebody_extended_are_put_back_as_they_were() {
    let found = observed(&dump(dumps::EXTENDED));
    let (_, again) = changed(&Observed::at(1), found.native());
    assert_eq!(again.native(), found.native());
    let (nothing_to_do, _) = changed(&found, found.native());
    assert!(
        Messages::new(&nothing_to_do)
            .all(|message| matches!(message.kind, kind::BATCH_BEGIN | kind::BATCH_END))
    );
}

/// No kernel answers so; what is read of it is still put back.
#[test]
fn a_reference_that_does_not_say_what_it_looks_up_is_put_back_as_it_was() {
    let mut dump = dump(dumps::EXTENDED);
    // The register that the map is looked up with, and the name of the map.
    let reference = b"\x08\0\x03\0\0\0\0\x01\x0e\0\x04\0__objmap0\0";
    let at = dump.windows(reference.len()).position(|bytes| bytes == reference).unwrap();
    dump[at + 2] = 19;
    let found = observed(&dump);
    let (_, again) = changed(&Observed::at(1), found.native());
    assert!(again.native() == found.native());
}

#[test]
fn a_map_to_another_object_is_another_map() {
    let dump = dump(dumps::EXTENDED);
    let found = observed(&dump);
    let mut maps = 0;
    for at in elements_that_name(&dump, b"counted\0") {
        let mut renamed = dump.clone();
        renamed[at] = b'm';
        assert_ne!(observed(&renamed).native(), found.native(), "{at}");
        maps += 1;
    }
    assert_eq!(maps, 3, "one of a map with a name, two of a rule's own");
}

#[test]
fn what_a_map_does_with_all_other_keys_and_where_a_range_of_pairs_ends_count() {
    let dump = dump(dumps::EXTENDED);
    let found = observed(&dump);
    for part in [&b"istio-redirect\0"[..], &[192, 0, 2, 9, 0, 90]] {
        let [at] = elements_that_name(&dump, part)[..] else { panic!("{part:?} is there once") };
        let mut other = dump.clone();
        other[at] ^= 1;
        assert!(observed(&other).native() != found.native(), "{part:?}");
    }
}

/// Where elements of sets have this name, or these bytes, in a dump.
fn elements_that_name(dump: &[u8], name: &[u8]) -> Vec<usize> {
    let mut start = 0;
    let mut found = Vec::new();
    for message in Messages::new(dump) {
        let length = u32::from_ne_bytes(dump[start..start + 4].try_into().unwrap()) as usize;
        if message.kind == kind::NEW_SET_ELEMENT {
            let body = &dump[start..start + length];
            let places = body.windows(name.len()).enumerate().filter(|(_, bytes)| *bytes == name);
            found.extend(places.map(|(at, _)| start + at));
        }
        start += length.next_multiple_of(4);
    }
    found
}

/// No kernel answers so; what is read of it is still what it is.
#[test]
fn rules_whose_sets_are_not_told_of_are_the_same_as_themselves_and_no_others() {
    let dump = dump(dumps::EXTENDED);
    let without_sets = || {
        let mut observed = Observed::at(1);
        let told =
            Messages::new(&dump).filter(|one| !matches!(one.kind, kind::NEW_SET | kind::NEW_SET_ELEMENT));
        told.for_each(|message| observed.take(&message));
        observed
    };
    let found = without_sets();
    assert_eq!(found.native(), without_sets().native());
    assert_ne!(found.native(), observed(&dump).native());
    assert_eq!(changed(&Observed::at(1), found.native()).1.native(), found.native());
    let mut renamed = dump.clone();
    let name = b"counting\0";
    let at = dump.windows(name.len()).rposition(|bytes| bytes == name).unwrap();
    renamed[at] = b'k';
    let mut other = Observed::at(1);
    let told =
        Messages::new(&renamed).filter(|one| !matches!(one.kind, kind::NEW_SET | kind::NEW_SET_ELEMENT));
    told.for_each(|message| other.take(&message));
    assert_ne!(other.native(), found.native());
}

#[test]
fn nft_is_told_what_it_understood() {
    for (name, plan) in dumps::plans() {
        dumps::assert_recorded(&dumps::script(name), &plan.nft_text(NativeForm::Plain));
    }
}

/// Rules that a plan may have are known as such, and those of other programs are kept as they are.
#[test]
fn of_rules_of_others_those_that_a_plan_may_have_are_known() {
    let observed = observed(&dump(dumps::OF_OTHERS));
    let mut text = String::new();
    for (family, table) in
        Family::BOTH.into_iter().flat_map(|of| Table::ALL.iter().map(move |table| (of, *table)))
    {
        writeln!(text, "{family} {} {}", table.name(), observed.has_table(family, table)).unwrap();
        for (chain, entries) in observed.state(family).chains(table) {
            for entry in entries {
                let known = if matches!(entry, Entry::Rule(_)) { "known" } else { "kept " };
                writeln!(text, "{known} {chain} {entry}").unwrap();
            }
        }
    }
    dumps::assert_recorded("others.observed", &text);
}

/// Rules of plans as nf_tables' own expressions, which newer versions of iptables write for more and more of them.
#[test]
fn native_expressions_are_read_as_rules_of_plans_too() {
    let mut text = String::new();
    let plans = dumps::plans().map(|(name, _)| dumps::of_native(name, NativeForm::Plain));
    for name in plans.into_iter().chain([dumps::OF_OTHERS.into()]) {
        let dump = dump(&name);
        writeln!(text, "{name}").unwrap();
        for rule in
            Messages::new(&dump).filter(|rule| (rule.kind, rule.family) == (kind::NEW_RULE, family::INET))
        {
            let list = rule.attributes().find(attribute::rule::EXPRESSIONS).unwrap_or(Attribute(&[]));
            let read = Family::BOTH.map(|family| {
                decode::rule(list.attributes(), family).map_or_else(|| "-".into(), |rule| rule.text())
            });
            writeln!(text, "\t{}", if read[0] == read[1] { read[0].clone() } else { read.join(" | ") })
                .unwrap();
        }
    }
    dumps::assert_recorded("native.decoded", &text);
}

/// What a transaction does, a message a line.
fn report(bytes: &[u8]) -> String {
    let mut text = String::new();
    for message in Messages::new(bytes) {
        let Message { kind, flags, sequence, family, .. } = message;
        write!(text, "{kind:#x} {flags:#x} {sequence} {family}:").unwrap();
        for (kind, value) in message.attributes() {
            let letters = value.0.strip_suffix(b"\0").filter(|text| text.len() > 1 && text.is_ascii());
            match letters.and_then(|letters| str::from_utf8(letters).ok()) {
                Some(letters) if letters.chars().all(|c| c.is_ascii_graphic()) => {
                    write!(text, " {kind}={letters}").unwrap();
                }
                _ => {
                    write!(text, " {kind}=").unwrap();
                    value.0.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
                }
            }
        }
        text.push('\n');
    }
    text
}

/// From an extended plan to the plan and back, rule by rule.
#[test]
fn a_transaction_says_to_the_kernel_what_is_to_be_done() {
    let extended = observed(&dump(dumps::EXTENDED));
    let [(_, redirect), ..] = dumps::plans();
    let wanted = NativeState::wanted(&redirect, NativeForm::Sets);
    let differences = extended.native().differences_to(&wanted);
    let differences: String = differences.iter().map(|one| format!("{one}\n")).collect();
    let of_plan = observed(&dump(&dumps::of_native("redirect", NativeForm::Sets)));
    let nothing = NativeState::default();
    let text = [
        &differences,
        "\nto the plan\n",
        &report(&changed(&extended, &wanted).0),
        "\nback\n",
        &report(&changed(&of_plan, extended.native()).0),
        "\nto nothing\n",
        &report(&changed(&extended, &nothing).0),
    ]
    .concat();
    dumps::assert_recorded("extended.told", &text);
}

/// The same in iptables' tables: what others have there stays.
#[test]
fn iptables_tables_are_changed_beside_rules_of_others() {
    let others = observed(&dump(dumps::OF_OTHERS));
    let [(_, redirect), (_, tproxy), _] = dumps::plans();
    let mut text = String::new();
    let of_plan = observed(&dump(&dumps::of_iptables("tproxy")));
    for (now, plan) in [(&others, &tproxy), (&of_plan, &redirect), (&of_plan, &RulePlan::empty())] {
        let changes = Family::BOTH
            .map(|family| (family, IptablesChange::between(now.state(family), &plan.rules(family))));
        let mut batch = Batch::new(now);
        for (family, change) in &changes {
            batch.change(*family, change).unwrap();
        }
        text.push_str(&report(batch.finish().unwrap().bytes()));
        text.push('\n');
    }
    dumps::assert_recorded("iptables.told", &text);
}

#[test]
fn questions_ask_the_kernel_for_what_they_say() {
    let extension = xt::of_match(&Match::OwnerUid(Equality { value: 1, not: false })).map(|(of, _)| of);
    let questions = [
        Question::Generation,
        Question::Tables,
        Question::Chains(Some(TableFamily::Ip6)),
        Question::Chains(None),
        Question::Rules,
        Question::Sets,
        Question::Elements(TableFamily::Ip, "theirs", "set"),
        Question::Elements(TableFamily::Ip6, "theirs", "set"),
        Question::RulesOfTable(TableFamily::Ip, "nat"),
        Question::RulesOfChain(TableFamily::Ip6, "mangle", "OUTPUT"),
        Question::Chains(Some(TableFamily::Inet)),
        Question::RulesOfTable(TableFamily::Inet, "ours"),
        Question::SetsOfTable(TableFamily::Inet, "ours"),
        Question::Objects(TableFamily::Inet, "ours"),
        Question::Elements(TableFamily::Inet, "ours", "set"),
        Question::Extension(Family::V4, extension.unwrap()),
    ];
    let questions = (1..).zip(questions).map(|(sequence, question)| question.message(sequence));
    let transactions = [Batch::take_lock(17, 18), Batch::release_lock(19)].into_iter().map(Option::unwrap);
    let told: String = questions.chain(transactions).map(|bytes| report(&bytes)).collect();
    dumps::assert_recorded("questions.told", &told);
}

/// A plan in force, as every backend leaves it.
fn in_force(name: &str) -> [(&'static str, HookedRules); 4] {
    let dumped = |name: String| dumps::dumped(&dump(&name));
    [
        ("iptables-nft", dumped(dumps::of_iptables(name))),
        ("iptables-legacy", read_saved(name)),
        ("native", dumped(dumps::of_native(name, NativeForm::Plain))),
        ("native with sets", dumped(dumps::of_native(name, NativeForm::Sets))),
    ]
}

#[test]
fn nothing_of_a_plan_is_seen_that_is_not_understood() {
    for (name, _) in dumps::plans() {
        for (backend, ruleset) in in_force(name) {
            let seen = dumps::seen(&ruleset);
            let rules = seen.lines().filter(|line| line.starts_with('\t'));
            let strange: Vec<_> = rules.clone().filter(|rule| rule.contains('[')).collect();
            assert!(strange.is_empty() && rules.count() > 30, "{name} {backend} {strange:#?}");
        }
    }
}

/// A missing module is reported by the kernel's name for it.
#[test]
fn every_extension_that_plans_need_is_named_with_its_module() {
    let rules = dumps::plans().into_iter().flat_map(|(_, plan)| plan.planned_rules().to_vec());
    let needed: BTreeSet<String> = rules
        .flat_map(|planned| Extension::of_rule(planned.rule()).collect::<Vec<_>>())
        .map(|one| format!("{} {} {} {}", one.name, one.revision, one.is_target, one.module()))
        .collect();
    let wanted = [
        "CONNMARK 2 true xt_connmark",
        "CT 2 true xt_CT",
        "MARK 2 true xt_mark",
        "REDIRECT 0 true xt_REDIRECT",
        "TPROXY 1 true xt_TPROXY",
        "connmark 1 false xt_connmark",
        "conntrack 3 false xt_conntrack",
        "multiport 1 false xt_multiport",
        "owner 1 false xt_owner",
    ];
    assert_eq!(needed.iter().map(String::as_str).collect::<Vec<_>>(), wanted);
}

/// The names of the parts of a transaction that the kernel refuses.
#[test]
fn parts_of_a_transaction_are_told_by_what_they_are_about() {
    let now = observed(&dump(&dumps::of_iptables("tproxy")));
    let [(_, redirect), ..] = dumps::plans();
    let changes = Family::BOTH
        .map(|family| (family, IptablesChange::between(now.state(family), &redirect.rules(family))));
    let native = NativeState::wanted(&redirect, NativeForm::Sets);
    let mut batch = Batch::new(&now);
    for (family, change) in &changes {
        batch.change(*family, change).unwrap();
    }
    batch.native_change(now.native(), &native);
    let finished = batch.finish().unwrap();
    let mut text = String::new();
    for part in (1..=finished.confirmed()).filter_map(|sequence| finished.part(sequence)) {
        let needs: Vec<_> = part.extensions().iter().map(|(of, one)| format!(" {of} {}", one.name)).collect();
        writeln!(text, "{part}{}", needs.concat()).unwrap();
    }
    dumps::assert_recorded("parts.told", &text);
}

#[test]
fn of_tables_with_chains_of_others_only_those_are_read_that_a_change_may_touch() {
    let read = |name: &str, table| {
        let chains = observed(&dump(name)).chains_to_read(Family::V4, table)?;
        Some(chains.iter().map(|chain| String::from(chain.name())).collect::<Vec<_>>())
    };
    // No other program's rules, or no table.
    assert_eq!(read(&dumps::of_iptables("strict"), Table::Nat), None);
    assert_eq!(read("redirect-plain", Table::Nat), None);
    let mut with_others = observed(&dump(&dumps::of_iptables("redirect")));
    let all =
        with_others.state(Family::V4).chains(Table::Nat).map(|(chain, _)| chain.clone()).collect::<Vec<_>>();
    let mut writer = MessageWriter::default();
    for name in ["KUBE-SERVICES", "ISTIO_LEFT_BEHIND"] {
        let head = Head { kind: kind::NEW_CHAIN, flags: 0, sequence: 1, family: family::IPV4, resource: 0 };
        writer.message(head, |body| {
            body.text(attribute::TABLE, "nat");
            body.text(attribute::chain::NAME, name);
        });
    }
    let bytes = writer.finish().unwrap();
    Messages::new(&bytes).for_each(|message| with_others.take(&message));
    let chains = with_others.chains_to_read(Family::V4, Table::Nat).unwrap();
    assert!(
        all.iter().all(|chain| chains.contains(chain)) && chains.contains(&Chain::named("ISTIO_LEFT_BEHIND"))
    );
    assert!(!chains.contains(&Chain::named("KUBE-SERVICES")));
    assert_eq!(with_others.chains_to_read(Family::V6, Table::Nat), None);
}

#[test]
fn only_what_a_change_may_touch_tells_two_looks_apart() {
    let look = || observed(&dump(&dumps::of_iptables("tproxy")));
    assert!(look().reads_like(&look().of_any_generation()));
    let native = observed(&dump(&dumps::of_native("tproxy", NativeForm::Plain)));
    let others = observed(&dump(dumps::OF_OTHERS));
    for one in [&native, &others, &Observed::at(1)] {
        assert!(one.reads_like(one) && !one.reads_like(&look()) && !look().reads_like(one));
    }
    // Each side by itself: rules alone, and native tables alone.
    assert!(!native.reads_like(&Observed::at(1)) && !others.reads_like(&Observed::at(1)));
    let asleep = observed(&dump(dumps::EXTENDED));
    assert!(!asleep.reads_like(&native) && asleep.reads_like(&observed(&dump(dumps::EXTENDED))));
}
