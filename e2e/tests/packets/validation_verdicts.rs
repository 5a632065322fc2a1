//! `istio-validation` as the proxy's user, without privilege, in namespaces that are programmed, not programmed, and
//! programmed wrongly: it passes where it may, and names what is missing where it may not.

use anyhow::{Context, Result, ensure};
use e2e::iptables;
use e2e::traffic::TcpServer;
use e2e::validation::{self, APP, INJECTED, PROXY, ValidationRun, validate};
use test_support::netns::{Families, Namespace, Topology};

use Families::{Dual, V4, V6};

const THREADS: usize = 2;

/// Where a case happens.
#[derive(Clone, Copy)]
enum World {
    /// A pod alone, without a route to anywhere.
    Alone(Families),
    /// A pod with a default route.
    Routed(Families),
}

/// One case: how the pod is programmed, what is done to it then, who validates with which flags, and the reason.
struct Case {
    name: String,
    world: World,
    /// Flags of `istio-iptables` behind [`INJECTED`]; `None` to program nothing.
    programmed: Option<String>,
    spoiled: &'static str,
    who: (u32, u32),
    /// Flags of `istio-validation` behind [`INJECTED`].
    flags: String,
    /// The timeout of a case that is to fail is short.
    reason: &'static str,
    /// Checks expected besides, as `family path result`.
    checks: &'static [(&'static str, &'static str, &'static str)],
}

enum Stage {
    Pod(Namespace),
    Topology(Topology),
}

impl Stage {
    fn pod(&self) -> &Namespace {
        match self {
            Self::Pod(pod) => pod,
            Self::Topology(topology) => &topology.pod,
        }
    }
}

impl Case {
    fn play(&self) -> Result<Vec<String>> {
        let stage = match self.world {
            World::Alone(families) => Stage::Pod(Namespace::pod(families)?),
            World::Routed(families) => Stage::Topology(Topology::new(families)?),
        };
        if let Some(flags) = &self.programmed {
            iptables::apply(stage.pod(), &format!("{INJECTED} {flags}"))?;
        }
        stage.pod().sh(self.spoiled).with_context(|| format!("{}: spoiling", self.name))?;
        let verdict = self.validate(stage.pod())?;
        let mut problems = verdict.problems(self.reason);
        for (family, path, result) in self.checks {
            if verdict.check(family, path) != Some(result) {
                problems.push(format!("wants {family} {path} {result}: {}", verdict.message["checks"]));
            }
        }
        Ok(problems.into_iter().map(|problem| format!("{}: {problem}", self.name)).collect())
    }

    fn validate(&self, pod: &Namespace) -> Result<ValidationRun> {
        let timeout = if self.reason == "redirected" { "5s" } else { "250ms" };
        validate(pod, self.who, &format!("{} --probe-timeout {timeout}", self.flags))
    }
}

#[track_caller]
fn play(cases: &[Case]) {
    let problems = iptables::in_parallel(THREADS, cases, |_, case| case.play());
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

const FAMILIES: [(&str, Families, &str); 3] =
    [("v4", Families::V4, ""), ("v6", Families::V6, ""), ("dual", Families::Dual, "--dual-stack")];

/// Programmed and validated with the same flags.
fn agreeing(name: impl Into<String>, world: World, who: (u32, u32), flags: impl Into<String>) -> Case {
    let flags = flags.into();
    Case {
        name: name.into(),
        world,
        programmed: Some(flags.clone()),
        spoiled: "",
        who,
        flags,
        reason: "redirected",
        checks: &[],
    }
}

#[test]
fn every_mode_family_and_backend_passes() {
    let mut cases = Vec::new();
    for mode in ["REDIRECT", "TPROXY"] {
        for (family, families, dual) in FAMILIES {
            for (dns, dns_flags) in
                [("", ""), ("dns", "--redirect-dns"), ("all-dns", "--redirect-dns --capture-all-dns")]
            {
                for (backend, backend_flags) in [
                    ("nft", "--force-iptables-binary nft"),
                    ("legacy", "--force-iptables-binary legacy"),
                    ("native", "--native-nftables"),
                ] {
                    let name = format!("{mode} {family} {dns} {backend}");
                    let flags = format!("-m {mode} {dual} {dns_flags} {backend_flags}");
                    cases.push(agreeing(name, World::Alone(families), PROXY, flags));
                }
            }
        }
    }
    assert_eq!(cases.len(), 54);
    play(&cases);
}

#[test]
fn every_setting_passes() {
    let dual = |flags: &str| {
        let flags = format!("--dual-stack {flags}");
        agreeing(flags.clone(), World::Alone(Families::Dual), PROXY, flags)
    };
    let cases: Vec<Case> = [
        "-b=",
        "-b= -m TPROXY",
        "-b 80,8000:8099",
        "-b 80 -m TPROXY",
        "-b *  -m TPROXY -d 15000:15100",
        "-i=",
        "-i 10.0.0.0/8,fd00::/8",
        "-i 127.0.0.0/8",
        "-x 192.0.2.0/24",
        "-q 80,443",
        "-o 15000:15100",
        "-o 1:60000",
        "-c eth1",
        "-k net1",
        "--drop-invalid",
        "-z 16006 -p 16001",
        "-e 16008 -m TPROXY",
        "-t 0x77 -r 177 -m TPROXY",
        "-u 1337,2000 -g 1337,2000",
        "--iptables-probe-port 53 --redirect-dns --capture-all-dns",
        "--iptables-probe-port 15008",
    ]
    .into_iter()
    .map(dual)
    .collect();
    let other = Case { who: (2000, 3000), ..dual("-u 2000 -g 3000") };
    play(&cases.into_iter().chain([other]).collect::<Vec<_>>());
}

#[test]
fn the_applications_user_proves_outbound_and_dns() {
    let mut cases = Vec::new();
    for (family, families, dual) in FAMILIES {
        for mode in ["REDIRECT", "TPROXY"] {
            let flags = format!("-m {mode} {dual} --redirect-dns --capture-all-dns");
            cases.push(Case {
                checks: match families {
                    Families::V4 | Families::Dual => &[
                        ("IPv4", "outbound", "proven"),
                        ("IPv4", "dns-udp", "proven"),
                        ("IPv4", "dns-tcp", "proven"),
                        ("IPv4", "own-address", "proven"),
                    ],
                    Families::V6 => &[("IPv6", "outbound", "proven"), ("IPv6", "dns-udp", "proven")],
                },
                ..agreeing(format!("app {mode} {family}"), World::Routed(families), APP, flags)
            });
        }
    }
    play(&cases);
}

/// A pod that must be held back. All flags stand behind [`INJECTED`].
#[derive(Clone, Copy)]
struct Bad {
    name: &'static str,
    world: World,
    who: (u32, u32),
    /// Flags of `istio-iptables`; `None` to program nothing.
    programmed: Option<&'static str>,
    spoiled: &'static str,
    /// Flags of `istio-validation`.
    flags: &'static str,
    reason: &'static str,
}

/// A pod without a route, validated as its proxy.
const fn bad(
    name: &'static str,
    families: Families,
    programmed: Option<&'static str>,
    spoiled: &'static str,
    flags: &'static str,
    reason: &'static str,
) -> Bad {
    Bad { name, world: World::Alone(families), who: PROXY, programmed, spoiled, flags, reason }
}

/// The same with a route.
const fn routed(bad: Bad) -> Bad {
    let (World::Alone(families) | World::Routed(families)) = bad.world;
    Bad { world: World::Routed(families), ..bad }
}

/// The same with a route, validated as the application.
const fn app(bad: Bad) -> Bad {
    Bad { who: APP, ..routed(bad) }
}

const NOT_REDIRECTED: &[Bad] = &[
    bad("none v4", V4, None, "", "", "no-rules"),
    bad("none v6", V6, None, "", "", "no-rules"),
    bad("none dual", Dual, None, "", "--dual-stack", "no-rules"),
    bad("none tproxy", Dual, None, "", "--dual-stack -m TPROXY", "no-rules"),
    bad("none dns", Dual, None, "", "--dual-stack --redirect-dns --capture-all-dns", "no-rules"),
    bad("v4 only", Dual, Some(""), "", "--dual-stack", "one-family-only"),
    bad("v4 only tproxy", Dual, Some("-m TPROXY"), "", "--dual-stack -m TPROXY", "one-family-only"),
    bad(
        "v4 only legacy",
        Dual,
        Some("--force-iptables-binary legacy"),
        "",
        "--dual-stack",
        "one-family-only",
    ),
    bad("v6 only", Dual, Some("--dual-stack"), "iptables-nft -t nat -F", "--dual-stack", "one-family-only"),
    bad(
        "v6 unhooked",
        Dual,
        Some("--dual-stack"),
        "ip6tables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT",
        "--dual-stack",
        "rules-not-in-effect",
    ),
    bad("unhooked", V4, Some(""), "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT", "", "rules-not-in-effect"),
    bad(
        "unhooked dual",
        Dual,
        Some("--dual-stack"),
        "for i in iptables-nft ip6tables-nft; do $i -t nat -D OUTPUT -j ISTIO_OUTPUT; done",
        "--dual-stack",
        "rules-not-in-effect",
    ),
    bad(
        "unhooked legacy",
        V4,
        Some("--force-iptables-binary legacy"),
        "iptables-legacy -t nat -D OUTPUT -j ISTIO_OUTPUT",
        "",
        "rules-not-in-effect",
    ),
    bad("flushed", V4, Some(""), "iptables-nft -t nat -F", "", "no-rules"),
    bad("output emptied", V4, Some(""), "iptables-nft -t nat -F ISTIO_OUTPUT", "", "rules-not-in-effect"),
    bad(
        "redirect emptied",
        V4,
        Some(""),
        "iptables-nft -t nat -F ISTIO_IN_REDIRECT",
        "",
        "rules-not-in-effect",
    ),
    bad("overruled", V4, Some(""), "iptables-nft -t nat -I OUTPUT -j ACCEPT", "", "rules-not-in-effect"),
    bad(
        "native flushed",
        Dual,
        Some("--dual-stack --native-nftables"),
        "nft flush ruleset",
        "--dual-stack --native-nftables",
        "no-rules",
    ),
    bad(
        "native unhooked",
        V4,
        Some("--native-nftables"),
        "nft flush chain inet istio-proxy-nat OUTPUT || nft flush chain inet istio-proxy-nat output",
        "--native-nftables",
        "rules-not-in-effect",
    ),
];

const REDIRECTED_WRONGLY: &[Bad] = &[
    bad("wrong inbound port", Dual, Some("--dual-stack -z 15106"), "", "--dual-stack", "wrong-port"),
    bad("swapped ports", Dual, Some("--dual-stack -z 15001 -p 15006"), "", "--dual-stack", "wrong-port"),
    bad("wrong port tproxy", V4, Some("-m TPROXY -z 15106"), "", "-m TPROXY", "wrong-port"),
    routed(bad("wrong user", Dual, Some("--dual-stack -u 2000"), "", "--dual-stack", "wrong-owner")),
    routed(bad("wrong user tproxy", V4, Some("-u 2000 -m TPROXY"), "", "-m TPROXY", "wrong-owner")),
    bad("wrong user, right group", V4, Some("-u 2000 -g 1337"), "", "", "rules-not-in-effect"),
    app(bad(
        "application has the proxy's user",
        Dual,
        Some("--dual-stack -u 1000"),
        "",
        "--dual-stack",
        "wrong-owner",
    )),
    app(bad(
        "application has the proxy's group",
        Dual,
        Some("--dual-stack -g 1000"),
        "",
        "--dual-stack",
        "rules-not-in-effect",
    )),
    app(bad("outbound port", Dual, Some("--dual-stack -p 15101"), "", "--dual-stack", "wrong-port")),
    app(bad("no outbound", Dual, Some("--dual-stack -i="), "", "--dual-stack", "rules-not-in-effect")),
    app(bad("no rules for the app", Dual, None, "", "--dual-stack", "no-rules")),
    app(bad(
        "no dns",
        Dual,
        Some("--dual-stack"),
        "",
        "--dual-stack --redirect-dns --capture-all-dns",
        "dns-not-captured",
    )),
    app(bad("nothing to see", Dual, Some("--dual-stack -i="), "", "--dual-stack -i=", "nothing-proven")),
    bad(
        "redirect instead of tproxy",
        Dual,
        Some("--dual-stack"),
        "",
        "--dual-stack -m TPROXY",
        "tproxy-not-in-effect",
    ),
    bad(
        "mangle flushed",
        V4,
        Some("-m TPROXY"),
        "iptables-nft -t mangle -F",
        "-m TPROXY",
        "tproxy-not-in-effect",
    ),
    bad(
        "mangle unhooked",
        V4,
        Some("-m TPROXY"),
        "iptables-nft -t mangle -D PREROUTING -p tcp -j ISTIO_INBOUND",
        "-m TPROXY",
        "tproxy-not-in-effect",
    ),
    bad("no policy rule", V4, Some("-m TPROXY"), "ip rule del fwmark 1337", "-m TPROXY", "no-policy-route"),
    bad(
        "no local route",
        Dual,
        Some("-m TPROXY --dual-stack"),
        "ip -6 route flush table 133",
        "-m TPROXY --dual-stack",
        "no-policy-route",
    ),
    bad("another mark", V4, Some("-m TPROXY -t 99"), "", "-m TPROXY", "no-policy-route"),
    bad(
        "no ::6",
        Dual,
        Some("--dual-stack"),
        "ip addr del ::6/128 dev lo",
        "--dual-stack",
        "no-passthrough-address",
    ),
    bad("dropped", V4, Some(""), "iptables-nft -A INPUT -i lo -p tcp --dport 15006 -j DROP", "", "no-answer"),
    bad(
        "loopback captured",
        V4,
        Some(""),
        "iptables-nft -t nat -I ISTIO_OUTPUT -p tcp -d 127.0.0.1 -j REDIRECT --to-ports 15001",
        "",
        "loopback-captured",
    ),
    bad(
        "passthrough captured",
        V4,
        Some(""),
        "iptables-nft -t nat -D ISTIO_OUTPUT 1",
        "",
        "loopback-captured",
    ),
    bad("lo down", V4, Some(""), "ip link set lo down", "", "loopback-down"),
];

#[test]
fn a_pod_that_is_not_redirected_is_held_back() {
    play_bad(NOT_REDIRECTED);
}

#[test]
fn a_pod_that_is_redirected_wrongly_is_held_back() {
    play_bad(REDIRECTED_WRONGLY);
}

#[track_caller]
fn play_bad(cases: &[Bad]) {
    let case = |bad: &Bad| Case {
        name: bad.name.to_owned(),
        world: bad.world,
        programmed: bad.programmed.map(str::to_owned),
        spoiled: bad.spoiled,
        who: bad.who,
        flags: bad.flags.to_owned(),
        reason: bad.reason,
        checks: &[],
    };
    play(&cases.iter().map(case).collect::<Vec<_>>());
}

/// Another mesh's rules, as its init container writes them: before ours, and with names of their own.
const OTHER_MESH: &str = "iptables-nft -t nat -N PROXY_INIT_OUTPUT
    iptables-nft -t nat -A PROXY_INIT_OUTPUT -m owner --uid-owner 2102 -j RETURN
    iptables-nft -t nat -A PROXY_INIT_OUTPUT -p tcp -m comment --comment proxy-init/redirect-all-outgoing -j REDIRECT --to-ports 4140
    iptables-nft -t nat -I OUTPUT -j PROXY_INIT_OUTPUT";

#[test]
fn another_meshs_rule_is_named_by_who_may_read_it() -> Result<()> {
    for form in ["", "--native-nftables"] {
        let pod = Namespace::pod(Families::V4)?;
        pod.sh(OTHER_MESH)?;
        iptables::apply(&pod, &format!("{INJECTED} {form}"))?;
        let flags = format!("{INJECTED} {form} --run-validation --skip-rule-apply --probe-timeout 250ms");
        let log = validation::termination_log()?;
        let path = log.path().display().to_string();
        let words: Vec<&str> = flags.split_whitespace().chain(["--termination-log", path.as_str()]).collect();
        let run = ValidationRun::of(iptables::run(&pod, &words)?, &log)?;
        // As the proxy's user, whose connections to itself are the ones that must not be captured.
        ensure!(run.output.code() == Some(126), "{run:?}");
        let named = run.message["rules"].as_array().context("no rules")?;
        let named: Vec<&str> = named.iter().filter_map(|rule| rule.as_str()).collect();
        let wanted = "table ip nat, chain PROXY_INIT_OUTPUT, rule 2 (-p tcp -j REDIRECT --to-ports 4140) decides about";
        ensure!(
            named.len() == 1 && named[0].starts_with(wanted) && named[0].contains("IPv4 loopback"),
            "{form}: {named:?}"
        );
        ensure!(run.output.stderr.contains(&format!("rule: {wanted}")), "{}", run.output.stderr);
        // Without the right to read rules there is advice.
        let run = validate(&pod, PROXY, &format!("{form} --probe-timeout 250ms"))?;
        ensure!(run.message["rules"] == serde_json::json!([]), "{run:?}");
        let advice = run.message["remedy"]["setting"].as_str().unwrap_or_default();
        ensure!(run.reason() != "loopback-captured" || advice.contains("redirectctl"), "{run:?}");
    }
    Ok(())
}

#[test]
fn ports_that_somebody_has_are_named() -> Result<()> {
    let pod = Namespace::pod(Families::V4)?;
    iptables::apply(&pod, INJECTED)?;
    let flags = "--probe-timeout 250ms";
    // One port more than needed is taken: what can be proven, is.
    let outbound = TcpServer::start(&pod, "outbound", ([127, 0, 0, 1], 15001))?;
    validate(&pod, PROXY, flags)?.assert("redirected");
    drop(outbound);
    for address in [[127, 0, 0, 1], [0, 0, 0, 0]] {
        let _inbound = TcpServer::start(&pod, "inbound", (address, 15006))?;
        validate(&pod, PROXY, flags)?.assert("ports-busy");
    }
    // The probe's port taken by the application: another one does.
    let _probe = TcpServer::start(&pod, "app", ([0, 0, 0, 0], 15002))?;
    validate(&pod, PROXY, flags)?.assert("redirected");
    Ok(())
}
