//! What the plugin answers, logs and refuses, apart from redirecting.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::plugin::{Answer, Invocation, PodApi, RunDir, istio_cni, plain_kubeconfig, sidecar};
use e2e::traffic::{Client, TcpServer};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background, EARLY, SHORT, until};

/// A run directory with the manifest of the pod `web`, and a namespace for it.
fn web() -> Result<(RunDir, Namespace)> {
    let run_dir = RunDir::new()?;
    run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
    Ok((run_dir, Namespace::pod(Families::Dual)?))
}

fn add(run_dir: &RunDir, namespace: &Namespace) -> Invocation {
    Invocation::new("ADD", &run_dir.manifest_conf()).netns(namespace).pod("default", "web")
}

#[test]
fn the_previous_result_comes_back_to_the_last_byte() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let previous = r#"{"zeta": 18446744073709551617, "cniVersion":"1.1.0",  "ips":[{"address":"10.1.0.2/24","odd":1.10}], "x":{"b":1e-400,"a":[ ]}}"#;
    let mut conf = run_dir.manifest_conf().to_string();
    conf.insert_str(1, &format!("\"prevResult\": {previous},"));
    let output = add(&run_dir, &namespace).input(&conf).run()?.0.ok()?;
    assert_eq!(output.stdout, format!("{previous}\n"));
    Ok(())
}

#[test]
fn what_needs_no_pod_needs_no_kubeconfig_and_no_namespace() -> Result<()> {
    let run_dir = RunDir::new()?;
    let mut conf = run_dir.conf();
    conf["exclude_namespaces"] = json!(["kube-system"]);
    conf["pod_namespace"] = json!("istio-system");
    for (namespace, name) in
        [("kube-system", "dns"), ("istio-system", "istio-cni-node-x7"), ("", ""), ("a", "")]
    {
        let add = Invocation::new("ADD", &conf).env("CNI_NETNS", "/nonexistent").pod(namespace, name);
        assert_eq!(add.run()?.result()?, json!({"cniVersion": "1.1.0"}), "{namespace}/{name}");
    }
    // Of the same name elsewhere, it is a pod like any other.
    let add = Invocation::new("ADD", &conf).env("CNI_NETNS", "/nonexistent").pod("shop", "istio-cni-node-x7");
    let (code, text) = add.run()?.error()?;
    assert!(code == 11 && text.contains("istio-cni-kubeconfig is missing"), "{code} {text}");
    Ok(())
}

#[test]
fn a_pod_outside_the_mesh_by_the_annotations_that_the_runtime_passes_asks_nobody() -> Result<()> {
    let run_dir = RunDir::new()?;
    let answer = |command: &str, annotations: Value| {
        let mut conf = run_dir.conf();
        conf["prevResult"] = json!({"cniVersion": "1.1.0"});
        conf["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": annotations});
        let invocation = Invocation::new(command, &conf).env("CNI_NETNS", "/nonexistent");
        invocation.pod("shop", "web").run()
    };
    let outside = json!({"kubernetes.io/config.source": "api", "sidecar.istio.io/inject": "true"});
    let added = answer("ADD", outside.clone())?;
    let log = added.log()?;
    assert_eq!((&log[0]["decision"], &log[0]["reason"]), (&json!("skip"), &json!("not_injected")), "{log:?}");
    assert_eq!(added.result()?, json!({"cniVersion": "1.1.0"}));
    answer("CHECK", outside)?.silence()?;
    // One of the mesh, or one that may be.
    for annotations in [
        json!({"kubernetes.io/config.source": "api", "sidecar.istio.io/status": "{}"}),
        json!({"sidecar.istio.io/inject": "true"}),
        Value::Null,
    ] {
        for command in ["ADD", "CHECK"] {
            let (code, text) = answer(command, annotations.clone())?.error()?;
            assert!(code == 11 && text.contains("istio-cni-kubeconfig is missing"), "{code} {text}");
        }
    }
    Ok(())
}

#[test]
fn adding_twice_changes_nothing_and_another_plan_replaces_the_first() -> Result<()> {
    let (run_dir, namespace) = web()?;
    add(&run_dir, &namespace).run()?.result()?;
    let first = namespace.state()?;
    let log = add(&run_dir, &namespace).run()?.log()?;
    assert_eq!(log[0]["changed"], false, "{log:?}");
    assert_eq!(namespace.state()?, first);

    run_dir
        .write_manifest("web.json", &sidecar("web", &[("sidecar.istio.io/interceptionMode", "TPROXY")]))?;
    add(&run_dir, &namespace).run()?.result()?;
    let second = namespace.state()?;
    assert!(second.v4.contains_key("mangle") && !second.rule4.is_empty(), "{second:?}");
    run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
    add(&run_dir, &namespace).run()?.result()?;
    assert_eq!(namespace.state()?, first);
    Ok(())
}

#[test]
fn the_runtimes_environment_counts_for_all_pods() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let groups = add(&run_dir, &namespace).env("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "202,root");
    groups.env("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "127.0.0.0/8").run()?.result()?;
    let output = namespace.state()?.v4["nat"]["ISTIO_OUTPUT"].join("\n");
    for rule in ["--gid-owner 202 -j RETURN", "--gid-owner 0 -j RETURN", "-d 127.0.0.0/8 -j RETURN"] {
        assert!(output.contains(rule), "{rule} is missing in {output}");
    }
    let bad = add(&run_dir, &namespace).env("ISTIO_OUTBOUND_OWNER_GROUPS", "no-such-group").run()?;
    let (code, text) = bad.error()?;
    assert!(code == 100 && text.contains("ISTIO_OUTBOUND_OWNER_GROUPS"), "{code} {text}");
    Ok(())
}

#[test]
fn namespaces_of_the_host_are_refused() -> Result<()> {
    let (run_dir, _) = web()?;
    for path in ["/proc/self/ns/net", "/proc/thread-self/ns/net"] {
        let conf = run_dir.manifest_conf();
        let answer = Invocation::new("ADD", &conf).env("CNI_NETNS", path).pod("default", "web").run()?;
        let (code, text) = answer.error()?;
        assert!(code == 4 && text.contains("CNI_NETNS: ") && text.contains("runs in"), "{code} {text}");
    }
    // Also by another name.
    let own = Namespace::attach(std::path::Path::new("/proc/self/ns/net"))?;
    assert_eq!(add(&run_dir, &own).run()?.error()?.0, 4);
    Ok(())
}

/// A process with a user namespace in which ids begin at 100000 outside, as a kubelet makes it for `hostUsers: false`, and a
/// network namespace that belongs to it. Ends with the value.
struct Foreign(Background);

impl Foreign {
    fn start(folder: &Path) -> Result<Self> {
        let sleeper = process::command("unshare", ["--user", "--net", "sleep", "infinity"]);
        let foreign = Self(
            Background::start("the foreign process", &sleeper, &folder.join("foreign.log"))?.killed_on_drop(),
        );
        let proc = |file: &str| format!("/proc/{}/{file}", foreign.0.id());
        let own = fs::read_link("/proc/self/ns/user")?;
        until("the user namespace to be made", SHORT, &[&foreign.0], || {
            Ok((fs::read_link(proc("ns/user"))? != own).then_some(()))
        })?;
        for map in ["uid_map", "gid_map"] {
            fs::write(proc(map), "0 100000 65536")?;
        }
        Ok(foreign)
    }
}

#[test]
fn a_pod_with_users_of_its_own_is_redirected() -> Result<()> {
    let (run_dir, _) = web()?;
    let foreign = Foreign::start(run_dir.path())?;
    let pod = Namespace::attach(format!("/proc/{}/ns/net", foreign.0.id()).as_ref())?;
    pod.ip_batch(
        "link set lo up\nlink add eth0 type veth peer name pe0\nlink set pe0 up\nlink set eth0 up\n",
    )?;
    pod.ip_batch("addr add 10.1.0.2/24 dev eth0\nroute add default via 10.1.0.1\n")?;
    let log = add(&run_dir, &pod).run()?.log()?;
    assert_eq!(log[0]["because"], "the namespace belongs to another user namespace", "{log:?}");
    add(&run_dir, &pod).env("CNI_COMMAND", "CHECK").run()?.silence()?;

    // Ids in rules are those inside: 1337 is 101337 out here.
    let _outbound = TcpServer::start(&pod, "outbound", ([0, 0, 0, 0], 15001))?;
    let far: SocketAddr = "198.51.100.9:80".parse()?;
    for user in [1337, 100_000, 101_338] {
        let report = Client::new(&pod).user(user, user).tcp(far)?.report()?;
        assert_eq!((report.server.as_str(), report.original), ("outbound", Some(far)), "{user}");
    }
    let proxy = Client::new(&pod).user(101_337, 101_337).patience(Duration::from_secs(1)).tcp(far)?;
    assert_eq!(proxy.server(), None, "{proxy:?}");

    pod.sh("nft delete table inet istio-proxy-nat")?;
    assert_eq!(add(&run_dir, &pod).env("CNI_COMMAND", "CHECK").run()?.error()?.0, 111);
    Ok(())
}

#[test]
fn del_and_gc_always_succeed_and_keep_nothing() -> Result<()> {
    let (run_dir, namespace) = web()?;
    add(&run_dir, &namespace).run()?.result()?;
    for netns in [
        namespace.path().display().to_string(),
        "/nonexistent".into(),
        String::new(),
        "/proc/self/ns/net".into(),
    ] {
        add(&run_dir, &namespace).env("CNI_COMMAND", "DEL").env("CNI_NETNS", &netns).run()?.silence()?;
    }
    let mut conf = run_dir.manifest_conf();
    conf["cni.dev/valid-attachments"] = json!([{"containerID": "abc", "ifname": "eth0"}]);
    let gc = Invocation::new("GC", &conf).env("CNI_CONTAINERID", "").env("CNI_IFNAME", "");
    gc.run()?.silence()?;
    let mut names: Vec<String> = fs::read_dir(run_dir.path())?
        .map(|entry| Ok(entry?.file_name().display().to_string()))
        .collect::<Result<_>>()?;
    names.sort();
    assert_eq!(names, ["istio-cni.log", "manifests"]);
    Ok(())
}

#[test]
fn commands_a_version_does_not_have_are_refused() -> Result<()> {
    let run_dir = RunDir::new()?;
    for (command, version) in [("CHECK", "0.3.1"), ("GC", "1.0.0"), ("STATUS", "1.0.0")] {
        let mut conf = run_dir.conf();
        conf["cniVersion"] = json!(version);
        let (code, text) = Invocation::new(command, &conf).env("CNI_NETNS", "/x").run()?.error()?;
        assert!(code == 1 && text.contains(version) && text.contains(command), "{code} {text}");
    }
    Ok(())
}

#[test]
fn status_says_what_is_missing() -> Result<()> {
    let run_dir = RunDir::new()?;
    let status = |conf: &Value| Invocation::new("STATUS", conf).run();
    let refused = |conf: &Value, named: &str| -> Result<()> {
        let (code, text) = status(conf)?.error()?;
        ensure!(code == 50 && text.contains(named), "want {named}, got {code}: {text}");
        Ok(())
    };
    let mut with_host_agent = run_dir.conf();
    with_host_agent["agent_host_network"] = json!(true);
    refused(&with_host_agent, "istio-cni-kubeconfig is missing")?;
    run_dir.write_kubeconfig(&json!({"clusters": []}))?;
    refused(&with_host_agent, "istio-cni-kubeconfig")?;
    run_dir.write_kubeconfig(&plain_kubeconfig(1))?;
    status(&with_host_agent)?.silence()?;

    let mut conf = with_host_agent.clone();
    for wrong in ["/nonexistent", "/etc/hostname"] {
        conf["cni_agent_run_dir"] = json!(wrong);
        refused(&conf, &format!("cni_agent_run_dir: {wrong}"))?;
    }
    let read_only =
        format!("mount -t tmpfs -o ro none {}; exec {}", run_dir.path().display(), istio_cni().display());
    let mut command = process::command("unshare", ["--mount", "sh", "-ec", &read_only]);
    command.env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/opt/cni/bin");
    let output = process::run_with_input(&mut command, &with_host_agent.to_string(), process::SHORT)?;
    let (code, text) = Answer(output).error()?;
    assert!(code == 50 && text.contains("is not writable: EROFS"), "{code} {text}");

    let mut conf = run_dir.manifest_conf();
    refused(&conf, "pod_manifest_dir: cannot read")?;
    run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
    status(&conf)?.silence()?;
    conf["native_nftables"] = json!(true);
    status(&conf)?.silence()
}

/// A node whose network is reported as not ready starts no pod of the pods' network. If the agent is one of those, only it can bring
/// the credentials, so their absence must not count.
#[test]
fn status_does_not_wait_for_an_agent_that_waits_for_it() -> Result<()> {
    let run_dir = RunDir::new()?;
    let mut conf = run_dir.conf();
    Invocation::new("STATUS", &conf).run()?.silence()?;
    conf["cni_agent_run_dir"] = json!("/nonexistent");
    Invocation::new("STATUS", &conf).run()?.silence()?;
    conf["agent_host_network"] = json!(false);
    Invocation::new("STATUS", &conf).run()?.silence()
}

/// Runtimes ask every few seconds, and a network namespace costs the kernel milliseconds and memory.
#[test]
fn status_makes_no_network_namespace() -> Result<()> {
    let (run_dir, _) = web()?;
    let script = format!("echo 0 > /proc/sys/user/max_net_namespaces; exec {}", istio_cni().display());
    let mut command =
        process::command("unshare", ["--user", "--map-root-user", "--net", "sh", "-ec", &script]);
    command.env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/opt/cni/bin");
    let output = process::run_with_input(&mut command, &run_dir.manifest_conf().to_string(), process::SHORT)?;
    Answer(output).silence()
}

/// In a network namespace that another user namespace owns, and as nobody there, the kernel refuses everything.
#[test]
fn status_says_what_the_kernel_refuses() -> Result<()> {
    let (run_dir, _) = web()?;
    let mut command = process::command("setpriv", ["--bounding-set=-all", "--inh-caps=-all", "--"]);
    command.arg(istio_cni()).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/opt/cni/bin");
    let output = process::run_with_input(&mut command, &run_dir.manifest_conf().to_string(), process::SHORT)?;
    let (code, text) = Answer(output).error()?;
    assert!(code == 51 && text.contains("CAP_SYS_ADMIN"), "{code} {text}");
    Ok(())
}

#[test]
fn what_a_pod_says_in_vain_is_warned_of() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let annotations = [
        ("traffic.sidecar.istio.io/excludeOutboundPort", "3306"),
        ("traffic.sidecar.istio.io/includeInboundPorts", "80"),
        ("traffic.sidecar.istio.io/excludeInboundPorts", "22"),
    ];
    let mut pod = sidecar("web", &annotations);
    pod["spec"]["containers"][1]["env"] = json!([
        {"name": "ISTIO_DUAL_STACK", "value": "yes"},
        {"name": "ISTIO_META_DNS_CAPTUR", "value": "true"},
    ]);
    run_dir.write_manifest("web.json", &pod)?;
    // The runtime's environment holds for all pods; only what the plugin reads there can be misspelt.
    let runtime =
        add(&run_dir, &namespace).env("ISTIO_OUTBOUND_OWNER_GROUP", "7").env("ISTIO_INBOUND_PORT", "80");
    let log = runtime.run()?.log()?;
    let warnings: Vec<&str> =
        log.iter().filter(|line| line["level"] == "warn").filter_map(|line| line["msg"].as_str()).collect();
    for wanted in [
        "\"yes\" is not a boolean and counts as false; use true or false",
        "did you mean traffic.sidecar.istio.io/excludeOutboundPorts?",
        "variable ISTIO_OUTBOUND_OWNER_GROUP is not a setting and is ignored; did you mean ISTIO_OUTBOUND_OWNER_GROUPS?",
        "did you mean ISTIO_META_DNS_CAPTURE?",
        "annotation traffic.sidecar.istio.io/excludeInboundPorts has no effect",
    ] {
        assert_eq!(
            warnings.iter().filter(|line| line.contains(wanted)).count(),
            1,
            "{wanted}: {warnings:#?}"
        );
    }
    assert_eq!(warnings.len(), 5, "{warnings:#?}");
    // A runtime may check each pod every few seconds.
    let mut conf = run_dir.manifest_conf();
    conf["no_such_key"] = json!(1);
    conf["prevResult"] = json!({"cniVersion": "1.1.0"});
    let check = Invocation::new("CHECK", &conf).netns(&namespace).pod("default", "web").run()?;
    assert_eq!(check.log()?, [] as [Value; 0]);
    check.silence()
}

/// A manifest of the pod `web` whose spec has these fields, too.
fn web_with(run_dir: &RunDir, annotations: &[(&str, &str)], spec: &Value) -> Result<()> {
    let mut pod = sidecar("web", annotations);
    for (field, value) in spec.as_object().context("no fields")? {
        match (&mut pod["spec"][field], value) {
            (Value::Array(list), Value::Array(more)) => list.extend(more.iter().cloned()),
            (place, value) => *place = value.clone(),
        }
    }
    run_dir.write_manifest("web.json", &pod)
}

/// Rules exempt the proxy by its user and group, whoever has them.
#[test]
fn a_container_that_runs_as_the_proxy_is_warned_of_and_refused_with_strict_capture() -> Result<()> {
    const STRICT: (&str, &str) = ("traffic.sidecar.istio.io/strictCapture", "true");
    let (run_dir, namespace) = web()?;
    let container = |field: &str| json!([{"name": "x", "securityContext": {field: 1337}}]);
    let found: [(Value, &str); 4] = [
        (json!({"containers": container("runAsUser")}), "container x runs as user 1337, as the proxy does"),
        (json!({"containers": container("runAsGroup")}), "container x runs as group 1337, as the proxy does"),
        (
            json!({"initContainers": [{"name": "x", "restartPolicy": "Always"}], "securityContext": {"runAsUser": 1337}}),
            "container x runs as user 1337, as the proxy does",
        ),
        (
            json!({"securityContext": {"runAsGroup": 1337}}),
            "container app runs as group 1337, as the proxy does",
        ),
    ];
    for (spec, words) in found {
        web_with(&run_dir, &[], &spec)?;
        let log = add(&run_dir, &namespace).run()?.log()?;
        let warning = log.iter().find(|line| line["level"] == "warn").context("no warning")?;
        let message = warning["msg"].as_str().unwrap_or_default();
        ensure!(message.starts_with(words) && message.contains("bypasses"), "{spec}: {message}");
        // Nothing is written.
        let fresh = Namespace::pod(Families::Dual)?;
        let before = fresh.state()?;
        web_with(&run_dir, &[STRICT], &spec)?;
        let (code, text) = add(&run_dir, &fresh).run()?.error()?;
        ensure!(code == 100 && text.contains(words) && text.contains("runAs"), "{code} {text}");
        ensure!(fresh.state()? == before, "{spec}");
    }
    let harmless = [
        // The known way for one that needs the network before the proxy runs, and the mesh's own validation.
        json!({"initContainers": [{"name": "x", "securityContext": {"runAsUser": 1337, "runAsGroup": 1337}}]}),
        // The kernel's owner match knows neither.
        json!({"securityContext": {"fsGroup": 1337, "supplementalGroups": [1337]}}),
        json!({"containers": [{"name": "x", "securityContext": {"runAsUser": 1338}}], "securityContext": {"runAsUser": 7}}),
    ];
    for spec in harmless {
        web_with(&run_dir, &[STRICT], &spec)?;
        let log = add(&run_dir, &namespace).run()?.log()?;
        ensure!(log.iter().all(|line| line["level"] != "warn"), "{spec}: {log:?}");
    }
    Ok(())
}

/// Rules do not bind what runs in a sandbox: where the class's name shows one, no API server is asked.
#[test]
fn a_pod_in_a_sandbox_is_refused_or_left_alone_and_never_redirected_in_vain() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let before = namespace.state()?;
    let add = |conf: &Value| Invocation::new("ADD", conf).netns(&namespace).pod("default", "web").run();
    let conf = run_dir.manifest_conf();
    for class in ["gvisor", "kata-qemu"] {
        web_with(&run_dir, &[], &json!({"runtimeClassName": class}))?;
        let (code, text) = add(&conf)?.error()?;
        ensure!(code == 104 && text.contains(class) && text.contains("SANDBOXED_PODS=skip"), "{code} {text}");
        let mut skips = conf.clone();
        skips["sandboxed_pods"] = json!("skip");
        let log = add(&skips)?.log()?;
        let line = log.last().context("no line")?;
        ensure!(line["decision"] == "skip" && line["reason"] == "sandboxed_runtime", "{line}");
        ensure!(namespace.state()? == before, "{class}");
    }
    // Pods outside the mesh are nobody's business.
    let mut plain = sidecar("web", &[("sidecar.istio.io/inject", "false")]);
    plain["spec"]["runtimeClassName"] = json!("gvisor");
    run_dir.write_manifest("web.json", &plain)?;
    ensure!(add(&conf)?.log()?[0]["reason"] == "injection_disabled");
    // The list is the operator's.
    let mut own = conf;
    own["sandboxed_runtimes"] = json!(["vm-*"]);
    for (class, refused) in [("vm-1", true), ("gvisor", false), ("nvidia", false)] {
        web_with(&run_dir, &[], &json!({"runtimeClassName": class}))?;
        let answer = add(&own)?;
        ensure!(answer.0.status.success() != refused, "{class}");
    }
    Ok(())
}

#[test]
fn at_level_debug_every_rule_is_explained() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let excluded = ("traffic.sidecar.istio.io/excludeOutboundPorts", "3306");
    run_dir.write_manifest("web.json", &sidecar("web", &[excluded]))?;
    let mut conf = run_dir.manifest_conf();
    conf["plugin_log_level"] = json!("debug");
    let log = Invocation::new("ADD", &conf).netns(&namespace).pod("default", "web").run()?.log()?;
    let told = |part: &str| {
        let lines = log.iter().filter(|line| line["level"] == "debug" && line["pod"] == "default/web");
        lines.filter(|line| line["msg"].as_str().is_some_and(|text| text.contains(part))).count()
    };
    let saved = namespace.sh("iptables-nft-save -t nat")?.stdout;
    let rules = saved.lines().filter(|line| line.starts_with("-A")).count();
    assert!(rules > 10 && told("  # ") >= rules, "{} lines for {rules} rules: {log:#?}", told("  # "));
    assert_eq!(told("--to-ports 15006"), 1, "{log:#?}");
    // TCP and UDP.
    assert_eq!(told("[annotation traffic.sidecar.istio.io/excludeOutboundPorts]"), 2, "{log:#?}");
    assert!(told("[default of --istio-inbound-ports]") > 0, "{log:#?}");
    Ok(())
}

#[test]
fn the_pods_user_is_the_proxys_where_its_container_has_none() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let mut pod = sidecar("web", &[]);
    pod["spec"]["securityContext"] = json!({"runAsUser": 2102, "runAsGroup": 2103});
    pod["spec"]["containers"][1]["securityContext"] = json!({"runAsGroup": 2104});
    run_dir.write_manifest("web.json", &pod)?;
    add(&run_dir, &namespace).run()?.result()?;
    let rules = namespace.sh("iptables-nft-save -t nat")?.stdout;
    assert!(rules.contains("--uid-owner 2102 ") && rules.contains("--gid-owner 2104 "), "{rules}");
    assert!(!rules.contains("1337") && !rules.contains("2103"), "{rules}");
    Ok(())
}

#[test]
fn one_line_tells_about_one_add() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let log = add(&run_dir, &namespace).run()?.log()?;
    assert_eq!(log.len(), 1, "{log:?}");
    let line = &log[0];
    assert_eq!(
        (&line["level"], &line["scope"], &line["msg"]),
        (&json!("info"), &json!("cni-plugin"), &json!("redirected"))
    );
    assert_eq!((&line["pod"], &line["decision"]), (&json!("default/web"), &json!("redirect")));
    assert!(!line["backend"].as_str().unwrap_or_default().is_empty(), "{line}");
    for phase in ["read:", "pod:", "plan:", "apply:", "total:"] {
        assert!(line["ms"].as_str().unwrap_or_default().contains(phase), "{phase} is missing in {line}");
    }
    let file = fs::read_to_string(run_dir.path().join("istio-cni.log"))?;
    assert_eq!(serde_json::from_str::<Value>(file.trim())?, *line);

    let skipped = add(&run_dir, &namespace).pod("", "").run()?.log()?;
    assert_eq!((&skipped[0]["decision"], &skipped[0]["reason"]), (&json!("skip"), &json!("not_a_pod")));
    let failed = add(&run_dir, &namespace).pod("default", "other").run()?.log()?;
    assert_eq!(
        (&failed[0]["level"], &failed[0]["decision"]),
        (&json!("error"), &json!("fail")),
        "{failed:?}"
    );
    Ok(())
}

#[test]
fn the_agent_gets_the_lines_in_one_request() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let socket = run_dir.path().join("log.sock");
    let listener = UnixListener::bind(&socket)?;
    let (send, received) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let lines = stream.map_err(Into::into).and_then(|stream| posted(BufReader::new(stream)));
            if send.send(lines).is_err() {
                return;
            }
        }
    });
    let answer = add(&run_dir, &namespace).run()?;
    let said: Vec<String> = answer.0.stderr.lines().map(str::to_owned).collect();
    // Whatever the plugin has sent comes before a request of our own, also where the answer came too late for it.
    UnixStream::connect(&socket)?.write_all(b"POST /log HTTP/1.0\r\nContent-Length: 7\r\n\r\n[\"end\"]")?;
    let is_end = |lines: &Result<Vec<String>>| lines.as_ref().is_ok_and(|lines| lines == &["end"]);
    let requests: Vec<_> = received.iter().take_while(|lines| !is_end(lines)).collect();
    let [Ok(lines)] = &requests[..] else { bail!("{requests:?}") };
    // Before them that it is called, which is for the agent alone.
    let (called, rest) = lines.split_first().context("no line")?;
    ensure!(called.contains("\"called\":\"ADD\""), "{called}");
    assert_eq!(rest, said);
    Ok(())
}

/// The lines of one request, which is answered.
fn posted(mut reader: BufReader<UnixStream>) -> Result<Vec<String>> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        ensure!(reader.read_line(&mut head)? > 0, "hung up");
    }
    ensure!(head.starts_with("POST /log HTTP/1.0\r\n"), "{head}");
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).context("a length")?;
    let mut body = vec![0; length.parse()?];
    reader.read_exact(&mut body)?;
    // Whoever asked may have left.
    let _ = reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    Ok(serde_json::from_slice(&body)?)
}

#[test]
fn an_agent_that_hangs_holds_up_no_pod() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let _listener = UnixListener::bind(run_dir.path().join("log.sock"))?;
    let start = Instant::now();
    add(&run_dir, &namespace).run()?.result()?;
    assert!(start.elapsed() < EARLY, "{:?}", start.elapsed());
    Ok(())
}

#[test]
fn no_level_lets_a_token_out() -> Result<()> {
    let (api, run_dir) = (PodApi::start(), RunDir::new()?);
    let namespace = Namespace::pod(Families::V4)?;
    let mut kubeconfig = plain_kubeconfig(api.port);
    kubeconfig["users"][0]["user"] = json!({"token": "s3cr3t-t0k3n"});
    run_dir.write_kubeconfig(&kubeconfig)?;
    api.add("default", "web", &sidecar("web", &[]));
    let mut conf = run_dir.conf();
    conf["plugin_log_level"] = json!("debug");
    conf["add_timeout"] = json!("1s");
    for name in ["web", "missing"] {
        let output = Invocation::new("ADD", &conf).netns(&namespace).pod("default", name).run()?.0;
        assert!(output.stderr.lines().count() > 1, "debug says no more than info: {}", output.stderr);
        let all = output.stdout + &output.stderr + &fs::read_to_string(run_dir.path().join("istio-cni.log"))?;
        assert!(!all.contains("t0k3n"), "{all}");
    }
    Ok(())
}

/// A plugin that is killed leaves what the next one repairs.
#[test]
fn killed_at_any_moment_the_next_add_mends_it() -> Result<()> {
    let (run_dir, namespace) = web()?;
    let start = Instant::now();
    add(&run_dir, &namespace).run()?.result()?;
    // Unless the machine stood still meanwhile.
    let whole = start.elapsed().min(Duration::from_millis(200));
    let wanted = namespace.state()?;
    for part in 0..30 {
        let after = whole * part / 30;
        let namespace = Namespace::pod(Families::Dual)?;
        let mut child = Command::new(istio_cni())
            .env_clear()
            .envs([
                ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "a"),
            ])
            .envs([
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/opt"),
                ("CNI_ARGS", "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web"),
            ])
            .env("CNI_NETNS", namespace.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        child.stdin.take().context("piped")?.write_all(run_dir.manifest_conf().to_string().as_bytes())?;
        thread::sleep(after);
        child.kill()?;
        child.wait()?;
        add(&run_dir, &namespace).run()?.result()?;
        let differences = namespace.state()?.differences(&wanted);
        assert!(differences.is_empty(), "killed after {after:?}: {}", differences.join("\n"));
    }
    Ok(())
}

#[test]
fn an_answer_nobody_reads_is_a_failure() -> Result<()> {
    let mut command = Command::new(istio_cni());
    command.env_clear().env("CNI_COMMAND", "VERSION").stdin(Stdio::null());
    let full = command.stdout(File::options().write(true).open("/dev/full")?).status()?;
    assert_eq!(full.code(), Some(1));
    // VERSION does not wait for standard input.
    let mut child = Command::new(istio_cni())
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let ended = until("VERSION to end", SHORT, &[], || Ok(child.try_wait()?));
    let _ = child.kill();
    assert!(ended?.success());
    let mut text = String::new();
    child.stdout.take().context("piped")?.read_to_string(&mut text)?;
    let versions: Value = serde_json::from_str(&text)?;
    assert_eq!(versions["supportedVersions"].as_array().map(Vec::len), Some(7), "{versions}");
    Ok(())
}
