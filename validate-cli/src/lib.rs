//! Proves by traffic, without any privilege, that a pod is redirected to its sidecar proxy.
//!
//! For a moment the process takes the proxy's place: it listens on the proxy's ports on the loopback address, sends
//! packets along every path that the plan decides about and that its user's packets can take, and looks where they
//! arrive. Each carries a token that no other process knows. What to expect of each path is worked out from the plan's own
//! rules, so the validation follows every setting.
//!
//! Everything acts on the network namespace of the calling thread. Nothing is left behind: the kernel closes the
//! listeners with the process, whatever ends it.

mod address;
mod engine;
mod judge;
mod policy;
mod probes;
mod reason;
mod report;
mod run;
mod sandbox;
mod sockets;
mod stop;
mod verdict;
mod walk;

use engine::{ProbeObservation, Tokens};
use judge::TrackingKnowledge;
use nix::{
    errno::Errno,
    unistd::{Gid, Uid, getegid, geteuid, setfsgid, setfsuid},
};
use probes::{Aims, Probe};
use redirect_core::{Family, Redirect, values::is_routable};
use settings_cli::ValidationOptions;
use std::{
    fs,
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};
use stop::{Interrupted, Stop};

pub use reason::Reason;
pub use report::report;
pub use run::{NoVerdict, needed, run};
pub use verdict::{Path, PathCheck, Unproven, ValidationReport};
pub use walk::ProcessIdentity;

/// How long a round waits for what does not come.
const ROUND: Duration = Duration::from_millis(200);
/// The pause behind the first round that failed. Each is twice as long as the one before, up to [`LONGEST_PAUSE`].
///
/// No event can replace this: the kernel reports rules only to privileged processes.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// What is to be proven.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValidationRequest<'a> {
    /// The redirection that should be in force.
    redirect: &'a Redirect,
    /// The addresses of the pod's interfaces, in the kernel's order.
    addresses: &'a [IpAddr],
    /// The probe's port, and how long it may take.
    validation: ValidationOptions,
    /// Whether the rules are native nftables: they show less of TPROXY.
    native_nftables: bool,
    /// Whose packets are sent. Those of another user than the process's own need CAP_SETUID and CAP_SETGID.
    who: ProcessIdentity,
    /// When the run began.
    start: Instant,
    /// When it ends at the latest.
    deadline: Instant,
    /// Signals that end it sooner.
    stop: Option<&'a Stop>,
}

impl ValidationRequest<'_> {
    /// The families that are redirected and that the pod has an address of, each with its first.
    fn families(&self) -> Vec<(Family, IpAddr)> {
        self.redirect.families().iter().filter_map(|family| Some((family, self.own(family)?))).collect()
    }

    /// The pod's first address of a family.
    fn own(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|a| Family::of(a) == family && is_routable(a))
    }

    /// The families that the pod has an address of and that the settings leave alone.
    fn left_alone(&self) -> impl Iterator<Item = Unproven> {
        let why = "the pod has an address, but the settings do not capture this family: all its traffic bypasses the \
                   proxy (see ISTIO_DUAL_STACK)";
        let planned = |family: &Family| self.redirect.families().contains(*family);
        let families =
            Family::BOTH.into_iter().filter(move |family| !planned(family) && self.own(*family).is_some());
        families.map(move |family| Unproven { family, path: Path::Outbound, why })
    }
}

impl ProcessIdentity {
    /// The user and group of this process, as netfilter sees it.
    #[must_use]
    pub fn own() -> Self {
        Self { uid: geteuid().as_raw(), gid: getegid().as_raw() }
    }

    /// Whose packets are sent: this process's, or the proxy's when this is root, who is neither proxy nor application.
    fn of_sender(redirect: &Redirect) -> Self {
        let own = Self::own();
        match (redirect.proxy_uids(), redirect.proxy_gids()) {
            ([uid, ..], [gid, ..]) if own.uid == 0 => Self { uid: *uid, gid: *gid },
            _ => own,
        }
    }

    /// Makes the calling thread's new sockets belong to this user and group; false where that is not permitted.
    fn assume(self) -> bool {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        // Each call answers what held before it: the second shows whether the first was obeyed. The user last, since
        // who is not root may not choose a group.
        setfsgid(gid);
        let group = setfsgid(gid) == gid;
        setfsuid(uid);
        group && setfsuid(uid) == uid
    }
}

/// Proves it, or reports the failures. Returns as soon as all is proven within one round; otherwise tries again until
/// the time is up, since rules may still come.
///
/// On a thread of the user whose packets are wanted: netfilter checks the user of the thread that made the socket.
fn prove(request: &ValidationRequest<'_>) -> ValidationReport {
    let own = ValidationRequest { who: ProcessIdentity::own(), ..*request };
    if request.who == own.who {
        return prove_as_ourselves(request);
    }
    thread::scope(|scope| {
        let acting = thread::Builder::new()
            .spawn_scoped(scope, || prove_as_ourselves(if request.who.assume() { request } else { &own }));
        let verdict = acting.ok().and_then(|acting| acting.join().ok());
        verdict.unwrap_or_else(|| ValidationReport::new(Reason::NothingProven, own.who))
    })
}

fn prove_as_ourselves(request: &ValidationRequest<'_>) -> ValidationReport {
    let ValidationRequest { start, deadline, stop, .. } = *request;
    let mut verdict = ValidationReport::new(Reason::NothingProven, request.who);
    let mut pause = FIRST_PAUSE;
    loop {
        verdict.rounds = verdict.rounds.saturating_add(1);
        // The last round also asks why.
        let last = deadline.saturating_duration_since(Instant::now()) <= ROUND;
        let retries = attempt(request, last, &mut verdict).and_then(|()| {
            let room = deadline.saturating_duration_since(Instant::now()).saturating_sub(ROUND);
            if verdict.is_redirected() || last {
                return Ok(false);
            }
            stop::wait(Vec::new(), pause.min(room), stop).map(|_| true)
        });
        match retries {
            Ok(true) => {
                pause = (pause * 2).min(LONGEST_PAUSE);
                continue;
            }
            Ok(false) => {}
            Err(Interrupted) => verdict.reason = Reason::Interrupted,
        }
        verdict.elapsed = start.elapsed();
        return verdict;
    }
}

/// One round, with what it found.
fn attempt(
    request: &ValidationRequest<'_>,
    curious: bool,
    verdict: &mut ValidationReport,
) -> Result<(), Interrupted> {
    let families = request.families();
    let tracked_before = tracked();
    let aims = Aims::take(request, &families);
    let Aims { stand_ins, mut probes, mut checks, mut unproven, busy, curious: more } = aims;
    let asked = probes.len();
    if curious {
        probes.extend(more);
    }
    let shots: Vec<_> = probes.iter().map(|probe| probe.shot).collect();
    let seen = match Tokens::open() {
        Ok(mut tokens) => engine::round(&shots, &stand_ins, ROUND, &mut tokens, request.stop)?,
        Err(error) => {
            let error = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
            vec![ProbeObservation::NotSent(error); shots.len()]
        }
    };
    for (probe, seen) in probes.iter().zip(&seen).take(asked) {
        match judge::judge(probe, *seen, &busy) {
            Ok(check) => checks.push(check),
            Err(nothing) => unproven.push(nothing),
        }
    }
    unproven.extend(request.left_alone());
    // The proxy's own call came back: the rules take its user for the application's.
    let mistaken = seen.iter().skip(asked).any(|seen| matches!(seen, ProbeObservation::Arrived { .. }));
    checks.extend(policy::check(request, families.iter().map(|(family, _)| *family)));
    checks.sort_by_key(|check| (check.family, check.path));
    let tracked = TrackingKnowledge {
        any: tracked() > tracked_before,
        families: tracked_families(request, &probes, &seen),
    };
    verdict.reason = judge::conclude(&mut checks, mistaken, tracked);
    (verdict.checks, verdict.unproven) = (checks, unproven);
    Ok(())
}

/// The families whose connections are tracked: of those the kernel can say where they were meant to go. Native tables serve both
/// families, so there it proves nothing about one.
fn tracked_families(
    request: &ValidationRequest<'_>,
    probes: &[Probe],
    seen: &[ProbeObservation],
) -> [bool; 2] {
    Family::BOTH.map(|family| {
        let known = |(probe, seen): (&Probe, &ProbeObservation)| {
            probe.family == family && matches!(seen, ProbeObservation::Arrived { original: Some(_), .. })
        };
        !request.native_nftables && probes.iter().zip(seen).any(known)
    })
}

/// How many connections the namespace's connection tracking knows. It is at work only where rules need it.
fn tracked() -> u32 {
    let text = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}
