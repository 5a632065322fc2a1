//! What holds for every plan and every change, whatever the settings and whatever the kernel holds already.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod generated;

use generated::{settings, typed::builders};
use proptest::{
    collection::vec,
    option,
    prelude::*,
    sample::{Index, select},
};
use redirect_core::{
    Family, Redirect,
    change::{Change, RuleDifference, Step},
    netlink::{Batch, NativeForm, NativeState, Observed},
    parse,
    plan::FamilyRules,
    render,
    rule::{Chain, Hook, Match, Rule, Table, Target},
    settings::{Key, NamespaceFacts, RawSettings, SETTINGS, Source},
    state::{Entry, RuleState},
};
use std::collections::{BTreeMap, BTreeSet};

fn entries(state: &RuleState) -> impl Iterator<Item = &Entry> {
    Table::ALL.iter().copied().flat_map(|table| state.chains(table)).flat_map(|(_, rules)| rules)
}

// A kernel

/// The tables of one family, changed as the kernel does: whatever it would refuse is an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Kernel {
    tables: BTreeMap<Table, BTreeMap<Chain, Vec<Entry>>>,
}

impl Kernel {
    fn holding(state: &RuleState) -> Self {
        let chains =
            |table| state.chains(table).map(|(chain, rules)| (chain.clone(), rules.to_vec())).collect();
        Self { tables: Table::ALL.iter().copied().map(|table| (table, chains(table))).collect() }
    }

    /// As iptables-save would show it.
    fn observe(&self) -> RuleState {
        let mut state = RuleState::new();
        for (table, chains) in &self.tables {
            for (chain, rules) in chains {
                if !(matches!(chain, Chain::Hook(_)) && rules.is_empty()) {
                    *state.declare(*table, chain.clone()) = rules.clone();
                }
            }
        }
        state
    }

    fn apply(&mut self, change: &Change) -> Result<(), String> {
        for table in &change.tables {
            for step in &table.steps {
                self.step(table.table, step)
                    .map_err(|error| format!("{}: {step:?}: {error}", table.table.name()))?;
            }
        }
        Ok(())
    }

    fn step(&mut self, table: Table, step: &Step) -> Result<(), &'static str> {
        match step {
            Step::DeclareEmpty(Chain::Hook(_)) => return Err("a built-in chain is not declared"),
            Step::DeclareEmpty(chain) => drop(self.chains(table).insert(chain.clone(), Vec::new())),
            Step::Append(chain, entry) => {
                self.check_target(table, entry)?;
                self.chain(table, chain)?.push(entry.clone());
            }
            Step::Insert(chain, number, entry) => {
                self.check_target(table, entry)?;
                let rules = self.chain(table, chain)?;
                let index = number.checked_sub(1).filter(|index| *index <= rules.len());
                rules.insert(index.ok_or("no such number")?, entry.clone());
            }
            Step::Delete(chain, entry) => {
                let rules = self.chain(table, chain)?;
                let index = rules.iter().position(|rule| rule == entry).ok_or("no such rule")?;
                rules.remove(index);
            }
            Step::Flush(chain) => self.chain(table, chain)?.clear(),
            Step::RemoveChain(chain) => {
                if !self.chain(table, chain)?.is_empty() {
                    return Err("the chain is not empty");
                }
                if self.chains(table).values().flatten().any(|entry| goes_to(entry) == Some(chain.clone())) {
                    return Err("something jumps to the chain");
                }
                self.chains(table).remove(chain);
            }
        }
        Ok(())
    }

    fn chains(&mut self, table: Table) -> &mut BTreeMap<Chain, Vec<Entry>> {
        self.tables.entry(table).or_default()
    }

    fn chain(&mut self, table: Table, chain: &Chain) -> Result<&mut Vec<Entry>, &'static str> {
        let chains = self.chains(table);
        if matches!(chain, Chain::Hook(_)) {
            return Ok(chains.entry(chain.clone()).or_default());
        }
        chains.get_mut(chain).ok_or("no such chain")
    }

    fn check_target(&mut self, table: Table, entry: &Entry) -> Result<(), &'static str> {
        match goes_to(entry) {
            Some(chain) if !self.chains(table).contains_key(&chain) => {
                Err("jumps to a chain that is not there")
            }
            Some(_) | None => Ok(()),
        }
    }

    /// What is not the mesh's while a plan is put in force, in order.
    fn others(&self, wanted: &FamilyRules) -> BTreeMap<(Table, Chain), Vec<Entry>> {
        let state = self.observe();
        let mut others = BTreeMap::new();
        for table in Table::ALL.iter().copied() {
            for (chain, rules) in state.chains(table).filter(|(chain, _)| !chain.belongs_to_mesh()) {
                let kept: Vec<Entry> = rules
                    .iter()
                    .filter(|rule| !state.owns_beside(wanted.state(), table, chain, rule))
                    .cloned()
                    .collect();
                if !kept.is_empty() || !matches!(chain, Chain::Hook(_)) {
                    others.insert((table, chain.clone()), kept);
                }
            }
        }
        others
    }
}

/// The chain a rule jumps to.
fn goes_to(entry: &Entry) -> Option<Chain> {
    match entry {
        Entry::Rule(Rule { target: Target::Jump(chain), .. }) => Some(chain.clone()),
        Entry::Rule(_) => None,
        Entry::Foreign(rule) => rule.jumps_to().filter(|chain| {
            !matches!(chain.name(), "ACCEPT" | "DROP" | "RETURN" | "LOG" | "MASQUERADE" | "DNAT")
        }),
    }
}

/// Something that happens to the tables of a kernel, by somebody else or by accident.
#[derive(Debug, Clone)]
enum Event {
    /// Somebody else's rule in a built-in chain.
    Rule(Table, Hook, Index, &'static str),
    /// Somebody else's chain.
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

impl Kernel {
    fn suffer(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::Rule(table, hook, at, text) => {
                    let rules = self.chain(*table, &Chain::Hook(*hook)).unwrap();
                    rules.insert(at.index(rules.len() + 1), parse::entry(text));
                }
                Event::Chain(table) => {
                    self.chains(*table).insert(Chain::named("OTHERS"), vec![parse::entry(OTHERS[0])]);
                }
                Event::Loss(table, at) => {
                    if let Some((rules, index)) = self.pick(*table, *at) {
                        rules.remove(index);
                    }
                }
                Event::Duplicate(table, at) => {
                    if let Some((rules, index)) = self.pick(*table, *at) {
                        rules.insert(index, rules[index].clone());
                    }
                }
                Event::Leftover(table, hook) => {
                    let chain = Chain::named("ISTIO_OLDER");
                    self.chains(*table).insert(chain, vec![parse::entry("-p tcp -j LOG")]);
                    let jump = parse::entry("-p tcp -m comment --comment \"older\" -j ISTIO_OLDER");
                    self.chain(*table, &Chain::Hook(*hook)).unwrap().push(jump);
                }
            }
        }
    }

    /// One of the mesh's rules: its chain, and where in it.
    fn pick(&mut self, table: Table, at: Index) -> Option<(&mut Vec<Entry>, usize)> {
        let state = self.observe();
        let ours = |(chain, rules): &(&Chain, &[Entry])| -> Vec<(Chain, usize)> {
            let owned = |(_, rule): &(usize, &Entry)| state.owns(table, chain, rule);
            rules.iter().enumerate().filter(owned).map(|(index, _)| ((*chain).clone(), index)).collect()
        };
        let all: Vec<(Chain, usize)> = state.chains(table).flat_map(|chain| ours(&chain)).collect();
        let (chain, index) = (!all.is_empty()).then(|| at.get(&all).clone())?;
        Some((self.chain(table, &chain).unwrap(), index))
    }

    /// With a plan in force, and what happened before and after that.
    fn with(before: &[Event], rules: &FamilyRules, after: &[Event]) -> Self {
        let mut kernel = Self::default();
        kernel.suffer(before);
        kernel.apply(&Change::between(&kernel.observe(), rules)).unwrap();
        kernel.suffer(after);
        kernel
    }

    /// Whether a plan is in force exactly: nothing of the mesh but what is wanted, in order, and what leads in front.
    fn check(&self, wanted: &FamilyRules) -> Result<(), TestCaseError> {
        let observed = self.observe();
        let ours = observed.of_mesh_beside(wanted.state());
        prop_assert_eq!(Self::holding(&ours), Self::holding(wanted.state()));
        prop_assert_eq!(RuleDifference::first(&observed, wanted), None);
        for table in Table::ALL.iter().copied() {
            for hook in Hook::ALL.iter().copied() {
                let (chain, leading) = (Chain::Hook(hook), wanted.leading(table, hook));
                let rules = observed.rules(table, &chain);
                let first = &wanted.state().rules(table, &chain)[..leading];
                prop_assert_eq!(&rules[..leading], first, "{} {}", table.name(), chain);
            }
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn reading_what_is_rendered_gives_the_plan(settings in settings()) {
        let plan = settings.plan();
        for family in Family::BOTH {
            let rules = plan.rules(family);
            let text = render::restore_text(&rules);
            prop_assert_eq!(&parse::rule_state(&text).unwrap(), rules.state(), "{}", text);
        }
    }

    #[test]
    fn the_same_settings_give_the_same_bytes(settings in settings()) {
        let bytes = || {
            let plan = settings.plan();
            let texts = Family::BOTH.map(|family| render::restore_text(&plan.rules(family)));
            (texts, render::nft_text(&plan), render::explain(&plan))
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
        // What it refuses is told, each error for the setting it is about.
        let plan = match builder.build() {
            Ok(redirect) => redirect.plan(),
            Err(errors) => {
                prop_assert!(errors.iter().count() > 0 && errors.iter().all(|error| error.key.is_some()));
                return Ok(());
            }
        };
        prop_assert!(!render::explain(&plan).is_empty() && !render::nft_text(&plan).is_empty());
        let nothing = Observed::at(1);
        let changes = Family::BOTH.map(|family| Change::between(&RuleState::new(), &plan.rules(family)));
        let mut batch = Batch::new(&nothing);
        for (family, change) in Family::BOTH.into_iter().zip(&changes) {
            let rules = plan.rules(family);
            prop_assert_eq!(&parse::rule_state(&render::restore_text(&rules)).unwrap(), rules.state());
            Kernel::with(&[], &rules, &[]).check(&rules)?;
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
            for entry in entries(rules.state()) {
                let Entry::Rule(rule) = entry else { panic!("a planned rule that is not understood: {entry:?}") };
                for condition in &rule.matches {
                    if let Match::Source(is) | Match::Destination(is) = condition {
                        prop_assert_eq!(Family::of(&is.value.addr()), family, "{:?}", rule);
                    }
                }
            }
            prop_assert!(plan.families().contains(&family) || rules == FamilyRules::default());
        }
    }

    #[test]
    fn every_chain_a_rule_jumps_to_is_declared(settings in settings()) {
        let plan = settings.plan();
        for family in Family::BOTH {
            let rules = plan.rules(family);
            for table in Table::ALL.iter().copied() {
                let chains: BTreeSet<Chain> =
                    rules.state().chains(table).map(|(chain, _)| chain.clone()).collect();
                let jumps: BTreeSet<Chain> =
                    rules.state().chains(table).flat_map(|(_, rules)| rules).filter_map(goes_to).collect();
                prop_assert!(jumps.is_subset(&chains), "{}: {jumps:?} {chains:?}", table.name());
            }
        }
    }

    #[test]
    fn any_state_becomes_the_plan_and_others_keep_their_rules(
        earlier in settings(), wanted in settings(),
        before in events(), after in events(),
        rewrite in any::<bool>(),
    ) {
        for family in Family::BOTH {
            let mut kernel = Kernel::with(&before, &earlier.plan().rules(family), &after);
            let wanted = wanted.plan().rules(family);
            let others = kernel.others(&wanted);
            let change = if rewrite { Change::rewriting } else { Change::between };
            let change = change(&kernel.observe(), &wanted);
            kernel.apply(&change).map_err(TestCaseError::fail)?;
            kernel.check(&wanted)?;
            prop_assert_eq!(kernel.others(&wanted), others);
            prop_assert!(Change::between(&kernel.observe(), &wanted).is_empty());
        }
    }

    #[test]
    fn applied_and_cleaned_up_is_as_before(settings in settings(), before in events()) {
        for family in Family::BOTH {
            let mut kernel = Kernel::default();
            let others = before.iter().filter(|event| !matches!(event, Event::Leftover(..)));
            kernel.suffer(&others.cloned().collect::<Vec<_>>());
            let untouched = kernel.observe();
            let apply = Change::between(&untouched, &settings.plan().rules(family));
            kernel.apply(&apply).map_err(TestCaseError::fail)?;
            let cleanup = Change::between(&kernel.observe(), &FamilyRules::default());
            kernel.apply(&cleanup).map_err(TestCaseError::fail)?;
            prop_assert_eq!(kernel.observe(), untouched);
        }
    }

    #[test]
    fn going_back_restores_exactly_what_was(
        earlier in settings(), wanted in settings(),
        before in events(), after in events(),
        done in 0_usize..4,
    ) {
        for family in Family::BOTH {
            let mut kernel = Kernel::with(&before, &earlier.plan().rules(family), &after);
            let was = kernel.observe();
            let mut change = Change::between(&was, &wanted.plan().rules(family));
            // Tables come into force one after the other: any number of them may have.
            change.tables.truncate(done);
            kernel.apply(&change).map_err(TestCaseError::fail)?;
            let back = Change::back(&kernel.observe(), &was, &change);
            kernel.apply(&back).map_err(TestCaseError::fail)?;
            prop_assert_eq!(kernel.observe(), was);
        }
    }

    #[test]
    fn no_setting_makes_the_reader_panic(
        texts in vec(
            option::of(prop_oneof![any::<String>(), "[0-9a-f:./,*+ -]{0,40}", "\\PC{0,20}"]),
            SETTINGS.len(),
        ),
        settings in settings(),
    ) {
        let mut raw = if settings.pod { RawSettings::for_pod() } else { RawSettings::new() };
        for (setting, text) in SETTINGS.iter().zip(texts) {
            let name = setting.annotations.first().copied();
            let source = name.map_or(Source::Flag("f"), Source::Annotation);
            raw.set(setting.key, text.unwrap_or_default(), source);
        }
        for (key, text) in settings.said {
            raw.set(key, text, Source::Flag("f"));
        }
        let facts = NamespaceFacts::new(&settings.addresses);
        match Redirect::parse(&raw, &facts) {
            Ok(redirect) => drop(render::restore_text(&redirect.plan().rules(Family::V4))),
            Err(errors) => for error in &errors {
                // One line each, whatever somebody wrote.
                prop_assert!(!error.to_string().chars().any(char::is_control), "{error}");
            },
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in prop_oneof![any::<String>(), SAVED]) {
        if let Ok(state) = parse::rule_state(&text) {
            // What was read can be cleaned up, or is refused for what others have.
            let mut kernel = Kernel::holding(&state);
            let _ = kernel.apply(&Change::between(&state, &FamilyRules::default()));
        }
    }

    #[test]
    fn a_damaged_plan_is_read_or_refused(settings in settings(), at in any::<Index>(), with in "[\\PC\n]{0,3}") {
        let mut text = render::restore_text(&settings.plan().rules(Family::V4));
        let places: Vec<usize> = text.char_indices().map(|(place, _)| place).collect();
        let place = *at.get(&places);
        text.replace_range(place..=place, &with);
        if let Ok(state) = parse::rule_state(&text) {
            let _ = Change::between(&state, &settings.plan().rules(Family::V4));
        }
    }
}
