//! Selectors of labels and fields, as people write them and as the API server understands them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

/// Which labels an object has, as text or as an object of the API. An empty one selects every object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelSelector {
    #[serde(skip)]
    pub(crate) text: String,
    #[serde(default)]
    pub(crate) match_labels: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) match_expressions: Vec<LabelRequirement>,
}

/// A condition on a label.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LabelRequirement {
    pub(crate) key: String,
    pub(crate) operator: Operator,
    #[serde(default)]
    pub(crate) values: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

/// Which fields a pod has. An empty one selects every pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSelector {
    text: String,
    /// A field, the value, and whether it has to have it.
    conditions: Vec<(&'static str, String, bool)>,
}

/// Fields that the API server selects pods by. One that only a newer server knows is rejected.
const FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    HOST_NETWORK,
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
];

/// The one whose default is not empty.
const HOST_NETWORK: &str = "spec.hostNetwork";

/// Why a text is not a selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// A part of it is not a condition.
    #[error(
        "{0:?} is not a condition on a label, such as app=web, app!=web, app in (web, shop), app or !app"
    )]
    Label(String),
    /// A part of it is not a condition.
    #[error("{0:?} is not a condition on a field, such as metadata.namespace!=kube-system")]
    Field(String),
    /// The API server does not select pods by it.
    #[error("pods cannot be selected by the field {0:?}; they can by {fields}", fields = FIELDS.join(", "))]
    UnknownField(String),
}

impl LabelSelector {
    /// Reads one.
    ///
    /// # Errors
    /// The first part that is not a condition.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        let parts = split(text);
        let conditions = parts
            .into_iter()
            .map(|part| label_condition(part).ok_or_else(|| SelectorError::Label(part.to_owned())));
        let match_expressions = conditions.collect::<Result<_, _>>()?;
        Ok(Self { text: text.trim().to_owned(), match_expressions, ..Self::default() })
    }

    /// As it is sent.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether it selects an object, by the values of its labels.
    #[must_use]
    pub fn selects<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.match_labels.iter().all(|(key, wanted)| value(key) == Some(wanted))
            && self.match_expressions.iter().all(|condition| condition.holds(value(&condition.key)))
    }
}

impl LabelRequirement {
    pub(crate) fn check(&self) -> Result<(), String> {
        let problem = match (self.operator, self.values.is_empty()) {
            (Operator::In | Operator::NotIn, true) => "In and NotIn need values",
            (Operator::Exists | Operator::DoesNotExist, false) => "Exists and DoesNotExist take no values",
            (Operator::In | Operator::NotIn, false) | (Operator::Exists | Operator::DoesNotExist, true) => {
                return Ok(());
            }
        };
        Err(format!("condition on label {:?}: {problem}", self.key))
    }

    fn holds(&self, value: Option<&str>) -> bool {
        let is_listed = value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            Operator::In => is_listed,
            Operator::NotIn => !is_listed,
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}

impl FieldSelector {
    /// Reads one.
    ///
    /// # Errors
    /// The first part that is not a condition, or about a field that the API server does not select by.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        let mut conditions = Vec::new();
        for part in split(text) {
            let no_condition = || SelectorError::Field(part.to_owned());
            let (name, value, equal) = comparison(part).ok_or_else(no_condition)?;
            let field = FIELDS.iter().find(|field| **field == name);
            let field = field.ok_or_else(|| SelectorError::UnknownField(name.to_owned()))?;
            conditions.push((*field, value.to_owned(), equal));
        }
        Ok(Self { text: text.trim().to_owned(), conditions })
    }

    /// As it is sent, with the pods' node.
    #[must_use]
    pub fn on_node(&self, node: &str) -> String {
        let comma = if self.text.is_empty() { "" } else { "," };
        format!("{}{comma}spec.nodeName={node}", self.text)
    }

    /// Whether it selects a pod.
    #[must_use]
    pub fn selects(&self, pod: &Value) -> bool {
        self.conditions.iter().all(|(field, wanted, equal)| {
            let is = match pod.pointer(&format!("/{}", field.replace('.', "/"))) {
                Some(Value::String(text)) => text.as_str(),
                Some(Value::Bool(true)) => "true",
                Some(Value::Bool(false)) => "false",
                Some(_) | None if *field == HOST_NETWORK => "false",
                Some(_) | None => "",
            };
            (is == wanted) == *equal
        })
    }
}

/// The parts between commas, those within parentheses aside. An empty text has none.
#[must_use]
pub fn split(text: &str) -> Vec<&str> {
    if text.trim().is_empty() {
        return Vec::new();
    }
    let (mut parts, mut begin, mut depth) = (Vec::new(), 0, 0_usize);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth = depth.saturating_add(1),
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(text[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[begin..].trim());
    parts
}

fn label_condition(part: &str) -> Option<LabelRequirement> {
    let condition = |key: &str, operator: Operator, values: &[&str]| {
        (is_key(key) && values.iter().all(|value| is_value(value))).then(|| LabelRequirement {
            key: key.to_owned(),
            operator,
            values: values.iter().map(|value| (*value).to_owned()).collect(),
        })
    };
    if let Some(key) = part.strip_prefix('!') {
        return condition(key.trim(), Operator::DoesNotExist, &[]);
    }
    if let Some((key, value, equal)) = comparison(part) {
        return condition(key, if equal { Operator::In } else { Operator::NotIn }, &[value]);
    }
    if let Some((left, list)) = part.split_once('(') {
        let values: Vec<&str> = list.strip_suffix(')')?.split(',').map(str::trim).collect();
        return match left.split_whitespace().collect::<Vec<_>>()[..] {
            [key, "in"] => condition(key, Operator::In, &values),
            [key, "notin"] => condition(key, Operator::NotIn, &values),
            _ => None,
        };
    }
    condition(part, Operator::Exists, &[])
}

/// Key, value, and whether they have to be equal.
fn comparison(part: &str) -> Option<(&str, &str, bool)> {
    let (left, right) = part.split_once('=')?;
    let (key, equal) = match left.strip_suffix('!') {
        Some(key) => (key, false),
        None => (left, true),
    };
    let value = if equal { right.strip_prefix('=').unwrap_or(right) } else { right };
    let (key, value) = (key.trim(), value.trim());
    (!key.is_empty() && !value.contains('=')).then_some((key, value, equal))
}

/// Whether it can be the key of a label: a name, perhaps with the prefix of a domain.
#[must_use]
pub fn is_key(key: &str) -> bool {
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let domain = |prefix: &str| {
        prefix.len() <= 253
            && prefix
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte))
            && prefix.split('.').all(|part| is_ended_well(part) && !part.is_empty())
    };
    !name.is_empty() && is_value(name) && prefix.is_none_or(domain)
}

/// Whether it can be the value of a label.
#[must_use]
pub fn is_value(value: &str) -> bool {
    value.len() <= 63
        && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && is_ended_well(value)
}

fn is_ended_well(text: &str) -> bool {
    let good = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
    good(text.bytes().next()) && good(text.bytes().last())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn selects(selector: &str, labels: &[(&str, &str)]) -> bool {
        let value = |key: &str| labels.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        LabelSelector::parse(selector).unwrap_or_else(|error| panic!("{error}")).selects(value)
    }

    #[test]
    fn labels_are_selected_as_the_api_server_does() {
        let web = [("app", "web"), ("example.com/tier", "front")];
        for (selector, selected) in [
            ("", true),
            ("  ", true),
            ("app", true),
            ("!app", false),
            ("! color", true),
            ("app=web", true),
            ("app == web", true),
            ("app!=web", false),
            ("app != shop", true),
            ("color!=red", true),
            ("app in (web, shop)", true),
            ("app in (shop)", false),
            ("app notin (shop,bank)", true),
            ("color notin (red)", true),
            ("color in (red)", false),
            ("color=", false),
            ("example.com/tier=front,app in (web,shop),!color", true),
            ("example.com/tier=front,app in (bank,shop),!color", false),
        ] {
            assert_eq!(selects(selector, &web), selected, "{selector}");
        }
    }

    #[test]
    fn what_is_no_selector_is_refused() {
        for selector in [
            "=web",
            "app=a=b",
            "app in web",
            "app in (web",
            "app of (web)",
            ",",
            "app,",
            "a b",
            "-a",
            "app=ü",
            "!",
            "/x",
            "a in b (c)",
        ] {
            assert!(LabelSelector::parse(selector).is_err(), "{selector}");
        }
        assert!(matches!(FieldSelector::parse("status.phase"), Err(SelectorError::Field(_))));
        let error = FieldSelector::parse("spec.priority=1").expect_err("no such field").to_string();
        assert!(error.contains("spec.priority") && error.contains("status.phase"), "{error}");
    }

    #[test]
    fn fields_are_selected_and_sent_with_the_node() {
        let pod = json!({"metadata": {"namespace": "shop"}, "status": {"phase": "Pending"}, "spec": {"hostNetwork": true}});
        for (selector, selected) in [
            ("", true),
            ("metadata.namespace!=kube-system", true),
            ("metadata.namespace=shop, status.phase==Pending", true),
            ("metadata.namespace=shop,status.phase!=Pending", false),
            ("spec.hostNetwork=true", true),
            ("spec.nodeName=", true),
        ] {
            let parsed = FieldSelector::parse(selector).expect("a selector");
            assert_eq!(parsed.selects(&pod), selected, "{selector}");
        }
        let no_host = FieldSelector::parse("spec.hostNetwork=false").expect("a selector");
        assert!(no_host.selects(&json!({"spec": {}})) && !no_host.selects(&pod));
        assert_eq!(no_host.on_node("n"), "spec.hostNetwork=false,spec.nodeName=n");
        assert_eq!(FieldSelector::default().on_node("n"), "spec.nodeName=n");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _ = (LabelSelector::parse(&text), FieldSelector::parse(&text));
        }

        #[test]
        fn a_condition_and_its_contrary_never_select_the_same(
            key in "[a-z]{1,3}", value in "[a-z]{0,2}",
            labels in prop::collection::btree_map("[a-z]{1,3}", "[a-z]{0,2}", 0..4),
        ) {
            for (one, other) in [("{k}={v}", "{k}!={v}"), ("{k} in ({v},x)", "{k} notin ({v},x)"), ("{k}", "!{k}")] {
                let selects = |text: &str| {
                    let text = text.replace("{k}", &key).replace("{v}", &value);
                    let value = |key: &str| labels.get(key).map(String::as_str);
                    LabelSelector::parse(&text).expect("a selector").selects(value)
                };
                prop_assert_ne!(selects(one), selects(other));
            }
        }
    }
}
