//! The node's table for ambient mode, in the calling thread's network namespace, which must be the node's: the addresses of pods whose probes pods'
//! rules let through. [`ProbeTable`] has its form.

use crate::{
    netlink::{NetlinkError, NftConnection},
    system_error::SystemError,
};
use netfilter_state::netlink::{ProbeTable, Question};
use nix::errno::Errno;
use redirect_core::ambient::ProbeSources;
use std::{collections::BTreeSet, net::IpAddr};

/// The ipsets in which Istio's agent has the addresses of probes.
const ISTIO_NODE_SETS: [&str; 2] = ["istio-inpod-probes-v4", "istio-inpod-probes-v6"];
/// How often the table is read again if it changes while it is read.
const TRIES: usize = 20;

impl NftConnection {
    /// Makes these addresses, and no others, those of probes, which get these sources. Returns whether that changed anything. A killed call leaves the table as it was, or as
    /// wanted.
    ///
    /// # Errors
    /// The kernel refuses, or another program keeps changing the table. Nothing was changed then.
    ///
    /// ```no_run
    /// use netns_apply::netlink::NftConnection;
    /// use redirect_core::ambient::ProbeSources;
    /// use std::collections::BTreeSet;
    ///
    /// let pod = "10.1.0.2".parse()?;
    /// NftConnection::open()?.set_probe_addresses(&BTreeSet::from([pod]), ProbeSources::USUAL)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_probe_addresses(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        sources: ProbeSources,
    ) -> Result<bool, NetlinkError> {
        if read(self, sources)?.is_for(addresses) {
            return Ok(false);
        }
        let replace = |sequence| ProbeTable::replace(sequence, addresses, sources);
        self.transact("change the addresses of probes", replace)?;
        // It is read back: what another agent wrote at the same moment must not count as ours.
        if read(self, sources)?.is_for(addresses) { Ok(true) } else { Err(NetlinkError::Changed) }
    }

    /// Reads the table, which is to give probes these sources.
    ///
    /// # Errors
    /// The kernel refuses, or another program keeps changing it.
    pub fn probe_addresses(&mut self, sources: ProbeSources) -> Result<ProbeTable, NetlinkError> {
        read(self, sources)
    }

    /// Removes the table. Returns whether it existed.
    ///
    /// # Errors
    /// The kernel refuses. Nothing was changed then.
    pub fn remove_probe_addresses(&mut self) -> Result<bool, NetlinkError> {
        let exists = read(self, ProbeSources::USUAL)?.exists();
        if exists {
            self.transact("remove the addresses of probes", ProbeTable::remove)?;
        }
        Ok(exists)
    }

    /// Destroys the ipsets in which Istio's agent keeps the addresses of probes. Returns whether any existed.
    ///
    /// # Errors
    /// The kernel refuses, as it does while rules look something up in them.
    pub fn destroy_probe_ipsets(&mut self) -> Result<bool, NetlinkError> {
        let mut had_any = false;
        for name in ISTIO_NODE_SETS {
            let destroy = |sequence| ProbeTable::destroy_ipset(sequence, name);
            match self.transact("destroy Istio's ipset for probes", destroy) {
                // It has none, or the kernel has not loaded ipset.
                Err(NetlinkError::Question {
                    cause: SystemError(Errno::ENOENT | Errno::EINVAL | Errno::EOPNOTSUPP),
                    ..
                }) => {}
                destroyed => {
                    destroyed?;
                    had_any = true;
                }
            }
        }
        Ok(had_any)
    }
}

/// Other programs may change other tables all the time; then two readings alike are enough.
fn read(connection: &mut NftConnection, sources: ProbeSources) -> Result<ProbeTable, NetlinkError> {
    let mut earlier = None;
    for _ in 0..TRIES {
        let (table, is_of_one_generation) = read_once(connection, sources)?;
        if is_of_one_generation || earlier.as_ref() == Some(&table) {
            return Ok(table);
        }
        earlier = Some(table);
    }
    Err(NetlinkError::Contended)
}

/// The table, and whether nothing changed while it was read.
fn read_once(
    connection: &mut NftConnection,
    sources: ProbeSources,
) -> Result<(ProbeTable, bool), NetlinkError> {
    const WHAT: &str = "list the addresses of probes";
    let mut table = ProbeTable::new(sources);
    let generation = connection.generation()?;
    let mut is_whole = connection.ask(WHAT, Question::Tables, |message| table.take(message))?;
    if table.exists() {
        for question in ProbeTable::QUESTIONS {
            is_whole &= connection.ask(WHAT, question, |message| table.take(message))?;
        }
    }
    let is_of_one_generation = is_whole && connection.generation()? == generation;
    Ok((table, is_of_one_generation))
}
