//! Strict capture: what would pass on a connection that was not captured.
//!
//! nat decides about the first packet of a conntrack entry; a later user of the entry's addresses and ports inherits the
//! decision. So connections that are exempt for their opener or interface carry a mark, and no other process may reuse
//! their entries.

use super::builder::*;
use crate::{
    redirect::{InterceptionMode, OwnerGroups, Redirect, Tproxy},
    rule::{ConnState, Equality, Hook, Match, OurChain, Table, Target, TcpFlags},
    settings::Key,
    values::MaskedMark,
};
use alloc::vec::Vec;

/// The chains that decide what passes.
const GUARD_IN: (Table, OurChain) = (Table::Mangle, OurChain::GuardIn);
const GUARD_OUT: (Table, OurChain) = (Table::Mangle, OurChain::GuardOut);

impl RuleListBuilder<'_> {
    pub(super) fn strict_capture(&mut self, r: &Redirect) {
        if !r.strict_capture() {
            return;
        }
        let mut group = self.group(Key::StrictCapture, "what opens a connection, or answers");
        let opens = [not_in_by_loopback(), tcp(), opening()];
        group.insert((Table::Mangle, Hook::Prerouting), 1, opens, Target::Jump(OurChain::GuardIn.into()));
        group.insert((Table::Mangle, Hook::Output), 1, [tcp()], Target::Jump(OurChain::GuardOut.into()));
        self.guard_in(r);
        self.guard_out(r);
    }

    fn guard_in(&mut self, r: &Redirect) {
        let mut group = self.group(Key::ExcludeInterfaces, "excluded interface");
        for interface in r.exclude_interfaces() {
            group.append(GUARD_IN, [coming_in(interface)], Target::Return);
        }
        let mut group = self.group(Key::StrictCapture, "not what opens a connection: nat would let it pass");
        group.append(GUARD_IN, [invalid()], Target::Drop);
        group.append(GUARD_IN, [reply()], Target::Drop);
        let mut group = self.group(Key::StrictCapture, "drops reuse of an exempt connection");
        group.append(GUARD_IN, [guarded()], Target::Drop);
    }

    /// Packets without SYN pass unless they begin an entry: the kernel makes one for an acknowledgement, too, where that of the
    /// connection is gone.
    fn guard_out(&mut self, r: &Redirect) {
        let goes_on = [
            tcp(),
            Match::TcpFlags(Equality::not_equals(TcpFlags::SYNCHRONIZING)),
            Match::Tracked(ConnState::RelatedOrEstablished.into()),
        ];
        let mut group = self.group(Key::StrictCapture, "what belongs to a known connection");
        group.append(GUARD_OUT, goes_on, Target::Return);
        let interfaces =
            r.exclude_interfaces().iter().map(|interface| (Key::ExcludeInterfaces, going_out(interface)));
        for (setting, exempt) in [(Key::StrictCapture, out_by_loopback())].into_iter().chain(interfaces) {
            self.exempts(setting, &[[exempt].into()]);
        }
        self.exempts(Key::ProxyUid, &exempt_senders(r));
        let mut group = self.group(Key::StrictCapture, "not what opens a connection: nat would let it pass");
        group.append(GUARD_OUT, [tcp(), opening(), invalid()], Target::Drop);
        group.append(GUARD_OUT, [tcp(), opening(), reply()], Target::Drop);
        if let InterceptionMode::Tproxy(tproxy) = r.mode()
            && let Some(shared) = shared_mark(r, tproxy)
        {
            let answers = Match::ConnMark(Equality::equals(shared));
            self.group(Key::TproxyMark, "the application's answers to the proxy, which are sent to lo")
                .append(GUARD_OUT, [answers], Target::Return);
        }
        let mut group = self.group(Key::StrictCapture, "drops reuse of an exempt connection");
        let reuses = [tcp(), Match::TcpFlags(Equality::equals(TcpFlags::SYNCHRONIZING)), guarded()];
        group.append(GUARD_OUT, reuses, Target::Drop);
    }

    /// Connections with any of these conditions are exempt, and marked; so are all their packets.
    fn exempts(&mut self, setting: Key, exempt: &[Vec<Match>]) {
        let mut group = self.group(setting, "this connection is not captured");
        for conditions in exempt {
            let opens = [conditions.as_slice(), &[tcp(), not_answering()]].concat();
            group.append(GUARD_OUT, opens, Target::SetConnMark(MaskedMark::GUARD));
        }
        for conditions in exempt {
            group.append(GUARD_OUT, conditions.clone(), Target::Return);
        }
    }
}

/// TPROXY's mark of connections where they carry the guard's as well: in the bits it leaves.
pub(super) fn shared_mark(r: &Redirect, tproxy: Tproxy) -> Option<MaskedMark> {
    if r.strict_capture() { MaskedMark::GUARD.beside(tproxy.mark()) } else { None }
}

/// Whose connections are not captured: the proxy's users and groups, and the excluded groups.
fn exempt_senders(r: &Redirect) -> Vec<Vec<Match>> {
    let mut senders: Vec<Vec<Match>> = proxy_owners(r).map(|(_, sender)| [sender].into()).collect();
    match r.owner_groups() {
        OwnerGroups::AllExcept(groups) => {
            senders.extend(groups.iter().map(|gid| [Match::OwnerGid(Equality::equals(*gid))].into()));
        }
        OwnerGroups::Only(groups) => {
            senders.push(groups.iter().map(|gid| Match::OwnerGid(Equality::not_equals(*gid))).collect());
        }
    }
    senders
}

/// Whatever does not answer another's SYN.
fn not_answering() -> Match {
    Match::TcpFlags(Equality::not_equals(TcpFlags::ANSWERING))
}

fn guarded() -> Match {
    Match::ConnMark(Equality::equals(MaskedMark::GUARD))
}

fn invalid() -> Match {
    Match::Tracked(ConnState::Invalid.into())
}
