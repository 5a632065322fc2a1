//! Tables of other programs beside the mesh's: old chains, tables that are switched off or owned by a process, and many rules that change all the time.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use e2e::iptables::told::{assert_unchanged, changes, errors};
use e2e::iptables::{apply, run};
use e2e::plugin::{Invocation, RunDir, sidecar};
use tempfile::TempDir;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background, SHORT, until};

/// Words of a command line without quotes.
fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
}

/// The reference has never used these tables; somebody's fork has.
#[test]
fn old_chains_of_the_mesh_leave_every_table() -> Result<()> {
    let mut problems = Vec::new();
    for variant in ["nft", "legacy"] {
        for table in ["raw", "mangle", "nat"] {
            let namespace = Namespace::pod(Families::Dual)?;
            let others: String = ["iptables", "ip6tables"].map(|family| format!(
                "{family}-{variant} -t {table} -N OTHERS; {family}-{variant} -t {table} -A OUTPUT -p udp -j OTHERS\n"
            )).concat();
            namespace.sh(&others)?;
            let before = namespace.snapshot()?;
            let old: String = ["iptables", "ip6tables"]
                .map(|family| {
                    format!(
                        "{family}-{variant} -t {table} -N ISTIO_OLD; {family}-{variant} -t {table} -N ISTIO_OLDER
                         {family}-{variant} -t {table} -A ISTIO_OLD -p tcp -j ISTIO_OLDER
                         {family}-{variant} -t {table} -A ISTIO_OLDER -m comment --comment old -j RETURN
                         {family}-{variant} -t {table} -I OUTPUT 1 -p tcp -j ISTIO_OLD\n"
                    )
                })
                .concat();
            namespace.sh(&old)?;
            let output = run(&namespace, &["--cleanup-only"])?.ok()?;
            let left = changes(&namespace, &before)?;
            if !left.is_empty() || !output.stderr.contains("removed all redirection") {
                problems.push(format!("{table} ({variant}): {}{}", output.stderr, left.join("\n")));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// Nothing of it is in force, whatever rules it holds.
#[test]
fn a_dormant_table_is_woken_or_told() -> Result<()> {
    let ours = |name: &str| format!("add table inet {name} {{ flags dormant; }}");
    let stories = [
        ("-b * -i *", String::new(), "add table ip nat { flags dormant; }".to_owned(), "nat"),
        ("-m TPROXY -b * -i *", String::new(), "add table ip mangle { flags dormant; }".to_owned(), "mangle"),
        (
            "-b * -i * --backend restore",
            String::new(),
            "add table ip nat { flags dormant; }".to_owned(),
            "nat",
        ),
        ("-b * -i *", "-b * -i *".to_owned(), "add table ip nat { flags dormant; }".to_owned(), "nat"),
        (
            "-b * -i * --native-nftables",
            "-b * -i * --native-nftables".to_owned(),
            ours("istio-proxy-nat"),
            "istio-proxy-nat",
        ),
        (
            "-m TPROXY -b * -i * --native-nftables",
            "-m TPROXY -b * -i * --native-nftables".to_owned(),
            ours("istio-proxy-mangle"),
            "istio-proxy-mangle",
        ),
    ];
    let mut problems = Vec::new();
    for (args, earlier, dormant, table) in stories {
        let namespace = Namespace::pod(Families::V4)?;
        if !earlier.is_empty() {
            apply(&namespace, &earlier)?;
        }
        namespace.sh(&format!("nft '{dormant}'"))?;
        let before = namespace.snapshot()?;
        ensure!(before.has("nft", &[table, "dormant"]), "{table} sleeps not: {before:?}");
        let output = run(&namespace, &words(args))?;
        let told = errors(&output);
        let is_told = output.code() == Some(1) && told.contains("dormant") && told.contains(table);
        let is_woken = output.code() == Some(0) && !namespace.snapshot()?.has("nft", &[table, "dormant"]);
        if !is_told && !is_woken {
            problems.push(format!("{args} over {earlier:?}, {table}: {}", output.stderr));
        }
        if output.code() == Some(1) {
            problems.extend(changes(&namespace, &before)?);
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

#[test]
fn check_sees_a_dormant_table() -> Result<()> {
    let (run_dir, mut problems) = (RunDir::new()?, Vec::new());
    run_dir.write_manifest("web.json", &sidecar("web", &[]))?;
    for (native, table) in [(false, "ip nat"), (true, "inet istio-proxy-nat")] {
        let mut conf = run_dir.manifest_conf();
        conf["native_nftables"] = native.into();
        let namespace = Namespace::pod(Families::V4)?;
        let call = |verb: &str| Invocation::new(verb, &conf).netns(&namespace).pod("default", "web").run();
        call("ADD")?.result()?;
        call("CHECK")?.silence()?;
        namespace.sh(&format!("nft 'add table {table} {{ flags dormant; }}'"))?;
        ensure!(namespace.snapshot()?.has("nft", &["dormant"]), "{table} sleeps not");
        match call("CHECK")?.error() {
            Ok((_, text)) if text.contains("dormant") => {}
            other => problems.push(format!("{table}: {other:?}")),
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// What the kernel refuses is not always for want of a capability.
#[test]
fn a_table_owned_by_another_process_is_told_as_such() -> Result<()> {
    let mut problems = Vec::new();
    for (table, args) in [
        ("ip nat", "-b * -i *"),
        ("inet istio-proxy-nat", "--native-nftables -b * -i *"),
        ("inet istio-proxy-nat", "-b * -i *"),
        ("inet istio-proxy-nat", "--cleanup-only"),
    ] {
        let (namespace, folder) = (Namespace::pod(Families::V4)?, TempDir::new()?);
        // nft keeps its socket, and with it the table, as long as it waits for more.
        let script = format!("(echo 'add table {table} {{ flags owner; }}'; exec sleep 100000) | nft -i");
        let owner = namespace.command(&process::command("sh", ["-c", &script]));
        let owner = Background::start("nft", &owner, &folder.path().join("log"))?.killed_on_drop();
        let seen = until("the table", SHORT, &[&owner], || {
            let listed = namespace.sh("nft list ruleset")?.stdout;
            Ok(listed.contains("flags owner").then_some(listed))
        })?;
        ensure!(seen.contains("# progname nft"), "no owner: {seen}");
        let before = namespace.snapshot()?;
        let output = run(&namespace, &words(args))?;
        assert_unchanged(&namespace, &before, args);
        let told = errors(&output);
        let of_whom = told.contains(table) && (told.contains("owned") || told.contains("owns"));
        if output.code() != Some(1) || !of_whom || told.contains("CAP_NET_ADMIN") {
            problems.push(format!("{args}, {table}: {}", output.stderr));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// Other programs' rules, as a node's proxy of services has them.
const RULES: usize = 20_000;

/// Fills a table of iptables-nft.
fn crowd(namespace: &Namespace, table: &str) -> Result<()> {
    let mut text = format!("*{table}\n:CROWD - [0:0]\n");
    for number in 0..RULES {
        writeln!(
            text,
            "-A CROWD -d 10.{}.{}.{} -p tcp -j RETURN",
            200 + number / 65536,
            number / 256 % 256,
            number % 256
        )?;
    }
    text.push_str("COMMIT\n");
    let mut restore = namespace.command(&process::command("iptables-nft-restore", ["--noflush"]));
    process::run_with_input(&mut restore, &text, SHORT)?.ok()?;
    Ok(())
}

/// Another program that changes a table of its own without a pause, until dropped.
fn busy(namespace: &Namespace, folder: &TempDir) -> Result<Background> {
    let script = "while :; do nft 'add table inet busy; add chain inet busy c; delete table inet busy'; echo done; done";
    let command = namespace.command(&process::command("sh", ["-c", script]));
    let writer = Background::start("the writer", &command, &folder.path().join("busy"))?.killed_on_drop();
    until("the writer", SHORT, &[&writer], || Ok(writer.log().contains("done").then_some(())))?;
    Ok(writer)
}

#[test]
fn a_crowd_of_rules_and_a_constant_writer_hold_no_run_up() -> Result<()> {
    let mut problems = Vec::new();
    for table in ["filter", "nat"] {
        let (namespace, folder) = (Namespace::pod(Families::Dual)?, TempDir::new()?);
        crowd(&namespace, table)?;
        let writer = busy(&namespace, &folder)?;
        for args in [
            "-b * -i *",
            "-m TPROXY -b * -i * --dual-stack",
            "--native-nftables -b * -i *",
            "-b * -i *",
            "--cleanup-only",
        ] {
            let output = run(&namespace, &words(args))?;
            if output.code() != Some(0) {
                problems.push(format!("{args}, with {RULES} rules in {table}: {}", output.stderr));
            }
        }
        ensure!(writer.ended().is_none(), "{}", writer.tail());
        drop(writer);
        let kept = namespace.sh("iptables-nft-save | grep -c CROWD")?.stdout;
        ensure!(kept.trim().parse::<usize>()? == RULES + 1, "{kept} rules of the others");
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}
