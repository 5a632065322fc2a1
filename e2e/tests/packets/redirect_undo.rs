//! A run that fails leaves the namespace as it was, to the last line and whoever's that line is; where it cannot, its error names what is left.

use anyhow::Result;
use e2e::iptables::stubs::{Stubs, without_programs};
use e2e::iptables::told::{assert_refused, assert_unchanged, errors, not_named};
use e2e::iptables::{apply, run};
use test_support::netns::{Families, Namespace};

/// Words of a command line without quotes.
fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
}

/// From here on, a change to both families fails at its first step: without IPv6 on `lo`, there can be no `::6` there.
fn forbid_the_loopback_address(namespace: &Namespace) -> Result<()> {
    namespace.sh("echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6").map(drop)
}

#[test]
fn a_failed_run_keeps_native_tables_and_what_somebody_added_to_them() -> Result<()> {
    for (mode, limit) in [
        ("-b * -i *", "istio-proxy-nat istio-inbound"),
        ("-m TPROXY -b * -i *", "istio-proxy-mangle istio-inbound"),
        (
            "--nft-sets -b 80,81,82,83 -i 10.0.0.0/8,192.0.2.0/24,198.51.100.0/24",
            "istio-proxy-nat istio-inbound",
        ),
    ] {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, &format!("--native-nftables {mode}"))?;
        namespace.sh(&format!("nft add rule inet {limit} limit rate 5/second accept"))?;
        forbid_the_loopback_address(&namespace)?;
        let before = namespace.snapshot()?;
        assert!(before.has("nft", &["istio-inbound", "limit rate 5/second"]), "{before:?}");
        let output = run(&namespace, &words(&format!("--native-nftables {mode} --dual-stack")))?;
        assert_refused(&output, &["::6"]);
        assert_unchanged(&namespace, &before, mode);
    }
    Ok(())
}

#[test]
fn a_failed_run_of_another_backend_keeps_native_tables() -> Result<()> {
    for other in ["", "--backend restore", "--force-iptables-binary legacy"] {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, "--native-nftables -b * -i *")?;
        namespace.sh("nft add rule inet istio-proxy-nat istio-output limit rate 5/second accept")?;
        forbid_the_loopback_address(&namespace)?;
        let before = namespace.snapshot()?;
        let output = run(&namespace, &words(&format!("{other} -b * -i * --dual-stack")))?;
        assert_refused(&output, &["::6"]);
        assert_unchanged(&namespace, &before, other);
    }
    Ok(())
}

#[test]
fn a_failed_first_run_leaves_nothing() -> Result<()> {
    for mode in ["-b * -i *", "-m TPROXY -b * -i *"] {
        for backend in ["", "--backend restore", "--force-iptables-binary legacy", "--native-nftables"] {
            let namespace = Namespace::pod(Families::Dual)?;
            forbid_the_loopback_address(&namespace)?;
            let before = namespace.snapshot()?;
            let args = format!("{mode} {backend} --dual-stack");
            let output = run(&namespace, &words(&args))?;
            assert_refused(&output, &["::6"]);
            assert_unchanged(&namespace, &before, &args);
        }
    }
    Ok(())
}

/// What was done can be undone, although it does not read as written.
#[test]
fn an_iptables_that_lists_rules_in_other_words_leaves_nothing_half_done() -> Result<()> {
    for program in ["iptables-nft-save", "ip6tables-nft-save"] {
        for earlier in ["", "--backend restore --dual-stack -b * -i *"] {
            let namespace = Namespace::pod(Families::Dual)?;
            if !earlier.is_empty() {
                apply(&namespace, earlier)?;
            }
            let stubs = Stubs::new()?;
            // Of what is there before the run, it says the truth.
            stubs.add(program, "REAL \"$@\" | /bin/sed 's/--to-ports 16006/--to-port 16006/'")?;
            let before = namespace.snapshot()?;
            let command = stubs.command("--backend restore --dual-stack -b * -i 10.0.0.0/8 -z 16006");
            let output = namespace.run(&command)?;
            assert_eq!(output.code(), Some(1), "{program}, after {earlier:?}: {output:?}");
            let changes = namespace.snapshot()?.changes_since(&before);
            let silent = not_named(&changes, &errors(&output));
            assert!(
                silent.is_empty(),
                "{program}, after {earlier:?}: left and not named in {}\n{}",
                errors(&output),
                silent.join("\n")
            );
        }
    }
    Ok(())
}

/// Legacy rules are read from the kernel, so what is in force is recognized; but nothing is done that needs them gone.
#[test]
fn without_the_programs_of_iptables_legacy_rules_are_seen_and_changing_them_is_refused_in_words() -> Result<()>
{
    for mode in ["-b * -i *", "-m TPROXY -b * -i *"] {
        let namespace = Namespace::pod(Families::Dual)?;
        apply(&namespace, &format!("--force-iptables-binary legacy --dual-stack {mode}"))?;
        let before = namespace.snapshot()?;
        assert!(before.has("iptables-legacy", &["ISTIO_INBOUND"]), "{before:?}");
        let same = without_programs(&namespace, &format!("--dual-stack {mode}"))?;
        assert_eq!(same.code(), Some(0), "{same:?}");
        assert!(same.stderr.contains("in force"), "{same:?}");
        assert_unchanged(&namespace, &before, "the same");
        let other = format!("--dual-stack {mode} -o 9");
        for args in ["--cleanup-only", &other, "--native-nftables --dual-stack -b * -i *"] {
            let output = without_programs(&namespace, args)?;
            assert!(!output.stderr.contains("in force\t"), "{args}: {}", output.stderr);
            assert!(!output.stderr.contains("removed all"), "{args}: {}", output.stderr);
            assert_refused(&output, &["legacy"]);
            assert_unchanged(&namespace, &before, args);
        }
        // With the programs there, the same works.
        apply(&namespace, "--cleanup-only")?;
        assert!(namespace.state_with_nft()?.is_pristine());
    }
    Ok(())
}
