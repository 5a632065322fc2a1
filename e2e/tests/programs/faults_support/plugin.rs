//! `istio-cni`, as a runtime runs it.

use std::fs;

use anyhow::{Result, ensure};
use e2e::faults::Ending;
use e2e::plugin::{plain_kubeconfig, sidecar};
use e2e::program::PATH;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};

use super::api::Api;
use super::place::Place;
use super::run::{Ended, Invoked, Wrapping};
use super::{Operation, SECRET};

/// Where the plugin reads pods.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Manifests,
    Api,
}

/// What was in the namespace before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Added,
    /// Added, and then a rule was lost.
    Damaged,
}

struct Command {
    name: &'static str,
    command: &'static str,
    source: Source,
    before: Before,
    /// More of the network configuration.
    conf: &'static str,
    expected: i32,
}

const ADD: Command = Command {
    name: "ADD",
    command: "ADD",
    source: Source::Manifests,
    before: Before::Nothing,
    conf: "{}",
    expected: 0,
};

pub fn operations() -> Vec<Box<dyn Operation>> {
    let commands = [
        ADD,
        Command { name: "ADD, API", source: Source::Api, ..ADD },
        Command { name: "ADD, native", conf: r#"{"native_nftables": true}"#, ..ADD },
        Command { name: "CHECK", command: "CHECK", before: Before::Added, ..ADD },
        Command { name: "CHECK, a rule lost", command: "CHECK", before: Before::Damaged, expected: 1, ..ADD },
        Command { name: "DEL", command: "DEL", before: Before::Added, ..ADD },
        Command { name: "STATUS", command: "STATUS", source: Source::Api, ..ADD },
        Command { name: "GC", command: "GC", conf: r#"{"cni.dev/valid-attachments": []}"#, ..ADD },
    ];
    commands.into_iter().map(|command| Box::new(command) as Box<dyn Operation>).collect()
}

/// A kubeconfig for a server without TLS.
pub fn kubeconfig(port: u16) -> Value {
    let mut config = plain_kubeconfig(port);
    config["users"][0]["user"]["token"] = json!(SECRET);
    config
}

/// Redirects a namespace as the plugin does for the pod `web`, whose manifest is put into the place.
pub fn add(place: &Place, namespace: &Namespace) -> Result<()> {
    fs::create_dir_all(place.file("run/manifests"))?;
    fs::write(place.file("run/manifests/web.json"), sidecar("web", &[]).to_string())?;
    let ended = ADD.invoked_in(place, namespace)?.run(&Wrapping::default(), None)?;
    ensure!(ended.ending == Ending::Code(0), "ADD: {ended:?}");
    let _ = fs::remove_file(place.file("run/istio-cni.log"));
    Ok(())
}

impl Command {
    fn invoked_in(&self, place: &Place, namespace: &Namespace) -> Result<Invoked> {
        let mut conf = json!({"cniVersion": "1.1.0", "name": "net", "type": "istio-cni",
            "cni_agent_run_dir": place.file("run"), "add_timeout": "8s"});
        if self.source == Source::Manifests {
            conf["pod_manifest_dir"] = json!(place.file("run/manifests"));
        }
        for (key, value) in serde_json::from_str::<Value>(self.conf)?.as_object().into_iter().flatten() {
            conf[key] = value.clone();
        }
        if self.command == "CHECK" {
            conf["prevResult"] = json!({"cniVersion": "1.1.0", "interfaces": [], "ips": []});
        }
        let args =
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=abc";
        let netns = namespace.path().display().to_string();
        let mut env = vec![("PATH", PATH), ("CNI_COMMAND", self.command), ("CNI_PATH", "/opt/cni/bin")];
        if !matches!(self.command, "STATUS" | "GC") {
            env.extend([("CNI_CONTAINERID", "abc"), ("CNI_IFNAME", "eth0"), ("CNI_ARGS", args)]);
            env.push(("CNI_NETNS", &netns));
        }
        Ok(Invoked {
            env: env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            input: conf.to_string(),
            ..Invoked::of("istio-cni", "")?
        })
    }
}

impl Operation for Command {
    fn name(&self) -> &'static str {
        self.name
    }

    fn expected(&self) -> i32 {
        self.expected
    }

    fn stage(&self) -> Result<Place> {
        let mut place = Place::new()?;
        let namespace = Namespace::pod(Families::Dual)?;
        fs::create_dir_all(place.file("run/manifests"))?;
        fs::write(place.file("run/manifests/web.json"), sidecar("web", &[]).to_string())?;
        if self.source == Source::Api {
            let api = Api::start()?;
            api.put(sidecar("web", &[]));
            fs::write(place.file("run/istio-cni-kubeconfig"), kubeconfig(api.port()).to_string())?;
            fs::remove_dir_all(place.file("run/manifests"))?;
            place.api = Some(api);
        }
        if self.before != Before::Nothing {
            add(&place, &namespace)?;
        }
        if self.before == Before::Damaged {
            namespace.sh("iptables-nft -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT")?;
        }
        place.namespace = Some(namespace);
        Ok(place)
    }

    fn invoked(&self, place: &Place) -> Result<Invoked> {
        self.invoked_in(place, place.network()?)
    }

    fn files(&self) -> &'static [&'static str] {
        match (self.source, self.command) {
            (Source::Api, _) => &["run/istio-cni-kubeconfig", "run"],
            (Source::Manifests, "ADD" | "CHECK") => &["run/manifests/web.json", "run/manifests", "run"],
            (Source::Manifests, _) => &[],
        }
    }

    fn asks_api(&self) -> bool {
        self.source == Source::Api && self.command == "ADD"
    }

    /// The specification: an error is an object with code and msg, and standard output holds nothing else.
    fn bad_answer(&self, ended: &Ended) -> Option<String> {
        let answer = || -> Result<()> {
            if ended.ending == Ending::Code(0) {
                if self.command == "ADD" {
                    let _: Value = serde_json::from_str(&ended.stdout)?;
                }
                return Ok(());
            }
            let object: Value = serde_json::from_str(&ended.stdout)?;
            ensure!(object["code"].as_u64().is_some_and(|code| code > 0), "no code");
            ensure!(object["msg"].as_str().is_some_and(|text| !text.is_empty()), "no message");
            // By a mistake of its own: a panic.
            ensure!(object["code"] != 199, "an internal error");
            Ok(())
        };
        answer().err().map(|error| format!("{error:#}: {:?} {}", ended.stdout, ended.stderr))
    }
}
