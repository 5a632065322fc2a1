//! From hook to hook, and from base chain to base chain.

use super::{
    super::{
        Fate, PacketEdit, TraceEvent, Unknown,
        packets::{VariedField, state},
        rules::{Order, TRACKING},
        set::RangeSet,
    },
    Call, Cause, Interface, Point, Split, Tracking, Walk,
};
use netfilter_state::ruleset::{Base, InterfaceDirection};
use redirect_core::rule::Hook;

impl Walk<'_> {
    pub(super) fn begins(&mut self, hook: Hook) {
        self.now.hook = hook;
        let by = if self.now.came_in == Interface::None { self.now.goes_out } else { self.now.came_in };
        self.note(|walk| TraceEvent::Hook { hook, interface: walk.name_of(by) });
        let rules = self.rules;
        let is_met = |chain: &&usize| self.records || !rules.is_idle(**chain);
        self.now.to_come.clear();
        self.now.to_come.extend(rules.hooked(hook).iter().filter(is_met));
        self.now.point = Point::Base;
    }

    /// The base chains that hang on the interface by which it comes or goes.
    pub(super) fn begins_device(&mut self, direction: InterfaceDirection) -> Result<Option<Fate>, Split> {
        let by = if direction == InterfaceDirection::Ingress { self.now.came_in } else { self.now.goes_out };
        let mut to_come = Vec::new();
        for (names, chain) in self.rules.on_devices(direction) {
            let holds = self.by(by, names);
            if self.decide(holds, || Unknown::Interface)? {
                to_come.push(chain);
            }
        }
        self.now.device = Some(direction);
        if to_come.is_empty() {
            return self.ends_hook();
        }
        self.now.to_come = to_come;
        self.now.point = Point::Base;
        Ok(None)
    }

    /// The next base chain of the hook, or what comes behind the hook.
    pub(super) fn base(&mut self) -> Result<Option<Fate>, Split> {
        let Some(number) = self.next_base()? else { return self.ends_hook() };
        let Some((chain, base)) = self.now.to_come.get(number).and_then(|chain| self.rules.base(*chain))
        else {
            return Ok(None);
        };
        let is_tracked = self.is_tracked_at(self.now.to_come.get(number).copied(), base)?;
        let is_asked = !base.is_nat || self.asks_nat(is_tracked)?;
        if is_tracked {
            self.track();
        }
        let index = self.now.to_come.remove(number);
        if !is_asked {
            return Ok(None);
        }
        self.note(|_| TraceEvent::Chain { place: chain.place(None), priority: base.priority });
        (self.now.mark_before, self.now.destination_before) = (self.now.mark, self.now.destination);
        (self.now.in_base, self.now.base_rule) = (Some(index), None);
        self.now.calls.push(Call::to(index));
        self.now.point = Point::Rule;
        Ok(None)
    }

    /// The next of the remaining base chains: the first, unless others share its priority and the last registered is unknown.
    fn next_base(&mut self) -> Result<Option<usize>, Split> {
        if self.now.to_come.is_empty() {
            return Ok(None);
        }
        let rules = self.rules;
        if self.now.device.is_none() && rules.has_ties(self.now.hook) {
            let may_be_first = self.may_be_first();
            for number in may_be_first.iter().skip(1).rev() {
                let name = |at: usize| self.now.to_come.get(at).map(|chain| rules.base_name(*chain));
                let [first, other] = [0, *number].map(|at| name(at).unwrap_or_default());
                if self.assume(|| Unknown::Order(first, other))? {
                    return Ok(Some(*number));
                }
            }
        }
        Ok(Some(0))
    }

    /// Those of the base chains to come that may go first.
    fn may_be_first(&self) -> Vec<usize> {
        let goes_before = |number: usize, chain: usize| {
            let mut earlier = self.now.to_come.iter().take(number);
            earlier.any(|other| self.rules.order(*other, chain) == Order::Known)
        };
        let numbered = self.now.to_come.iter().copied().enumerate();
        numbered.filter(|(number, chain)| !goes_before(*number, *chain)).map(|(number, _)| number).collect()
    }

    /// Whether connection tracking has come before a base chain.
    fn is_tracked_at(&mut self, chain: Option<usize>, base: Base) -> Result<bool, Split> {
        if self.now.device.is_some() || !matches!(self.now.hook, Hook::Output | Hook::Prerouting) {
            return Ok(false);
        }
        if base.priority != TRACKING {
            return Ok(base.priority > TRACKING);
        }
        match chain.and_then(|chain| self.rules.is_behind_tracking(chain)) {
            Some(is_behind) => Ok(is_behind),
            None if self.now.tracking == Tracking::Seen || self.now.tracking == Tracking::Never => Ok(true),
            None => {
                let rules = self.rules;
                self.assume(|| Unknown::Tracking(chain.map_or_else(Default::default, |c| rules.base_name(c))))
            }
        }
    }

    pub(super) fn track(&mut self) {
        if self.now.tracking != Tracking::Never {
            self.now.tracking = Tracking::Seen;
        }
    }

    /// Whether nat applies: only to the first packet of a connection, once for its destination and once for its source.
    fn asks_nat(&mut self, is_tracked: bool) -> Result<bool, Split> {
        let of_destination = matches!(self.now.hook, Hook::Prerouting | Hook::Output);
        let is_bound = if of_destination { self.now.is_bound } else { self.now.is_source_bound };
        if is_bound
            || self.now.tracking == Tracking::Never
            || !is_tracked && self.now.tracking != Tracking::Seen
        {
            return Ok(false);
        }
        // What the pod sends to itself has passed nat on its way out, even without nat chains.
        if self.has_been_sent() {
            return Ok(false);
        }
        let repeats = self.given.repeats;
        if repeats.is_none() && self.ask(VariedField::State, &RangeSet::range(state::NEW, state::RELATED))? {
            return Ok(true);
        }
        let earlier = self.given.translated_to.map(|to| (to, None));
        let translated = repeats.map_or(earlier, |first| first.translated);
        if let (Some((to, captured)), None) = (translated, self.now.destination)
            && of_destination
        {
            (self.now.destination, self.now.captured) = (Some(to), captured.or(self.now.captured));
            self.changed(PacketEdit::Destination { destination: to });
        }
        Ok(false)
    }

    /// Whether it comes in over `lo`, where this pod has sent it.
    pub(super) const fn has_been_sent(&self) -> bool {
        self.given.is_local && !matches!(self.now.came_in, Interface::None)
    }

    /// No rule has decided.
    pub(super) fn policy(&mut self) -> Result<Option<Fate>, Split> {
        let index = self.now.in_base.and_then(|index| Some((index, self.rules.base(index)?)));
        let Some((index, (chain, _))) = index.filter(|(_, (_, base))| base.drops) else {
            return self.leaves();
        };
        self.note(|_| TraceEvent::Policy { place: chain.place(None) });
        self.decided = self.steps.len().checked_sub(1);
        self.now.causes.last = Some(Cause::Policy(index));
        Ok(Some(Fate::Dropped))
    }

    /// Behind a base chain: its changes may reroute the packet.
    pub(super) fn leaves(&mut self) -> Result<Option<Fate>, Split> {
        let base = self.now.in_base.and_then(|index| self.rules.base(index)).map(|(_, base)| base);
        let moved = self.now.destination != self.now.destination_before;
        let remarked = base.is_some_and(|base| base.reroutes)
            && (self.now.is_reclassed || self.now.mark != self.now.mark_before);
        if self.now.hook == Hook::Output
            && self.now.device.is_none()
            && (moved || remarked)
            && let Some(fate) = self.route_out(moved)?
        {
            return Ok(Some(fate));
        }
        self.now.leaves_base();
        Ok(None)
    }

    /// What comes behind the last base chain of a hook or interface.
    pub(super) fn ends_hook(&mut self) -> Result<Option<Fate>, Split> {
        self.now.point = match (self.now.device, self.now.hook) {
            (None, Hook::Output) => {
                self.now.goes_out = self.now.routed.unwrap_or(self.now.goes_out);
                self.track();
                Point::Hook(Hook::Postrouting)
            }
            (None, Hook::Postrouting) => Point::Device(InterfaceDirection::Egress),
            (Some(InterfaceDirection::Egress), _) if self.now.goes_out == Interface::Loopback => {
                // A packet on lo belongs to no socket any more; mark and connection stay with it.
                (self.now.came_in, self.now.goes_out) = (Interface::Loopback, Interface::None);
                self.now.has_owner = false;
                Point::Device(InterfaceDirection::Ingress)
            }
            (Some(InterfaceDirection::Ingress), _) => Point::Hook(Hook::Prerouting),
            (None, Hook::Prerouting) => {
                if let Some(fate) = self.route_in()? {
                    return Ok(Some(fate));
                }
                self.track();
                self.now.mark_routed = Some(self.now.mark);
                Point::Hook(Hook::Input)
            }
            (None, Hook::Input) => return self.arrives().map(Some),
            (Some(InterfaceDirection::Egress), _) | (None, Hook::Forward) => {
                let lost =
                    self.now.strays.filter(|_| self.now.captured.is_none()).map(|words| self.is_lost(words));
                return Ok(lost.or(self.now.captured).or(Some(Fate::Untouched)));
            }
        };
        self.now.device = None;
        Ok(None)
    }
}
