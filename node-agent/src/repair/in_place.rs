//! Redirecting a broken pod where it stands: what the plugin does at ADD, then what it does for CHECK, and an end for what was open before.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cni_core::conf::Conf;
use cni_core::pod_source::PodName;
use netns_apply::capabilities::{self, NET_ADMIN, SYS_ADMIN, SYS_PTRACE};
use netns_apply::connections::{ClosedConnections, sever};
use netns_apply::facts::addresses;
use netns_apply::pod::Outside;
use netns_apply::{ApplyError, ApplyOptions, Programs, apply, verify};
use redirect_core::pod::{Decision, PodFacts};
use serde_json::Value;
use tokio::sync::watch::Receiver;

use super::action::{Outcome, Trouble, UNVERIFIABLE};
use super::filter::{Broken, Filter, Verdict};
use super::sandbox::{self, Wanted};
use crate::cluster::{Cluster, PodsError};
use crate::drift::Rules;
use crate::install::Installer;
use crate::plugin_conf::plugin_conf;
use crate::settings::{DriftSettings, Settings};

/// How long somebody else may be at work in a pod's network namespace.
const PATIENCE: Duration = Duration::from_secs(10);

/// What redirects pods where they stand.
pub struct Mender {
    installer: Arc<Installer>,
    /// Where the runtime's network namespaces are mounted, and the host's processes.
    mounted: PathBuf,
    proc: PathBuf,
    /// What the container runtime's environment says is part of it, and may change while the agent runs.
    drift: Receiver<DriftSettings>,
}

/// A pod that is to be redirected.
struct Patient {
    uid: String,
    addresses: Vec<IpAddr>,
    facts: PodFacts,
}

/// What is done alike for all pods.
struct Practice {
    mounted: PathBuf,
    proc: PathBuf,
    rules: Rules,
}

/// What was done.
pub(crate) struct Mended {
    backend: String,
    changed: bool,
    severed: ClosedConnections,
}

impl Mender {
    /// Nothing is looked at yet.
    #[must_use]
    pub fn new(settings: &Settings, drift: Receiver<DriftSettings>, installer: Arc<Installer>) -> Self {
        Self { installer, mounted: settings.paths.netns.clone(), proc: settings.paths.proc.clone(), drift }
    }

    /// Redirects a broken pod, if it is broken still.
    pub async fn mend(&self, cluster: &Cluster, filter: &Filter, broken: &Broken) -> Outcome {
        match self.try_mend(cluster, filter, broken).await {
            Ok(mended) => Outcome::Done(mended.words()),
            Err(outcome) => outcome,
        }
    }

    async fn try_mend(&self, cluster: &Cluster, filter: &Filter, broken: &Broken) -> Result<Mended, Outcome> {
        let wanted = [NET_ADMIN, SYS_ADMIN, SYS_PTRACE];
        let missing = wanted.into_iter().filter(|wanted| capabilities::has(*wanted) == Some(false));
        let missing: Vec<&str> = missing.map(|capability| capability.name).collect();
        if !missing.is_empty() {
            let text = format!("the agent's container lacks {}", missing.join(" and "));
            return Err(Trouble::new("no_capability", text).into());
        }
        let conf = plugin_conf(&self.installer).map_err(|error| {
            Trouble::new("no_entry", format!("the plugin's entry cannot be read: {error}"))
        })?;
        // As it is now: addresses may be other ones than when its container failed.
        let pod = cluster.pod(&broken.name.namespace, &broken.name.name).await.map_err(unread)?;
        let pod = pod.ok_or(Outcome::Gone)?;
        match filter.judge(&pod) {
            Verdict::Broken(now) if now.uid == broken.uid => {}
            Verdict::Broken(_) => return Err(Outcome::Gone),
            Verdict::Sound(_) => return Err(Outcome::Changed),
        }
        let patient = Patient::of(&pod, &broken.name, &conf)?;
        let practice = Practice {
            mounted: self.mounted.clone(),
            proc: self.proc.clone(),
            rules: Rules::of(&conf, &self.drift.borrow().environment),
        };
        let mended = tokio::task::spawn_blocking(move || practice.mend(&patient)).await;
        let panicked =
            |error: tokio::task::JoinError| Trouble::new("not_applied", format!("it panicked: {error}"));
        Ok(mended.map_err(panicked)??)
    }
}

fn unread(error: PodsError) -> Outcome {
    match error {
        PodsError::NoNode | PodsError::Denied { .. } => Trouble::new("refused", error).into(),
        PodsError::Later { text, after } => Outcome::Unanswered { text, retry_after: Some(after) },
        PodsError::Unreachable(text) => Outcome::Unanswered { text, retry_after: None },
    }
}

impl Patient {
    /// The pod, unless the plugin would leave it alone, or nothing can be done for it where it stands.
    fn of(pod: &Value, name: &PodName, conf: &Conf) -> Result<Self, Trouble> {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        if pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true)) {
            return Err(Trouble::new(
                "not_meshed",
                "the pod is on the node's network, which is never redirected",
            ));
        }
        if let phase @ ("Failed" | "Succeeded") = text("/status/phase") {
            let text = format!(
                "the pod has ended ({phase}) and will not run again; only another pod can be redirected"
            );
            return Err(Trouble::new("ended", text));
        }
        let alone = |why: &str| Trouble::new("not_meshed", format!("the plugin leaves the pod alone: {why}"));
        if let Some(reason) = conf.skips(name) {
            return Err(alone(reason.explanation()));
        }
        let facts = PodFacts::from_json(pod).map_err(|errors| {
            let problems: Vec<String> = errors.iter().map(ToString::to_string).collect();
            Trouble::new("not_meshed", problems.join("; "))
        })?;
        if let Some(reason) = facts.skip_reason() {
            return Err(alone(reason.explanation()));
        }
        let listed = pod.pointer("/status/podIPs").and_then(Value::as_array).into_iter().flatten();
        let addresses = listed.filter_map(|item| item.get("ip")?.as_str()?.parse().ok()).collect();
        Ok(Self { uid: text("/metadata/uid").to_owned(), addresses, facts })
    }
}

impl Practice {
    fn mend(&self, patient: &Patient) -> Result<Mended, Trouble> {
        let wanted = Wanted { uid: &patient.uid, addresses: &patient.addresses };
        let netns = sandbox::open(&wanted, &self.mounted, &self.proc)?;
        let outside = Outside::of_this_process();
        let entered = netns
            .run(|| redirect_here(&patient.uid, &patient.facts, &self.rules, outside.finds_this_foreign()));
        entered.map_err(|error| Trouble::new("not_applied", error))?
    }
}

/// Puts a pod's plan in force in the calling thread's network namespace, which is to be the pod's; verifies it, and ends what was open before, also
/// where other rules keep it from being verified. The addresses are what the plan depends on, as at ADD, and not only the pod's.
pub(crate) fn redirect_here(
    pod: &str,
    facts: &PodFacts,
    rules: &Rules,
    is_foreign: bool,
) -> Result<Mended, Trouble> {
    let not_applied = |error: &dyn std::fmt::Display| Trouble::new("not_applied", error.to_string());
    let there = addresses().map_err(|error| not_applied(&error))?;
    let plan = match rules.decide(facts, &there).map_err(|errors| Trouble::new("not_meshed", errors))? {
        Decision::Redirect(redirect) => redirect.plan(),
        Decision::Skip(reason) => return Err(Trouble::new("not_meshed", reason.explanation())),
    };
    let options = ApplyOptions {
        programs: Programs::in_path(&std::env::var_os("PATH").unwrap_or_default()),
        patience: PATIENCE,
        ..rules.options(is_foreign)
    };
    let applied = apply(&plan, &options).map_err(|error| not_applied(&error))?;
    for warning in &applied.warnings {
        log::warn!(target: super::SCOPE, pod = pod; "{warning}");
    }
    let unverified = match verify(&plan, &options) {
        Ok(None) => None,
        Ok(Some(mismatch)) => return Err(Trouble::new("not_verified", mismatch)),
        Err(error @ ApplyError::OthersUnread { .. }) => Some(error.to_string()),
        Err(error) => Some(format!("the rules are in force, but cannot be verified: {error}")),
    };
    let severed = sever(&plan).map_err(|error| {
        let text = format!("the rules are in force, but connections that were open before may go on beside the proxy: {error}");
        Trouble::new("not_severed", text)
    })?;
    let mended = Mended { backend: applied.backend.to_string(), changed: applied.changed, severed };
    match unverified {
        None => Ok(mended),
        Some(why) => Err(Trouble::new(UNVERIFIABLE, why + &mended.ended())),
    }
}

impl Mended {
    /// In words.
    pub(crate) fn words(&self) -> String {
        let rules =
            if self.changed { "its rules are in force now" } else { "its rules were in force already" };
        format!("{rules} and verified ({}){}", self.backend, self.ended())
    }

    /// How many connections were ended, if any.
    fn ended(&self) -> String {
        match self.severed.sockets + self.severed.tracked {
            0 => String::new(),
            count => format!("; {count} connections that bypassed the proxy were ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::conf::Envelope;
    use cni_core::wire::Command;
    use serde_json::json;

    fn patient(pod: &Value) -> Result<Patient, &'static str> {
        let conf =
            br#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","exclude_namespaces":["kube-system"]}"#;
        let conf = Envelope::read(conf, Command::Add).expect("JSON").conf().expect("a configuration");
        let namespace = pod["metadata"]["namespace"].as_str().expect("a namespace").to_owned();
        Patient::of(pod, &PodName { namespace, name: "web".into() }, &conf).map_err(|trouble| trouble.reason)
    }

    #[test]
    fn only_a_pod_that_the_plugin_would_redirect_is_redirected_where_it_stands() {
        let pod = json!({"metadata": {"namespace": "shop", "uid": "u-1", "annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"containers": [{"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
            "status": {"phase": "Pending", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}});
        let good = patient(&pod).expect("a patient");
        assert_eq!((good.uid.as_str(), good.addresses.len()), ("u-1", 2));
        for (pointer, value, reason) in [
            ("/spec/hostNetwork", json!(true), "not_meshed"),
            ("/status/phase", json!("Failed"), "ended"),
            ("/status/phase", json!("Succeeded"), "ended"),
            ("/metadata/namespace", json!("kube-system"), "not_meshed"),
            ("/metadata/annotations", json!({}), "not_meshed"),
            ("/spec/initContainers", json!([{"name": "istio-init"}]), "not_meshed"),
            ("/spec/containers", json!([{"name": "app"}]), "not_meshed"),
            ("/spec/containers", json!(7), "not_meshed"),
        ] {
            let mut pod = pod.clone();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            pod.pointer_mut(parent).expect("a parent")[key] = value;
            assert_eq!(patient(&pod).err(), Some(reason), "{pointer}");
        }
    }
}
