//! The socket: questions with their answers, transactions with their one answer.

#![allow(clippy::wildcard_enum_match_arm)] // error numbers are many, and may grow

mod ruleset;

use super::{Missing, NetlinkError};
use crate::{
    socket::{Ended, NetlinkSocket, code},
    system_error::SystemError,
};
use netfilter_state::{
    netlink::{
        AnswerEnd, Batch, BatchError, Extension, FinishedBatch, Message, MessagePart, Messages, Observed,
        Question, TableObstacle,
    },
    ruleset::TableFamily::Inet,
    steps::Transaction,
};
use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use redirect_core::{Family, RulePlan, rule::Table};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// How long to try to read the rules at one generation. If another program changes them faster than they can be read, they are
/// read without one.
const ONE_GENERATION: Duration = Duration::from_millis(500);

/// A socket that talks about nf_tables in the network namespace it was opened in.
#[derive(Debug)]
pub struct NftConnection {
    socket: NetlinkSocket,
    /// Limit on the bytes of a reading, and the bytes read so far.
    most: usize,
    read: usize,
}

/// An error of the socket, while doing something.
fn failed(what: &'static str) -> impl Fn(Errno) -> NetlinkError {
    move |cause| NetlinkError::Socket { what, cause: SystemError(cause) }
}

/// The kernel's refusal to do something.
fn refused(what: &'static str, answer: AnswerEnd) -> NetlinkError {
    match code(&answer) {
        Errno::EPERM => NetlinkError::NotPermitted,
        cause => NetlinkError::Question { what, cause: SystemError(cause), text: answer.text },
    }
}

fn socket() -> Result<NetlinkSocket, NetlinkError> {
    NetlinkSocket::open(NETLINK_NETFILTER).map_err(|cause| match cause {
        Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => NetlinkError::NoNfTables,
        cause => failed("open a socket")(cause),
    })
}

impl NftConnection {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no netlink for netfilter at all.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self { socket: socket()?, most: usize::MAX, read: 0 })
    }

    /// Limits every later reading to this many bytes: a hostile program may add rules to exhaust our memory. A reading that
    /// is taken again, because something changed concurrently, may read as much again.
    pub const fn limit(&mut self, bytes: usize) {
        (self.most, self.read) = (bytes, 0);
    }

    /// Whether the kernel has nf_tables and we may use it.
    ///
    /// # Errors
    /// [`NetlinkError::NoNfTables`] or [`NetlinkError::NotPermitted`].
    pub fn probe(&mut self) -> Result<(), NetlinkError> {
        self.generation().map(drop)
    }

    /// Reads the rules that are in force, native tables included, at one generation of the ruleset. Reading changes nothing.
    ///
    /// If other programs change rules faster than they can be read, the rules count as read once two readings in a row show the
    /// same of everything that a change may touch; the observation is then bound to no generation.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or other programs keep changing the mesh's own rules until the deadline.
    pub fn observe(&mut self, deadline: Instant) -> Result<Observed, NetlinkError> {
        self.observe_at(None, deadline)
    }

    /// The same, where the present generation has just been read.
    pub(crate) fn observe_at(
        &mut self,
        mut present: Option<u32>,
        deadline: Instant,
    ) -> Result<Observed, NetlinkError> {
        let patient_until = Instant::now() + ONE_GENERATION;
        let mut earlier: Option<Observed> = None;
        loop {
            self.read = 0;
            let generation = present.take().map_or_else(|| self.generation(), Ok)?;
            let mut observed = Observed::at(generation);
            let whole = self.observe_into(&mut observed)?;
            if whole && self.generation()? == generation {
                return Ok(observed);
            }
            let now = Instant::now();
            if now >= patient_until && earlier.is_some_and(|earlier| earlier.reads_like(&observed)) {
                return Ok(observed.of_any_generation());
            }
            if now >= deadline {
                return Err(NetlinkError::Contended);
            }
            earlier = Some(observed);
        }
    }

    /// Puts a transaction in force that was derived from `observed`. If another program has changed other rules since,
    /// it is sent again until the deadline.
    ///
    /// # Errors
    /// Why it could not be put in force; then nothing was changed, unless the answer was lost ([`NetlinkError::Socket`]). [`NetlinkError::Changed`] means: observe and derive it again. After
    /// the deadline, the error is [`NetlinkError::Contended`].
    pub fn commit(
        &mut self,
        transaction: &Transaction,
        observed: &Observed,
        deadline: Instant,
    ) -> Result<(), NetlinkError> {
        self.commit_and_tell(transaction, observed, deadline).map(drop)
    }

    /// The same. Returns the transaction's messages if no program had any table: then they say everything that is there now.
    pub(crate) fn commit_and_tell(
        &mut self,
        transaction: &Transaction,
        observed: &Observed,
        deadline: Instant,
    ) -> Result<Option<Vec<u8>>, NetlinkError> {
        let mut newer: Option<Observed> = None;
        loop {
            match self.send_once(transaction, newer.as_ref().unwrap_or(observed)) {
                Err(NetlinkError::Contended) if Instant::now() < deadline => {}
                result => return result,
            }
            let now = self.observe(deadline)?;
            if !now.reads_like(observed) {
                return Err(NetlinkError::Changed);
            }
            newer = Some(now);
        }
    }

    /// Which of these matches and targets the kernel lacks. The kernel loads modules for them that it has not loaded yet;
    /// nothing else changes.
    ///
    /// # Errors
    /// The socket failed.
    pub fn missing(
        &mut self,
        needs: impl IntoIterator<Item = (Family, Extension)>,
    ) -> Result<Vec<Missing>, NetlinkError> {
        const WHAT: &str = "find an extension";
        let needs: BTreeSet<(Family, Extension)> = needs.into_iter().collect();
        let (mut questions, mut asked) = (Vec::new(), BTreeMap::new());
        for (family, extension) in needs {
            let sequence = self.socket.next_sequence();
            questions.extend(Question::Extension(family, extension).message(sequence));
            asked.insert(sequence, Missing { family, extension });
        }
        let mut missing = Vec::new();
        if !asked.is_empty() {
            self.socket.send(&questions).map_err(failed(WHAT))?;
        }
        let deadline = NetlinkSocket::deadline();
        while !asked.is_empty() {
            let messages = self.socket.receive(deadline).map_err(failed(WHAT))?;
            for answer in messages.filter_map(|message| message.answer()) {
                match (asked.remove(&answer.sequence), code(&answer)) {
                    (_, Errno::EPERM) => return Err(NetlinkError::NotPermitted),
                    (Some(one), _) if answer.code != 0 => missing.push(one),
                    (Some(_) | None, _) => {}
                }
            }
        }
        Ok(missing)
    }

    /// The matches and targets that a plan needs in the tables of iptables and that the kernel lacks.
    ///
    /// # Errors
    /// The socket failed.
    pub fn missing_for(&mut self, plan: &RulePlan) -> Result<Vec<Missing>, NetlinkError> {
        let mut needs = BTreeSet::new();
        for family in plan.families() {
            let planned = plan.planned_rules().iter().filter(|planned| planned.scope().covers(*family));
            let extensions = planned.flat_map(|planned| Extension::of_rule(planned.rule()));
            needs.extend(extensions.map(|extension| (*family, extension)));
        }
        self.missing(needs)
    }

    fn observe_into(&mut self, observed: &mut Observed) -> Result<bool, NetlinkError> {
        let mut whole = self.ask("list tables", Question::Tables, |message| observed.take(message))?;
        for family in Family::BOTH {
            let tables: Vec<Table> =
                Table::ALL.iter().copied().filter(|table| observed.has_table(family, *table)).collect();
            if tables.is_empty() {
                continue;
            }
            let chains = Question::Chains(Some(family.into()));
            whole &= self.ask("list chains", chains, |message| observed.take(message))?;
            for table in tables {
                whole &= self.observe_rules(observed, family, table)?;
            }
        }
        Ok(whole & self.observe_native(observed)?)
    }

    /// The rules of a table: of all chains at once or, where others have chains too, only of those that matter.
    fn observe_rules(
        &mut self,
        observed: &mut Observed,
        family: Family,
        table: Table,
    ) -> Result<bool, NetlinkError> {
        const WHAT: &str = "list rules";
        let Some(chains) = observed.chains_to_read(family, table) else {
            let rules = Question::RulesOfTable(family.into(), table.name());
            return self.ask(WHAT, rules, |message| observed.take(message));
        };
        let mut whole = true;
        for chain in chains {
            let rules = Question::RulesOfChain(family.into(), table.name(), chain.name());
            whole &= self.ask(WHAT, rules, |message| observed.take(message))?;
        }
        Ok(whole)
    }

    fn observe_native(&mut self, observed: &mut Observed) -> Result<bool, NetlinkError> {
        const WHAT: &str = "list native tables";
        let tables: Vec<String> = observed.native().names().map(str::to_owned).collect();
        if tables.is_empty() {
            return Ok(true);
        }
        let mut whole = self.ask(WHAT, Question::Chains(Some(Inet)), |message| observed.take(message))?;
        for table in &tables {
            let questions = [
                Question::RulesOfTable(Inet, table),
                Question::SetsOfTable(Inet, table),
                Question::Objects(Inet, table),
            ];
            for question in questions {
                whole &= self.ask(WHAT, question, |message| observed.take(message))?;
            }
        }
        for (table, set) in observed.native().sets() {
            let elements = Question::Elements(Inet, &table, &set);
            whole &= self.ask(WHAT, elements, |message| observed.take(message))?;
        }
        Ok(whole)
    }

    /// The generation of the ruleset: every transaction makes a new one.
    pub(crate) fn generation(&mut self) -> Result<u32, NetlinkError> {
        const WHAT: &str = "read the ruleset's generation";
        let sequence = self.socket.next_sequence();
        let mut generation = None;
        self.socket.send(&Question::Generation.message(sequence)).map_err(failed(WHAT))?;
        let deadline = NetlinkSocket::deadline();
        while generation.is_none() {
            let messages = self.socket.receive(deadline).map_err(failed(WHAT))?;
            for message in messages.filter(|message| message.sequence == sequence) {
                generation = generation.or_else(|| message.generation());
                match message.answer() {
                    Some(answer) if code(&answer) == Errno::EPERM => return Err(NetlinkError::NotPermitted),
                    // A message type that no kernel subsystem handles is rejected as invalid.
                    Some(_) => return Err(NetlinkError::NoNfTables),
                    None => {}
                }
            }
        }
        generation.ok_or(NetlinkError::NoNfTables)
    }

    /// Asks a question and reads the answer to its end. `false` if what was asked for changed concurrently.
    pub(crate) fn ask(
        &mut self,
        what: &'static str,
        question: Question<'_>,
        mut take: impl FnMut(&Message<'_>),
    ) -> Result<bool, NetlinkError> {
        let sequence = self.socket.next_sequence();
        let (read, most) = (&mut self.read, self.most);
        let ended = self.socket.ask(&question.message(sequence), sequence, |message| {
            *read = read.saturating_add(message.payload().len());
            if *read > most {
                return Err(AskError::TooMuch(most));
            }
            take(message);
            Ok(())
        });
        match ended {
            Ok(Ended::Whole) => Ok(true),
            Ok(Ended::Interrupted) => Ok(false),
            // A table or set that is gone already.
            Ok(Ended::Refused(answer)) if code(&answer) == Errno::ENOENT => Ok(false),
            Ok(Ended::Refused(answer)) => Err(refused(what, answer)),
            Err(AskError::Socket(cause)) => Err(failed(what)(cause)),
            Err(AskError::TooMuch(most)) => {
                // The rest of this answer would come before every other one. The calling thread is still in the same namespace.
                self.socket = socket()?;
                Err(NetlinkError::TooMuch(most))
            }
        }
    }

    /// Sends a transaction all of whose messages have one number, as they are.
    pub(crate) fn transact(
        &mut self,
        what: &'static str,
        transaction: impl FnOnce(u32) -> Option<Vec<u8>>,
    ) -> Result<(), NetlinkError> {
        let sequence = self.socket.next_sequence();
        let bytes = transaction(sequence).ok_or(BatchError::TooLong)?;
        self.socket.send(&bytes).map_err(failed(what))?;
        let ended = self.socket.answer(sequence, |_| Ok::<(), Errno>(())).map_err(failed(what))?;
        match ended {
            Ended::Whole | Ended::Interrupted => Ok(()),
            Ended::Refused(answer) if [Errno::ERESTART, Errno::EAGAIN].contains(&code(&answer)) => {
                Err(NetlinkError::Contended)
            }
            Ended::Refused(answer) => Err(refused(what, answer)),
        }
    }

    fn send_once(
        &mut self,
        transaction: &Transaction,
        observed: &Observed,
    ) -> Result<Option<Vec<u8>>, NetlinkError> {
        const WHAT: &str = "send a transaction";
        let mut batch = Batch::new(observed);
        for (family, change) in &transaction.iptables {
            batch.change(*family, change)?;
        }
        if let Some(wanted) = &transaction.native {
            batch.native_change(observed.native(), wanted);
        }
        if batch.is_empty() {
            return Ok(None);
        }
        let batch = batch.finish()?;
        self.socket.send(batch.bytes()).map_err(failed(WHAT))?;
        match self.verdict(&batch)? {
            None => {
                // The kernel would have refused it if others had written since.
                let is_first = !observed.has_tables() && observed.generation().is_some();
                Ok(is_first.then(|| batch.bytes().to_vec()))
            }
            Some(answer) => Err(self.refusal(&batch, answer, observed)?),
        }
    }

    /// The first error about a transaction; `None` if it is in force.
    fn verdict(&mut self, batch: &FinishedBatch<'_>) -> Result<Option<AnswerEnd>, NetlinkError> {
        const WHAT: &str = "read the answer to a transaction";
        let (mut first_error, mut confirmed) = (None, false);
        let mut take = |messages: Messages<'_>| {
            for answer in messages.filter_map(|message| message.answer()) {
                match answer.code {
                    0 => confirmed |= answer.sequence == batch.confirmed(),
                    _ => first_error = first_error.take().or(Some(answer)),
                }
            }
        };
        // All answers have arrived when sending returns; without one, wait for it.
        let mut next = self.socket.receive(NetlinkSocket::deadline()).map(Some);
        loop {
            match next {
                Ok(Some(messages)) => take(messages),
                Ok(None) => break,
                // More errors than fit into the buffer; the first ones are there.
                Err(Errno::ENOBUFS) => {}
                Err(cause) => return Err(failed(WHAT)(cause)),
            }
            next = self.socket.received();
        }
        match (first_error, confirmed) {
            (None, true) => Ok(None),
            (Some(error), _) => Ok(Some(error)),
            (None, false) => Err(failed(WHAT)(Errno::ENOMSG)),
        }
    }

    /// An error about a transaction in words: which part, and what the kernel lacks.
    fn refusal(
        &mut self,
        batch: &FinishedBatch<'_>,
        answer: AnswerEnd,
        observed: &Observed,
    ) -> Result<NetlinkError, NetlinkError> {
        let cause = code(&answer);
        let part = batch.part(answer.sequence);
        let owned = observed.obstacles().find(|obstacle| matches!(obstacle, TableObstacle::Owned { .. }));
        Ok(match (cause, part) {
            (Errno::ERESTART, _) => NetlinkError::Contended,
            // Not bound to a generation: a rule that was to be removed, or behind which another was to go, is gone.
            (Errno::ENOENT, Some(MessagePart::RemovedRule(_) | MessagePart::Rule(..)))
                if observed.generation().is_none() =>
            {
                NetlinkError::Contended
            }
            (Errno::EPERM, Some(_)) if owned.is_some() => {
                owned.map_or(NetlinkError::NotPermitted, |owned| NetlinkError::Obstacle(owned.clone()))
            }
            (Errno::EPERM, _) => NetlinkError::NotPermitted,
            (Errno::EINVAL | Errno::EOPNOTSUPP, None) => NetlinkError::NoNfTables,
            (cause, part) => {
                let missing = match part {
                    Some(part) if cause == Errno::ENOENT => self.missing(part.extensions())?,
                    Some(_) | None => Vec::new(),
                };
                let part = part.map_or_else(|| "the transaction".into(), ToString::to_string);
                NetlinkError::Refused { part, cause: SystemError(cause), text: answer.text, missing }
            }
        })
    }
}

/// Why an answer was not read to its end.
enum AskError {
    Socket(Errno),
    TooMuch(usize),
}

impl From<Errno> for AskError {
    fn from(cause: Errno) -> Self {
        Self::Socket(cause)
    }
}
