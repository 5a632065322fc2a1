//! One reading of everything the mesh has, or may have left, in a network namespace.

use crate::{
    ApplyError, ApplyOptions,
    backend::{Handles, restore},
    exec::{ExecError, Programs},
    netlink::NetlinkError,
    pause::deadline,
};
use nix::sched::{CloneFlags, unshare};
use redirect_core::{
    Family, netlink,
    options::Variant,
    rule::Table,
    state::RuleState,
    steps::{Observation, PerFamily},
};
use std::{
    collections::BTreeSet,
    fs, thread,
    time::{Duration, Instant},
};

/// How long to try to see legacy tables and routing at the same generation as nf_tables.
const ONE_GENERATION: Duration = Duration::from_millis(500);

/// What a look has shown, and what a transaction is based on.
#[derive(Debug, Clone, Default)]
pub(crate) struct NamespaceState {
    pub(crate) state: Observation,
    /// nf_tables, where it answers: with the handles of rules.
    pub(crate) nf_tables: Option<netlink::Observed>,
    /// Legacy tables that exist but that nothing installed here can list.
    pub(crate) unreadable: Vec<(Family, String)>,
    /// Whether iptables-nft's programs have listed its tables.
    pub(crate) nft_by_programs: bool,
}

impl NamespaceState {
    /// Checks the calling thread's network namespace. Looking loads and changes nothing.
    pub(crate) fn now(handles: &mut Handles<'_>, deadline: Instant) -> Result<Self, ApplyError> {
        let patient_until = Instant::now() + ONE_GENERATION;
        loop {
            let generation = match &mut handles.netlink {
                Some(connection) => Some(connection.generation()?),
                None => None,
            };
            let seen = Self::once(handles, deadline)?;
            let same = seen.nf_tables.as_ref().is_none_or(|observed| observed.generation() == generation);
            if same || Instant::now() >= patient_until {
                return Ok(seen);
            }
        }
    }

    fn once(handles: &mut Handles<'_>, deadline: Instant) -> Result<Self, ApplyError> {
        let (programs, most) = (handles.programs, handles.most_read);
        let mut unreadable = Vec::new();
        let mut legacy = |family| {
            // Asks the kernel first whether anything needs listing; what cannot be listed is reported elsewhere.
            let tables = legacy_tables(family);
            let hidden = hidden(programs, family, tables.clone())?;
            let is_read = !tables.is_empty() && hidden.is_empty();
            unreadable.extend(hidden);
            if is_read { legacy_saved(programs, family, &tables, most) } else { Ok(RuleState::new()) }
        };
        let legacy = PerFamily { v4: legacy(Family::V4)?, v6: legacy(Family::V6)? };
        let mut state = Observation { legacy, routing: handles.routes.observe()?, ..Observation::default() };
        let nf_tables = match &mut handles.netlink {
            Some(connection) => Some(connection.observe(deadline)?),
            None => None,
        };
        state.native = nf_tables.as_ref().map(|observed| observed.native().clone()).unwrap_or_default();
        let nft_by_programs = match nf_tables.as_ref().filter(|_| handles.nft_in_transaction) {
            Some(observed) => {
                let of = |family| observed.state(family).clone();
                state.nft = PerFamily { v4: of(Family::V4), v6: of(Family::V6) };
                false
            }
            None => {
                let (v4, v6) =
                    (nft_saved(programs, Family::V4, most)?, nft_saved(programs, Family::V6, most)?);
                let all_listed = v4.is_some() && v6.is_some();
                state.nft = PerFamily { v4: v4.unwrap_or_default(), v6: v6.unwrap_or_default() };
                all_listed
            }
        };
        Ok(Self { state, nf_tables, unreadable, nft_by_programs })
    }

    /// What keeps rules in these tables from taking effect: a dormant table.
    pub(crate) fn asleep(&self, is_used: impl Fn(&str) -> bool) -> Option<NetlinkError> {
        let obstacles = self.nf_tables.iter().flat_map(netlink::Observed::obstacles);
        let mut asleep = obstacles
            .filter(|obstacle| matches!(obstacle, netlink::Obstacle::Dormant { table } if is_used(table)));
        asleep.next().map(|obstacle| NetlinkError::Obstacle(obstacle.clone()))
    }
}

/// What the calling thread's network namespace holds, as far as it concerns the mesh, from any program. Changes nothing. Legacy
/// tables that nothing installed here can list are passed over; see [`unreadable_tables`](crate::unreadable_tables).
///
/// # Errors
/// The namespace cannot be inspected.
pub fn observe(options: &ApplyOptions) -> Result<Observation, ApplyError> {
    let mut handles = Handles::open(options)?;
    Ok(NamespaceState::now(&mut handles, deadline(options.patience))?.state)
}

/// What legacy tables hold. If all of them take too much, only those that the mesh uses are read: what fills the others is not ours to judge here.
fn legacy_saved(
    programs: &Programs,
    family: Family,
    tables: &[String],
    most: usize,
) -> Result<RuleState, ApplyError> {
    match restore::save(programs, Variant::Legacy, family, most) {
        Err(ApplyError::Exec(ExecError::TooMuch { .. })) => {
            let used = Table::ALL.iter().map(|table| table.name());
            let used = used.filter(|name| tables.iter().any(|table| table == name));
            restore::save_tables(programs, Variant::Legacy, family, used, most)
        }
        saved => saved,
    }
}

/// What iptables-nft's program lists; `None` without that program.
fn nft_saved(programs: &Programs, family: Family, most: usize) -> Result<Option<RuleState>, ApplyError> {
    match restore::find(programs, Variant::Nft, family, "save") {
        Ok(_) => restore::save(programs, Variant::Nft, family, most).map(Some),
        Err(cause) if cause.is_lasting() => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

/// The legacy tables that this namespace has but nothing installed here can list.
pub(crate) fn unreadable(programs: &Programs) -> Result<Vec<(Family, String)>, ExecError> {
    let mut all = hidden(programs, Family::V4, legacy_tables(Family::V4))?;
    all.extend(hidden(programs, Family::V6, legacy_tables(Family::V6))?);
    Ok(all)
}

/// Those tables of a family that nothing installed here can list: all or none of them.
fn hidden(
    programs: &Programs,
    family: Family,
    tables: Vec<String>,
) -> Result<Vec<(Family, String)>, ExecError> {
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    match restore::find(programs, Variant::Legacy, family, "save") {
        Ok(_) => Ok(Vec::new()),
        Err(cause) if cause.is_lasting() => Ok(tables.into_iter().map(|table| (family, table)).collect()),
        Err(cause) => Err(cause),
    }
}

/// What is known about unreadable tables. Kernels before 5.13 or so give every new namespace the tables whose modules
/// are loaded, so there they mean nothing; on other kernels they have been used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// They were created here, and may hold rules of the mesh.
    MadeHere,
    /// A new namespace has them as well.
    Everywhere,
    /// A namespace to compare with cannot be made.
    Unknown,
}

/// Finds out about unreadable tables by looking at what a new namespace has.
pub(crate) fn judge_unreadable(tables: &[(Family, String)]) -> Unreadable {
    let look = || {
        unshare(CloneFlags::CLONE_NEWNET).ok()?;
        let names = |family| legacy_tables(family).into_iter().map(move |table| (family, table));
        Some(Family::BOTH.into_iter().flat_map(names).collect::<BTreeSet<_>>())
    };
    // The namespace goes with the thread.
    let looked = thread::scope(|scope| {
        let spawned = thread::Builder::new().spawn_scoped(scope, look).ok()?;
        spawned.join().ok()?
    });
    match looked {
        None => Unreadable::Unknown,
        Some(everywhere) if tables.iter().all(|table| everywhere.contains(table)) => Unreadable::Everywhere,
        Some(_) => Unreadable::MadeHere,
    }
}

/// The tables of the legacy variant that this namespace has (ip_tables_names); reading this creates none.
pub(crate) fn legacy_tables(family: Family) -> Vec<String> {
    let file = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    fs::read_to_string(file).map(|text| text.lines().map(str::to_owned).collect()).unwrap_or_default()
}
