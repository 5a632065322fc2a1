//! A node with pods of every kind: one pass finds exactly those that are not as they should be, each with its cause.
//!
//! `make scan` (SCANNED=200) does so with 200 pods, 40 of them broken, and fails where the pass takes a second or more.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use e2e::redirectctl::{self, Patient, State};
use e2e::strace::Strace;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::leftovers::{cgroup_roots, fresh_name, remove_cgroup};
use test_support::netns::NetnsDirectory;
use test_support::process::{self, Output};

/// How many pods are broken at most.
const BROKEN: usize = 40;
/// How many questions a pod costs at most, sets of native rules among them, and one for each hook of each family where the kernel
/// lists what hangs there.
const MOST_QUESTIONS: usize = 48;
/// What a pass may take with a release build, where SCANNED names the pods.
const IN_TIME: Duration = Duration::from_secs(1);
/// How many passes are timed; the fastest counts.
const PASSES: usize = 5;
/// Longer than a pass takes on any machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// The namespaces and the list of a node's pods.
struct Node {
    runtime: NetnsDirectory,
    folder: TempDir,
    /// The file of the first pod's namespace.
    first: PathBuf,
    /// Further flags.
    more: Vec<String>,
}

impl Node {
    fn new(patients: &[Patient]) -> Result<Self> {
        let node = Self {
            runtime: NetnsDirectory::of(patients.iter().map(Patient::namespace))?,
            folder: tempfile::tempdir()?,
            first: patients.first().map(|first| first.namespace().path()).unwrap_or_default(),
            more: Vec::new(),
        };
        let objects: Vec<&Value> = patients.iter().flat_map(Patient::objects).collect();
        fs::write(node.pods(), json!({"kind": "List", "items": objects}).to_string())?;
        Ok(node)
    }

    fn pods(&self) -> String {
        self.folder.path().join("pods.json").display().to_string()
    }

    fn command(&self, output: &str) -> Command {
        let (pods, directory) = (self.pods(), self.runtime.path().display().to_string());
        let args = ["scan", "-f", &pods, "--netns-dir", &directory];
        let mut command = redirectctl::command(&args);
        if !self.more.iter().any(|word| word == "--cni-conf-dir") {
            command.args(["--cni-conf-dir", "/nonexistent"]);
        }
        command.args(["--output", output]).args(&self.more);
        command
    }

    fn scan(&self, output: &str) -> Result<Output> {
        process::run(&mut self.command(output), PATIENCE)
    }
}

/// The pods of a node, the broken ones first.
fn patients(count: usize) -> Result<Vec<(State, Patient)>> {
    let broken = BROKEN.min(redirectctl::broken().len().max(count / 5));
    let states = redirectctl::broken().into_iter().cycle().take(broken);
    let whole = redirectctl::whole();
    let all = states.chain(whole.iter().cloned().cycle()).take(count.max(broken + whole.len()));
    let patient = |(number, state): (usize, State)| {
        let patient = state.patient(u8::try_from(number)?)?;
        Ok((state, patient))
    };
    all.enumerate().map(patient).collect()
}

#[test]
fn one_pass_finds_exactly_the_pods_that_are_broken() -> Result<()> {
    let count = match env::var("SCANNED") {
        Ok(text) => text.parse().context("SCANNED is a number of pods")?,
        Err(_) => 0,
    };
    let (states, patients): (Vec<State>, Vec<Patient>) = patients(count)?.into_iter().unzip();
    let node = Node::new(&patients)?;
    let scan = |output: &str| node.scan(output);

    let mut output = scan("json")?;
    if env::var_os("SCANNED").is_some() {
        // Other work on the machine makes a pass slower, and nothing makes it faster than it is.
        let mut fastest = Duration::MAX;
        for _ in 0..PASSES {
            let start = Instant::now();
            output = scan("json")?;
            fastest = fastest.min(start.elapsed());
        }
        println!("{} pods in {fastest:?}", patients.len());
        ensure!(fastest < IN_TIME, "it took {fastest:?}, more than {IN_TIME:?}");
    }
    ensure!(output.code() == Some(2), "{output:?}");
    let found: Value = serde_json::from_str(&output.stdout)?;
    let found: BTreeMap<&str, Vec<&str>> = found["pods"]
        .as_array()
        .context("pods")?
        .iter()
        .map(|pod| (pod["subject"].as_str().unwrap_or("?"), causes(pod)))
        .collect();
    assert_eq!(found.len(), patients.len(), "every pod once, and nothing else");
    for (number, state) in states.iter().enumerate() {
        let wanted = state.causes();
        assert_eq!(found[format!("default/web-{number}").as_str()], wanted, "{}", state.name);
    }

    let table = scan("text")?.stdout;
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let broken = states.iter().filter(|state| !state.cause.is_empty()).count();
    // The advice about the node names one as well.
    let rows = table.lines().filter(|line| line.contains("default/web-") && !line.contains("- pod "));
    assert_eq!(rows.count(), broken, "{table}");
    let metrics = scan("prometheus")?.stdout;
    let has_no_rules =
        |state: &&State| state.cause == "not-redirected" || state.name == "node rebooted in ambient mode";
    let not_redirected = states.iter().filter(has_no_rules).count();
    let wanted = format!("redirectctl_pods{{state=\"not-redirected\"}} {not_redirected}\n");
    assert!(metrics.contains(&wanted), "{metrics}");
    Ok(())
}

/// What a look may cost: the time it takes is a matter of the machine, what is asked of the kernel is not.
#[test]
fn a_pod_costs_a_bounded_number_of_questions() -> Result<()> {
    let numbered = redirectctl::whole().into_iter().zip(200..);
    let patients = numbered.map(|(state, number)| state.patient(number)).collect::<Result<Vec<_>>>()?;
    let strace = Strace::noting("sendto,openat,execve")?;
    let node = Node::new(&patients)?;
    process::run(&mut strace.command(&node.command("json")), PATIENCE)?.ok()?;
    let calls = strace.calls()?;
    let count = |name: &str, text: &str| {
        calls.iter().filter(|call| call.name == name && call.text.contains(text)).count()
    };
    let mut wrong = Vec::new();
    for (what, counted, most) in [
        ("programs that were run", count("execve", ""), 1),
        (
            "lists of the machine's connections that were read",
            count("openat", "net/tcp") + count("openat", "net/udp"),
            0,
        ),
        ("questions for the kernel", count("sendto", ""), MOST_QUESTIONS * patients.len()),
    ] {
        println!("{what}: {counted}");
        if counted > most {
            wrong.push(format!("{what}: {counted}, at most {most}"));
        }
    }
    assert!(wrong.is_empty(), "{} pods: {wrong:#?}", patients.len());
    Ok(())
}

/// Objects of pods in these states, all in a namespace that asks for ambient mode.
fn in_ambient_namespace(names: &[&str]) -> Result<(Vec<Patient>, Node)> {
    let numbered = names.iter().zip(0..);
    let patients: Vec<Patient> =
        numbered.map(|(name, number)| redirectctl::patient(name, number)).collect::<Result<_>>()?;
    let node = Node::new(&patients)?;
    let mut list: Value = serde_json::from_str(&fs::read_to_string(node.pods())?)?;
    let items = list["items"].as_array_mut().context("no list")?;
    for pod in items.iter_mut().filter(|item| item["kind"] == "Pod") {
        // The namespace's label decides, except where the pod's own does.
        pod["metadata"]["labels"] = json!({});
    }
    let labels = json!({"istio.io/dataplane-mode": "ambient"});
    items.push(json!({"kind": "Namespace", "metadata": {"name": "default", "labels": labels}}));
    fs::write(node.pods(), list.to_string())?;
    Ok((patients, node))
}

#[test]
fn pods_of_ambient_mode_are_counted_and_those_that_are_pending_have_a_cause() -> Result<()> {
    let names = [
        "enrolled in ambient mode",
        "ambient capture removed",
        "node rebooted in ambient mode",
        "no ztunnel",
        "redirected",
        "outside the mesh",
    ];
    let (_patients, mut node) = in_ambient_namespace(&names)?;
    let mut list: Value = serde_json::from_str(&fs::read_to_string(node.pods())?)?;
    let last = list["items"]
        .as_array_mut()
        .context("no list")?
        .iter_mut()
        .find(|pod| pod["metadata"]["name"] == "web-5");
    let metadata = &mut last.context("the last pod")?["metadata"];
    metadata["labels"] = json!({"istio.io/dataplane-mode": "none"});
    metadata["annotations"] = json!({});
    fs::write(node.pods(), list.to_string())?;

    let output = node.scan("json")?;
    ensure!(output.code() == Some(2), "{output:?}");
    let scan: Value = serde_json::from_str(&output.stdout)?;
    let pods = scan["pods"].as_array().context("pods")?;
    let seen: Vec<(&str, Option<&str>, Vec<&str>)> = pods
        .iter()
        .map(|pod| (pod["state"].as_str().unwrap_or("?"), pod["dataPlane"].as_str(), causes(pod)))
        .collect();
    assert_eq!(
        seen,
        [
            ("verified", Some("ambient"), vec![]),
            ("drifted", Some("ambient"), vec!["rules-differ"]),
            ("not-redirected", Some("ambient"), vec!["not-enrolled"]),
            ("pending", Some("ambient"), vec!["not-enrolled"]),
            ("verified", Some("sidecar"), vec![]),
            ("left-alone", None, vec![]),
        ],
        "{scan:#}"
    );
    let told = |index: usize| pods[index]["findings"][0]["seen"].to_string();
    ensure!(told(2).contains("no table has a chain of the mesh") && told(2).contains("enabled"), "{scan:#}");
    for words in ["nothing listens on tcp port 15001", "no ztunnel is connected; start one on this node"] {
        ensure!(told(3).contains(words), "{scan:#}");
    }
    let text = node.scan("text")?.stdout;
    ensure!(
        text.contains("6 pods: 2 verified, 1 left-alone, 1 not-redirected, 1 drifted, 1 pending\n"),
        "{text}"
    );
    ensure!(text.contains("\n1 of 4 ambient pods enrolled, verified\n"), "{text}");
    let metrics = node.scan("prometheus")?.stdout;
    for sample in ["{state=\"enrolled\"} 1\n", "{state=\"pending\"} 3\n"] {
        ensure!(metrics.contains(&format!("\nredirectctl_ambient_pods{sample}")), "{metrics}");
    }
    // Whose namespace is not known is judged by its annotation.
    list["items"].as_array_mut().context("no list")?.retain(|object| object["kind"] == "Pod");
    fs::write(node.pods(), list.to_string())?;
    let text = node.scan("text")?.stdout;
    ensure!(text.contains("\n1 of 4 ambient pods enrolled, verified\n"), "{text}");
    // Where the plugin's entry says that ambient mode is off, nobody enrols them.
    let conf = tempfile::tempdir()?;
    node.more = configured(conf.path(), false)?;
    ensure!(!node.scan("text")?.stdout.contains("ambient pods"), "ambient mode is off");
    Ok(())
}

/// A network configuration with the plugin's entry; what names it.
fn configured(folder: &Path, ambient: bool) -> Result<Vec<String>> {
    let entry = json!({"type": "istio-cni", "ambient_enabled": ambient});
    let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "ptp"}, entry]});
    fs::write(folder.join("10-net.conflist"), list.to_string())?;
    Ok(vec!["--cni-conf-dir".to_owned(), folder.display().to_string()])
}

/// What only the agent knows, such as ztunnel's answer, it says at its port.
#[test]
fn what_the_agent_says_of_a_pod_in_ambient_mode_is_its_cause() -> Result<()> {
    const WHY: &str = "the addresses of probes: permission denied";
    let (_patients, mut node) = in_ambient_namespace(&["enrolled in ambient mode", "redirected"])?;
    let agent = TcpListener::bind("127.0.0.1:0")?;
    let address = agent.local_addr()?;
    let conf = tempfile::tempdir()?;
    node.more = configured(conf.path(), true)?;
    node.more.extend(["--agent".to_owned(), address.to_string()]);
    let answer = format!(
        "HTTP/1.0 200 OK\r\n\r\nready\n1 of 1 meshed pods verified\n0 of 1 ambient pods enrolled, verified\n  default/web-0: {WHY}\n"
    );
    let server = thread::spawn(move || -> Result<String> {
        let (mut client, _) = agent.accept()?;
        let mut asked = [0; 512];
        let read = client.read(&mut asked)?;
        client.write_all(answer.as_bytes())?;
        Ok(String::from_utf8_lossy(&asked[..read]).into_owned())
    });
    let scan: Value = serde_json::from_str(&node.scan("json")?.stdout)?;
    let asked = server.join().map_err(|_| anyhow!("the server panicked"))??;
    ensure!(asked.starts_with("GET /readyz?verbose "), "{asked}");
    let codes = |what: &Value| causes(&json!({"findings": what})).join(", ");
    ensure!(!codes(&scan["node"]).contains("agent-not-ready"), "{scan:#}");
    ensure!(scan["pods"][0]["state"] == "pending" && scan["pods"][1]["state"] == "verified", "{scan:#}");
    let [finding] = &*scan["pods"][0]["findings"]
        .as_array()
        .context("findings")?
        .iter()
        .filter(|finding| finding["severity"] != "note")
        .collect::<Vec<_>>()
    else {
        bail!("one finding: {scan:#}")
    };
    ensure!(finding["code"] == "not-enrolled" && finding["seen"].to_string().contains(WHY), "{scan:#}");
    Ok(())
}

/// A cgroup of version 2, gone with this.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Result<Self> {
        let roots = cgroup_roots();
        let root = roots.iter().find(|root| root.join("cgroup.controllers").exists());
        let folder = root.context("no cgroup2")?.join(fresh_name());
        fs::create_dir(&folder)?;
        Ok(Self(folder))
    }

    /// Runs a command as one of its processes.
    fn run(&self, command: &Command) -> Result<Output> {
        let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", self.0.display());
        process::run(&mut process::prefixed(&["sh", "-euc", &enter, "sh"], command), PATIENCE)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove_cgroup(&self.0);
    }
}

#[test]
fn a_program_that_gives_connections_to_services_another_destination_is_found() -> Result<()> {
    let patient = redirectctl::whole()[0].patient(1)?;
    let mut node = Node::new(std::slice::from_ref(&patient))?;
    let conf = tempfile::tempdir()?;
    node.more = configured(conf.path(), false)?;
    let cgroup = Cgroup::new()?;
    let found = |service: &str| -> Result<bool> {
        let mut scan = node.command("json");
        scan.env("KUBERNETES_SERVICE_HOST", service).env("KUBERNETES_SERVICE_PORT", "443");
        let scan: Value = serde_json::from_str(&cgroup.run(&scan)?.stdout)?;
        let codes = causes(&json!({"findings": scan["node"]})).join(", ");
        ensure!(codes.contains("services-translated") == scan["node"].to_string().contains(service));
        Ok(codes.contains("services-translated"))
    };
    ensure!(!found("10.96.0.1")? && !found("fd00:96::1")?);
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/socket-balancing.pl");
    let attach = [program, &cgroup.0.display().to_string(), "10.96.0.1", "203.0.113.7"];
    process::run(&mut process::command("perl", attach), PATIENCE)?.ok()?;
    ensure!(found("10.96.0.1")? && !found("10.96.0.2")? && !found("fd00:96::1")?);
    Ok(())
}

/// A pod's, as its cgroup has it.
const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";

/// What the kernel shows of a process of a pod's container, in whose user namespace IDs begin at a number of the node.
fn process(proc: &Path, id: u32, container: &str, user: u32, group: u32, begin: u32) -> Result<()> {
    let folder = proc.join(id.to_string());
    fs::create_dir_all(&folder)?;
    let slice = UID.replace('-', "_");
    let cgroup = format!("0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{container}.scope\n");
    let (user, group) = (user + begin, group + begin);
    let status = format!("Name:\tprog{id}\nUid:\t0\t0\t0\t{user}\nGid:\t0\t0\t0\t{group}\n");
    let map = format!("         0 {begin:10} {:10}\n", 65536);
    for (file, text) in [("cgroup", cgroup), ("status", status), ("uid_map", map.clone()), ("gid_map", map)] {
        fs::write(folder.join(file), text)?;
    }
    Ok(())
}

/// What an image, or a setuid program, makes of a container no specification says.
#[test]
fn processes_that_run_as_the_proxy_are_found() -> Result<()> {
    let patient = redirectctl::whole()[0].patient(1)?;
    let mut node = Node::new(std::slice::from_ref(&patient))?;
    let proc = tempfile::tempdir()?;
    node.more = ["--proc-dir".to_owned(), proc.path().display().to_string()].into();
    let mut objects: Vec<Value> = patient.objects().cloned().collect();
    objects[0]["metadata"]["uid"] = json!(UID);
    objects[0]["spec"]["initContainers"] = json!([{"name": "early", "securityContext": {"runAsUser": 1337}}]);
    let status = |name: &str, id: &str| json!({"name": name, "containerID": format!("containerd://{id}")});
    objects[0]["status"]["containerStatuses"] = json!([status("app", "aa11"), status("istio-proxy", "bb22")]);
    objects[0]["status"]["initContainerStatuses"] = json!([status("early", "cc33")]);
    objects[0]["status"]["ephemeralContainerStatuses"] = json!([status("debugger", "dd44")]);
    fs::write(node.pods(), json!({"kind": "List", "items": objects}).to_string())?;
    // The proxy itself, one that ends before it, the runtime's own, and whom the rules do not exempt.
    for (id, container, user, group) in [
        (10, "bb22", 1337, 1337),
        (11, "cc33", 1337, 1337),
        (12, "ee55", 1337, 1337),
        (13, "aa11", 1000, 1000),
    ] {
        process(proc.path(), id, container, user, group, 0)?;
    }
    // In a user namespace of its own another user has that number.
    process(proc.path(), 14, "aa11", 0, 0, 1337)?;
    ensure!(node.scan("json")?.ok()?.status.success());
    process(proc.path(), 20, "aa11", 1337, 7, 0)?;
    process(proc.path(), 21, "aa11", 1337, 1337, 100_000)?;
    process(proc.path(), 22, "dd44", 7, 1337, 0)?;
    let output = node.scan("json")?;
    let scan: Value = serde_json::from_str(&output.stdout)?;
    ensure!(causes(&scan["pods"][0]) == ["uid-collision"], "{scan}");
    let seen: Vec<String> = serde_json::from_value(scan["pods"][0]["findings"][0]["seen"].clone())?;
    ensure!(
        seen == [
            "process 20 (prog20) of container app runs as user 1337, as the proxy does",
            "process 21 (prog21) of container app runs as user 1337, as the proxy does",
            "process 22 (prog22) of container debugger runs as group 1337, as the proxy does",
        ],
        "{seen:?}"
    );
    // As many as it likes: they are counted.
    for id in 23..100 {
        process(proc.path(), id, "aa11", 1337, 7, 0)?;
    }
    let text = node.scan("json")?.stdout;
    ensure!(text.contains("and 75 more processes") && text.len() < 4000, "{text}");
    Ok(())
}

/// A neighbour can take a pod's addresses, but none of its processes.
#[test]
fn processes_decide_where_addresses_do_not() -> Result<()> {
    let patient = redirectctl::whole()[0].patient(1)?;
    let hostile = redirectctl::whole()[0].patient(2)?;
    for address in
        patient.objects().next().context("no pod")?["status"]["podIPs"].as_array().context("none")?
    {
        let ip = address["ip"].as_str().context("no address")?;
        hostile
            .namespace()
            .add_address("lo", &format!("{ip}/{}", if ip.contains(':') { 128 } else { 32 }))?;
    }
    let patients = [patient, hostile];
    let mut node = Node::new(&patients)?;
    let mut pods: Value = serde_json::from_str(&fs::read_to_string(node.pods())?)?;
    pods["items"][0]["metadata"]["uid"] = json!(UID);
    fs::write(node.pods(), pods.to_string())?;
    let proc = tempfile::tempdir()?;
    node.more = ["--proc-dir".to_owned(), proc.path().display().to_string()].into();
    let states = |node: &Node| -> Result<Vec<String>> {
        let scan: Value = serde_json::from_str(&node.scan("json")?.stdout)?;
        let pods = scan["pods"].as_array().context("no pods")?;
        Ok(pods.iter().map(|pod| pod["state"].as_str().unwrap_or_default().to_owned()).collect())
    };
    ensure!(states(&node)? == ["unknown", "verified"]);
    process(proc.path(), 7, "aa11", 1000, 1000, 0)?;
    let link = |id: u32, namespace: &Path| -> Result<()> {
        fs::create_dir_all(proc.path().join(format!("{id}/ns")))?;
        Ok(std::os::unix::fs::symlink(namespace, proc.path().join(format!("{id}/ns/net")))?)
    };
    link(1, Path::new("/proc/self/ns/net"))?;
    link(7, &node.first)?;
    ensure!(states(&node)? == ["verified", "verified"], "{:?}", states(&node)?);
    Ok(())
}

/// The codes of findings that are more than notes.
fn causes(pod: &Value) -> Vec<&str> {
    let findings = pod["findings"].as_array().into_iter().flatten();
    findings.filter(|one| one["severity"] != "note").filter_map(|one| one["code"].as_str()).collect()
}
