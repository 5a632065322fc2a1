//! One reading of everything the mesh has, or may have left, in a network namespace.

use crate::{
    ApplyError,
    exec::Programs,
    handles::{Handles, Surroundings},
    legacy,
    netlink::{NetlinkError, NftConnection},
};
use netfilter_state::{
    netlink,
    state::{IptablesTables, PerFamily},
    steps::Observation,
};
use redirect_core::{Family, options::Variant};
use std::time::{Duration, Instant};

/// How long to try to see legacy tables and routing at the same generation as nf_tables.
const ONE_GENERATION: Duration = Duration::from_millis(500);

/// What a look has shown, and what a transaction is based on.
#[derive(Default)]
pub(crate) struct NamespaceState {
    pub(crate) state: Observation,
    /// Where it could be read, all that routes packets here.
    pub(crate) surroundings: Option<Surroundings>,
    /// nf_tables, where it answers: with the handles of rules.
    pub(crate) nf_tables: Option<netlink::Observed>,
    /// Whether iptables-nft's programs have listed its tables.
    pub(crate) nft_by_programs: bool,
}

impl NamespaceState {
    /// Whether it has a table of connections that are kept ([`kept`](crate::kept)).
    pub(crate) fn keeps_connections(&self) -> bool {
        self.nf_tables.as_ref().is_some_and(netlink::Observed::keeps_connections)
    }

    /// Checks the calling thread's network namespace. Looking loads and changes nothing.
    pub(crate) fn now(handles: &mut Handles<'_>, deadline: Instant) -> Result<Self, ApplyError> {
        let patient_until = Instant::now() + ONE_GENERATION;
        loop {
            let generation = handles.generation()?;
            let seen = Self::once(handles, generation, deadline)?;
            let same = seen.nf_tables.as_ref().is_none_or(|observed| observed.generation() == generation);
            if same || Instant::now() >= patient_until {
                return Ok(seen);
            }
        }
    }

    fn once(
        handles: &mut Handles<'_>,
        generation: Option<u32>,
        deadline: Instant,
    ) -> Result<Self, ApplyError> {
        let (programs, most) = (handles.programs, handles.most_read);
        let legacy = PerFamily {
            v4: legacy::state(programs, Family::V4, most)?,
            v6: legacy::state(programs, Family::V6, most)?,
        };
        let (routing, surroundings) = handles.observe_routing()?;
        let mut state = Observation { legacy, routing, ..Observation::default() };
        let observe = |connection: &mut NftConnection| connection.observe_at(generation, deadline);
        let observed = handles.netlink.as_mut().map(observe);
        let nf_tables = observed.transpose()?;
        state.native = nf_tables.as_ref().map(|observed| observed.native().clone()).unwrap_or_default();
        let nft_by_programs = match nf_tables.as_ref().filter(|_| handles.nft_in_transaction) {
            Some(observed) => {
                state.nft = PerFamily::each(|family| observed.state(family).clone());
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
        Ok(Self { state, surroundings, nf_tables, nft_by_programs })
    }

    /// What keeps rules in these tables from taking effect: a dormant table.
    pub(crate) fn asleep(&self, is_used: impl Fn(&str) -> bool) -> Option<NetlinkError> {
        let obstacles = self.nf_tables.iter().flat_map(netlink::Observed::obstacles);
        let mut asleep = obstacles.filter(
            |obstacle| matches!(obstacle, netlink::TableObstacle::Dormant { table } if is_used(table)),
        );
        asleep.next().map(|obstacle| NetlinkError::Obstacle(obstacle.clone()))
    }
}

/// What iptables-nft's program lists; `None` without that program.
fn nft_saved(programs: &Programs, family: Family, most: usize) -> Result<Option<IptablesTables>, ApplyError> {
    let nft = programs.iptables(Variant::Nft, family);
    match nft.find("save") {
        Ok(_) => nft.save(most).map(Some),
        Err(cause) if cause.is_lasting() => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}
