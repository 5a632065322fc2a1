//! Everything that hangs on the namespace's hooks, whoever made it.

use super::{Connection, DUMP_ATTEMPTS, NetlinkError};
use redirect_core::{interference::ruleset::Ruleset, netlink::request};

impl Connection {
    /// Reads all tables of all families that IP packets meet, at one generation of the ruleset.
    ///
    /// # Errors
    /// As [`observe`](Self::observe).
    pub fn ruleset(&mut self) -> Result<Ruleset, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            let generation = self.generation()?;
            let mut ruleset = Ruleset::default();
            let whole = self.ruleset_into(&mut ruleset)?;
            if whole && self.generation()? == generation {
                return Ok(ruleset);
            }
        }
        Err(NetlinkError::Contended)
    }

    fn ruleset_into(&mut self, ruleset: &mut Ruleset) -> Result<bool, NetlinkError> {
        let question = request::tables(self.next_sequence());
        let mut whole = self.ask(&question, "list tables", |message| ruleset.take(message))?;
        if ruleset.tables.is_empty() {
            return Ok(whole);
        }
        let question = request::all_chains(self.next_sequence());
        whole &= self.ask(&question, "list chains", |message| ruleset.take(message))?;
        let question = request::all_rules(self.next_sequence());
        whole &= self.ask(&question, "list rules", |message| ruleset.take(message))?;
        Ok(whole)
    }
}
