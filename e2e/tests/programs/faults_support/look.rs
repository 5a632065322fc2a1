//! What only looks: `istio-validation` and `redirectctl`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use e2e::faults::Ending;
use e2e::plugin::sidecar;
use e2e::validation::INJECTED;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, NetnsDirectory};

use super::Operation;
use super::api::Api;
use super::place::Place;
use super::plugin::{add, kubeconfig};
use super::rules::put_in_force;
use super::run::{Ended, Invoked};

struct Validation {
    name: &'static str,
    is_redirected: bool,
}

struct Ctl {
    name: &'static str,
    args: &'static str,
    asks_api: bool,
}

pub fn operations() -> Vec<Box<dyn Operation>> {
    vec![
        Box::new(Validation { name: "validation", is_redirected: true }),
        Box::new(Validation { name: "validation, not redirected", is_redirected: false }),
        Box::new(Ctl { name: "redirectctl netns", args: "netns NETNS -f pods.json", asks_api: false }),
        Box::new(Ctl {
            name: "redirectctl scan",
            args: "scan -f pods.json --netns-dir RUNTIME --cni-conf-dir /nonexistent",
            asks_api: false,
        }),
        Box::new(Ctl {
            name: "redirectctl pod, API",
            args: "pod default/web --kubeconfig kubeconfig --netns-dir RUNTIME --cni-conf-dir /nonexistent",
            asks_api: true,
        }),
    ]
}

impl Operation for Validation {
    fn name(&self) -> &'static str {
        self.name
    }

    fn expected(&self) -> i32 {
        if self.is_redirected { 0 } else { 126 }
    }

    fn stage(&self) -> Result<Place> {
        let mut place = Place::new()?;
        let namespace = Namespace::pod(Families::Dual)?;
        if self.is_redirected {
            put_in_force(&namespace, &format!("{INJECTED} --dual-stack"))?;
        }
        fs::create_dir(place.file("log"))?;
        fs::write(place.file("log/termination"), "")?;
        fs::set_permissions(place.file("log/termination"), Permissions::from_mode(0o666))?;
        place.namespace = Some(namespace);
        // What a verdict says of times and tokens is another thing in every run.
        place.unlike = &["log/termination"];
        Ok(place)
    }

    fn invoked(&self, place: &Place) -> Result<Invoked> {
        let user = "setpriv --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all --reuid=1337 \
                    --regid=1337";
        let args = format!(
            "{INJECTED} --dual-stack --probe-timeout 2s --termination-log {}",
            place.text("log/termination")
        );
        Ok(Invoked {
            prefix: user.split_whitespace().map(str::to_owned).collect(),
            namespace: Some(place.network()?.name().to_owned()),
            ..Invoked::of("istio-validation", &args)?
        })
    }

    fn files(&self) -> &'static [&'static str] {
        &["log/termination"]
    }

    fn writes_to(&self) -> &'static [&'static str] {
        &[""]
    }

    fn bad_answer(&self, ended: &Ended) -> Option<String> {
        (!ended.stdout.is_empty()).then(|| format!("standard output: {}", ended.stdout))
    }
}

impl Operation for Ctl {
    fn name(&self) -> &'static str {
        self.name
    }

    /// Nothing listens in the pod, which is worth a finding.
    fn expected(&self) -> i32 {
        2
    }

    fn stage(&self) -> Result<Place> {
        let mut place = Place::new()?;
        let namespace = Namespace::pod(Families::V4)?;
        add(&place, &namespace)?;
        let mut pod = sidecar("web", &[]);
        pod["status"] = json!({"phase": "Running", "podIPs": [{"ip": test_support::netns::POD_V4}]});
        fs::write(place.file("pods.json"), json!({"kind": "List", "items": [pod]}).to_string())?;
        if self.asks_api {
            let api = Api::start()?;
            api.put(pod);
            fs::write(place.file("kubeconfig"), kubeconfig(api.port()).to_string())?;
            place.api = Some(api);
        }
        let runtime = NetnsDirectory::of([&namespace])?;
        place.runtime = Some(runtime.path().display().to_string());
        place.keeps.push(Box::new(runtime));
        place.namespace = Some(namespace);
        Ok(place)
    }

    fn invoked(&self, place: &Place) -> Result<Invoked> {
        let word = |word: &str| -> Result<String> {
            Ok(match word {
                "NETNS" => place.network()?.path().display().to_string(),
                "RUNTIME" => place.runtime.clone().context("a runtime")?,
                "pods.json" | "kubeconfig" => place.text(word),
                _ => word.to_owned(),
            })
        };
        let args = self.args.split(' ').map(word).collect::<Result<Vec<_>>>()?.join(" ");
        Invoked::of("redirectctl", &format!("{args} --output json"))
    }

    fn files(&self) -> &'static [&'static str] {
        if self.asks_api { &["kubeconfig"] } else { &["pods.json"] }
    }

    fn asks_api(&self) -> bool {
        self.asks_api
    }

    /// What it found, as JSON; or nothing at all, and why on standard error.
    fn bad_answer(&self, ended: &Ended) -> Option<String> {
        let answer = || -> Result<()> {
            match ended.ending {
                Ending::Code(2) => {
                    let _: Value = serde_json::from_str(&ended.stdout)?;
                }
                Ending::Code(_) | Ending::Signal(_) | Ending::Never => {
                    ensure!(ended.stdout.is_empty(), "standard output: {}", ended.stdout);
                }
            }
            Ok(())
        };
        answer().err().map(|error| format!("{error:#}"))
    }
}
