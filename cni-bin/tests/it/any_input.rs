//! Whatever comes in: never a panic, always an answer that is JSON, and nothing is programmed that was not asked for.

use std::{ffi::OsString, path::Path};

use istio_cni::{
    kernel::{KernelError, MachineNamespaces, NamespaceWork},
    selection::Programming,
};
use proptest::prelude::*;
use redirect_core::pod::PodFacts;
use serde_json::{Map, Value};

/// A kernel that must not be asked: no input of these tests names a pod that can be found.
struct Untouched;

impl MachineNamespaces for Untouched {
    fn inside(&self, path: &Path, _: &mut NamespaceWork<'_>) -> Result<(), KernelError> {
        panic!("{} was entered", path.display())
    }

    fn preflight(&self, _: Programming) -> Result<(), KernelError> {
        Ok(())
    }
}

fn answer(command: &str, input: &[u8], variables: &[(String, String)]) -> istio_cni::RuntimeReply {
    let env = |name: &str| {
        let said = variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        Some(OsString::from(if name == "CNI_COMMAND" { command } else { said.unwrap_or("x") }))
    };
    istio_cni::answer(&env, &mut &*input, &Untouched, &|_| ())
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z0-9./:*\\n -]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key(), inner), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<String, Value>>())),
        ]
    })
}

/// Keys that mean something, so that more than the outermost layer is reached.
fn key() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "cniVersion",
        "name",
        "prevResult",
        "ips",
        "address",
        "routes",
        "dst",
        "interfaces",
        "kubernetes",
        "kubeconfig",
        "nft_sets",
        "strict_capture",
        "exclude_namespaces",
        "add_timeout",
        "plugin_log_level",
        "metadata",
        "labels",
        "annotations",
        "spec",
        "containers",
        "initContainers",
        "args",
        "env",
        "value",
        "securityContext",
        "runAsUser",
        "kind",
        "é\"\\",
    ])
    .prop_map(str::to_owned)
}

fn is_answer(answer: &istio_cni::RuntimeReply) -> bool {
    let output = &answer.output;
    if answer.success && output.is_empty() {
        return true;
    }
    let Ok(Value::Object(object)) = serde_json::from_str(output) else { return false };
    answer.success || object["code"].is_u64() && object["msg"].as_str().is_some_and(|text| !text.is_empty())
}

proptest! {
    #[test]
    fn any_bytes_are_answered(input: Vec<u8>, command in "ADD|CHECK|DEL|GC|VERSION|[A-Z]{0,4}") {
        prop_assert!(is_answer(&answer(&command, &input, &[])));
    }

    #[test]
    fn any_configuration_is_answered(mut conf in json(), version in "0\\.[1-4]\\.0|1\\.[01]\\.0") {
        if let Some(conf) = conf.as_object_mut() {
            conf.insert("cniVersion".into(), version.into());
            conf.entry("name").or_insert("net".into());
        }
        let args = [("CNI_ARGS".to_owned(), String::new())];
        for command in ["ADD", "CHECK", "DEL", "GC"] {
            prop_assert!(is_answer(&answer(command, conf.to_string().as_bytes(), &args)));
        }
    }

    #[test]
    fn any_environment_is_answered(args in "\\PC{0,40}|([A-Z0-9a-z_]{1,8}=[a-z./-]{0,8};){0,3}", id in "\\PC{0,20}", ifname in "\\PC{0,20}") {
        let variables = [("CNI_ARGS", args), ("CNI_CONTAINERID", id), ("CNI_IFNAME", ifname)];
        let variables = variables.map(|(name, value)| (name.to_owned(), value));
        let input = br#"{"cniVersion":"1.0.0","name":"net","add_timeout":"1ms","cni_agent_run_dir":"/nonexistent"}"#;
        prop_assert!(is_answer(&answer("ADD", input, &variables)));
    }

    #[test]
    fn any_pod_is_read_or_refused(pod in json()) {
        if let Err(errors) = PodFacts::from_json(&pod) {
            let told: Vec<String> = errors.iter().map(ToString::to_string).collect();
            prop_assert!(!told.is_empty() && told.iter().all(|error| error.contains(": ")));
        }
    }
}
