//! What an ADD asks the kernel over netlink, where each request delays the pod's start; and how often a namespace is read to answer one question.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::plugin::{Invocation, RunDir, sidecar};
use e2e::program::under_test;
use e2e::strace::Strace;
use redirect_core::rule::Hook;
use test_support::netns::{Families, Namespace};
use test_support::process;

const PATIENCE: Duration = Duration::from_secs(60);

/// The types of requests (linux/rtnetlink.h; linux/netfilter, subsystem and message), how many of each an ADD may make where no other program has rules,
/// and what for.
const REQUESTS: [(u16, usize, &str); 9] = [
    (18, 2, "RTM_GETLINK: for the plan; for routing and the interfaces of captured packets"),
    (22, 2, "RTM_GETADDR: for the plan; for captured packets, and the plan's own address"),
    (34, 2, "RTM_GETRULE: of each family, the plan's own and those that may take captured packets"),
    (26, 2, "RTM_GETROUTE: the same"),
    (0x0a10, 2, "NFT_MSG_GETGEN: before and after the rules are read"),
    (0x0a01, 1, "NFT_MSG_GETTABLE: the rules; without a table there are none"),
    (0x0b00, 1, "NFNL_MSG_COMPAT_GET: whether the kernel has all matches and targets, in one datagram"),
    (0x10, 1, "NFNL_MSG_BATCH_BEGIN: the transaction"),
    (
        HOOKS,
        2 * Hook::ALL.len(),
        "NFNL_MSG_HOOK_GET: programs on the hooks; one if the kernel does not list them",
    ),
];

/// Whether the kernel supports it, it says in answer to the first.
const HOOKS: u16 = 0x0c00;

#[test]
fn an_add_asks_for_nothing_twice() -> Result<()> {
    for families in [Families::V4, Families::Dual] {
        let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(families)?);
        run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
        let strace = Strace::noting("sendto,sendmsg")?.raw();
        let add = Invocation::new("ADD", &run_dir.manifest_conf()).netns(&namespace).pod("default", "web");
        let log = add.under(strace.words().to_vec()).run()?.log()?;
        ensure!(log.len() == 1 && log[0]["changed"] == true, "{families:?}: {log:?}");
        let counts = requests(&strace)?;
        let allowed = |kind: u16| REQUESTS.iter().find(|(one, ..)| *one == kind);
        let too_many: Vec<String> = counts
            .iter()
            .filter(|(kind, count)| allowed(**kind).is_none_or(|(_, most, _)| *count > most))
            .map(|(kind, count)| format!("{count} of type {kind:#x}, allowed: {:?}", allowed(*kind)))
            .collect();
        ensure!(too_many.is_empty(), "{families:?}:\n{}", too_many.join("\n"));
        ensure!(counts.contains_key(&HOOKS), "the trace is not read: {counts:?}");
    }
    Ok(())
}

/// How many requests of each type a program has made.
fn requests(strace: &Strace) -> Result<BTreeMap<u16, usize>> {
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for call in strace.calls()? {
        let kind = call.text.split_once("nlmsg_type=0x").and_then(|(_, kind)| kind.split(',').next());
        let kind = kind.with_context(|| format!("no request over netlink: {}", call.text))?;
        *counts.entry(u16::from_str_radix(kind, 16)?).or_default() += 1;
    }
    Ok(counts)
}

/// The requests that begin a reading of rules and of policy routing (NFT_MSG_GETTABLE, RTM_GETRULE for both families).
const OF_RULES: u16 = 0x0a01;
const OF_ROUTING: u16 = 34;

/// How many times rules and policy routing were read, while this ran.
fn readings(run: impl FnOnce(&Strace) -> Result<()>) -> Result<(usize, usize)> {
    let strace = Strace::noting("sendto,sendmsg")?.raw();
    run(&strace)?;
    let counts = requests(&strace)?;
    let of = |kind| counts.get(&kind).copied().unwrap_or_default();
    Ok((of(OF_RULES), of(OF_ROUTING) / 2))
}

#[test]
fn a_namespace_is_read_once_for_all_that_is_asked_of_it() -> Result<()> {
    for (native, flush) in
        [(false, "flush chain ip nat OUTPUT"), (true, "flush chain inet istio-proxy-nat output")]
    {
        let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(Families::Dual)?);
        run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
        let mut conf = run_dir.manifest_conf();
        conf["native_nftables"] = native.into();
        let read = |command: &str, code: Option<i32>| {
            readings(|strace| {
                let call = Invocation::new(command, &conf).netns(&namespace).pod("default", "web");
                let answer = call.under(strace.words().to_vec()).run()?;
                ensure!(answer.0.code() == code, "{command}: {answer:?}");
                Ok(())
            })
        };
        let seen = [
            ("ADD", read("ADD", Some(0))?),
            ("ADD again", read("ADD", Some(0))?),
            ("CHECK", read("CHECK", Some(0))?),
            ("CHECK of rules that have changed", {
                namespace.sh(&format!("nft {flush}"))?.ok()?;
                read("CHECK", Some(1))?
            }),
        ];
        ensure!(seen.iter().all(|(_, readings)| *readings == (1, 1)), "native: {native}: {seen:?}");
    }
    Ok(())
}

#[test]
fn a_pod_of_ambient_mode_is_read_before_its_rules_are_written_and_after() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let (of_rules, _) = readings(|strace| {
        let mut command = process::command(under_test("install-cni")?, ["ambient", "apply"]);
        command.arg("--network-namespace").arg(namespace.path());
        process::run(&mut strace.command(&command), PATIENCE)?.ok().map(drop)
    })?;
    ensure!(of_rules == 2, "{of_rules}");
    Ok(())
}
