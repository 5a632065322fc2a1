//! The agent, killed at one call into the kernel after the other while it enrols pods.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use super::super::{ENROLLED, has_rules, label};
use super::{Mesh, PORT, Planned, Running};
use e2e::agent::Agent;
use e2e::pods::metric;

/// Where enrolment acts: it enters network namespaces, talks to the kernel and to ztunnel, and writes annotations. At how many of the calls of a thread the
/// agent is killed: each, or every third.
const CALLS: [(&str, usize); 4] = [("setns", 1), ("sendto", 3), ("sendmsg", 1), ("writev", 1)];
/// More calls than a thread makes while it enrols two pods.
const MOST_CALLS: usize = 1000;
/// How long the next agent may take, from its readiness.
const REPAIRED: Duration = Duration::from_secs(5);

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn an_agent_killed_at_any_call_leaves_no_pod_half_enrolled_under_native_rules() {
    killed_at_any_call(true);
}

#[test]
#[ignore = "needs a ztunnel: make ztunnel"]
fn an_agent_killed_at_any_call_leaves_no_pod_half_enrolled_under_rules_of_iptables() {
    killed_at_any_call(false);
}

#[allow(clippy::print_stderr, reason = "figures")]
fn killed_at_any_call(is_native: bool) {
    let mesh = Mesh::new(is_native);
    let pods = [Planned::web(), Planned::db()].map(|pod| mesh.running(pod));
    let ztunnel = mesh.ztunnel();
    let served = || ztunnel.served().expect("ztunnel answers");
    let mut slowest = Duration::ZERO;
    for (call, step) in CALLS {
        let mut deaths = 0;
        for number in (1..=MOST_CALLS).step_by(step) {
            label(&mesh.world, "=ambient");
            let mut agent = start_to_be_killed(&mesh, call, number);
            let survived = survives(&mesh, &mut agent);
            drop(agent);
            // What the annotation says is so, whenever that is.
            let (served_then, probes) = (served(), mesh.world.probes());
            for pod in &pods {
                if mesh.world.annotation(&pod.planned.name).as_deref() == Some("enabled") {
                    let state =
                        (has_rules(&pod.namespace), served_then.contains(&pod.uid), has_probes(&probes, pod));
                    assert_eq!(state, (true, true, true), "{call} {number}: {}", pod.planned.name);
                }
            }
            let next = mesh.world.start();
            let ready = Instant::now();
            mesh.world.wait_enrolled(2.0);
            slowest = slowest.max(ready.elapsed());
            assert_eq!(served(), pods.iter().map(|pod| pod.uid.clone()).collect::<BTreeSet<_>>());
            let target = SocketAddr::new(pods[1].planned.addresses[number % 2], PORT);
            let since = mesh.accesses().len();
            assert_eq!(pods[0].client().tcp(target).expect("runs").server(), Some("db"), "{call} {number}");
            mesh.wait_access(since, "a connection by HBONE", |access| {
                access.direction == "outbound" && access.target_identity == pods[1].planned.identity()
            });

            label(&mesh.world, "-");
            mesh.world.wait_enrolled(0.0);
            mesh.wait("pods to leave", || {
                served().is_empty() && pods.iter().all(|pod| !has_rules(&pod.namespace))
            });
            assert_eq!(next.end(), Some(0));
            if survived {
                break;
            }
            deaths += 1;
        }
        eprintln!("killed at {deaths} calls of {call}");
        assert!(deaths > 0, "it never was killed at {call}");
    }
    eprintln!("the next agent had enrolled both after {slowest:?} at most");
    assert!(slowest < REPAIRED, "{slowest:?}");
}

/// One whose threads are each killed at their call of this number, and all others with it.
fn start_to_be_killed<'m>(mesh: &'m Mesh, call: &str, number: usize) -> Agent<'m> {
    let tampering = format!("inject={call}:signal=KILL:when={number}");
    // With -D it is the agent whom the test started.
    let strace =
        ["strace", "-D", "-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &tampering];
    mesh.world.node.start_as(&strace)
}

/// Whether it lives until both pods are enrolled.
fn survives(mesh: &Mesh, agent: &mut Agent<'_>) -> bool {
    let start = Instant::now();
    while !agent.has_ended() {
        if metric(&mesh.world.node, ENROLLED) == Some(2.0) {
            return true;
        }
        assert!(
            start.elapsed() < test_support::process::SHORT,
            "neither killed nor done\n{}",
            mesh.world.node.log()
        );
        thread::sleep(Duration::from_millis(20));
    }
    false
}

fn has_probes(probes: &[IpAddr], pod: &Running) -> bool {
    pod.planned.addresses.iter().all(|address| probes.contains(address))
}
