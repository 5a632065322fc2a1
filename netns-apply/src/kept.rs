//! Connections that go on past ztunnel when their pod is enrolled, in the calling thread's network namespace, which must be the pod's.
//! [`KeptTable`] has the form of the table.
//!
//! [`begin`] comes before the rules, and [`settle`] after them. In between, what opens a connection is noted by the kernel itself, so none is lost between
//! the list of sockets and the rules.

use crate::{
    connections::{self, CloseError},
    netlink::{Connection, NetlinkError},
};
use netfilter_state::netlink::{Question, kept::KeptTable};
use std::time::Duration;

/// Why connections cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// They cannot be listed.
    #[error(transparent)]
    Sockets(#[from] CloseError),
    /// The kernel refuses the table.
    #[error(transparent)]
    Table(#[from] NetlinkError),
}

/// Keeps the TCP connections that are open, and those that are opened from now on until [`settle`], for this time; returns how many are open.
/// Without any, nothing is made. The table of an earlier call is replaced.
///
/// # Errors
/// Why they cannot be kept. A part of the table may be there: [`remove`] it.
pub fn begin(keep: Duration) -> Result<usize, KeepError> {
    let open = connections::kept_when_enrolled()?;
    if open.is_empty() {
        remove()?;
        return Ok(0);
    }
    let mut connection = Connection::open()?;
    connection.transact("keep connections", |sequence| KeptTable::make(sequence, &open, keep))?;
    // Those that were opened since the first list.
    let open = connections::kept_when_enrolled()?;
    connection.transact("keep connections", |sequence| KeptTable::add(sequence, &open))?;
    connections::forget(&open)?;
    Ok(open.len())
}

/// From now on no connection is added: what is opened is captured.
///
/// # Errors
/// The kernel refuses.
pub fn settle() -> Result<(), NetlinkError> {
    Connection::open()?.transact("end adding connections that are kept", KeptTable::settle)
}

/// Reads the table.
///
/// # Errors
/// The kernel refuses.
pub fn observe() -> Result<KeptTable, NetlinkError> {
    const WHAT: &str = "list connections that are kept";
    let mut connection = Connection::open()?;
    let mut table = KeptTable::default();
    connection.ask(WHAT, Question::Tables, |message| table.take(message))?;
    if table.exists() {
        for question in KeptTable::QUESTIONS {
            // One of another form may lack a set.
            connection.ask(WHAT, question, |message| table.take(message))?;
        }
    }
    Ok(table)
}

/// Removes the table, if it exists: all is captured from then on where a plan is in force.
///
/// # Errors
/// The kernel refuses.
pub fn remove() -> Result<(), NetlinkError> {
    if observe()?.exists() {
        remove_with(&mut Connection::open()?)?;
    }
    Ok(())
}

/// Removes the table.
pub(crate) fn remove_with(connection: &mut Connection) -> Result<(), NetlinkError> {
    connection.transact("end keeping connections", KeptTable::remove)
}
