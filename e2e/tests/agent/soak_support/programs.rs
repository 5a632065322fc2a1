//! The plugin and `istio-iptables`, run as a runtime and an operator do, and killed at random moments.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use e2e::killing::Moments;
use e2e::plugin::Invocation;
use e2e::program::{self, PATH};
use serde_json::{Value, json};
use test_support::dice::Dice;

/// One in so many runs is killed before the one that counts.
const KILLED: usize = 4;

/// How often something was done, by all threads.
#[derive(Debug, Default)]
pub struct Count(AtomicUsize);

impl Count {
    pub fn one_more(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// What is run in the namespace of one pod.
pub struct Call {
    command: Command,
    input: String,
}

impl Call {
    /// A call of the plugin by a runtime, with the configuration that the agent has made; the result of ADD for those that come after it.
    pub fn of_plugin(verb: &str, conf: &Value, pod: &str, namespace: &Path, result: Option<&Value>) -> Self {
        let mut conf = conf.clone();
        if let Some(result) = result {
            conf["prevResult"] = result.clone();
        }
        let program = conf["plugin"].take();
        conf.as_object_mut().map(|object| object.remove("plugin"));
        let invocation = Invocation::new(verb, &conf).pod("shop", pod).env("CNI_CONTAINERID", pod);
        let invocation = invocation.env("CNI_NETNS", &namespace.display().to_string());
        let invocation = invocation.program(program.as_str().expect("the path of the plugin").as_ref());
        let (command, input) = invocation.command();
        Self { command, input: input.to_owned() }
    }

    /// Takes all redirection away.
    pub fn of_cleanup(istio_iptables: &Path, namespace: &Path) -> Self {
        let mut command = Command::new(istio_iptables);
        command.env_clear().env("PATH", PATH);
        command.args(["--cleanup-only", "--network-namespace"]).arg(namespace);
        Self { command, input: String::new() }
    }

    fn start(&mut self) -> Result<Child> {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().with_context(|| format!("{:?}", self.command))?;
        // Closed when this is dropped. A program that does not read ends badly, or not.
        let _ = child.stdin.take().context("standard input")?.write_all(self.input.as_bytes());
        Ok(child)
    }

    /// Runs it to its end; it has to succeed. What it printed.
    pub fn run(&mut self) -> Result<String> {
        let output = self.start()?.wait_with_output()?;
        let (printed, said) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{:?}: {}: {printed}{said}", self.command, output.status);
        Ok(printed.into_owned())
    }

    /// Likewise; sometimes a run is killed before.
    pub fn insist(&mut self, dice: &mut Dice, moments: &Moments, kills: &Count) -> Result<String> {
        if dice.one_in(KILLED) && moments.kill(&mut self.start()?, dice)?.is_some() {
            kills.one_more();
        }
        self.run()
    }
}

/// The result of the plugins before ours, and of ours.
pub fn result(addresses: &[String]) -> Value {
    let ips: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"address": format!("{address}/{}", if address.contains(':') { 128 } else { 32 }), "interface": 0}))
        .collect();
    json!({"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": ips})
}

/// The program that cleans up.
pub fn istio_iptables() -> Result<PathBuf> {
    program::under_test("istio-iptables")
}
