//! Who of several replicas acts: the one that holds the Lease. Pure.
//!
//! Clocks of different machines are never compared. A waiting replica measures how long it has seen the Lease unchanged; a leader stops some
//! seconds before another replica may consider it gone. Both count the time that their machine sleeps.

use std::time::Duration;

use agent_runtime::BootTime;
use serde_json::{Value, json};

/// How long the other replicas trust a silent leader.
pub const LEASE: Duration = Duration::from_secs(15);
/// How long a leader acts without a response. A request that it has begun in that time ends before the lease does.
pub const ACTS: Duration = Duration::from_secs(8);
/// How often the Lease is read and renewed.
pub const PAUSE: Duration = Duration::from_secs(2);
/// The longest duration of a Lease that counts.
const LONGEST_LEASE: Duration = Duration::from_secs(120);

/// What to do about the Lease.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseWrite {
    /// Make it.
    Create(Value),
    /// Replace the one that was read.
    Replace(Value),
    /// Nothing: another replica leads.
    Wait,
}

/// Whether who acts `until` then may do so now.
#[must_use]
pub fn may_act(until: Option<BootTime>, now: BootTime) -> bool {
    until.is_some_and(|until| now < until)
}

/// One candidate.
#[derive(Debug)]
pub struct Candidate {
    me: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The Lease as it was seen last, and since when it is so.
    seen: Option<(Value, BootTime)>,
    /// Until when to act; none for who does not lead.
    pub(crate) acts_until: Option<BootTime>,
    /// How often it began to lead.
    terms: u64,
}

impl Candidate {
    /// Nothing is known yet.
    #[must_use]
    pub const fn new(me: String, namespace: String, name: String) -> Self {
        Self { me, namespace, name, seen: None, acts_until: None, terms: 0 }
    }

    /// What to do about the Lease as it was read, if it exists. `time` is a time as the API server writes it.
    pub fn consider(&mut self, lease: Option<&Value>, now: BootTime, time: &str) -> LeaseWrite {
        let Some(lease) = lease else {
            self.seen = None;
            return LeaseWrite::Create(self.lease(&json!({}), time));
        };
        let holder = lease.pointer("/spec/holderIdentity").and_then(Value::as_str).unwrap_or_default();
        let is_same = self.seen.as_ref().is_some_and(|(seen, _)| seen["spec"] == lease["spec"]);
        if !is_same {
            self.seen = Some((lease.clone(), now));
        }
        let since = self.seen.as_ref().map_or(now, |(_, since)| *since);
        let seconds = lease.pointer("/spec/leaseDurationSeconds").and_then(Value::as_u64);
        let lasts = Duration::from_secs(seconds.unwrap_or(LEASE.as_secs())).min(LONGEST_LEASE);
        let is_free = holder.is_empty() || holder == self.me || now.since(since) >= lasts;
        if is_free { LeaseWrite::Replace(self.lease(lease, time)) } else { LeaseWrite::Wait }
    }

    /// The Lease was written; `asked` is when that was asked for. If it was not held then, another replica may have led before.
    pub fn won(&mut self, asked: BootTime) {
        if !may_act(self.acts_until, asked) {
            self.terms += 1;
        }
        self.acts_until = Some(asked + ACTS);
    }

    /// Another replica has it.
    pub const fn lost(&mut self) {
        self.acts_until = None;
    }

    /// The term in which it leads at this moment, if it does: what a leader knew in an earlier one is outdated.
    #[must_use]
    pub fn term(&self, now: BootTime) -> Option<u64> {
        may_act(self.acts_until, now).then_some(self.terms)
    }

    /// The Lease by which a leader steps down.
    #[must_use]
    pub fn release_lease(&self, lease: &Value, time: &str) -> Option<Value> {
        let is_mine = lease.pointer("/spec/holderIdentity").and_then(Value::as_str) == Some(&self.me);
        is_mine.then(|| {
            let mut lease = self.lease(lease, time);
            lease["spec"]["holderIdentity"] = json!("");
            lease["spec"]["leaseDurationSeconds"] = json!(1);
            lease
        })
    }

    /// As it should be. It keeps the version that was read, so that the API server refuses if another replica was faster.
    fn lease(&self, old: &Value, time: &str) -> Value {
        let of = |key: &str| old["spec"][key].clone();
        let is_mine = of("holderIdentity") == self.me.as_str();
        let changes = of("leaseTransitions").as_i64().unwrap_or_default();
        let is_first = old.get("spec").is_none();
        let mut metadata = old.get("metadata").cloned().unwrap_or_else(|| json!({}));
        metadata["name"] = json!(self.name);
        metadata["namespace"] = json!(self.namespace);
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
            "spec": {
                "holderIdentity": self.me,
                "leaseDurationSeconds": LEASE.as_secs(),
                "acquireTime": if is_mine { of("acquireTime") } else { json!(time) },
                "renewTime": time,
                "leaseTransitions": if is_mine || is_first { changes } else { changes.saturating_add(1) },
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(me: &str) -> Candidate {
        Candidate::new(me.into(), "system".into(), "lock".into())
    }

    fn replaced(step: LeaseWrite) -> Value {
        match step {
            LeaseWrite::Replace(lease) | LeaseWrite::Create(lease) => lease,
            LeaseWrite::Wait => panic!("waits"),
        }
    }

    #[test]
    fn a_lease_is_made_kept_and_taken_when_its_holder_is_silent() {
        let (now, mut a, mut b) = (BootTime::now(), candidate("a"), candidate("b"));
        let step = a.consider(None, now, "t0");
        assert!(matches!(step, LeaseWrite::Create(_)));
        let mut lease = replaced(step);
        assert_eq!(
            (&lease["spec"]["holderIdentity"], &lease["spec"]["leaseTransitions"]),
            (&json!("a"), &json!(0))
        );
        lease["metadata"]["resourceVersion"] = json!("7");
        assert_eq!(b.consider(Some(&lease), now, "t0"), LeaseWrite::Wait);
        // The holder renews it: the others start waiting again.
        let renewed = replaced(a.consider(Some(&lease), now + PAUSE, "t1"));
        assert_eq!(renewed["metadata"]["resourceVersion"], "7", "the one that was read");
        assert_eq!(
            (&renewed["spec"]["acquireTime"], &renewed["spec"]["renewTime"]),
            (&json!("t0"), &json!("t1"))
        );
        let noticed = now + (LEASE - PAUSE);
        assert_eq!(b.consider(Some(&renewed), noticed, "t2"), LeaseWrite::Wait);
        assert_eq!(b.consider(Some(&renewed), noticed + (LEASE - PAUSE), "t3"), LeaseWrite::Wait);
        let taken = replaced(b.consider(Some(&renewed), noticed + LEASE, "t4"));
        assert_eq!(
            (&taken["spec"]["holderIdentity"], &taken["spec"]["leaseTransitions"]),
            (&json!("b"), &json!(1))
        );
        assert_eq!(a.consider(Some(&taken), noticed + LEASE, "t5"), LeaseWrite::Wait);
    }

    #[test]
    fn who_steps_down_is_followed_at_once() {
        let (now, mut a, mut b) = (BootTime::now(), candidate("a"), candidate("b"));
        let lease = replaced(a.consider(None, now, "t0"));
        assert_eq!(b.release_lease(&lease, "t1"), None);
        let left = a.release_lease(&lease, "t1").expect("its own");
        assert_eq!(replaced(b.consider(Some(&left), now, "t1"))["spec"]["holderIdentity"], "b");
    }

    #[test]
    fn a_lease_with_an_odd_duration_expires() {
        let (now, mut a) = (BootTime::now(), candidate("a"));
        let odd = json!({"metadata": {}, "spec": {"holderIdentity": "x", "leaseDurationSeconds": 4_000_000_000_u64}});
        assert_eq!(a.consider(Some(&odd), now, "t"), LeaseWrite::Wait);
        assert!(matches!(a.consider(Some(&odd), now + LONGEST_LEASE, "t"), LeaseWrite::Replace(_)));
    }

    /// A machine, by how long it ran and how long it slept.
    struct Machine {
        start: BootTime,
        ran: Duration,
        slept: Duration,
    }

    impl Machine {
        fn now(&self) -> BootTime {
            self.start + self.ran + self.slept
        }
    }

    #[test]
    fn a_leader_that_slept_for_as_long_as_its_lease_lasts_does_not_act_and_begins_anew() {
        let mut machine = Machine { start: BootTime::now(), ran: Duration::ZERO, slept: Duration::ZERO };
        let mut a = candidate("a");
        a.won(machine.now());
        let first = a.term(machine.now()).expect("leads");
        machine.ran += PAUSE;
        a.won(machine.now());
        assert_eq!(a.term(machine.now()), Some(first), "renewed in time");
        machine.slept += LEASE;
        assert_eq!(a.term(machine.now()), None, "another replica may lead");
        // It has the Lease again before it noticed.
        a.won(machine.now());
        let second = a.term(machine.now()).expect("leads");
        assert_ne!(second, first, "what it knew is of another time");
        // It slept between the request and its response.
        let asked = machine.now();
        machine.slept += LEASE;
        a.won(asked);
        assert_eq!(a.term(machine.now()), None);
        a.won(machine.now());
        a.lost();
        assert_eq!(a.term(machine.now()), None);
        a.won(machine.now());
        assert!(a.term(machine.now()).is_some_and(|third| third != second));
    }

    proptest! {
        /// Two candidates with clocks that stand still for any time, and an API server that takes one write at a version: never do both act.
        #[test]
        fn never_do_two_act_at_once(steps in prop::collection::vec((0_u64..2, 0_u64..9, any::<bool>()), 1..200)) {
            let mut now = BootTime::now();
            let mut both = [candidate("a"), candidate("b")];
            let mut stored: Option<(Value, u64)> = None;
            for (index, (who, seconds, is_slow)) in steps.into_iter().enumerate() {
                now = now + Duration::from_secs(seconds);
                let me = &mut both[usize::try_from(who).expect("0 or 1")];
                let found = stored.clone();
                let step = me.consider(found.as_ref().map(|(lease, _)| lease), now, &format!("t{index}"));
                let (asked, version) = (now, found.map(|(_, version)| version));
                if is_slow {
                    // It stood still between the request and its response.
                    now = now + Duration::from_secs(4);
                }
                match step {
                    LeaseWrite::Create(lease) | LeaseWrite::Replace(lease) => {
                        prop_assert_eq!(stored.as_ref().map(|(_, version)| *version), version);
                        stored = Some((lease, version.unwrap_or_default() + 1));
                        me.won(asked);
                    }
                    LeaseWrite::Wait => me.lost(),
                }
                let acting = both.iter().filter(|one| one.acts_until.is_some_and(|until| until > now)).count();
                prop_assert!(acting <= 1);
            }
        }
    }
}
