//! Everything that hangs on the namespace's hooks, whoever made it.

use super::{Connection, NetlinkError};
use redirect_core::{interference::ruleset::Ruleset, netlink::request};
use std::time::Instant;

impl Connection {
    /// Reads all tables of all families that IP packets meet, at one generation of the ruleset.
    ///
    /// # Errors
    /// As [`observe`](Self::observe).
    pub fn ruleset(&mut self, deadline: Instant) -> Result<Ruleset, NetlinkError> {
        loop {
            let generation = self.generation()?;
            let mut ruleset = Ruleset::default();
            let whole = self.ruleset_into(&mut ruleset)?;
            if whole && self.generation()? == generation {
                return Ok(ruleset);
            }
            if Instant::now() >= deadline {
                return Err(NetlinkError::Contended);
            }
        }
    }

    fn ruleset_into(&mut self, ruleset: &mut Ruleset) -> Result<bool, NetlinkError> {
        let mut whole = self.ask("list tables", request::tables, |message| ruleset.take(message))?;
        if ruleset.tables.is_empty() {
            return Ok(whole);
        }
        whole &= self.ask("list chains", request::all_chains, |message| ruleset.take(message))?;
        whole &= self.ask("list rules", request::all_rules, |message| ruleset.take(message))?;
        Ok(whole)
    }
}
