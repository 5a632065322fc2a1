//! Pods as Istio's injector wrote them on a real mesh (`fixtures/injected.json`): what the plugin makes of their annotations is what `istio-validation` looks for
//! by the flags that it was given, and what `istio-iptables` makes of them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use e2e::iptables::{self, with_environment};
use e2e::validation::{PROXY, validate_with};
use netns_apply::{ApplyOptions, apply, facts};
use redirect_core::RulePlan;
use redirect_core::pod::{Decision, PodFacts};
use redirect_core::settings::NamespaceFacts;
use serde::Deserialize;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};

const FIXTURE: &str = include_str!("../../fixtures/injected.json");
/// Flags that every pod has, unless its own say otherwise.
const FLAGS: [(&str, &str); 8] = [
    ("-p", "15001"),
    ("-z", "15006"),
    ("-u", "1337"),
    ("-m", "REDIRECT"),
    ("-i", "*"),
    ("-x", ""),
    ("-b", "*"),
    ("-d", "15090,15021,15020"),
];

#[derive(Deserialize)]
struct Fixture {
    pods: BTreeMap<String, Injected>,
}

/// In what a pod differs from a plain one.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Injected {
    mode: Option<String>,
    user: Option<u32>,
    annotations: BTreeMap<String, String>,
    flags: BTreeMap<String, String>,
    env: BTreeMap<String, String>,
    classic: bool,
}

impl Injected {
    fn mode(&self) -> &str {
        self.mode.as_deref().unwrap_or("REDIRECT")
    }

    /// The pod as the plugin reads it from the API server.
    fn pod(&self, name: &str) -> Value {
        let own = |key: &str| {
            if key.contains('/') { key.to_owned() } else { format!("traffic.sidecar.istio.io/{key}") }
        };
        let mut annotations = json!({
            "sidecar.istio.io/status": "{}",
            "sidecar.istio.io/interceptionMode": self.mode(),
            "traffic.sidecar.istio.io/includeOutboundIPRanges": "*",
            "traffic.sidecar.istio.io/includeInboundPorts": "*",
            "traffic.sidecar.istio.io/excludeInboundPorts": "15020",
        });
        for (key, value) in &self.annotations {
            annotations[own(key)] = json!(value);
        }
        let env: Vec<Value> =
            self.env.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        let proxy = json!({
            "name": "istio-proxy", "args": ["proxy", "sidecar"], "env": env,
            "securityContext": {"runAsUser": self.user.unwrap_or(PROXY.0), "runAsGroup": PROXY.1},
        });
        let (mut first, mut containers) =
            (vec![json!({"name": "istio-validation"})], vec![json!({"name": "app"})]);
        if self.classic { &mut containers } else { &mut first }.push(proxy);
        json!({
            "metadata": {"name": name, "namespace": "default", "annotations": annotations},
            "spec": {"initContainers": first, "containers": containers},
        })
    }

    fn flags(&self) -> Vec<&str> {
        let mut flags: BTreeMap<&str, &str> = FLAGS.into();
        flags.insert("-m", self.mode());
        flags.extend(self.flags.iter().map(|(flag, value)| (&**flag, &**value)));
        let words = flags.into_iter().flat_map(|(flag, value)| [flag, value]);
        ["istio-iptables"].into_iter().chain(words).chain(["--log_output_level=default:info"]).collect()
    }

    fn env(&self) -> Vec<(String, String)> {
        self.env.clone().into_iter().collect()
    }
}

/// What the plugin would make of the pod in the calling thread's network namespace.
fn plan(pod: &Value) -> Result<RulePlan> {
    let addresses = facts::addresses()?;
    match PodFacts::from_json(pod)?.decide(&NamespaceFacts::new(&addresses))? {
        Decision::Redirect(redirect) => Ok(redirect.plan()),
        Decision::Skip(reason) => bail!("skipped: {reason}"),
    }
}

fn is_redirected_as_validated(name: &str, injected: &Injected) -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let validation = [&injected.flags()[..], &["--run-validation", "--skip-rule-apply"]].concat();
    let before = validate_with(&namespace, PROXY, &validation, &injected.env())?;
    ensure!(before.problems("no-rules").is_empty(), "before: {:?}", before.problems("no-rules"));

    namespace.enter(|| -> Result<()> {
        apply(&plan(&injected.pod(name))?, &ApplyOptions::default())?;
        Ok(())
    })??;
    let after = validate_with(&namespace, PROXY, &validation, &injected.env())?;
    ensure!(after.problems("redirected").is_empty(), "after: {:?}", after.problems("redirected"));

    let plugins = namespace.snapshot()?;
    let mut flags = injected.flags();
    if !injected.flags.contains_key("-o") {
        // Without that annotation the plugin, and Istio's, exclude it by themselves; the init container does not.
        flags.extend(["-o", "15020"]);
    }
    if injected.env.contains_key("ISTIO_META_DNS_CAPTURE") {
        // A plugin does not see the pod's name servers.
        flags.push("--capture-all-dns");
    }
    let again = with_environment(iptables::istio_iptables(), &flags, &injected.env());
    namespace.run(&again)?.ok()?;
    // The plugin excludes the proxy's own ports in another order.
    let mut differences = namespace.snapshot()?.changes_since(&plugins);
    differences.retain(|difference| !difference.line.starts_with("the same lines in another order"));
    ensure!(differences.is_empty(), "istio-iptables makes something else of its flags: {differences:#?}");
    Ok(())
}

#[test]
fn the_plugin_makes_of_injected_pods_what_their_init_containers_look_for_and_would_make() -> Result<()> {
    let fixture: Fixture = serde_json::from_str(FIXTURE)?;
    let pods: Vec<_> = fixture.pods.iter().collect();
    let problems = iptables::in_parallel(2, &pods, |_, (name, injected)| {
        is_redirected_as_validated(name, injected).with_context(|| (*name).clone()).map(|()| Vec::new())
    });
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}
