//! Rules of other programs in a pod's namespace. Where one keeps packets from the proxy although every rule of the mesh is in force,
//! packets show it and CHECK names it; where packets still reach the proxy, CHECK is content.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::mesh::Mesh;
use e2e::iptables::{self, in_parallel};
use e2e::plugin::{Answer, Invocation, RunDir, sidecar};
use e2e::traffic::{Client, Outcome, PROXY_ID, TcpServer};
use serde::Deserialize;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, pod_address, remote_address};
use test_support::process::Output;

use crate::ambient_support;

const THREADS: usize = 2;
/// For packets that nobody is expected to answer.
const IMPATIENT: Duration = Duration::from_millis(300);
/// A port of a stranger in the pod, who is not the proxy.
const STRANGER: u16 = 3128;

/// How the pod is redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Mode {
    /// By iptables-nft's tables, over netlink.
    Redirect,
    /// The same, inbound by TPROXY.
    Tproxy,
    /// By native nftables.
    Native,
    /// The same, inbound by TPROXY.
    NativeTproxy,
    /// The legacy variant's tables are in use before the plugin comes.
    Legacy,
}

/// A packet to try.
#[derive(Clone, Copy, Debug, Deserialize)]
enum Probe {
    /// From outside to the application.
    Inbound,
    /// From the application to the outside.
    Outbound,
    /// A DNS query of the application.
    Dns,
    /// The same to a resolver in the pod.
    DnsInPod,
}

/// Other programs' rules that keep packets from the proxy.
#[derive(Deserialize)]
struct Harmful {
    mode: Mode,
    script: String,
    probe: Probe,
    /// What CHECK has to name.
    named: Vec<String>,
}

/// A redirected pod with servers everywhere.
struct Pod {
    mesh: Mesh,
    run_dir: RunDir,
    conf: Value,
    _stranger: TcpServer,
}

impl Pod {
    fn new(mode: Mode) -> Result<Self> {
        Self::annotated(mode, &[])
    }

    fn annotated(mode: Mode, more: &[(&str, &str)]) -> Result<Self> {
        let mesh = Mesh::new()?;
        let stranger = TcpServer::start(mesh.pod(), "stranger", ([0, 0, 0, 0], STRANGER))?;
        let run_dir = RunDir::new()?;
        let inbound = match mode {
            Mode::Redirect | Mode::Native | Mode::Legacy => "REDIRECT",
            Mode::Tproxy | Mode::NativeTproxy => "TPROXY",
        };
        let annotations = [&[("sidecar.istio.io/interceptionMode", inbound)], more].concat();
        let mut pod = sidecar("web", &annotations);
        let variables = [("ISTIO_META_DNS_CAPTURE", "true"), ("ISTIO_DUAL_STACK", "true")];
        pod["spec"]["containers"][1]["env"] =
            variables.map(|(name, value)| json!({"name": name, "value": value})).into_iter().collect();
        run_dir.write_manifest("web.json", &pod)?;
        let mut conf = run_dir.manifest_conf();
        if matches!(mode, Mode::Native | Mode::NativeTproxy) {
            conf["native_nftables"] = json!(true);
        }
        if mode == Mode::Legacy {
            mesh.pod().sh("iptables-legacy -t nat -A INPUT -p udp --dport 9 -j ACCEPT")?;
        }
        Ok(Self { mesh, run_dir, conf, _stranger: stranger })
    }

    fn redirected(mode: Mode) -> Result<Self> {
        let pod = Self::new(mode)?;
        pod.call("ADD")?.result()?;
        pod.call("CHECK")?.silence().context("CHECK of a pod that nobody has touched")?;
        Ok(pod)
    }

    /// CHECK has nothing to say but what is accepted, by whom and how much of it.
    fn check_accepts(&self, by: &str, named: &str) -> Result<()> {
        let answer = self.call("CHECK")?;
        let log = answer.log()?;
        answer.silence()?;
        let accepted: Vec<&Value> = log.iter().filter(|line| line["accepted"].is_u64()).collect();
        ensure!(!accepted.is_empty() && accepted[0]["accepted"] == accepted.len(), "{log:?}");
        let is_it = |line: &&Value| {
            let text = line["msg"].as_str().unwrap_or_default();
            text.contains(&format!("(accepted by {by}")) && text.contains(named) && line["level"] == "info"
        };
        ensure!(accepted.iter().any(is_it), "{by} {named}: {log:?}");
        Ok(())
    }

    fn call(&self, command: &str) -> Result<Answer> {
        let mut conf = self.conf.clone();
        if command == "CHECK" {
            conf["prevResult"] = json!({"cniVersion": "1.1.0"});
        }
        let call = Invocation::new(command, &conf).netns(self.mesh.pod()).pod("default", "web");
        call.run().with_context(|| format!("{command} in {}", self.run_dir.path().display()))
    }

    /// Where a packet arrives, and where it would at the proxy.
    fn send(&self, probe: Probe) -> Result<(Outcome, &'static str)> {
        let app = self.mesh.app().patience(IMPATIENT);
        Ok(match probe {
            Probe::Inbound => {
                let client = Client::new(&self.mesh.topology.client).patience(IMPATIENT);
                (client.tcp((pod_address(false), 8080))?, "inbound")
            }
            Probe::Outbound => (app.tcp((remote_address(false), 80))?, "outbound"),
            Probe::Dns => (app.udp((remote_address(false), 53))?, "dns"),
            Probe::DnsInPod => (app.udp(([127, 0, 0, 11], 53))?, "dns"),
        })
    }
}

impl Harmful {
    fn play(&self) -> Result<Vec<String>> {
        let pod = Pod::redirected(self.mode)?;
        pod.mesh.pod().sh(&self.script)?;
        let mut problems = Vec::new();
        let (outcome, proxy) = pod.send(self.probe)?;
        if outcome.server() == Some(proxy) {
            problems.push(format!("{}: {:?} reaches the proxy all the same", self.script, self.probe));
        }
        match pod.call("CHECK")?.error() {
            Ok((111, text)) => {
                let missing = self.named.iter().filter(|word| !text.contains(word.as_str()));
                problems.extend(missing.map(|word| format!("{}: {word:?} is not in {text}", self.script)));
            }
            other => problems.push(format!("{}: CHECK says {other:?}", self.script)),
        }
        Ok(problems)
    }
}

#[test]
fn check_names_what_keeps_packets_from_the_proxy() -> Result<()> {
    let cases: Vec<Harmful> = serde_saphyr::from_str(include_str!("../../fixtures/harmful-rules.yaml"))?;
    let problems = in_parallel(THREADS, &cases, |_, case| case.play());
    ensure!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// What programs in a pod have without coming in the mesh's way.
const HARMLESS: &str = "
iptables-nft -t nat -I OUTPUT 1 -p icmp -j ACCEPT
iptables-nft -t nat -I OUTPUT 1 -o tun0 -j ACCEPT
iptables-nft -t nat -I PREROUTING 1 -i tun0 -j ACCEPT
iptables-nft -t nat -I PREROUTING 1 -p tcp --dport 15021 -j ACCEPT
iptables-nft -t nat -I PREROUTING 1 -d 10.77.0.0/16 -j ACCEPT
iptables-nft -t nat -I OUTPUT 1 -m conntrack --ctstate ESTABLISHED -j ACCEPT
iptables-nft -t nat -A OUTPUT -j ACCEPT
iptables-nft -t nat -A POSTROUTING -o eth0 -j MASQUERADE
iptables-nft -t nat -N DOCKER_OUTPUT
iptables-nft -t nat -A DOCKER_OUTPUT -d 127.0.0.11/32 -p udp --dport 54 -j DNAT --to-destination 127.0.0.11:4053
iptables-nft -t nat -I OUTPUT 1 -d 127.0.0.11/32 -j DOCKER_OUTPUT
iptables-nft -A INPUT -m conntrack --ctstate INVALID -j DROP
iptables-nft -A INPUT -p udp --dport 9 -j DROP
iptables-nft -t mangle -A OUTPUT -p udp -j MARK --set-mark 7
nft '
table inet theirs {
    chain forward { type filter hook forward priority 0; policy drop; }
    chain in {
        type filter hook input priority 10; policy drop
        ct state established,related accept
        iifname \"lo\" accept
        meta l4proto tcp accept
        meta l4proto icmp accept
        meta l4proto ipv6-icmp accept
        udp sport 53 accept
    }
    chain pre { type filter hook prerouting priority -350; tcp flags syn counter log prefix \"syn\" accept; }
    chain out { type filter hook output priority -350; udp dport { 9, 10 } drop; ip daddr { 127.0.0.11, 127.0.0.53 } udp dport 54 drop; }
    chain sleeping { ip saddr 198.51.100.0/24 drop; }
}
table ip6 asleep {
    flags dormant
    chain out { type filter hook output priority -350; policy drop; }
}'
";

#[test]
fn harmless_rules_of_others_pass() -> Result<()> {
    for mode in [Mode::Redirect, Mode::Tproxy, Mode::Native] {
        let pod = Pod::redirected(mode)?;
        pod.mesh.pod().sh(HARMLESS)?;
        for probe in [Probe::Inbound, Probe::Outbound, Probe::Dns] {
            let (outcome, proxy) = pod.send(probe)?;
            ensure!(
                outcome.server() == Some(proxy),
                "{mode:?} {probe:?} does not reach the proxy: {outcome:?}"
            );
        }
        pod.call("CHECK")?.silence().with_context(|| format!("{mode:?}"))?;
    }
    Ok(())
}

#[test]
fn adding_a_pod_warns_of_rules_in_the_way_and_does_not_fail() -> Result<()> {
    let pod = Pod::new(Mode::Redirect)?;
    pod.mesh.pod().sh("iptables-nft -t nat -I OUTPUT 1 -j ACCEPT")?;
    let answer = pod.call("ADD")?;
    let log = answer.log()?;
    answer.result()?;
    let warned = log.iter().find(|line| line["level"] == "warn").context("no warning")?;
    let text = warned["msg"].as_str().unwrap_or_default();
    ensure!(text.contains("rule of another program") && text.contains("chain OUTPUT"), "{text}");
    ensure!(warned["pod"] == "default/web", "{warned}");
    // And only then.
    let quiet = Pod::new(Mode::Redirect)?.call("ADD")?;
    ensure!(quiet.log()?.iter().all(|line| line["level"] != "warn"), "{quiet:?}");
    Ok(())
}

/// A rule that is meant, as each mode's programs write it, and one beside it that is not.
const MEANT: [(Mode, &str, &str); 3] = [
    (
        Mode::Redirect,
        "iptables-nft -t nat -I OUTPUT 1 -p tcp --dport 80 -m comment --comment 'backups by night' -j REDIRECT --to-ports 3128",
        "iptables-nft -t nat -A OUTPUT -p tcp --dport 80 -j ACCEPT
         iptables-nft -t mangle -A OUTPUT -p tcp --dport 15001 -s 10.1.0.2 -j DROP",
    ),
    (
        Mode::Legacy,
        "iptables-legacy -t nat -I OUTPUT 1 -p tcp --dport 80 -m comment --comment 'backups by night' -j REDIRECT --to-ports 3128",
        "iptables-legacy -A OUTPUT -p tcp --dport 15001 -s 10.1.0.2 -j DROP",
    ),
    (
        Mode::Native,
        "nft 'table ip theirs {
             chain out { type nat hook output priority -150; tcp dport 80 redirect to :3128 comment \"backups by night\"; }
         }'",
        "nft 'add table ip other; add chain ip other out { type nat hook output priority -140; }
              add rule ip other out tcp dport 80 redirect to :3128'",
    ),
];

#[test]
fn a_rule_that_is_meant_is_no_fault_and_hides_none() -> Result<()> {
    let names = "comment=backups by night";
    for (mode, meant, second) in MEANT {
        let annotation = [("cni.istio.io/acceptedRules", names)];
        let mut pod = Pod::annotated(mode, &annotation)?;
        pod.mesh.pod().sh(meant)?;
        let add = pod.call("ADD")?;
        let log = add.log()?;
        add.result()?;
        ensure!(log.iter().all(|line| line["level"] != "warn"), "{mode:?}: {log:?}");
        // It does what it is meant to do.
        ensure!(pod.send(Probe::Outbound)?.0.server() == Some("stranger"), "{mode:?}");
        pod.check_accepts("the pod's annotation", "REDIRECT").with_context(|| format!("{mode:?}"))?;
        // Another rule, which packets meet only behind it.
        pod.mesh.pod().sh(second)?;
        let (code, text) = pod.call("CHECK")?.error().with_context(|| format!("{mode:?}"))?;
        ensure!(code == 111 && !text.contains("-j REDIRECT --to-ports 3128 ("), "{mode:?}: {text}");
        ensure!(text.contains("DROP") || text.contains("table ip other"), "{mode:?}: {text}");
        // The node's operator has the last word.
        let mut forbidden = Pod::annotated(mode, &annotation)?;
        forbidden.conf["accept_rules_of_pods"] = json!(false);
        forbidden.mesh.pod().sh(meant)?;
        let add = forbidden.call("ADD")?;
        let says_why =
            |line: &Value| line["msg"].as_str().is_some_and(|text| text.contains("ACCEPT_RULES_OF_PODS"));
        ensure!(add.log()?.iter().any(says_why), "{mode:?}: {add:?}");
        add.result()?;
        ensure!(forbidden.call("CHECK")?.error()?.0 == 111, "{mode:?}");
        forbidden.conf["accepted_rules"] = json!(names);
        forbidden.check_accepts("the node's setting", "REDIRECT")?;
        pod.conf["accepted_rules"] = json!("table=nat");
        ensure!(pod.call("CHECK")?.error()?.0 == 7, "a table that programs share");
    }
    Ok(())
}

/// What KubeVirt's masquerade binding makes for a machine in a mesh: without named ports, and with one.
const KUBEVIRT: [&str; 2] = [
    "tcp dport { 15000, 15001, 15004, 15006, 15008, 15009, 15020, 15021, 15053, 15090 } ip saddr 127.0.0.1 counter return
     ip daddr { 127.0.0.1, 10.1.0.2 } counter dnat to 10.0.2.2",
    "ip daddr { 127.0.0.1, 10.1.0.2 } tcp dport 8080 counter dnat to 10.0.2.2",
];

#[test]
fn kubevirts_rules_for_a_mesh_are_known_and_nothing_else_there_is() -> Result<()> {
    for mode in [Mode::Redirect, Mode::Native] {
        for output in KUBEVIRT {
            let pod = Pod::new(mode)?;
            let output: String =
                output.lines().map(|rule| format!("add rule ip nat output {rule}\n")).collect();
            pod.call("ADD")?.result()?;
            pod.mesh.pod().sh(&format!(
                "nft -f - <<'E'
add table ip nat
add chain ip nat prerouting {{ type nat hook prerouting priority -100; }}
add chain ip nat input {{ type nat hook input priority 100; }}
add chain ip nat output {{ type nat hook output priority -100; }}
add chain ip nat postrouting {{ type nat hook postrouting priority 100; }}
add chain ip nat KUBEVIRT_PREINBOUND
add chain ip nat KUBEVIRT_POSTINBOUND
add rule ip nat postrouting ip saddr 10.0.2.2 counter masquerade
add rule ip nat prerouting iifname eth0 counter jump KUBEVIRT_PREINBOUND
add rule ip nat postrouting oifname k6t-eth0 counter jump KUBEVIRT_POSTINBOUND
add rule ip nat KUBEVIRT_PREINBOUND tcp dport {{ 22 }} counter dnat to 10.0.2.2
add rule ip nat KUBEVIRT_POSTINBOUND ip saddr {{ 127.0.0.1, 127.0.0.6 }} counter snat to 10.0.2.1
{output}E"
            ))?;
            pod.check_accepts("being KubeVirt's", "table ip nat")
                .with_context(|| format!("{mode:?} {output}"))?;
            for probe in [Probe::Inbound, Probe::Outbound] {
                let (outcome, proxy) = pod.send(probe)?;
                ensure!(outcome.server() == Some(proxy), "{mode:?} {probe:?}: {outcome:?}");
            }
            // Without a mesh it takes all that comes in.
            pod.mesh.pod().sh("nft add rule ip nat KUBEVIRT_PREINBOUND counter dnat to 10.0.2.2")?;
            let (code, text) = pod.call("CHECK")?.error()?;
            ensure!(code == 111 && text.contains("KUBEVIRT_PREINBOUND") && text.contains("rule 2"), "{text}");
        }
    }
    Ok(())
}

/// A container engine's rules inside the pod, in each variant of iptables.
const PORT_80: [&str; 2] = [
    "iptables-nft -t nat -A PREROUTING -p tcp --dport 80 -j DNAT --to-destination 10.1.0.2:8080",
    "iptables-legacy -t nat -A PREROUTING -p tcp --dport 80 -j DNAT --to-destination 10.1.0.2:8080",
];

#[test]
fn whoever_puts_rules_in_force_warns_of_rules_in_the_way_in_the_same_words() -> Result<()> {
    for script in PORT_80 {
        let namespace = Namespace::pod(Families::Dual)?;
        namespace.sh(script)?;
        for backend in ["", "--native-nftables", "--backend restore"] {
            let output = iptables::apply(&namespace, &format!("-b * -i * {backend}"))?;
            let warned = warnings(&output);
            ensure!(
                warned.len() == 1
                    && warned[0].starts_with("a rule of another program: table ip nat")
                    && warned[0].contains("--dport 80 -j DNAT"),
                "{backend}: {warned:?}"
            );
            // What was in force already is no better.
            let again = warnings(&iptables::apply(&namespace, &format!("-b * -i * {backend}"))?);
            ensure!(again == warned, "{backend}: {again:?}");
        }
        let warned = warnings(&iptables::apply(&namespace, "-b * -i *")?);
        iptables::apply(&namespace, "--cleanup-only")?;
        let by_ambient = warnings(&ambient_support::run(&namespace, "apply")?.ok()?);
        ensure!(by_ambient.len() == 1 && by_ambient[0].contains("--dport 80 -j DNAT"), "{by_ambient:?}");
        ensure!(by_ambient[0].starts_with("a rule of another program: table ip nat"), "{by_ambient:?}");
        ambient_support::run(&namespace, "remove")?.ok()?;
        let run_dir = RunDir::new()?;
        run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
        let add = Invocation::new("ADD", &run_dir.manifest_conf()).netns(&namespace).pod("default", "web");
        let log = add.run()?.log()?;
        let mut by_add = log.iter().filter(|line| line["level"] == "warn").map(|line| line["msg"].as_str());
        ensure!(by_add.any(|text| text == Some(&warned[0])), "{log:?}, not {warned:?}");
    }
    let quiet = iptables::apply(&Namespace::pod(Families::Dual)?, "-b * -i *")?;
    ensure!(warnings(&quiet).is_empty(), "{}", quiet.stderr);
    Ok(())
}

/// The warnings of other programs' rules in a log.
fn warnings(output: &Output) -> Vec<String> {
    let lines = output.stderr.lines().filter(|line| line.contains("\twarn\t"));
    let texts = lines.filter_map(|line| line.rsplit('\t').next());
    texts.filter(|text| text.contains("of another program:")).map(str::to_owned).collect()
}

#[test]
fn check_names_a_strange_rule_without_its_bytes() -> Result<()> {
    let pod = Pod::redirected(Mode::Redirect)?;
    let comment = "x".repeat(200);
    pod.mesh.pod().sh(&format!(
        "iptables-nft -t nat -A ISTIO_OUTPUT -m limit --limit 5/sec -m comment --comment {comment} -j RETURN"
    ))?;
    let (code, text) = pod.call("CHECK")?.error()?;
    ensure!(code == 111 && text.contains("nat ISTIO_OUTPUT: unexpected rule"), "{code} {text}");
    ensure!(text.contains("limit") && text.len() < 400, "{text}");
    let digits = text.split(|c: char| !c.is_ascii_hexdigit()).map(str::len).max();
    ensure!(digits < Some(16), "bytes in {text}");
    Ok(())
}

#[test]
fn a_rule_for_the_proxys_own_user_is_its_own_affair() -> Result<()> {
    let pod = Pod::redirected(Mode::Redirect)?;
    let script = format!("iptables-nft -t nat -I OUTPUT 1 -m owner --uid-owner {PROXY_ID} ! -o lo -j ACCEPT");
    pod.mesh.pod().sh(&script)?;
    pod.call("CHECK")?.silence()
}
