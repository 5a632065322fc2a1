//! The command lines of `istio-iptables` and `istio-validation`: where they work, what they show, how they say no.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::iptables::{self, apply, istio_iptables_command, run, with_environment};
use e2e::program;
use e2e::validation::istio_validation;
use nix::{sys::stat::Mode, unistd::mkfifo};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Output, SHORT, command, prefixed};

const EVERYTHING: &str =
    "-b * -d 22,23,24,8000:8099 -i * -x 192.0.2.0/24,198.51.100.7/32,203.0.113.0/24 --dual-stack";

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// The lines of this level, without their time.
fn report<'a>(output: &'a Output, level: &str) -> Vec<&'a str> {
    let level = format!("\t{level}\t");
    output.stderr.lines().filter_map(|line| line.split_once(&level)).map(|(_, text)| text).collect()
}

#[test]
fn a_named_namespace_is_entered_and_the_current_one_left_alone() -> Result<()> {
    let (here, there) = (Namespace::pod(Families::V4)?, Namespace::pod(Families::Dual)?);
    let untouched = here.state_with_nft()?;
    let path = there.path().display().to_string();
    let run = |args: &str| -> Result<Output> {
        run(&here, &[vec!["--network-namespace", &path], words(args)].concat())
    };
    // What a plan depends on is read there, too.
    assert!(run(&format!("{EVERYTHING} -n"))?.ok()?.stdout.contains("# IPv6"));
    assert_eq!(there.state_with_nft()?, Namespace::pod(Families::Dual)?.state_with_nft()?);
    run(&format!("{EVERYTHING} -m TPROXY"))?.ok()?;
    let wanted = Namespace::pod(Families::Dual)?;
    apply(&wanted, &format!("{EVERYTHING} -m TPROXY"))?;
    assert_eq!(there.state_with_nft()?, wanted.state_with_nft()?);
    assert_eq!(here.state_with_nft()?, untouched);

    let validation = format!("{EVERYTHING} -m TPROXY --run-validation --skip-rule-apply --probe-timeout 1m");
    assert_eq!(run(&validation)?.code(), Some(0));
    let args = [vec!["--network-namespace", &path], words(EVERYTHING), words("-m TPROXY --probe-timeout 1m")];
    let validated = here.run(&with_environment(istio_validation(), &args.concat(), &[]))?;
    assert_eq!(validated.code(), Some(0), "{validated:?}");
    // There it is not redirected, which is told of there and not of here.
    let args = [words(EVERYTHING), words("-m TPROXY --probe-timeout 1s")].concat();
    let validated = here.run(&with_environment(istio_validation(), &args, &[]))?;
    assert_eq!(validated.code(), Some(126), "{validated:?}");

    apply(&here, EVERYTHING)?;
    let redirected = here.state_with_nft()?;
    let variable = ("NETWORK_NAMESPACE".to_owned(), path.clone());
    let cleanup = with_environment(iptables::istio_iptables(), &["--cleanup-only"], &[variable]);
    here.run(&cleanup)?.ok()?;
    assert!(there.state_with_nft()?.is_pristine());
    assert_eq!(here.state_with_nft()?, redirected);
    Ok(())
}

#[test]
fn the_own_namespace_by_name_needs_no_privilege_to_be_entered() -> Result<()> {
    let (here, there) = (Namespace::pod(Families::Dual)?, Namespace::pod(Families::Dual)?);
    let unprivileged = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", "--"];
    let run = |path: &str| {
        let args = [vec!["--network-namespace", path], words(EVERYTHING)].concat();
        here.run(&prefixed(&unprivileged, &istio_iptables_command(&args)))
    };
    let refused = run(&there.path().display().to_string())?;
    assert_eq!(refused.code(), Some(1));
    let [error] = report(&refused, "error")[..] else { anyhow::bail!("{refused:?}") };
    assert!(
        error.contains("flag --network-namespace") && error.contains("CAP_SYS_ADMIN is needed"),
        "{error}"
    );
    assert!(here.state_with_nft()?.is_pristine() && there.state_with_nft()?.is_pristine());
    run(&here.path().display().to_string())?.ok()?;
    assert!(!here.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn what_cannot_be_entered_is_told_with_everything_else() -> Result<()> {
    let here = Namespace::pod(Families::Dual)?;
    for (path, why) in [
        ("/nonexistent", "cannot open network namespace /nonexistent"),
        ("/etc/hostname", "/etc/hostname is not a network namespace"),
        ("/proc/self/ns/uts", "/proc/self/ns/uts is not a network namespace"),
        ("/proc/self/status", "/proc/self/status is not a network namespace"),
    ] {
        let output = run(&here, &["--network-namespace", path, "-b", "http", "--dry-run=maybe", "--frob"])?;
        assert_eq!(output.code(), Some(1));
        let errors = report(&output, "error").join("\n");
        for wanted in [why, "\"http\"", "\"maybe\"", "\"--frob\""] {
            assert!(errors.contains(wanted), "{wanted} is not in {errors}");
        }
    }
    assert!(here.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn a_dry_run_of_cleaning_up_shows_what_cleaning_up_does() -> Result<()> {
    for args in [
        "-m TPROXY --drop-invalid --redirect-dns --capture-all-dns",
        "--native-nftables",
        "--force-iptables-binary legacy",
    ] {
        let namespace = Namespace::pod(Families::Dual)?;
        assert_eq!(
            run(&namespace, &["--cleanup-only", "--dry-run"])?.ok()?.stdout,
            "",
            "there is nothing yet"
        );
        apply(&namespace, &format!("{EVERYTHING} {args}"))?;
        let before = namespace.state_with_nft()?;
        let shown = run(&namespace, &["--cleanup-only", "--dry-run"])?.ok()?.stdout;
        assert_eq!(namespace.state_with_nft()?, before, "{args}");
        carry_out(&namespace, &shown)?;
        let state = namespace.state_with_nft()?;
        assert!(state.is_pristine(), "{args}: {state:?} after\n{shown}");
    }
    Ok(())
}

/// Does by hand what a dry run shows: each part has a heading that says whose input it is.
fn carry_out(namespace: &Namespace, shown: &str) -> Result<()> {
    let mut parts: Vec<(&str, String)> = Vec::new();
    for line in shown.lines() {
        match line.strip_prefix("# ") {
            Some(ip) if ip.starts_with("ip ") => parts.push((ip, String::new())),
            Some(heading) => parts.push((heading, String::new())),
            None => {
                let (_, text) = parts.last_mut().context("a heading comes first")?;
                *text += &format!("{line}\n");
            }
        }
    }
    ensure!(!parts.is_empty(), "nothing is shown");
    for (heading, input) in parts {
        let words: Vec<&str> = match heading {
            "IPv4 (iptables-nft)" => vec!["iptables-nft-restore", "--noflush"],
            "IPv6 (iptables-nft)" => vec!["ip6tables-nft-restore", "--noflush"],
            "IPv4 (iptables-legacy)" => vec!["iptables-legacy-restore", "--noflush"],
            "IPv6 (iptables-legacy)" => vec!["ip6tables-legacy-restore", "--noflush"],
            "native nftables" => vec!["nft", "-f", "-"],
            ip => words(ip),
        };
        let mut by_hand = namespace.command(&command(words[0], &words[1..]));
        process::run_with_input(&mut by_hand, &input, SHORT)?.ok().with_context(|| shown.to_owned())?;
    }
    Ok(())
}

#[test]
fn a_dry_run_with_sets_shows_the_sets_that_are_written() -> Result<()> {
    let (by_hand, applied) = (Namespace::pod(Families::Dual)?, Namespace::pod(Families::Dual)?);
    let args = format!("{EVERYTHING} --native-nftables --nft-sets");
    let shown = run(&by_hand, &words(&format!("{args} -n")))?.ok()?.stdout;
    assert!(shown.contains("tcp dport { 22-24, 8000-8099, 15008 }"), "{shown}");
    let nft = shown.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let mut load = by_hand.command(&command("nft", ["-f", "-"]));
    process::run_with_input(&mut load, &nft, SHORT)?.ok()?;
    apply(&applied, &args)?;
    let list =
        |namespace: &Namespace| Ok::<_, anyhow::Error>(namespace.sh("nft -s list ruleset inet")?.stdout);
    // nft shows a range that is a network as one only where it wrote it so itself.
    assert_eq!(normal(&list(&by_hand)?), normal(&list(&applied)?));
    Ok(())
}

fn normal(listed: &str) -> Vec<String> {
    let mut lines: Vec<String> = listed.lines().map(|line| line.trim().to_owned()).collect();
    lines.retain(|line| !line.is_empty());
    lines
}

#[test]
fn settings_without_effect_are_warned_of() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.set_nameservers::<&str>(&[])?;
    let warnings = |args: &str, env: &[(String, String)]| -> Result<String> {
        let output = namespace.run(&with_environment(iptables::istio_iptables(), &words(args), env))?.ok()?;
        Ok(report(&output, "warn").join("\n"))
    };
    assert_eq!(warnings("-b * -i *", &[])?, "");
    assert!(warnings("", &[])?.starts_with("nothing is captured"));
    for (args, wanted) in [
        ("-i * -b 80 -d 22", "--istio-local-exclude-ports has no effect"),
        ("-b * --nft-sets", "--nft-sets has no effect"),
        ("-b * --native-nftables --backend restore", "--backend has no effect"),
        ("-b * --redirect-dns", "/etc/resolv.conf names no server"),
        ("-b * -u 0 -g 1337", "user 0 counts as the proxy's"),
    ] {
        let told = warnings(args, &[])?;
        assert!(told.contains(wanted) && told.lines().count() == 1, "{args}: {told}");
    }
    let refused = run(&namespace, &["-b", "*", "-z", "15001"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let wanted = "flag --inbound-capture-port: \"15001\" is the port of --envoy-port as well";
    assert!(refused.stderr.contains(wanted), "{refused:?}");
    let misspelt = [("ISTIO_INBOUND_PORT".to_owned(), "80".to_owned())];
    assert!(warnings("-b *", &misspelt)?.contains("did you mean ISTIO_INBOUND_PORTS?"));
    let validated = namespace.run(&with_environment(
        istio_validation(),
        &words("--dry-run --probe-timeout 1s"),
        &misspelt,
    ))?;
    let told = report(&validated, "warn").join("\n");
    assert!(
        told.contains("did you mean ISTIO_INBOUND_PORTS?") && told.contains("--dry-run has no effect"),
        "{told}"
    );
    Ok(())
}

#[test]
fn a_run_that_captures_nothing_does_not_say_that_it_redirects() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    for what in [
        "the rules are in force, and capture nothing",
        "the rules were in force already, and capture nothing",
    ] {
        let output = run(&namespace, &[] as &[&str])?.ok()?;
        let told = report(&output, "info");
        assert!(told.len() == 1 && told[0].starts_with(what), "{told:?}");
    }
    Ok(())
}

#[test]
fn the_validation_refuses_to_clean_up() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    apply(&namespace, EVERYTHING)?;
    let args = [vec!["--cleanup-only", "-p", "http"], words(EVERYTHING)].concat();
    let output = namespace.run(&with_environment(istio_validation(), &args, &[]))?;
    assert_eq!(output.code(), Some(1), "{output:?}");
    let errors = report(&output, "error").join("\n");
    assert!(errors.contains("use istio-iptables --cleanup-only") && errors.contains("\"http\""), "{errors}");
    Ok(())
}

#[test]
fn a_log_that_may_not_grow_ends_no_run() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    let log = tempfile::NamedTempFile::new()?;
    let script = format!("ulimit -f 0; exec \"$@\" 2>{}", log.path().display());
    let words = ["sh", "-c", &script, "sh"];
    let args: Vec<&str> = EVERYTHING.split(' ').collect();
    let output = namespace.run(&prefixed(&words, &istio_iptables_command(&args)))?;
    assert_eq!(output.code(), Some(0), "{output:?}");
    assert_eq!(fs::read_to_string(log.path())?, "", "the limit held");
    assert!(!namespace.state_with_nft()?.is_pristine());
    Ok(())
}

#[test]
fn a_resolv_conf_that_is_none_is_waited_for_by_nobody() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.set_resolv_conf("")?;
    let path = Path::new("/etc/netns").join(namespace.name()).join("resolv.conf");
    fs::remove_file(&path)?;
    mkfifo(&path, Mode::S_IRWXU)?;
    let output = run(&namespace, &["-b", "*", "--redirect-dns"])?;
    assert_eq!(output.code(), Some(1));
    let errors = report(&output, "error").join("\n");
    assert!(errors.contains("cannot read /etc/resolv.conf: it is not a regular file"), "{errors}");
    assert!(namespace.state_with_nft()?.is_pristine());
    // Where its servers do not matter, it does not matter either.
    apply(&namespace, "-b * --redirect-dns --capture-all-dns")?;
    fs::remove_file(&path)?;
    namespace.set_resolv_conf(&"nameserver 10.96.0.10\n".repeat(2_000_000))?;
    assert_eq!(run(&namespace, &["-b", "*", "--redirect-dns"])?.code(), Some(1));
    fs::write(&path, b"# caf\xe9\nnameserver 10.96.0.10\nnameserver 10.96.0.10\n")?;
    apply(&namespace, "-b * --redirect-dns")?;
    let rules = namespace.sh("iptables-nft-save -t nat")?.stdout;
    let captured = rules.lines().filter(|line| line.contains("-d 10.96.0.10/32 -p tcp")).count();
    assert_eq!(captured, 1, "{rules}");
    Ok(())
}

/// The kernel refuses a thread, a process or a rest: strace makes it do so.
#[test]
fn what_the_kernel_refuses_is_an_error_and_no_panic() -> Result<()> {
    let (here, there) = (Namespace::pod(Families::V4)?, Namespace::pod(Families::V4)?);
    let named = format!("--network-namespace {} -b *", there.path().display());
    let validation = "-b * -i * --run-validation --skip-rule-apply --probe-timeout 300ms";
    let mut refused = 0;
    for args in [named.as_str(), "-b * --backend restore", "-b * --native-nftables", validation] {
        let threads = (1..=4).map(|which| format!("clone,clone3:error=EAGAIN:when={which}"));
        for fault in threads.chain(["clock_nanosleep,nanosleep:error=EINVAL".to_owned()]) {
            let calls = fault.split(':').next().unwrap_or_default();
            let (trace, inject) = (format!("trace={calls}"), format!("inject={fault}"));
            let strace = ["/usr/bin/strace", "-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &inject];
            let output = here.run(&prefixed(&strace, &istio_iptables_command(&words(args))))?;
            assert!(matches!(output.code(), Some(0 | 1 | 126)), "{args}, {fault}: {output:?}");
            assert!(!output.stderr.contains("panicked"), "{args}, {fault}: {output:?}");
            if output.code() == Some(1) {
                refused += 1;
                assert_eq!(report(&output, "error").len(), 1, "{args}, {fault}: {output:?}");
            }
        }
        for namespace in [&here, &there] {
            apply(namespace, "--cleanup-only")?;
        }
    }
    assert!(refused >= 3, "only {refused} runs met a fault");
    Ok(())
}

#[test]
fn every_program_has_the_same_subcommands_and_exit_codes() -> Result<()> {
    for name in ["istio-iptables", "istio-validation", "install-cni", "istio-cni"] {
        let program = program::under_test(name)?;
        let run = |args: &[&str]| process::run(&mut with_environment(&program, args, &[]), SHORT);
        for args in [&["help"][..], &["--help"], &["-h"], &["version"], &["--version"], &["man"]] {
            let output = run(args)?.ok().with_context(|| format!("{name} {args:?}"))?;
            assert!(output.stdout.contains(name), "{name} {args:?}: {}", output.stdout);
            assert_eq!(output.stderr, "", "{name} {args:?}");
        }
        for shell in ["bash", "zsh", "fish"] {
            assert!(run(&["completion", shell])?.ok()?.stdout.contains(name), "{name} {shell}");
        }
        let man = run(&["man"])?.ok()?.stdout;
        for section in ["EXIT STATUS", "FILES", "EXAMPLES", "SEE ALSO"] {
            assert!(
                man.lines().any(|line| line.starts_with(".SH") && line.contains(section)),
                "{name}: {section}"
            );
        }
        assert!(run(&["--help"])?.stdout.contains("Examples:"), "{name}");
        for args in [&["--no-such-flag"][..], &["stray"], &["completion"], &["completion", "csh"]] {
            let output = run(args)?;
            assert_eq!((output.code(), output.stdout.as_str()), (Some(1), ""), "{name} {args:?}: {output:?}");
            assert!(output.stderr.contains("--help"), "{name} {args:?}: {}", output.stderr);
        }
    }
    Ok(())
}
