//! What must be true of every plan, whatever text it was made of: each renderer writes its rules, all of them and nothing else.

use crate::{kernel, text};
use netfilter_state::{
    change::{IptablesChange, RuleDifference},
    state::{Entry, IptablesTables},
};
use redirect_core::{
    Family, Redirect, RulePlan,
    options::NativeForm,
    plan::FamilyRules,
    rule::{Table, Target},
};
use redirectctl::{
    plan::{PlanLanguage, written},
    text_writer::TextLayout,
};
use serde_json::Value;

/// Checks a plan in each of its forms.
///
/// # Panics
/// Something is not as it should be.
pub fn check(redirect: &Redirect) {
    let plan = redirect.plan();
    for family in Family::BOTH {
        restore_text(&plan.rules(family));
    }
    assert_eq!(plan, redirect.plan(), "a plan is made twice and is not the same");
    nft_text(&plan);
    netlink(&plan);
    json(&plan, redirect);
    pictures(&plan);
    text::is_safe(&plan.explain());
}

/// What iptables-restore is given says the plan's rules, a line each, and reads back as the plan.
fn restore_text(rules: &FamilyRules) {
    let text = rules.restore_text();
    text::is_safe(&text);
    let read = IptablesTables::saved(&text).expect("a rendered plan can be read");
    assert_eq!(read, IptablesTables::from(rules));
    assert_eq!(RuleDifference::all(&read, rules), []);
    assert!(IptablesChange::between(&read, rules).is_empty());
    assert_eq!(IptablesChange::between(&IptablesTables::new(), rules).is_empty(), rules.is_empty());
    let planned: usize =
        Table::ALL.iter().flat_map(|table| rules.chains(*table)).map(|(_, all)| all.len()).sum();
    assert_eq!(text.lines().filter(|line| is_rule(line)).count(), planned, "{text}");
    let known = |line: &str| line == "COMMIT" || line.starts_with(['*', ':']) || is_rule(line);
    assert!(text.lines().all(known), "a line that no plan has: {text}");
}

/// Whether a line adds a rule: behind those that are there, or before them.
fn is_rule(line: &str) -> bool {
    line.starts_with("-A ") || line.starts_with("-I ")
}

/// What nft is given says the plan's rules, a line each. Text for nft can begin a second command at a semicolon.
fn nft_text(plan: &RulePlan) {
    let merged = plan.merged_rules();
    let planned: usize = merged.values().flat_map(|chains| chains.values()).map(Vec::len).sum();
    let all = merged.values().flat_map(|chains| chains.values()).flatten();
    let handing_over = all.filter(|planned| matches!(planned.rule().target, Target::Tproxy { .. })).count();
    let chains: usize = merged.values().map(|chains| chains.len()).sum();
    for form in [NativeForm::Plain, NativeForm::Sets] {
        let text = plan.nft_text(form);
        text::is_safe(&text);
        let of = |words: &str| text.lines().filter(|line| line.starts_with(words)).count();
        let (rules, others) = (
            of("add rule inet istio-proxy-"),
            of("add table inet istio-proxy-") + of("delete table inet istio-proxy-"),
        );
        assert_eq!(of("add chain inet istio-proxy-"), chains, "{text}");
        assert_eq!(rules + chains + others, text.lines().count(), "a line that no plan has: {text}");
        match form {
            // Behind one that hands over to the proxy is one that drops what the proxy does not take.
            NativeForm::Plain => assert_eq!(rules, planned + handing_over, "{text}"),
            // Several rules become one with a set.
            _ => assert!(rules <= planned + handing_over, "{text}"),
        }
        for line in text.lines().filter(|line| line.starts_with("add rule")) {
            assert!(!line.contains([';', '#', '\\', '`']), "{line}");
            assert_eq!(line.matches('"').count() % 2, 0, "{line}");
        }
    }
}

/// What the kernel is sent over netlink reads back as the plan.
fn netlink(plan: &RulePlan) {
    let observed = kernel::after_iptables(plan);
    for family in Family::BOTH {
        let rules = plan.rules(family);
        assert_eq!(*observed.state(family), IptablesTables::from(&rules), "{family}");
        let is_ours = |entry: &Entry| matches!(entry, Entry::Rule(_));
        let mut read = Table::ALL
            .iter()
            .flat_map(|table| observed.state(family).chains(*table))
            .flat_map(|(_, all)| all);
        assert!(read.all(is_ours), "a rule that is not understood");
    }
    assert_eq!(observed.obstacles().count(), 0);
    let native = kernel::after_native(plan, NativeForm::Plain);
    let wanted = netfilter_state::netlink::NativeState::wanted(plan, NativeForm::Plain);
    assert_eq!(native.native().differences_to(&wanted), []);
    assert_eq!(native.native(), &wanted);
}

/// JSON for programs says the plan's rules in the words of iptables.
fn json(plan: &RulePlan, redirect: &Redirect) {
    let value = serde_json::to_value(plan).expect("a plan is JSON");
    let list = |value: &Value, name: &str| value[name].as_array().cloned().expect("a list");
    let text = |value: &Value, name: &str| value[name].as_str().map(str::to_owned).expect("a text");
    for (family, written) in plan.families().iter().zip(list(&value, "families")) {
        let rules = plan.rules(*family);
        for table in list(&written, "tables") {
            let named = Table::named(&text(&table, "table")).expect("a table");
            for chain in list(&table, "chains") {
                let name = text(&chain, "chain");
                let planned = rules.chains(named).find(|(one, _)| one.name() == name).map(|(_, all)| all);
                let told: Vec<Entry> =
                    list(&chain, "rules").iter().map(|rule| Entry::saved(&text(rule, "text"))).collect();
                let planned: Vec<Entry> = planned.unwrap_or_default().iter().map(Entry::from).collect();
                assert_eq!(told, planned);
            }
        }
    }
    let redirection = serde_json::to_value(redirect).expect("a redirection is JSON");
    no_control_characters(&value);
    no_control_characters(&redirection);
}

/// No string of it, and no key.
fn no_control_characters(value: &Value) {
    match value {
        Value::String(text) => text::is_one_safe_line(text),
        Value::Array(items) => items.iter().for_each(no_control_characters),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            text::is_one_safe_line(key);
            no_control_characters(value);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Text and pictures for people; an SVG is XML that runs nothing.
fn pictures(plan: &RulePlan) {
    for word in PlanLanguage::WORDS {
        let format = PlanLanguage::named(word).expect("its own word");
        let written = written(plan, format, NativeForm::Plain, TextLayout { width: 100, colour: false });
        text::is_safe(&written);
        if format == PlanLanguage::Svg {
            svg(&written);
        }
    }
}

/// Well-formed, and nothing in it but shapes and text.
///
/// # Panics
/// It is not.
pub fn svg(picture: &str) {
    let document = roxmltree::Document::parse(picture).expect("an SVG is XML");
    for element in document.descendants().filter(roxmltree::Node::is_element) {
        let name = element.tag_name().name();
        assert!(!matches!(name, "script" | "a" | "image" | "foreignObject" | "use"), "{name} in {picture}");
        let runs = |attribute: roxmltree::Attribute<'_, '_>| {
            attribute.name().starts_with("on") || attribute.name() == "href"
        };
        assert!(!element.attributes().any(runs), "{picture}");
    }
}
