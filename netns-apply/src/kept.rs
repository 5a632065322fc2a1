//! Connections that go on past ztunnel when their pod is enrolled, in the calling thread's network namespace, which must be the pod's.
//! [`KeptTable`] has the form of the table.
//!
//! [`NftConnection::keep_connections`] comes before the rules, and [`NftConnection::settle_kept`] after them. In between, what opens a connection is noted by the kernel itself, so none is lost between
//! the list of sockets and the rules.

use crate::{
    connections::{self, CloseError},
    netlink::{NetlinkError, NftConnection},
};
use netfilter_state::netlink::{Question, kept::KeptTable};
use std::time::Duration;

impl NftConnection {
    /// Keeps the TCP connections that are open, and those that are opened from now on until [`settle_kept`](Self::settle_kept), for this time; returns how many are open.
    /// Without any, nothing is made. The table of an earlier call is replaced.
    ///
    /// # Errors
    /// Why they cannot be kept. A part of the table may be there: [end it](Self::end_keeping).
    pub fn keep_connections(&mut self, keep: Duration) -> Result<usize, CloseError> {
        let open = connections::kept_when_enrolled()?;
        if open.is_empty() {
            self.end_keeping()?;
            return Ok(0);
        }
        self.transact("keep connections", |sequence| KeptTable::make(sequence, &open, keep))?;
        // Those that were opened since the first list.
        let open = connections::kept_when_enrolled()?;
        self.transact("keep connections", |sequence| KeptTable::add(sequence, &open))?;
        connections::forget(&open)?;
        Ok(open.len())
    }

    /// From now on no connection is added: what is opened is captured.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn settle_kept(&mut self) -> Result<(), NetlinkError> {
        self.transact("end adding connections that are kept", KeptTable::settle)
    }

    /// Reads the table.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kept_connections(&mut self) -> Result<KeptTable, NetlinkError> {
        const WHAT: &str = "list connections that are kept";
        let mut table = KeptTable::default();
        self.ask(WHAT, Question::Tables, |message| table.take(message))?;
        if table.exists() {
            for question in KeptTable::QUESTIONS {
                // One of another form may lack a set.
                self.ask(WHAT, question, |message| table.take(message))?;
            }
        }
        Ok(table)
    }

    /// Removes the table, if it exists: all is captured from then on where a plan is in force.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn end_keeping(&mut self) -> Result<(), NetlinkError> {
        if self.kept_connections()?.exists() {
            self.remove_kept()?;
        }
        Ok(())
    }

    /// Removes the table.
    pub(crate) fn remove_kept(&mut self) -> Result<(), NetlinkError> {
        self.transact("end keeping connections", KeptTable::remove)
    }
}
