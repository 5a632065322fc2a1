//! CHECK of the installed plugin, asked as a runtime asks it: the node's network configuration, the result of the plugins before it, and
//! the pod in the environment. CHECK compares and changes nothing; no other command is ever sent.

pub mod cache;
mod program;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use cni_core::pod_source::PodName;
use serde_json::{Value, json};

use crate::printable::Printable;
use crate::report::VERSION;
use crate::text_writer::{TextLayout, TextStyle, TextWriter};
use cache::Cached;
pub use program::{PluginReply, ask};

/// Where runtimes keep plugins, unless they are reported otherwise.
pub const BIN_DIR: &str = "/opt/cni/bin";
/// The plugin.
pub use cni_core::net_dir::PLUGIN_TYPE as PLUGIN;
/// The ID of an unknown container: runtimes give hexadecimal numbers.
const UNKNOWN_CONTAINER: &str = "redirectctl";
/// The first interface of a pod, as every runtime calls it.
const USUAL_INTERFACE: &str = "eth0";

/// What is known of a pod's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedPod {
    /// The pod.
    pub pod: PodName,
    /// The file of its network namespace.
    pub netns: PathBuf,
    /// The addresses there, but for loopback and link-local ones.
    pub addresses: Vec<IpAddr>,
    /// The first interface there but for loopback.
    pub interface: Option<String>,
    /// What the runtime remembers of its ADD.
    pub cached: Option<Cached>,
}

/// A question for the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginRequest {
    /// The pod it is about.
    pub pod: PodName,
    /// The program.
    pub program: PathBuf,
    /// Its whole environment.
    pub environment: BTreeMap<String, String>,
    /// Its standard input.
    pub input: Value,
    /// Where the previous result comes from.
    pub previous: String,
    /// What a runtime would do otherwise.
    pub notes: Vec<String>,
}

impl PluginRequest {
    /// CHECK for a pod. `entry` is the plugin's network configuration, with the name and version of its network; `environment` is what the
    /// plugin shall have besides.
    #[must_use]
    pub fn check(
        attachment: &AttachedPod,
        mut entry: Value,
        program: PathBuf,
        environment: BTreeMap<String, String>,
    ) -> Self {
        let mut notes = Vec::new();
        if entry.get("disableCheck") == Some(&Value::Bool(true)) {
            notes.push("the network configuration says disableCheck: runtimes do not ask".to_owned());
        }
        let version = entry.get("cniVersion").and_then(Value::as_str).unwrap_or("0.1.0").to_owned();
        let (result, previous) = match &attachment.cached {
            Some(cached) => (cached.result.clone(), cached.file.display().to_string()),
            None => {
                notes.push(
                    "the runtime has no result for this pod: the namespace's addresses stand in, with unknown prefix lengths"
                        .to_owned(),
                );
                (made_result(attachment, &version), "the addresses of the network namespace".to_owned())
            }
        };
        entry["prevResult"] = result;
        let mut all = environment;
        let folder = program.parent().map(|folder| folder.display().to_string()).unwrap_or_default();
        let own_name = || attachment.interface.clone().unwrap_or_else(|| USUAL_INTERFACE.to_owned());
        let cached = attachment.cached.as_ref();
        for (name, value) in [
            ("CNI_COMMAND", "CHECK".to_owned()),
            (
                "CNI_CONTAINERID",
                cached.map_or(UNKNOWN_CONTAINER.to_owned(), |cached| cached.container.clone()),
            ),
            ("CNI_NETNS", attachment.netns.display().to_string()),
            ("CNI_IFNAME", cached.map_or_else(own_name, |cached| cached.interface.clone())),
            ("CNI_ARGS", args(attachment)),
            ("CNI_PATH", folder),
        ] {
            all.insert(name.to_owned(), value);
        }
        Self { pod: attachment.pod.clone(), program, environment: all, input: entry, previous, notes }
    }

    /// What was sent and answered, for people.
    #[must_use]
    pub fn text(&self, answer: Option<&PluginReply>, layout: TextLayout) -> Printable {
        let mut paper = TextWriter::new(layout);
        paper.heading(&format!("CHECK of pod {}", self.pod));
        paper.labelled(2, "program    ", &self.program.display().to_string());
        paper.listed(
            2,
            "variables  ",
            self.environment.iter().map(|(name, value)| format!("{name}={value}")),
        );
        paper.labelled(2, "previous   ", &self.previous);
        paper.listed(2, "input      ", format!("{:#}", self.input).lines().map(str::to_owned));
        for note in &self.notes {
            paper.labelled(2, "note       ", note);
        }
        match answer {
            None => paper.line(0, "not sent: --dry-run"),
            Some(PluginReply::AsPlanned) => {
                paper.inked(0, "the plugin reports that all is as planned", TextStyle::Green);
            }
            Some(PluginReply::Refused { code, message, details }) => {
                paper.marked(0, "error  ", TextStyle::Red, &format!("code {code}: {message}"));
                if !details.is_empty() {
                    paper.labelled(7, "", details);
                }
                paper.line(0, &format!("redirectctl why cni-{code} explains the code"));
            }
        }
        paper.into_text()
    }

    /// The same for programs.
    #[must_use]
    pub fn json(&self, answer: Option<&PluginReply>) -> Value {
        json!({
            "version": VERSION,
            "pod": self.pod.to_string(),
            "program": self.program,
            "environment": self.environment,
            "input": self.input,
            "previous": self.previous,
            "notes": self.notes,
            "answer": answer.map(|answer| match answer {
                PluginReply::AsPlanned => json!({"asPlanned": true}),
                PluginReply::Refused { code, message, details } =>
                    json!({"asPlanned": false, "code": code, "message": message, "details": details}),
            }),
        })
    }
}

/// What the runtime said of the pod, or what it would say. Names of pods come from the API server or a file, and their characters have
/// been checked: none of them ends a pair.
fn args(attachment: &AttachedPod) -> String {
    let remembered = attachment.cached.as_ref().map(|cached| cached.args.clone()).unwrap_or_default();
    let own = [("K8S_POD_NAMESPACE", &attachment.pod.namespace), ("K8S_POD_NAME", &attachment.pod.name)];
    let mut pairs: Vec<(String, String)> = vec![("IgnoreUnknown".to_owned(), "1".to_owned())];
    pairs.extend(own.map(|(key, value)| (key.to_owned(), value.clone())));
    for (key, value) in remembered {
        if pairs.iter().all(|(known, _)| *known != key) {
            pairs.push((key, value));
        }
    }
    pairs.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(";")
}

/// A result with what the namespace shows. Before 1.0.0 each address says its family.
fn made_result(attachment: &AttachedPod, version: &str) -> Value {
    let is_old = version.starts_with("0.");
    let address = |ip: &IpAddr| {
        let (length, family) = if ip.is_ipv4() { (32, "4") } else { (128, "6") };
        let mut made = json!({"address": format!("{ip}/{length}"), "interface": 0});
        if is_old {
            made["version"] = family.into();
        }
        made
    };
    json!({
        "cniVersion": version,
        "interfaces": [{
            "name": attachment.interface.as_deref().unwrap_or(USUAL_INTERFACE),
            "sandbox": attachment.netns.display().to_string(),
        }],
        "ips": attachment.addresses.iter().map(address).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(cached: Option<Cached>) -> AttachedPod {
        AttachedPod {
            pod: PodName { namespace: "shop".into(), name: "cart-0".into() },
            netns: "/run/netns/cni-1".into(),
            addresses: vec!["10.1.0.2".parse().expect("an address"), "fd00::2".parse().expect("an address")],
            interface: Some("net0".into()),
            cached,
        }
    }

    fn question(version: &str, cached: Option<Cached>) -> PluginRequest {
        let entry = json!({"type": PLUGIN, "name": "k8s", "cniVersion": version});
        PluginRequest::check(&attachment(cached), entry, "/opt/cni/bin/istio-cni".into(), BTreeMap::new())
    }

    /// The plugin's own reader judges what is sent.
    fn accepted(question: &PluginRequest) {
        use cni_core::conf::Envelope;
        use cni_core::wire::{CniCommand, Invocation};
        let read =
            Invocation::read(|name| question.environment.get(name).map(Into::into)).expect("an environment");
        assert_eq!((read.command, read.pod.name.as_str()), (CniCommand::Check, "cart-0"));
        let input = question.input.to_string();
        Envelope::read(input.as_bytes(), CniCommand::Check)
            .and_then(|envelope| envelope.conf())
            .expect("a configuration");
    }

    #[test]
    fn what_is_made_of_addresses_is_what_the_plugin_reads() {
        for (version, says_family) in [("1.0.0", false), ("0.4.0", true), ("1.1.0", false)] {
            let question = question(version, None);
            accepted(&question);
            assert_eq!(question.environment["CNI_IFNAME"], "net0");
            assert_eq!(question.input["prevResult"]["ips"][1]["address"], "fd00::2/128");
            assert_eq!(
                question.input["prevResult"]["ips"][1].get("version").is_some(),
                says_family,
                "{version}"
            );
            assert_eq!(question.notes.len(), 1);
        }
    }

    #[test]
    fn what_the_runtime_remembers_is_sent_as_it_is() {
        let args = [("K8S_POD_UID", "u-1"), ("K8S_POD_NAME", "other")];
        let cached = Cached {
            file: "/var/lib/cni/results/k8s-abc-eth0".into(),
            container: "abc".into(),
            interface: "eth0".into(),
            args: args.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec(),
            result: json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.2/24"}], "x": 1}),
        };
        let question = question("1.0.0", Some(cached.clone()));
        accepted(&question);
        assert_eq!(question.input["prevResult"], cached.result);
        assert_eq!(question.environment["CNI_CONTAINERID"], "abc");
        let wanted = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_UID=u-1";
        assert_eq!(
            question.environment["CNI_ARGS"], wanted,
            "the pod that was asked for, whatever is remembered"
        );
        assert!(question.notes.is_empty());
    }

    #[test]
    fn nothing_is_wider_than_the_terminal() {
        let mut question = question("1.0.0", None);
        question.input["long"] = "x".repeat(300).into();
        let refused = PluginReply::Refused { code: 111, message: "y ".repeat(90), details: "z".repeat(100) };
        for answer in [None, Some(PluginReply::AsPlanned), Some(refused)] {
            let text = question.text(answer.as_ref(), TextLayout::default());
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
    }
}
