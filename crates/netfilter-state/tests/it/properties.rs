//! What holds for every plan and every change, whatever the settings and whatever the kernel holds already.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::generated::{settings, typed::builders};
use crate::model_kernel::{Refused, Tables, Writer};
use crate::of_mesh::of_mesh;
use netfilter_state::{
    change::{IptablesChange, RuleDifference},
    netlink::{Batch, NativeState, Observed},
    state::{Entry, IptablesTables},
};
use proptest::{
    collection::vec,
    option,
    prelude::*,
    sample::{Index, select},
};
use redirect_core::{
    Family, Redirect,
    options::NativeForm,
    plan::{FamilyRules, PlannedRule},
    rule::{Chain, Hook, Match, Rule, Table, Target},
    settings::{Key, NamespaceFacts, RawSettings, Setting, Source},
};
use std::collections::{BTreeMap, BTreeSet};

/// The chain a rule of a plan jumps to.
fn goes_to(rule: &Rule) -> Option<Chain> {
    if let Target::Jump(chain) = &rule.target { Some(chain.clone()) } else { None }
}

/// What is not the mesh's while a plan is put in force, in order.
fn others(kernel: &Tables, wanted: &FamilyRules) -> BTreeMap<(Table, Chain), Vec<Entry>> {
    let (state, wanted_state) = (kernel.observe(), IptablesTables::from(wanted));
    let mut others = BTreeMap::new();
    for table in Table::ALL.iter().copied() {
        for (chain, rules) in state.chains(table).filter(|(chain, _)| !chain.belongs_to_mesh()) {
            let is_kept = |rule: &&Entry| !state.owns_beside(&wanted_state, table, chain, rule);
            let kept: Vec<Entry> = rules.iter().filter(is_kept).cloned().collect();
            if !kept.is_empty() || !matches!(chain, Chain::Hook(_)) {
                others.insert((table, chain.clone()), kept);
            }
        }
    }
    others
}

/// Something that happens to the tables of a kernel, by another program or by accident.
#[derive(Debug, Clone)]
enum Event {
    /// Another program's rule in a built-in chain.
    Rule(Table, Hook, Index, &'static str),
    /// Another program's chain.
    Chain(Table),
    /// One of the mesh's rules goes.
    Loss(Table, Index),
    /// One of the mesh's rules is there twice.
    Duplicate(Table, Index),
    /// What another version of the mesh has left.
    Leftover(Table, Hook),
}

const OTHERS: [&str; 6] = [
    "-p icmp -j ACCEPT",
    "-p tcp -m tcp --dport 22 -j ACCEPT",
    "-m addrtype --dst-type LOCAL -j DROP",
    "-m comment --comment \"a  b\" -j LOG --log-prefix \"x \"",
    "-d 10.96.0.1/32 -p tcp -j DNAT --to-destination 10.0.0.1:6443",
    "! -d 10.0.0.0/8 -j RETURN",
];

/// Text that looks like the output of iptables-save, more or less.
const SAVED: &str = concat!(
    "(\\*(nat|mangle|raw|filter)\n)?",
    "(:[A-Z_]{0,8}( -)?( \\[0:0\\])?\n",
    "|(\\[[0-9:]{0,4}\\] )?-[AI] [A-Z_]{0,8}( [0-9]{1,3})?",
    "( -[a-z]| --[a-z]{2,6}| !| [0-9a-z./:]{1,9}){0,6}\n){0,8}",
);

fn events() -> impl Strategy<Value = Vec<Event>> {
    let (table, hook) = (|| select(Table::ALL), || select(vec![Hook::Prerouting, Hook::Output]));
    let rule = (table(), hook(), any::<Index>(), select(&OTHERS[..]));
    let event = prop_oneof![
        4 => rule.prop_map(|(table, hook, at, text)| Event::Rule(table, hook, at, text)),
        1 => table().prop_map(Event::Chain),
        1 => (table(), any::<Index>()).prop_map(|(table, at)| Event::Loss(table, at)),
        1 => (table(), any::<Index>()).prop_map(|(table, at)| Event::Duplicate(table, at)),
        1 => (table(), hook()).prop_map(|(table, hook)| Event::Leftover(table, hook)),
    ];
    vec(event, 0..10)
}

const LAST: usize = usize::MAX;

fn suffer(kernel: &mut Tables, events: &[Event]) {
    for event in events {
        match event {
            Event::Rule(table, hook, at, text) => {
                let rules = kernel.rules(*table, &Chain::Hook(*hook)).count();
                kernel.insert(*table, *hook, at.index(rules + 1) + 1, Entry::saved(text));
            }
            Event::Chain(table) => {
                kernel.insert(*table, Chain::named("OTHERS"), LAST, Entry::saved(OTHERS[0]));
            }
            Event::Loss(table, at) => {
                let lost =
                    pick(kernel, *table, *at).map(|(chain, number)| kernel.delete(*table, &chain, number));
                assert!(!matches!(lost, Some(None)), "a rule that is there can be deleted");
            }
            Event::Duplicate(table, at) => {
                let copied =
                    pick(kernel, *table, *at).map(|(chain, number)| kernel.duplicate(*table, &chain, number));
                assert!(copied != Some(false), "a rule that is there can be copied");
            }
            Event::Leftover(table, hook) => {
                kernel.insert(*table, Chain::named("ISTIO_OLDER"), LAST, Entry::saved("-p tcp -j LOG"));
                let jump = Entry::saved("-p tcp -m comment --comment \"older\" -j ISTIO_OLDER");
                kernel.insert(*table, *hook, LAST, jump);
            }
        }
    }
}

/// One of the mesh's rules: its chain, and its number in it.
fn pick(kernel: &Tables, table: Table, at: Index) -> Option<(Chain, usize)> {
    let state = kernel.observe();
    let ours = |(chain, rules): (&Chain, &[Entry])| -> Vec<(Chain, usize)> {
        let numbered = (1..).zip(rules);
        let owned = numbered.filter(|(_, rule)| state.owns(table, chain, rule));
        owned.map(|(number, _)| (chain.clone(), number)).collect()
    };
    let all: Vec<(Chain, usize)> = state.chains(table).flat_map(ours).collect();
    (!all.is_empty()).then(|| at.get(&all).clone())
}

/// With a plan in force, and what happened before and after that.
fn kernel_with(before: &[Event], rules: &FamilyRules, after: &[Event], writer: Writer) -> Tables {
    let mut kernel = Tables::new();
    suffer(&mut kernel, before);
    kernel.apply(&IptablesChange::between(&kernel.observe(), rules), writer).unwrap();
    suffer(&mut kernel, after);
    kernel
}

/// Whether a plan is in force exactly: nothing of the mesh but what is wanted, in order, and what leads in front.
fn check(kernel: &Tables, wanted: &FamilyRules) -> Result<(), TestCaseError> {
    let observed = kernel.observe();
    let state = IptablesTables::from(wanted);
    let ours = of_mesh(&observed, &state);
    prop_assert_eq!(Tables::holding(&ours), Tables::holding(&state));
    prop_assert_eq!(RuleDifference::all(&observed, wanted), []);
    for table in Table::ALL.iter().copied() {
        for hook in Hook::ALL.iter().copied() {
            let chain = Chain::Hook(hook);
            let leading = wanted.leading(table, &chain);
            let rules = observed.rules(table, &chain);
            let first = &state.rules(table, &chain)[..leading];
            prop_assert_eq!(&rules[..leading], first, "{} {}", table.name(), chain);
        }
    }
    Ok(())
}

#[allow(clippy::needless_pass_by_value)] // as map_err calls it
fn refused(refused: Refused) -> TestCaseError {
    TestCaseError::fail(refused.to_string())
}

fn writers() -> impl Strategy<Value = Writer> {
    select(vec![Writer::Iptables, Writer::Netlink])
}

proptest! {
    #[test]
    fn one_table_for_both_families_does_what_one_for_each_does(settings in settings()) {
        let plan = settings.plan();
        let place = |rule: &PlannedRule| plan.planned_rules().iter().position(|one| std::ptr::eq(one, rule)).unwrap();
        for family in plan.families().iter().copied() {
            let alone = plan.explained_rules(family);
            for (table, chains) in plan.merged_rules() {
                for (chain, rules) in chains {
                    let covers = |rule: &&&PlannedRule| rule.scope().covers(family);
                    let merged: Vec<usize> = rules.iter().filter(covers).map(|rule| place(rule)).collect();
                    let alone = alone.get(&table).and_then(|chains| chains.get(&chain));
                    let alone: Vec<usize> = alone.into_iter().flatten().map(|rule| place(rule)).collect();
                    // Neighbours may change places where both only return; so any two may that stand the other way round.
                    let mut sorted = (merged.clone(), alone.clone());
                    sorted.0.sort_unstable();
                    sorted.1.sort_unstable();
                    prop_assert_eq!(sorted.0, sorted.1);
                    for (index, one) in alone.iter().enumerate() {
                        for two in &alone[index + 1..] {
                            let at = |rule| merged.iter().position(|merged| merged == rule);
                            let returns = |rule: &usize| plan.planned_rules()[*rule].rule().target == Target::Return;
                            prop_assert!(at(one) < at(two) || returns(one) && returns(two), "{} {:?}", chain, rules);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn reading_what_is_rendered_gives_the_plan(settings in settings()) {
        let plan = settings.plan();
        for family in Family::BOTH {
            let rules = plan.rules(family);
            let text = rules.restore_text();
            prop_assert_eq!(IptablesTables::saved(&text).unwrap(), IptablesTables::from(&rules), "{}", text);
        }
    }

    #[test]
    fn the_same_settings_give_the_same_bytes(settings in settings()) {
        let bytes = || {
            let plan = settings.plan();
            let texts = Family::BOTH.map(|family| plan.rules(family).restore_text());
            (texts, plan.nft_text(NativeForm::Plain), plan.explain())
        };
        prop_assert_eq!(bytes(), bytes());
    }

    #[test]
    fn neither_order_nor_place_of_settings_matters(
        (settings, shuffled) in settings().prop_flat_map(|settings| {
            let said = settings.said.clone();
            (Just(settings), Just(said).prop_shuffle())
        }),
        places in vec(any::<bool>(), 32),
    ) {
        let sources = places.iter().map(|flag| if *flag { Source::Flag("f") } else { Source::Environment("E") });
        // What is said later holds: first something else is said of everything.
        let before = shuffled.iter().map(|(key, _)| (*key, "said before", Source::Environment("E")));
        let after = shuffled.iter().zip(sources).map(|((key, text), source)| (*key, text.as_str(), source));
        let redirect = settings.redirect_said_as(before.chain(after));
        prop_assert_eq!(&redirect, &settings.redirect());
        prop_assert_eq!(redirect.plan(), settings.plan());
    }

    #[test]
    fn the_environment_says_what_a_flag_says(settings in settings()) {
        let named = |key: Key| key.setting().env.last().copied();
        let mut raw = if settings.pod { RawSettings::for_pod() } else { RawSettings::new() };
        raw.read_environment(|_| true, |name| {
            settings.said.iter().find(|(key, _)| named(*key) == Some(name)).map(|(_, text)| text.clone())
        });
        for (key, text) in settings.said.iter().filter(|(key, _)| named(*key).is_none()) {
            raw.set(*key, text.clone(), Source::Flag("f"));
        }
        // An empty variable says nothing except of a list. The only other empty value here is that of the proxy's
        // groups, whose default is empty as well.
        let redirect = Redirect::parse(&raw, &settings.facts()).unwrap();
        prop_assert_eq!(redirect, settings.redirect());
    }

    #[test]
    fn what_the_builder_accepts_is_rendered_encoded_and_put_in_force(builder in builders()) {
        // What it refuses is reported, each error for the setting it is about.
        let plan = match builder.build() {
            Ok(redirect) => redirect.plan(),
            Err(errors) => {
                prop_assert!(errors.iter().count() > 0 && errors.iter().all(|error| error.key.is_some()));
                return Ok(());
            }
        };
        prop_assert!(!plan.explain().is_empty() && !plan.nft_text(NativeForm::Plain).is_empty());
        let nothing = Observed::at(1);
        let changes = Family::BOTH.map(|family| IptablesChange::between(&IptablesTables::new(), &plan.rules(family)));
        let mut batch = Batch::new(&nothing);
        for (family, change) in Family::BOTH.into_iter().zip(&changes) {
            let rules = plan.rules(family);
            prop_assert_eq!(IptablesTables::saved(&rules.restore_text()).unwrap(), IptablesTables::from(&rules));
            check(&kernel_with(&[], &rules, &[], Writer::Netlink), &rules)?;
            prop_assert!(batch.change(family, change).is_ok());
        }
        for form in [NativeForm::Plain, NativeForm::Sets] {
            let wanted = NativeState::wanted(&plan, form);
            prop_assert!(wanted != NativeState::default());
        }
        prop_assert!(!batch.is_empty() && batch.finish().is_ok());
    }

    #[test]
    fn no_rule_names_an_address_of_the_other_family(settings in settings()) {
        let plan = settings.plan();
        for family in Family::BOTH {
            let rules = plan.rules(family);
            for rule in Table::ALL.iter().flat_map(|table| rules.chains(*table)).flat_map(|(_, rules)| rules) {
                for condition in &rule.matches {
                    if let Match::Source(is) | Match::Destination(is) = condition {
                        prop_assert_eq!(Family::of(&is.value.addr()), family, "{:?}", rule);
                    }
                }
            }
            prop_assert!(plan.families().contains(&family) || rules.is_empty());
        }
    }

    #[test]
    fn every_chain_a_rule_jumps_to_is_declared(settings in settings()) {
        let plan = settings.plan();
        for family in Family::BOTH {
            let rules = plan.rules(family);
            for table in Table::ALL.iter().copied() {
                let chains: BTreeSet<Chain> =
                    rules.chains(table).map(|(chain, _)| chain.clone()).collect();
                let jumps: BTreeSet<Chain> =
                    rules.chains(table).flat_map(|(_, rules)| rules).filter_map(goes_to).collect();
                prop_assert!(jumps.is_subset(&chains), "{}: {jumps:?} {chains:?}", table.name());
            }
        }
    }

    #[test]
    fn any_state_becomes_the_plan_and_others_keep_their_rules(
        earlier in settings(), wanted in settings(),
        before in events(), after in events(),
        rewrite in any::<bool>(), earlier_writer in writers(), writer in writers(),
    ) {
        for family in Family::BOTH {
            let mut kernel = kernel_with(&before, &earlier.plan().rules(family), &after, earlier_writer);
            let wanted = wanted.plan().rules(family);
            let kept = others(&kernel, &wanted);
            let change = if rewrite { IptablesChange::rewriting } else { IptablesChange::between };
            let change = change(&kernel.observe(), &wanted);
            kernel.apply(&change, writer).map_err(refused)?;
            check(&kernel, &wanted)?;
            prop_assert_eq!(others(&kernel, &wanted), kept);
            prop_assert!(IptablesChange::between(&kernel.observe(), &wanted).is_empty());
        }
    }

    #[test]
    fn applied_and_cleaned_up_is_as_before(settings in settings(), before in events(), writer in writers()) {
        for family in Family::BOTH {
            let mut kernel = Tables::new();
            let others = before.iter().filter(|event| !matches!(event, Event::Leftover(..)));
            suffer(&mut kernel, &others.cloned().collect::<Vec<_>>());
            let untouched = kernel.observe();
            let apply = IptablesChange::between(&untouched, &settings.plan().rules(family));
            kernel.apply(&apply, writer).map_err(refused)?;
            let cleanup = IptablesChange::between(&kernel.observe(), &FamilyRules::default());
            kernel.apply(&cleanup, writer).map_err(refused)?;
            prop_assert_eq!(kernel.observe(), untouched);
        }
    }

    #[test]
    fn going_back_restores_exactly_what_was(
        earlier in settings(), wanted in settings(),
        before in events(), after in events(),
        done in 0_usize..4, writer in writers(),
    ) {
        for family in Family::BOTH {
            let mut kernel = kernel_with(&before, &earlier.plan().rules(family), &after, writer);
            let was = kernel.observe();
            let mut change = IptablesChange::between(&was, &wanted.plan().rules(family));
            // Tables come into force one after the other: any number of them may have.
            change.tables.truncate(done);
            kernel.apply(&change, writer).map_err(refused)?;
            let back = IptablesChange::back(&kernel.observe(), &was, &change);
            kernel.apply(&back, writer).map_err(refused)?;
            prop_assert_eq!(kernel.observe(), was);
        }
    }

    #[test]
    fn no_setting_makes_the_reader_panic(
        texts in vec(
            option::of(prop_oneof![any::<String>(), "[0-9a-f:./,*+ -]{0,40}", "\\PC{0,20}"]),
            Setting::ALL.len(),
        ),
        settings in settings(),
    ) {
        let mut raw = if settings.pod { RawSettings::for_pod() } else { RawSettings::new() };
        for (setting, text) in Setting::ALL.iter().zip(texts) {
            let name = setting.annotations.first().copied();
            let source = name.map_or(Source::Flag("f"), Source::Annotation);
            raw.set(setting.key, text.unwrap_or_default(), source);
        }
        for (key, text) in settings.said {
            raw.set(key, text, Source::Flag("f"));
        }
        let facts = NamespaceFacts::new(&settings.addresses);
        match Redirect::parse(&raw, &facts) {
            Ok(redirect) => drop(redirect.plan().rules(Family::V4).restore_text()),
            Err(errors) => for error in &errors {
                // One line each, whatever somebody wrote.
                prop_assert!(!error.to_string().chars().any(char::is_control), "{error}");
            },
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in prop_oneof![any::<String>(), SAVED]) {
        if let Ok(state) = IptablesTables::saved(&text) {
            // What was read can be cleaned up, or is refused for what others have.
            let mut kernel = Tables::holding(&state);
            let _ = kernel.apply(&IptablesChange::between(&state, &FamilyRules::default()), Writer::Iptables);
        }
    }

    #[test]
    fn a_damaged_plan_is_read_or_refused(settings in settings(), at in any::<Index>(), with in "[\\PC\n]{0,3}") {
        let mut text = settings.plan().rules(Family::V4).restore_text();
        let places: Vec<usize> = text.char_indices().map(|(place, _)| place).collect();
        let place = *at.get(&places);
        text.replace_range(place..=place, &with);
        if let Ok(state) = IptablesTables::saved(&text) {
            let _ = IptablesChange::between(&state, &settings.plan().rules(Family::V4));
        }
    }
}
