//! Any network configuration and CNI environment: always one answer that a runtime can read. What comes from the plugins before goes back
//! as it came, and what is programmed is a plan that every renderer writes as it is.
//!
//! Variables are lines; the configuration is behind the first zero byte.

#![no_main]

use istio_cni::{
    answer,
    kernel::{
        Applied, KernelError, MachineNamespaces, Namespace, NamespaceComparison, NamespaceWork, WantedRules,
    },
    selection::Programming,
};
use libfuzzer_sys::fuzz_target;
use redirect_core::options::NativeForm;
use redirect_core_fuzz::{kernel, parts, text};
use serde_json::{Value, value::RawValue};
use std::{collections::HashMap, ffi::OsString, net::IpAddr, path::Path, sync::LazyLock, time::Duration};

/// A folder with the pods that an environment can name.
static PODS: LazyLock<String> = LazyLock::new(|| format!("{}/pods", env!("CARGO_MANIFEST_DIR")));

/// A namespace in which every plan comes into force.
struct Anywhere;

impl MachineNamespaces for Anywhere {
    fn inside(&self, path: &Path, work: &mut NamespaceWork<'_>) -> Result<(), KernelError> {
        assert!(!path.as_os_str().is_empty());
        work(self);
        Ok(())
    }

    fn preflight(&self, _: Programming) -> Result<(), KernelError> {
        Ok(())
    }
}

impl Namespace for Anywhere {
    fn addresses(&self) -> Result<Vec<IpAddr>, KernelError> {
        Ok(parts::addresses().to_vec())
    }

    fn has_ipv6(&self) -> bool {
        true
    }

    fn apply(&self, wanted: &WantedRules<'_>, patience: Duration) -> Result<Applied, KernelError> {
        assert!(patience <= Duration::from_secs(600));
        let plan = wanted.plan;
        let _ = (kernel::after_iptables(plan), kernel::after_native(plan, NativeForm::Sets));
        Ok(Applied { backend: "none".into(), because: "a test".into(), changed: true, warnings: Vec::new() })
    }

    fn compare(&self, wanted: &WantedRules<'_>) -> Result<NamespaceComparison, KernelError> {
        let _ = kernel::after_native(wanted.plan, NativeForm::Plain);
        Ok(NamespaceComparison::default())
    }
}

fuzz_target!(|input: &str| {
    let (variables, conf) = parts::halves(input);
    let variables: HashMap<&str, &str> = variables.lines().filter_map(|line| line.split_once('=')).collect();
    let env = |name: &str| variables.get(name).map(OsString::from);
    let conf = told_where_pods_are(conf);
    let answer = answer(&env, &mut conf.as_bytes(), &Anywhere, &|_| ());
    if !answer.success {
        text::is_one_safe_line(&answer.output);
        let error: Value = serde_json::from_str(&answer.output).expect("an error is JSON");
        assert!(
            error["code"].is_u64() && error["msg"].as_str().is_some_and(|text| !text.is_empty()),
            "{error}"
        );
        text::is_one_safe_line(error["msg"].as_str().unwrap_or_default());
    } else if variables.get("CNI_COMMAND") == Some(&"ADD") {
        handed_on(&conf, &answer.output);
    } else {
        text::is_one_safe_line(&answer.output);
        assert!(answer.output.is_empty() || serde_json::from_str::<Value>(&answer.output).is_ok());
    }
});

/// The same with the keys that lead to pods of ours, and to nobody's network. The last one of a key counts.
fn told_where_pods_are(conf: &str) -> String {
    let Some(keys) = conf.trim_end().strip_suffix('}') else { return conf.to_owned() };
    let comma = if keys.trim_end().ends_with('{') { "" } else { "," };
    format!("{keys}{comma}\"pod_manifest_dir\":{:?},\"add_timeout\":\"1ms\"}}", PODS.as_str())
}

/// The previous result, whatever it is made of, and its version where it says none, is what is answered.
fn handed_on(conf: &str, output: &str) {
    let conf: HashMap<String, Box<RawValue>> = serde_json::from_str(conf).expect("what succeeds is JSON");
    let before = conf.get("prevResult").map(|value| value.get()).filter(|text| *text != "null");
    match before {
        Some(before) if before == output => {}
        Some(before) => {
            let rest = output
                .strip_prefix("{\"cniVersion\":\"")
                .and_then(|rest| rest.split_once('"'))
                .map(|(_, rest)| rest);
            let rest = rest.map(|rest| rest.strip_prefix(',').unwrap_or(rest));
            assert_eq!(rest, before.strip_prefix('{'), "{before} became {output}");
        }
        None => {
            text::is_one_safe_line(output);
            assert!(output.starts_with("{\"cniVersion\":\"") && output.len() < 32, "{output}");
        }
    }
}
