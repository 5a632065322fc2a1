//! The socket: questions with their answers, transactions with their one answer.

#![allow(clippy::wildcard_enum_match_arm)] // of error numbers there are many, and more to come

mod ruleset;

use super::{Missing, NetlinkError};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::{
    errno::Errno,
    sys::{
        socket::{MsgFlags, setsockopt, sockopt},
        time::TimeVal,
    },
};
use redirect_core::{
    Family, RulePlan,
    change::Change,
    netlink::{
        Answer, Batch, Extension, FinishedBatch, Message, Messages, NativeForm, NativeRules, NativeState,
        Observed, request,
    },
    rule::Table,
    state::Entry,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    time::Instant,
};

/// The kernel sends at most 32 KiB at once.
const RECEIVE_BUFFER: usize = 64 * 1024;
/// The kernel answers while it is asked; this is for the case that it does not.
const PATIENCE: TimeVal = TimeVal::new(10, 0);
/// What a transaction needs of the send buffer beyond its own size.
const SEND_OVERHEAD: usize = 64 * 1024;
/// The size a send buffer has anyway (net.core.wmem_default is at least that much).
const USUAL_SEND_BUFFER: usize = 128 * 1024;
/// How often a dump that others disturb is begun anew.
const DUMP_ATTEMPTS: usize = 20;

/// What happens to the native tables in a transaction.
#[derive(Debug, Clone, Copy, Default)]
pub enum NativeChange<'a> {
    /// Nothing.
    #[default]
    Keep,
    /// They are removed, if there are any.
    Remove,
    /// A plan's take the place of whatever there is.
    Write(&'a RulePlan, NativeForm),
}

/// What is to be changed, all of it at one instant or nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Transaction<'a> {
    /// Changes to the tables of iptables, by family.
    pub rules: &'a [(Family, Change)],
    /// The change to the native tables.
    pub native: NativeChange<'a>,
}

/// A socket that talks about nf_tables in the network namespace it was opened in.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    /// How many bytes of answers are read at most, and how many were.
    most: usize,
    read: usize,
}

impl Connection {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has no netlink for netfilter at all.
    pub fn open() -> Result<Self, NetlinkError> {
        let open = || -> io::Result<Socket> {
            let mut socket = Socket::new(NETLINK_NETFILTER)?;
            socket.bind_auto()?;
            // From now on only the kernel is heard.
            socket.connect(&SocketAddr::new(0, 0))?;
            // Older kernels explain less, that is all.
            let _ = socket.set_ext_ack(true);
            let _ = socket.set_cap_ack(true);
            setsockopt(&socket, sockopt::ReceiveTimeout, &PATIENCE)?;
            Ok(socket)
        };
        let socket = open().map_err(|cause| match errno(&cause) {
            Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => NetlinkError::NoNfTables,
            cause => NetlinkError::Socket { what: "open a socket", cause },
        })?;
        let buffer = Vec::with_capacity(RECEIVE_BUFFER);
        Ok(Self { socket, sequence: 0, buffer, most: usize::MAX, read: 0 })
    }

    /// Reads no more than so many bytes from now on: rules may be those of somebody who wants to fill our memory.
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

    /// Reads the rules that are in force. Nothing is changed by looking.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or others change rules all the time.
    pub fn observe(&mut self) -> Result<Observed, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            let generation = self.generation()?;
            let mut observed = Observed::at(generation);
            let whole = self.observe_into(&mut observed)?;
            if whole && self.generation()? == generation {
                return Ok(observed);
            }
        }
        Err(NetlinkError::Contended)
    }

    /// Reads the mesh's native tables.
    ///
    /// # Errors
    /// As [`observe`](Self::observe).
    pub fn native_state(&mut self, observed: &Observed) -> Result<NativeState, NetlinkError> {
        if observed.native_tables().next().is_none() {
            return Ok(NativeState::default());
        }
        for _ in 0..DUMP_ATTEMPTS {
            let generation = self.generation()?;
            let mut state = NativeState::default();
            let whole = self.native_into(observed, &mut state)?;
            if whole && self.generation()? == generation {
                return Ok(state);
            }
        }
        Err(NetlinkError::Contended)
    }

    /// Puts a transaction in force. It was worked out on what was observed; when somebody else has changed other rules
    /// since, it is sent again until the deadline.
    ///
    /// # Errors
    /// Why not; then nothing was changed. [`NetlinkError::Changed`] means: observe and work it out again.
    pub fn commit(
        &mut self,
        transaction: &Transaction<'_>,
        observed: &Observed,
        deadline: Instant,
    ) -> Result<(), NetlinkError> {
        let mut newer: Option<Observed> = None;
        loop {
            match self.send_once(transaction, newer.as_ref().unwrap_or(observed)) {
                Err(NetlinkError::Contended) if Instant::now() < deadline => {}
                result => return result,
            }
            let now = self.observe()?;
            if !now.reads_like(observed) {
                return Err(NetlinkError::Changed);
            }
            newer = Some(now);
        }
    }

    /// Which of these matches and targets the kernel lacks. It loads modules it has not loaded yet; nothing else changes.
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
            let sequence = self.next_sequence();
            questions.extend(request::extension(sequence, family, extension));
            asked.insert(sequence, Missing { family, extension });
        }
        let mut missing = Vec::new();
        if !asked.is_empty() {
            self.send(&questions, WHAT)?;
        }
        while !asked.is_empty() {
            self.receive(WHAT, true)?;
            for answer in Messages::new(&self.buffer).filter_map(|message| message.answer()) {
                match (asked.remove(&answer.sequence), code(&answer)) {
                    (_, Errno::EPERM) => return Err(NetlinkError::NotPermitted),
                    (Some(one), _) if answer.code != 0 => missing.push(one),
                    (Some(_) | None, _) => {}
                }
            }
        }
        Ok(missing)
    }

    /// Which matches and targets the kernel lacks that a plan needs in the tables of iptables.
    ///
    /// # Errors
    /// The socket failed.
    pub fn missing_for(&mut self, plan: &RulePlan) -> Result<Vec<Missing>, NetlinkError> {
        let mut needs = BTreeSet::new();
        for family in plan.families() {
            let rules = plan.rules(*family);
            for (_, entries) in Table::ALL.into_iter().flat_map(|table| rules.state().chains(table)) {
                for entry in entries {
                    if let Entry::Rule(rule) = entry {
                        needs.extend(redirect_core::netlink::extensions(rule).map(|one| (*family, one)));
                    }
                }
            }
        }
        self.missing(needs)
    }

    fn observe_into(&mut self, observed: &mut Observed) -> Result<bool, NetlinkError> {
        let tables = request::tables(self.next_sequence());
        let mut whole = self.ask(&tables, "list tables", |message| observed.take(message))?;
        for family in Family::BOTH {
            let tables: Vec<Table> =
                Table::ALL.into_iter().filter(|table| observed.has_table(family, *table)).collect();
            if tables.is_empty() {
                continue;
            }
            let chains = request::chains(self.next_sequence(), family);
            whole &= self.ask(&chains, "list chains", |message| observed.take(message))?;
            for table in tables {
                let rules = request::rules(self.next_sequence(), family, table);
                whole &= self.ask(&rules, "list rules", |message| observed.take(message))?;
            }
        }
        Ok(whole)
    }

    fn native_into(&mut self, observed: &Observed, state: &mut NativeState) -> Result<bool, NetlinkError> {
        const WHAT: &str = "list native tables";
        let question = request::tables(self.next_sequence());
        let mut whole = self.ask(&question, WHAT, |message| state.take(message))?;
        let question = request::native_chains(self.next_sequence());
        whole &= self.ask(&question, WHAT, |message| state.take(message))?;
        for table in observed.native_tables() {
            let question = request::native_rules(self.next_sequence(), table);
            whole &= self.ask(&question, WHAT, |message| state.take(message))?;
            let question = request::native_sets(self.next_sequence(), table);
            whole &= self.ask(&question, WHAT, |message| state.take(message))?;
        }
        for (table, set) in state.sets() {
            let question = request::native_elements(self.next_sequence(), &table, &set);
            whole &= self.ask(&question, WHAT, |message| state.take(message))?;
        }
        Ok(whole)
    }

    fn generation(&mut self) -> Result<u32, NetlinkError> {
        let sequence = self.next_sequence();
        let mut generation = None;
        self.send(&request::generation(sequence), "ask for the ruleset's generation")?;
        while generation.is_none() {
            self.receive("read the ruleset's generation", true)?;
            for message in Messages::new(&self.buffer).filter(|message| message.sequence == sequence) {
                generation = generation.or_else(|| request::generation_in(&message));
                match message.answer() {
                    // What nobody in the kernel feels addressed by is invalid.
                    Some(answer) if code(&answer) == Errno::EPERM => return Err(NetlinkError::NotPermitted),
                    Some(_) => return Err(NetlinkError::NoNfTables),
                    None => {}
                }
            }
        }
        generation.ok_or(NetlinkError::NoNfTables)
    }

    /// Sends a question and takes in the answer up to its end. `false` when what was asked for changed meanwhile.
    fn ask(
        &mut self,
        question: &[u8],
        what: &'static str,
        mut take: impl FnMut(&Message<'_>),
    ) -> Result<bool, NetlinkError> {
        self.send(question, what)?;
        let mut whole = true;
        loop {
            self.receive(what, true)?;
            self.read = self.read.saturating_add(self.buffer.len());
            if self.read > self.most {
                return Err(NetlinkError::TooMuch(self.most));
            }
            for message in Messages::new(&self.buffer).filter(|message| message.sequence == self.sequence) {
                whole &= !message.is_interrupted();
                match message.answer() {
                    None => take(&message),
                    Some(Answer { code: 0, .. }) => return Ok(whole),
                    Some(answer) => return refused_question(what, &answer),
                }
            }
        }
    }

    fn send_once(&mut self, transaction: &Transaction<'_>, observed: &Observed) -> Result<(), NetlinkError> {
        let native = match transaction.native {
            NativeChange::Write(plan, form) => Some(NativeRules::new(plan, form)),
            NativeChange::Keep | NativeChange::Remove => None,
        };
        let mut batch = Batch::new(observed);
        for (family, change) in transaction.rules {
            batch.change(*family, change)?;
        }
        match transaction.native {
            NativeChange::Keep => {}
            NativeChange::Remove | NativeChange::Write(..) => batch.remove_native(observed.native_tables()),
        }
        if let Some(native) = &native {
            batch.native(native);
        }
        if batch.is_empty() {
            return Ok(());
        }
        let batch = batch.finish()?;
        self.send(batch.bytes(), "send a transaction")?;
        match self.verdict(&batch)? {
            None => Ok(()),
            Some(answer) => Err(self.refusal(&batch, answer)?),
        }
    }

    /// The first error about a transaction; none when it is in force.
    fn verdict(&mut self, batch: &FinishedBatch<'_>) -> Result<Option<Answer>, NetlinkError> {
        let (mut first_error, mut confirmed) = (None, false);
        // All answers are there when sending returns; without any, one waits.
        let mut wait = true;
        loop {
            match self.receive("read the answer to a transaction", wait) {
                Ok(()) => {}
                Err(NetlinkError::Socket { cause: Errno::EAGAIN, .. }) if !wait => break,
                // More errors than fit the buffer; the first are there.
                Err(NetlinkError::Socket { cause: Errno::ENOBUFS, .. }) => {}
                Err(error) => return Err(error),
            }
            wait = false;
            for answer in Messages::new(&self.buffer).filter_map(|message| message.answer()) {
                match answer.code {
                    0 => confirmed |= answer.sequence == batch.confirmed(),
                    _ => first_error = first_error.or(Some(answer)),
                }
            }
        }
        match (first_error, confirmed) {
            (None, true) => Ok(None),
            (Some(error), _) => Ok(Some(error)),
            (None, false) => {
                Err(NetlinkError::Socket { what: "read the answer to a transaction", cause: Errno::ENOMSG })
            }
        }
    }

    /// An error about a transaction in words: which part, and what the kernel lacks.
    fn refusal(&mut self, batch: &FinishedBatch<'_>, answer: Answer) -> Result<NetlinkError, NetlinkError> {
        let cause = code(&answer);
        let part = batch.part(answer.sequence);
        Ok(match (cause, part) {
            (Errno::ERESTART, _) => NetlinkError::Contended,
            (Errno::EPERM, _) => NetlinkError::NotPermitted,
            (Errno::EINVAL | Errno::EOPNOTSUPP, None) => NetlinkError::NoNfTables,
            (cause, part) => {
                let missing = match part {
                    Some(part) if cause == Errno::ENOENT => self.missing(part.extensions())?,
                    Some(_) | None => Vec::new(),
                };
                let part = part.map_or_else(|| "the transaction".into(), ToString::to_string);
                NetlinkError::Refused { part, cause, text: answer.text, missing }
            }
        })
    }

    const fn next_sequence(&mut self) -> u32 {
        // Transactions number their messages from 1; questions use the other half.
        self.sequence = self.sequence.wrapping_add(1) | 1 << 31;
        self.sequence
    }

    fn send(&self, bytes: &[u8], what: &'static str) -> Result<(), NetlinkError> {
        if bytes.len().saturating_add(SEND_OVERHEAD) > USUAL_SEND_BUFFER {
            let size = bytes.len().saturating_add(SEND_OVERHEAD);
            // Without the right to exceed the limit the kernel says EMSGSIZE below.
            let _ = setsockopt(&self.socket, sockopt::SndBufForce, &size);
        }
        self.socket.send(bytes, 0).map_err(|cause| NetlinkError::Socket { what, cause: errno(&cause) })?;
        Ok(())
    }

    /// Reads one datagram into the buffer.
    fn receive(&mut self, what: &'static str, wait: bool) -> Result<(), NetlinkError> {
        let flags = if wait { MsgFlags::empty() } else { MsgFlags::MSG_DONTWAIT };
        loop {
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, flags.bits()) {
                Ok(_) => return Ok(()),
                Err(cause) if errno(&cause) == Errno::EINTR => {}
                Err(cause) => return Err(NetlinkError::Socket { what, cause: errno(&cause) }),
            }
        }
    }
}

fn refused_question(what: &'static str, answer: &Answer) -> Result<bool, NetlinkError> {
    match code(answer) {
        Errno::EPERM => Err(NetlinkError::NotPermitted),
        // What changes while it is listed.
        Errno::EINTR | Errno::EAGAIN => Ok(false),
        cause => Err(NetlinkError::Question { what, cause, text: answer.text.clone() }),
    }
}

fn code(answer: &Answer) -> Errno {
    Errno::from_raw(answer.code.saturating_neg())
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or_default())
}
