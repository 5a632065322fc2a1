//! `istio-validation` as the proxy's user, without privilege, in namespaces that are programmed, not programmed, and
//! programmed wrongly: it passes where it may, and names what is missing where it may not.

use anyhow::{Context, Result, ensure};
use e2e::iptables;
use e2e::traffic::TcpServer;
use e2e::validation::{self, APP, INJECTED, PROXY, ValidationRun, validate};
use serde::Deserialize;
use test_support::netns::{Families, Namespace, Topology};

const THREADS: usize = 2;

/// One case: how the pod is programmed, what is done to it then, who validates with which flags, and the reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    families: String,
    /// Whether the pod has a default route. Otherwise it is alone, without a route to anywhere.
    #[serde(default)]
    routed: bool,
    /// Flags of `istio-iptables` behind [`INJECTED`]; `None` to program nothing.
    programmed: Option<String>,
    #[serde(default)]
    spoiled: String,
    #[serde(default = "proxy")]
    who: (u32, u32),
    /// Flags of `istio-validation` behind [`INJECTED`].
    #[serde(default)]
    flags: String,
    /// The timeout of a case that is to fail is short.
    reason: String,
    /// Checks expected besides, as `family path result`.
    #[serde(skip)]
    checks: &'static [(&'static str, &'static str, &'static str)],
}

const fn proxy() -> (u32, u32) {
    PROXY
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
        let known = FAMILIES.iter().find(|(name, ..)| *name == self.families);
        let (_, families, _) = *known.with_context(|| self.families.clone())?;
        let stage = if self.routed {
            Stage::Topology(Topology::new(families)?)
        } else {
            Stage::Pod(Namespace::pod(families)?)
        };
        if let Some(flags) = &self.programmed {
            iptables::apply(stage.pod(), &format!("{INJECTED} {flags}"))?;
        }
        stage.pod().sh(&self.spoiled).with_context(|| format!("{}: spoiling", self.name))?;
        let verdict = self.validate(stage.pod())?;
        let mut problems = verdict.problems(&self.reason);
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
fn agreeing(name: impl Into<String>, families: &str, flags: impl Into<String>) -> Case {
    let flags = flags.into();
    Case {
        name: name.into(),
        families: families.to_owned(),
        routed: false,
        programmed: Some(flags.clone()),
        spoiled: String::new(),
        who: PROXY,
        flags,
        reason: "redirected".to_owned(),
        checks: &[],
    }
}

#[test]
fn every_mode_family_and_backend_passes() {
    let mut cases = Vec::new();
    for mode in ["REDIRECT", "TPROXY"] {
        for (family, _, dual) in FAMILIES {
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
                    cases.push(agreeing(name, family, flags));
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
        agreeing(flags.clone(), "dual", flags)
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
                routed: true,
                who: APP,
                ..agreeing(format!("app {mode} {family}"), family, flags)
            });
        }
    }
    play(&cases);
}

/// Pods that must be held back.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Bad {
    not_redirected: Vec<Case>,
    redirected_wrongly: Vec<Case>,
}

fn bad() -> Result<Bad> {
    Ok(serde_saphyr::from_str(include_str!("../../fixtures/validation.yaml"))?)
}

#[test]
fn a_pod_that_is_not_redirected_is_held_back() -> Result<()> {
    play(&bad()?.not_redirected);
    Ok(())
}

#[test]
fn a_pod_that_is_redirected_wrongly_is_held_back() -> Result<()> {
    play(&bad()?.redirected_wrongly);
    Ok(())
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
