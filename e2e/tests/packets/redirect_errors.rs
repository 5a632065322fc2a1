//! What goes wrong is reported in one message that says what to do, and leaves the namespace as it was.

use std::fs;
use std::path::Path;

use anyhow::Result;
use e2e::iptables::stubs::{Stubs, without_programs};
use e2e::iptables::{apply, istio_iptables, istio_iptables_command, run, with_environment};
use tempfile::TempDir;
use test_support::netns::{Families, Namespace};
use test_support::process::{Output, command, prefixed};

/// Rules in every table of both families, policy routes and an address.
const EARLIER: &str =
    "--dual-stack -m TPROXY -b * -d 15021 -i * --redirect-dns --capture-all-dns --drop-invalid";
/// Another one, with changes in every table of both families and other policy routes.
const LATER: &str =
    "--dual-stack -m TPROXY -b 8080 -i 10.0.0.0/8,fd00::/8 -t 0x77 -r 200 -c dummy0 --redirect-dns";

/// All there is, as its programs print it, but for counters and the time of day.
fn everything(namespace: &Namespace) -> Result<Vec<String>> {
    let shown = namespace.sh(
        "iptables-nft-save; ip6tables-nft-save; iptables-legacy-save; ip6tables-legacy-save; nft -s list ruleset inet
         ip -4 rule; ip -6 rule; ip -4 route show table all; ip -6 route show table all; ip -o addr show dev lo",
    )?;
    // The kernel's own link-local addresses come a while after their interface.
    let lines = shown.stdout.lines().filter(|line| !line.starts_with('#') && !line.contains("fe80:"));
    Ok(lines.map(|line| line.split(" [").next().unwrap_or(line).to_owned()).collect())
}

/// Asserts one error message, on standard error, that has all these words.
#[track_caller]
fn assert_told(output: &Output, words: &[&str]) {
    assert_eq!(output.code(), Some(1), "{output:?}");
    assert_eq!(output.stdout, "", "standard output belongs to what was asked for");
    let errors: Vec<&str> = output.stderr.lines().filter(|line| line.contains("\terror\t")).collect();
    assert_eq!(errors.len(), 1, "one message: {}", output.stderr);
    for word in words {
        assert!(errors[0].contains(word), "{word:?} is not in {}", errors[0]);
    }
}

#[test]
fn every_input_error_is_told_at_once() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    apply(&namespace, EARLIER)?;
    let before = everything(&namespace)?;
    let args = [
        "-p",
        "0",
        "-b",
        "http",
        "-d",
        "80,99999",
        "-i",
        "10.0.0.0",
        "-x",
        "*,10.0.0.0/33",
        "-m",
        "tproxy",
        "-u",
        "nobody-knows",
        "-c",
        "0eth",
        "-k",
        "a/b",
        "-t",
        "0",
        "-r",
        "254",
        "-o",
        "90:80",
        "--redirect-dns=maybe",
        "--force-iptables-binary",
        "ebpf",
        "--iptables-probe-port",
        "-1",
    ];
    let env = [("ISTIO_OUTBOUND_OWNER_GROUPS".to_owned(), "202,ghosts".to_owned())];
    let output = namespace.run(&with_environment(istio_iptables(), &args, &env))?;
    assert_eq!((output.code(), output.stdout.as_str()), (Some(1), ""), "{output:?}");
    let expected = [
        ("flag --envoy-port", "\"0\""),
        ("flag --istio-inbound-ports", "\"http\""),
        ("flag --istio-local-exclude-ports", "\"99999\""),
        ("flag --istio-service-cidr", "\"10.0.0.0\""),
        ("flag --istio-service-exclude-cidr", "\"*\""),
        ("flag --istio-service-exclude-cidr", "\"10.0.0.0/33\""),
        ("flag --istio-inbound-interception-mode", "\"tproxy\""),
        ("flag --proxy-uid", "\"nobody-knows\""),
        ("flag --istio-exclude-interfaces", "\"0eth\""),
        ("flag --kube-virt-interfaces", "\"a/b\""),
        ("flag --istio-inbound-tproxy-mark", "\"0\""),
        ("flag --istio-inbound-tproxy-route-table", "\"254\""),
        ("flag --istio-local-outbound-ports-exclude", "\"90:80\""),
        ("flag --redirect-dns", "\"maybe\""),
        ("flag --force-iptables-binary", "\"ebpf\""),
        ("flag --iptables-probe-port", "\"-1\""),
        ("environment variable ISTIO_OUTBOUND_OWNER_GROUPS", "\"ghosts\""),
    ];
    let lines: Vec<&str> = output.stderr.lines().collect();
    for (source, value) in expected {
        let told = lines.iter().filter(|line| line.contains(&format!("{source}: {value} "))).count();
        assert_eq!(told, 1, "{source}: {value} in\n{}", output.stderr);
    }
    assert_eq!(lines.len(), expected.len(), "a line for each error, and no other:\n{}", output.stderr);
    assert_eq!(everything(&namespace)?, before);
    Ok(())
}

#[test]
fn an_unknown_flag_is_refused() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    for args in [vec!["--no-such-flag"], vec!["stray"], vec!["-b"]] {
        let output = run(&namespace, &args)?;
        assert_eq!((output.code(), output.stdout.as_str()), (Some(1), ""), "{output:?}");
        assert!(output.stderr.contains("--help"), "{}", output.stderr);
    }
    assert!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn without_iptables_both_variants_and_the_package_are_named() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let output = without_programs(&namespace, "-b * --backend restore")?;
    assert_told(&output, &["iptables-nft", "iptables-legacy", "is not in", "apt-get install iptables"]);
    assert!(namespace.state_with_nft()?.is_pristine());

    let output = without_programs(&namespace, "-b * --force-iptables-binary legacy")?;
    assert_told(&output, &["iptables-legacy", "is not in", "apt-get install iptables"]);
    assert!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn without_iptables_the_default_backend_does_as_well() -> Result<()> {
    let (with, without) = (Namespace::pod(Families::Dual)?, Namespace::pod(Families::Dual)?);
    apply(&with, EARLIER)?;
    without_programs(&without, EARLIER)?.ok()?;
    assert_eq!(without.state_with_nft()?, with.state_with_nft()?);
    without_programs(&without, "--cleanup-only")?.ok()?;
    assert!(without.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn without_the_capability_it_is_named() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    apply(&namespace, EARLIER)?;
    let before = everything(&namespace)?;
    let words = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin", "--"];
    for args in [["-b", "*"], ["--cleanup-only", "--dual-stack"]] {
        let output = namespace.run(&prefixed(&words, &istio_iptables_command(&args)))?;
        assert_told(&output, &["CAP_NET_ADMIN is missing", "NET_ADMIN", "securityContext"]);
        assert_eq!(everything(&namespace)?, before);
    }
    Ok(())
}

#[test]
fn without_an_address_the_pod_network_is_asked_after() -> Result<()> {
    let namespace = Namespace::empty(Families::Dual)?;
    assert_told(
        &run(&namespace, &["-b", "*", "-i", "*"])?,
        &["network namespace", "no address", "is the pod network attached?"],
    );
    assert!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}

/// What a kernel without a table, or without a match, makes of `--test`; in the words of the real program.
#[test]
fn what_the_kernel_lacks_is_told_before_anything_changes() -> Result<()> {
    let refusals = [
        (
            "iptables-nft-restore",
            "iptables-restore: iptables-restore: unable to initialize table 'raw'\\n\\nError occurred at line: 1",
            "",
            "unable to initialize table 'raw'",
        ),
        (
            "iptables-legacy-restore",
            "iptables-restore v1.8.9 (legacy): can't initialize iptables table `mangle': Table does not exist",
            "--force-iptables-binary legacy",
            "can't initialize iptables table `mangle'",
        ),
        (
            "iptables-nft-restore",
            "Warning: Extension owner revision 0 not supported, missing kernel module?\\niptables-restore: line 9 failed: No such file or directory.",
            "",
            "missing kernel module",
        ),
    ];
    for (program, says, backend, words) in refusals {
        let namespace = Namespace::pod(Families::Dual)?;
        let stubs = Stubs::new()?;
        let refuse = format!(
            "case \"$*\" in *--test*) printf \"%b\\\\n\" {} >&2; exit 4;; esac; exec REAL \"$@\"",
            quoted(says)
        );
        stubs.add(program, &refuse)?;
        let output = namespace.run(&stubs.command(&format!("{LATER} --backend restore {backend}")))?;
        assert_told(&output, &["IPv4", "does not accept the plan", words]);
        if words.contains("initialize") || words.contains("module") {
            assert_told(&output, &["the kernel lacks", "modprobe"]);
        }
        let state = namespace.state_with_nft()?;
        assert!(state.is_pristine(), "{state:?}");
        assert!(!state.lo.contains(&"::6/128".to_owned()));
    }
    Ok(())
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
fn a_second_family_refused_by_the_test_leaves_the_first_as_it_was() -> Result<()> {
    second_family_refused(
        "case \"$*\" in *--test*) echo refused by the test >&2; exit 4;; esac; exec REAL \"$@\"",
    )
}

#[test]
fn a_second_family_refused_at_the_commit_leaves_the_first_as_it_was() -> Result<()> {
    second_family_refused(
        "case \"$*\" in *--test*) exec REAL \"$@\";; esac; echo refused at the commit >&2; exit 4",
    )
}

/// The first table is committed, the second is not. What undoes it succeeds.
#[test]
fn a_second_family_half_done_is_undone_with_the_first() -> Result<()> {
    second_family_refused(
        "case \"$*\" in *--test*) exec REAL \"$@\";; esac
        if [ -e FOLDER/refused ]; then exec REAL \"$@\"; fi
        : > FOLDER/refused
        /bin/sed /^COMMIT/q | REAL \"$@\"
        echo refused half way >&2; exit 4",
    )
}

fn second_family_refused(script: &str) -> Result<()> {
    for (backend, program) in [("nft", "ip6tables-nft-restore"), ("legacy", "ip6tables-legacy-restore")] {
        let namespace = Namespace::pod(Families::Dual)?;
        let stubs = Stubs::new()?;
        stubs.add(program, script)?;
        apply(&namespace, &format!("{EARLIER} --force-iptables-binary {backend}"))?;
        let (before, state) = (everything(&namespace)?, namespace.state_with_nft()?);
        let later = format!("{LATER} --force-iptables-binary {backend}");
        let output = namespace.run(&stubs.command(&later))?;
        assert_told(&output, &["refused", program]);
        assert_eq!(namespace.state_with_nft()?.differences(&state), Vec::<String>::new());
        assert_eq!(everything(&namespace)?, before, "to the last line");

        // Without the stub it works.
        apply(&namespace, &later)?;
        assert_ne!(namespace.state_with_nft()?, state);
    }
    Ok(())
}

/// The first of all: what is undone is everything.
#[test]
fn a_first_plan_refused_leaves_nothing() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let stubs = Stubs::new()?;
    stubs.add(
        "ip6tables-nft-restore",
        "case \"$*\" in *--test*) exec REAL \"$@\";; esac; echo refused at the commit >&2; exit 4",
    )?;
    let before = namespace.state_with_nft()?;
    let output = namespace.run(&stubs.command(&format!("{LATER} --backend restore")))?;
    assert_told(&output, &["refused at the commit"]);
    assert_eq!(namespace.state_with_nft()?.differences(&before), Vec::<String>::new());
    Ok(())
}

/// The kernel keeps a chain that another program's rule jumps to.
#[test]
fn a_chain_that_others_use_is_told_and_everything_stays() -> Result<()> {
    for (backend, iptables, words) in [
        ("--backend netlink", "ip6tables-nft", ["IPv6", "ISTIO_DROP"]),
        ("--backend restore", "ip6tables-nft", ["ip6tables-nft-restore", "ISTIO_DROP"]),
        ("--force-iptables-binary legacy", "ip6tables-legacy", ["IPv6", "does not accept the plan"]),
    ] {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, &format!("{EARLIER} {backend}"))?;
        namespace.sh(&format!(
            "{iptables} -t mangle -N OTHERS; {iptables} -t mangle -A OTHERS -p udp -j ISTIO_DROP"
        ))?;
        let before = everything(&namespace)?;
        for args in [LATER, "--cleanup-only"] {
            let args = format!("{args} {backend}");
            let output = run(&namespace, &args.split(' ').collect::<Vec<_>>())?;
            assert_told(&output, &words);
            assert_eq!(everything(&namespace)?, before, "{args}");
        }
        namespace.sh(&format!("{iptables} -t mangle -F OTHERS; {iptables} -t mangle -X OTHERS"))?;
        apply(&namespace, &format!("--cleanup-only {backend}"))?;
        assert!(namespace.state_with_nft()?.is_pristine());
    }
    Ok(())
}

#[test]
fn a_dry_run_prints_the_plan_and_changes_nothing() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    apply(&namespace, EARLIER)?;
    let before = everything(&namespace)?;
    let words: Vec<&str> = LATER.split(' ').chain(["--dry-run"]).collect();
    let output = run(&namespace, &words)?.ok()?;
    for line in [
        "*nat",
        "*mangle",
        "*raw",
        "COMMIT",
        "-A ISTIO_OUTPUT -d 10.0.0.0/8 -j ISTIO_REDIRECT",
        "-A ISTIO_OUTPUT -d fd00::/8 -j ISTIO_REDIRECT",
    ] {
        assert!(output.stdout.lines().any(|printed| printed == line), "{line} is not in\n{}", output.stdout);
    }
    assert_eq!(everything(&namespace)?, before);

    let native = run(&namespace, &[&words[..], &["--native-nftables"]].concat())?.ok()?;
    assert!(native.stdout.contains("add table inet istio-proxy-nat"), "{}", native.stdout);
    assert_eq!(everything(&namespace)?, before);

    // What it prints is what it would program: iptables-restore takes it, and ends in the same rules.
    let (printed, programmed) = (Namespace::pod(Families::Dual)?, Namespace::pod(Families::Dual)?);
    apply(&programmed, LATER)?;
    let mut families = output.stdout.split("# IPv6\n");
    for program in ["iptables-nft-restore", "ip6tables-nft-restore"] {
        let text = families.next().unwrap_or_default();
        let mut restore = printed.command(&command(program, ["--noflush"]));
        test_support::process::run_with_input(&mut restore, text, test_support::process::SHORT)?.ok()?;
    }
    let (printed, programmed) = (printed.state()?, programmed.state()?);
    assert_eq!((printed.v4, printed.v6), (programmed.v4, programmed.v6));
    Ok(())
}

#[test]
fn a_dry_run_is_appended_to_the_file_asked_for() -> Result<()> {
    let namespace = Namespace::pod(Families::V4)?;
    let folder = TempDir::new()?;
    let file = folder.path().join("plan");
    fs::write(&file, "kept\n")?;
    let env = [("DRY_RUN_FILE_PATH".to_owned(), file.display().to_string())];
    let command = with_environment(istio_iptables(), &["-b", "*", "--dry-run"], &env);
    let output = namespace.run(&command)?.ok()?;
    assert_eq!(fs::read_to_string(&file)?, format!("kept\n{}", output.stdout));
    assert!(namespace.state_with_nft()?.is_pristine());

    fs::remove_file(&file)?;
    fs::create_dir(&file)?;
    assert_told_about(&namespace.run(&command)?, "DRY_RUN_FILE_PATH", &file);
    Ok(())
}

#[track_caller]
fn assert_told_about(output: &Output, variable: &str, file: &Path) {
    assert_eq!(output.code(), Some(1), "{output:?}");
    for word in [variable, &file.display().to_string()] {
        assert!(output.stderr.contains(word), "{word} is not in {}", output.stderr);
    }
}

#[test]
fn help_and_version_go_to_standard_output() -> Result<()> {
    let namespace = Namespace::empty(Families::Dual)?;
    let help = run(&namespace, &["--help"])?.ok()?;
    for word in ["--istio-inbound-ports", "-b", "--cleanup-only", "ISTIO_OUTBOUND_OWNER_GROUPS"] {
        assert!(help.stdout.contains(word), "{word} is not in {}", help.stdout);
    }
    let version = run(&namespace, &["--version"])?.ok()?;
    assert!(version.stdout.starts_with("istio-iptables "), "{}", version.stdout);
    assert_eq!((help.stderr.as_str(), version.stderr.as_str()), ("", ""));
    assert!(namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn logs_go_to_standard_error_in_as_much_detail_as_asked_for() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let first = run(&namespace, &["-b", "*"])?.ok()?;
    assert_eq!(first.stdout, "");
    assert_eq!(first.stderr.lines().count(), 1, "one line of summary: {}", first.stderr);
    assert!(first.stderr.contains("\tinfo\tredirection is in force\t"), "{}", first.stderr);
    let again = run(&namespace, &["-b", "*"])?.ok()?;
    assert!(again.stderr.contains("in force already"), "{}", again.stderr);
    let detailed = run(&namespace, &["-b", "*", "--log_output_level", "default:debug"])?.ok()?;
    assert_eq!(detailed.stdout, "");
    assert!(detailed.stderr.contains("nat ISTIO_INBOUND"), "{}", detailed.stderr);
    let asked = "inbound connections [flag --istio-inbound-ports]";
    let by_default = "to the proxy's outbound listener [default of --envoy-port]";
    assert!(detailed.stderr.contains(asked) && detailed.stderr.contains(by_default), "{}", detailed.stderr);
    let json = run(&namespace, &["--cleanup-only", "--log_as_json"])?.ok()?;
    let line: serde_json::Value = serde_json::from_str(json.stderr.trim())?;
    assert_eq!(line["msg"], "removed all redirection");
    Ok(())
}
