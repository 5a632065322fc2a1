//! The profile, as runtimes and the Security Profiles Operator read it.

use anyhow::Result;
use serde_json::{Value, json};

use super::calls::{Call, Calls, Condition};

/// Those that images are made for. Calls by the 32-bit ways of the same machines are none of these, and end the program.
const ARCHITECTURES: [&str; 2] = ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"];

/// As the OCI runtime specification has it.
pub(crate) fn for_runtimes(calls: &Calls) -> Result<String> {
    Ok(serde_json::to_string_pretty(&profile(calls))?)
}

/// JSON is YAML.
pub(crate) fn for_the_operator(calls: &Calls) -> Result<String> {
    let object = json!({
        "apiVersion": "security-profiles-operator.x-k8s.io/v1beta1",
        "kind": "SeccompProfile",
        "metadata": {"name": "install-cni", "namespace": "istio-system"},
        "spec": profile(calls),
    });
    Ok(serde_json::to_string_pretty(&object)?)
}

fn profile(calls: &Calls) -> Value {
    let plain = |call: &&Call| call.condition.is_none() && call.errno.is_none();
    let names: Vec<&str> = calls.all.iter().filter(plain).map(|call| call.name.as_str()).collect();
    let mut rules = vec![json!({"names": names, "action": "SCMP_ACT_ALLOW"})];
    rules.extend(calls.all.iter().filter(|call| !plain(call)).flat_map(rules_of));
    json!({"defaultAction": "SCMP_ACT_ERRNO", "architectures": ARCHITECTURES, "syscalls": rules})
}

/// One for each value that an argument may have: conditions within a rule are joined by `and`.
fn rules_of(call: &Call) -> Vec<Value> {
    let rule = |args: Value| match call.errno {
        Some(errno) => {
            json!({"names": [call.name], "action": "SCMP_ACT_ERRNO", "errnoRet": errno, "args": args})
        }
        None => json!({"names": [call.name], "action": "SCMP_ACT_ALLOW", "args": args}),
    };
    match &call.condition {
        None => vec![rule(json!([]))],
        Some((index, Condition::Without(mask))) => {
            vec![rule(json!([{"index": index, "value": mask, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]))]
        }
        Some((index, Condition::OneOf(values))) => values
            .iter()
            .map(|value| rule(json!([{"index": index, "value": value, "op": "SCMP_CMP_EQ"}])))
            .collect(),
    }
}
