//! The real program on a node's directories, and an API server that says what a test wants.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::http::{self, HttpRequest, StandIn, failure};
use crate::plugin::Invocation;
use crate::program;
use serde_json::{Value, json};
use test_support::port::free_port;
use test_support::process::{Killed, prefixed, until};

/// The variables that name an agent's directories, and what tests call these below a folder of theirs.
pub const DIRECTORIES: [(&str, &str); 5] = [
    ("MOUNTED_CNI_NET_DIR", "net.d"),
    ("MOUNTED_CNI_BIN_DIR", "bin"),
    ("SOURCE_CNI_BIN_DIR", "image"),
    ("CNI_AGENT_RUN_DIR", "run"),
    ("SERVICE_ACCOUNT_DIR", "account"),
];

/// How long anything may take, on a machine that is ten times slower than it should be.
pub const DEADLINE: Duration = Duration::from_secs(180);
/// A network configuration list that calls Calico alone.
pub const CALICO: &str = include_str!("../fixtures/conflists/10-calico.conflist");

/// A plugin that is always content.
pub const PLUGIN: &str = "#!/bin/sh
[ \"$CNI_COMMAND\" != VERSION ] || echo '{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.1.0\"]}'
exit 0
";

/// A node's directories, the image's, and the agent's settings.
pub struct Node {
    folder: tempfile::TempDir,
    /// The agent's whole environment: variables and their values.
    pub env: BTreeMap<String, String>,
    /// The port of loopback for `/readyz` and `/healthz`.
    pub health: u16,
    /// The port of loopback for `/metrics`.
    pub monitoring: u16,
    /// The port of loopback for run-time control.
    pub control: u16,
}

impl Node {
    /// With these network configurations. The API server does not answer.
    pub fn new(confs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let [health, monitoring, control] = std::array::from_fn(|_| free_port().expect("a port"));
        let mut node = Self { folder, env: BTreeMap::new(), health, monitoring, control };
        for (_, part) in DIRECTORIES {
            fs::create_dir(node.path(part)).expect("makes");
        }
        fs::write(node.path("image/istio-cni"), PLUGIN).expect("writes");
        set_mode(&node.path("image/istio-cni"), 0o755);
        fs::write(node.path("account/ca.crt"), "authority\n").expect("writes");
        fs::write(node.path("account/token"), "token-1").expect("writes");
        for (name, text) in confs {
            fs::write(node.path("net.d").join(name), text).expect("writes");
        }
        for (name, part) in DIRECTORIES {
            let path = node.path(part).display().to_string();
            node.set(name, &path);
        }
        node.set("HEALTH_PORT", &health.to_string());
        node.set("MONITORING_PORT", &monitoring.to_string());
        node.set("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        node.set("KUBERNETES_SERVICE_PORT", "1");
        node.set("KUBERNETES_SERVICE_PROTOCOL", "http");
        node.set("SKIP_TLS_VERIFY", "true");
        node.set("POD_NAMESPACE", "istio-system");
        node.set("POD_NAME", "istio-cni-node-x");
        node.set("NODE_NAME", "node-1");
        node
    }

    /// Sets a variable of the agent's environment.
    pub fn set(&mut self, name: &str, value: &str) {
        self.env.insert(name.to_owned(), value.to_owned());
    }

    /// The returned file sets the program's clock of the day; the monotonic clock stays as it is.
    pub fn fake_clock(&mut self) -> impl Fn(&str) + use<> {
        // Where every program may read, also when it is confined.
        let clock = self.path("account/clock");
        fs::write(&clock, "+0").expect("writes");
        for (name, value) in [
            ("LD_PRELOAD", &*faketime()),
            ("FAKETIME_TIMESTAMP_FILE", &clock.display().to_string()),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ] {
            self.set(name, value);
        }
        move |time| fs::write(&clock, time).expect("writes")
    }

    /// The path of a directory or file of the node, by its path below the test's folder.
    pub fn path(&self, part: &str) -> PathBuf {
        self.folder.path().join(part)
    }

    /// The text of a network configuration; none where the file is missing.
    pub fn conf(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path("net.d").join(name)).ok()
    }

    /// Writes a network configuration in one step.
    pub fn write_conf(&self, name: &str, text: &str) {
        // As network plugins do it: beside, then renamed.
        let temporary = self.path("net.d").join(format!("{name}.tmp"));
        fs::write(&temporary, text).expect("writes");
        fs::rename(temporary, self.path("net.d").join(name)).expect("renames");
    }

    /// The texts of all files among the network configurations, by their names.
    pub fn confs(&self) -> BTreeMap<String, String> {
        let entries = fs::read_dir(self.path("net.d")).expect("lists").map(|entry| entry.expect("an entry"));
        let text = |entry: &fs::DirEntry| fs::read_to_string(entry.path()).unwrap_or_default();
        entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), text(&entry))).collect()
    }

    /// Whether the first configuration that can be loaded has the entry last.
    pub fn calls_us(&self) -> bool {
        let confs = self.confs();
        let mut valid = confs
            .iter()
            .filter(|(name, _)| [".conf", ".conflist", ".json"].iter().any(|end| name.ends_with(end)));
        valid.find_map(|(name, text)| {
            let conf: Value = serde_json::from_str(text).ok()?;
            let last = if name.ends_with(".conflist") { conf["plugins"].as_array()?.last()? } else { &conf };
            Some(last["type"].as_str()? == "istio-cni")
        }) == Some(true)
    }

    /// Whether the node's plugin is the image's, byte for byte.
    pub fn has_plugin(&self) -> bool {
        fs::read(self.path("bin/istio-cni")).ok() == fs::read(self.path("image/istio-cni")).ok()
    }

    /// One whose image has the real plugin, in a cluster whose own pods are outside the mesh.
    pub fn with_the_real_plugin() -> Self {
        let mut node = Self::new(&[("10-calico.conflist", CALICO)]);
        node.use_real_plugin();
        node.set("EXCLUDE_NAMESPACES", "kube-system");
        node
    }

    /// The image has the real plugin.
    pub fn use_real_plugin(&self) {
        let program = program::under_test("istio-cni").expect("istio-cni is built");
        fs::copy(program, self.path("image/istio-cni")).expect("copies");
    }

    /// A runtime gives the installed plugin a command with the configuration of a file that has its entry alone. The answer does not matter.
    pub fn runtime_asks(&self, command: &str, file: &str) {
        let mut conf: Value = serde_json::from_str(&self.conf(file).expect("a file")).expect("JSON");
        conf["cniVersion"] = "1.1.0".into();
        conf["prevResult"] = json!({"cniVersion": "1.1.0"});
        let call = Invocation::new(command, &conf).program(&self.path("bin/istio-cni")).pod("default", "web");
        call.env("CNI_NETNS", "/nonexistent").run().expect("runs");
    }

    /// The kubeconfig that the agent wrote for the plugin; none where it is missing.
    pub fn kubeconfig(&self) -> Option<String> {
        fs::read_to_string(self.path("run/istio-cni-kubeconfig")).ok()
    }

    /// The program with these arguments and the node's environment, not started.
    pub fn command(&self, args: &[&str]) -> Command {
        let program = program::under_test("install-cni").expect("install-cni is built");
        let mut command = Command::new(program);
        command.args(args).env_clear().envs(&self.env).stdin(Stdio::null());
        command
    }

    /// Starts the agent and does not wait for it. Its log lines are appended to the node's log.
    pub fn start(&self) -> Agent<'_> {
        self.start_with(&[])
    }

    /// Likewise, with further arguments.
    pub fn start_with(&self, args: &[&str]) -> Agent<'_> {
        self.spawn(self.command(&[args, &[&self.control_flag()]].concat()))
    }

    /// Starts it by another program, which is given its command line.
    pub fn start_as(&self, prefix: &[&str]) -> Agent<'_> {
        let mut command = prefixed(prefix, &self.command(&[&self.control_flag()]));
        command.env_clear().envs(&self.env).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
        self.spawn(command)
    }

    fn control_flag(&self) -> String {
        format!("--ctrlz_port={}", self.control)
    }

    fn spawn(&self, mut command: Command) -> Agent<'_> {
        let log = fs::File::options().create(true).append(true).open(self.path("log")).expect("a log");
        let child = command.stdout(Stdio::null()).stderr(log).spawn().expect("starts");
        Agent { node: self, child: Killed(child) }
    }

    /// Starts the agent, and waits until it is ready.
    pub fn start_ready(&self) -> Agent<'_> {
        let agent = self.start();
        agent.wait_ready();
        agent
    }

    /// The log lines of all agents of this node so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

/// The program while it runs. It is killed when dropped.
pub struct Agent<'n> {
    /// Where it runs.
    pub node: &'n Node,
    child: Killed,
}

impl Agent<'_> {
    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The status and body of its readiness; none while it does not answer.
    pub fn readyz(&self) -> Option<(u16, String)> {
        get(self.node.health, "/readyz")
    }

    /// Waits until it is ready.
    pub fn wait_ready(&self) {
        self.wait("readiness", || self.readyz().is_some_and(|(status, _)| status == 200));
    }

    /// Waits for a reason why it is not ready.
    pub fn wait_not_ready(&self, part: &str) -> String {
        let mut reason = String::new();
        self.wait(part, || {
            let Some((status, body)) = self.readyz() else { return false };
            reason = body;
            status == 503 && reason.contains(part)
        });
        reason
    }

    /// Waits until something is so. Panics after [`DEADLINE`], with `what`, the readiness and the log.
    pub fn wait(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        if let Err(error) = until(what, DEADLINE, &[], || Ok(is_so().then_some(()))) {
            panic!("{error}\n{:?}\n{}", self.readyz(), self.node.log());
        }
    }

    /// The value of a metric, by its name with labels.
    pub fn metric(&self, name: &str) -> f64 {
        self.find_metric(name).unwrap_or_else(|| panic!("no {name}\n{}", self.node.log()))
    }

    /// The number of passes once it stays the same: for as long as a busy machine may need to begin one that is due.
    pub fn passes_at_rest(&self) -> f64 {
        loop {
            let passes = self.metric("istio_cni_passes_total");
            thread::sleep(Duration::from_secs(1));
            if self.metric("istio_cni_passes_total") == passes {
                return passes;
            }
        }
    }

    /// Waits until a metric is as high: what it counts can be seen before it is counted.
    pub fn wait_metric(&self, name: &str, least: f64) {
        self.wait(name, || self.find_metric(name).is_some_and(|value| value >= least));
    }

    /// The value of a metric; none while the agent does not answer.
    pub fn find_metric(&self, name: &str) -> Option<f64> {
        http::metric(&get(self.node.monitoring, "/metrics")?.1, name)
    }

    /// Sends it a signal, as `kill` takes it: `-HUP`.
    pub fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().expect("kill").success());
    }

    /// Sends it a signal, and waits for it; returns its exit code.
    pub fn end(self) -> Option<i32> {
        self.signal("-TERM");
        self.wait_end()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("waits").is_some()
    }

    /// Waits until it ends; returns its exit code.
    pub fn wait_end(mut self) -> Option<i32> {
        let ended = until("its end", DEADLINE, &[], || Ok(self.child.try_wait()?));
        ended.unwrap_or_else(|error| panic!("{error}\n{}", self.node.log())).code()
    }

    /// Kills it with SIGKILL, and waits for its end.
    pub fn kill(mut self) {
        self.kill_now();
    }

    /// Kills it where it is; another may take its place.
    pub fn kill_now(&mut self) {
        self.child.kill().expect("kills");
        self.child.wait().expect("waits");
    }
}

/// The status and body of a page of loopback; none where no server answers.
pub fn get(port: u16, path: &str) -> Option<(u16, String)> {
    request(port, "GET", path, "")
}

/// One request: status and body. The agent closes a connection after five silent seconds, and on a machine that stands still any client may
/// look like that.
pub fn request(port: u16, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    (0..5)
        .find_map(|_| exchange(TcpStream::connect(("127.0.0.1", port)).ok()?, method, path, body.as_bytes()))
}

/// One request, tried once.
pub fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: &[u8],
) -> Option<(u16, String)> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    // A server that has seen enough closes before it has read everything.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    http::answered(&String::from_utf8_lossy(&answer))
}

/// The library that sets a program's clock of the day.
pub fn faketime() -> String {
    let library = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    assert!(Path::new(&library).exists(), "libfaketime is missing: run scripts/setup-apt.sh");
    library
}

/// Sets a file's permissions, such as `0o755`.
pub fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("sets the mode");
}

/// An API server that answers every request about DaemonSets in one way, and remembers what was posted.
pub struct FakeApi(StandIn<Answers>);

struct Answers {
    status: u16,
    daemon_set: String,
    posted: Vec<String>,
}

impl FakeApi {
    /// `daemon_set` is the status and the object.
    pub fn start(status: u16, daemon_set: &str) -> Self {
        let answers = Answers { status, daemon_set: daemon_set.to_owned(), posted: Vec::new() };
        Self(StandIn::of(answers, respond))
    }

    /// Makes this the API server of a node's agent. Takes effect at its next start.
    pub fn serve(&self, node: &mut Node) {
        node.set("KUBERNETES_SERVICE_PORT", &self.0.port.to_string());
    }

    /// The bodies of all POST requests, in their order.
    pub fn posted(&self) -> Vec<String> {
        self.0.state().posted.clone()
    }
}

fn respond(request: &HttpRequest, answers: &mut Answers) -> (u16, String) {
    let (head, status) = (&request.head, answers.status);
    let body = String::from_utf8_lossy(&request.body).into_owned();
    if request.method() == "POST" {
        answers.posted.push(body.clone());
    }
    match () {
        () if head.contains("/daemonsets") => (status, answers.daemon_set.clone()),
        () if head.contains("/events") => (201, body),
        // An agent without rights or credentials may not read its pod either. The plugin, which reads whole objects, keeps its rights until the end.
        () if matches!(status, 401 | 403) && head.contains("PartialObjectMetadata") => {
            (status, failure(status))
        }
        () => (404, failure(404)),
    }
}

/// A DaemonSet as the API server has it.
pub fn daemon_set(deleting: bool) -> String {
    let mut set = json!({"kind": "DaemonSet", "apiVersion": "apps/v1",
        "metadata": {"name": "istio-cni-node", "namespace": "istio-system", "resourceVersion": "7"},
        "spec": {"selector": {}, "template": {"spec": {"containers": []}}}});
    if deleting {
        set["metadata"]["deletionTimestamp"] = json!("2026-11-21T00:00:00Z");
    }
    set.to_string()
}

/// A size of a process, by its name in `/proc/PID/status` with a colon.
pub fn memory_kib(id: u32, what: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("a size");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
