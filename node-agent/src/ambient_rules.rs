//! Ambient mode's rules in one network namespace: put in force, verified, removed, by the code of the sidecar's.
//!
//! Everything acts on the calling thread's network namespace, which must be the pod's.

use netns_apply::facts::ambient_here;
use netns_apply::{ApplyOptions, Mismatch, Outcome, apply, cleanup, observe, probes, verify};
use redirect_core::plan::DataPlane;
use redirect_core::{AmbientRedirect, RulePlan};

/// Whether one condition of a pod's enrolment holds, verified. Otherwise why that cannot be determined, or, after a try that failed, why the
/// next one is not due yet.
pub type Condition = Result<bool, String>;

/// Why a namespace with rules of a sidecar is left as it is.
pub const HAS_SIDECAR: &str = "the network namespace has rules of a sidecar; remove them with istio-iptables --cleanup-only if the pod has none any more";

/// Fails if the namespace has rules of a sidecar: a pod stays with it, and they are not ambient mode's to replace or remove.
///
/// # Errors
/// It has, or its rules cannot be read.
pub fn refuse_sidecar(options: &ApplyOptions) -> Result<(), String> {
    let observed = observe(options).map_err(|error| error.to_string())?;
    if observed.data_planes().contains(&DataPlane::Sidecar) {
        return Err(HAS_SIDECAR.to_owned());
    }
    Ok(())
}

/// Whether the plan of this redirection is in force.
///
/// # Errors
/// That cannot be determined, and why; or what other programs' rules do to it: writing ours again would not change that.
pub fn are_in_force(redirect: &AmbientRedirect, options: &ApplyOptions) -> Condition {
    refuse_sidecar(options)?;
    match verify(&ambient_here(redirect.clone()).plan(), options).map_err(|error| error.to_string())? {
        None => Ok(true),
        Some(mismatch @ Mismatch::Interference(_)) => Err(mismatch.to_string()),
        Some(_) => Ok(false),
    }
}

/// Whether the namespace has any rules of ambient mode.
///
/// # Errors
/// They cannot be read.
pub fn exist(options: &ApplyOptions) -> Condition {
    let observed = observe(options).map_err(|error| error.to_string())?;
    Ok(observed.data_planes().contains(&DataPlane::Ambient))
}

/// Puts the plan in force, and verifies it. What other programs' rules do to it, only [`are_in_force`] shows.
///
/// # Errors
/// Why it is not in force, or not verified.
pub fn put_in_force(redirect: &AmbientRedirect, options: &ApplyOptions) -> Result<(), String> {
    let (plan, _) = apply_here(redirect, options)?;
    verify_applied(&plan, options).map(drop)
}

/// Puts the plan in force; returns it.
///
/// # Errors
/// Why it is not in force.
pub fn apply_here(redirect: &AmbientRedirect, options: &ApplyOptions) -> Result<(RulePlan, Outcome), String> {
    refuse_sidecar(options)?;
    let plan = ambient_here(redirect.clone()).plan();
    let outcome = apply(&plan, options).map_err(|error| error.to_string())?;
    Ok((plan, outcome))
}

/// Verifies a plan that was just put in force; returns what other programs' rules do to it.
///
/// # Errors
/// The plan is not in force any more, or that cannot be determined.
pub fn verify_applied(plan: &RulePlan, options: &ApplyOptions) -> Result<Option<Mismatch>, String> {
    match verify(plan, options) {
        // They are there; what others do is not undone by giving up.
        Ok(verified @ (None | Some(Mismatch::Interference(_)))) => Ok(verified),
        Ok(Some(mismatch)) => Err(format!("the rules have been changed since: {mismatch}; run it again")),
        Err(error) => Err(format!("the rules are in force, but cannot be verified: {error}")),
    }
}

/// Removes all rules of ambient mode.
///
/// # Errors
/// Why they are not removed.
pub fn remove(options: &ApplyOptions) -> Result<Outcome, String> {
    refuse_sidecar(options)?;
    cleanup(options).map_err(|error| error.to_string())
}

/// Removes the rules and ipsets by which Istio's agent lets probes through, from the calling thread's network namespace, which must be the node's. Returns
/// whether any existed.
///
/// # Errors
/// Why it is not removed.
pub fn remove_istios_of_node(options: &ApplyOptions) -> Result<bool, String> {
    let has_rules = exist(options)?;
    if has_rules {
        remove(options)?;
    }
    let had_sets = probes::destroy_ipsets().map_err(|error| error.to_string())?;
    Ok(has_rules || had_sets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::Families;
    use redirect_core::options::BackendChoice;
    use test_support::netns::{Families as Addresses, Namespace};

    fn options(backend: BackendChoice) -> ApplyOptions {
        ApplyOptions { backend, ..ApplyOptions::default() }
    }

    /// A pod with the routes that a network gives it.
    fn pod(addresses: Addresses) -> Namespace {
        let pod = Namespace::pod(addresses).expect("a namespace");
        pod.sh("ip route add default dev eth0; ip -6 route add default dev eth0 || true").expect("runs");
        pod
    }

    #[test]
    fn rules_come_are_found_changed_and_go_in_each_backend() {
        let redirect = AmbientRedirect::new(Families::Both).with_dns_capture(true);
        for backend in [BackendChoice::Netlink, BackendChoice::NativeNft] {
            let pod = pod(Addresses::Dual);
            let (of_pod, options) = (redirect.clone(), options(backend));
            let is_there =
                || pod.enter(|| (are_in_force(&of_pod, &options), exist(&options))).expect("enters");
            assert_eq!(is_there(), (Ok(false), Ok(false)));
            pod.enter(|| put_in_force(&of_pod, &options)).expect("enters").expect("in force");
            assert_eq!(is_there(), (Ok(true), Ok(true)));
            pod.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
            assert_eq!(is_there().0, Ok(false), "rules that are gone");
            pod.enter(|| put_in_force(&of_pod, &options)).expect("enters").expect("in force");
            pod.enter(|| remove(&options)).expect("enters").expect("removed");
            assert_eq!(is_there(), (Ok(false), Ok(false)));
            let left = pod
                .sh("{ nft list ruleset | grep -i istio; ip rule | grep 32764; } | wc -l")
                .expect("runs")
                .stdout;
            assert_eq!(left, "0\n", "{backend:?}");
        }
    }

    #[test]
    fn what_istios_agent_has_on_a_node_goes_and_all_else_stays() {
        let in_chain = |variant: &str| {
            let rules = |program: &str, set: &str, source: &str| {
                format!(
                    "{program}-{variant} -t nat -N ISTIO_POSTRT; {program}-{variant} -t nat -I POSTROUTING 1 -j ISTIO_POSTRT; {program}-{variant} -t nat \
                     -A ISTIO_POSTRT -m owner --socket-exists -p tcp -m set --match-set {set} dst -j SNAT --to-source {source}; "
                )
            };
            "ipset create istio-inpod-probes-v4 hash:ip comment; ipset create istio-inpod-probes-v6 hash:ip family inet6 comment; \
             ipset add istio-inpod-probes-v4 10.1.0.2 comment uid; "
                .to_owned()
                + &rules("iptables", "istio-inpod-probes-v4", "169.254.7.127")
                + &rules("ip6tables", "istio-inpod-probes-v6", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff")
        };
        let native = "nft 'table inet istio-ambient-nat { set istio-inpod-probes-v4 { type ipv4_addr; elements = { 10.1.0.2 }; }; chain postrouting \
             { type nat hook postrouting priority 100; meta l4proto tcp skuid 0 ip daddr @istio-inpod-probes-v4 counter snat ip to 169.254.7.127; }; }'";
        let others = "set -e; ipset create theirs hash:ip; iptables-legacy -t nat -A POSTROUTING -p tcp --dport 7 -j MASQUERADE; iptables-nft -t nat -A POSTROUTING \
             -p tcp --dport 7 -j MASQUERADE; ip6tables-nft -t nat -A POSTROUTING -p tcp --dport 7 -j MASQUERADE; ip6tables-legacy -t nat -N THEIRS";
        let of_istio = [in_chain("nft"), in_chain("legacy"), native.to_owned()];
        for script in of_istio {
            let node = pod(Addresses::Dual);
            node.sh(others).expect("runs").ok().expect("rules of other programs");
            let state = || (node.snapshot().expect("reads"), node.sh("ipset save").expect("runs").stdout);
            let before = state();
            let options = options(BackendChoice::Auto);
            let take_over = || node.enter(|| remove_istios_of_node(&options)).expect("enters");
            assert_eq!(take_over(), Ok(false), "Istio left nothing");
            node.sh(&format!("set -e; {script}")).expect("runs").ok().expect("Istio's rules");
            assert!(state() != before, "{script}");

            assert_eq!(take_over(), Ok(true), "{script}");
            assert_eq!(state().0.changes_since(&before.0), [], "{script}");
            assert_eq!(state().1, before.1);
            assert_eq!(take_over(), Ok(false), "it is gone");

            // A machine that is a workload of the mesh itself keeps its redirection.
            node.sh(&format!("set -e; {script}")).expect("runs").ok().expect("Istio's rules");
            node.sh("iptables-nft -t nat -N ISTIO_INBOUND").expect("runs").ok().expect("a chain");
            let state = state();
            assert_eq!(take_over(), Err(HAS_SIDECAR.to_owned()));
            assert_eq!(node.snapshot().expect("reads").changes_since(&state.0), []);
        }
    }

    #[test]
    fn a_namespace_without_ipv6_is_redirected_and_verified() {
        let redirect = AmbientRedirect::new(Families::Both);
        let pod = pod(Addresses::V4);
        let options = options(BackendChoice::Netlink);
        pod.enter(|| put_in_force(&redirect, &options)).expect("enters").expect("in force");
        assert_eq!(pod.enter(|| are_in_force(&redirect, &options)).expect("enters"), Ok(true));
    }

    #[test]
    fn rules_of_a_sidecar_are_neither_replaced_nor_removed() {
        let pod = pod(Addresses::V4);
        let options = options(BackendChoice::Netlink);
        let plan = redirect_core::Redirect::sidecar(Families::V4).build().expect("a redirection").plan();
        pod.enter(|| apply(&plan, &options)).expect("enters").expect("applied");
        let before = pod.state_with_nft().expect("a state");
        let redirect = AmbientRedirect::new(Families::Both);
        let refused = Err(HAS_SIDECAR.to_owned());
        assert_eq!(pod.enter(|| are_in_force(&redirect, &options)).expect("enters"), refused);
        assert_eq!(pod.enter(|| exist(&options)).expect("enters"), Ok(false));
        for done in [
            pod.enter(|| put_in_force(&redirect, &options)).expect("enters"),
            pod.enter(|| remove(&options).map(drop)).expect("enters"),
        ] {
            assert_eq!(done, Err(HAS_SIDECAR.to_owned()));
        }
        let differences = pod.state_with_nft().expect("a state").differences(&before);
        assert!(differences.is_empty(), "{differences:?}");
    }
}
