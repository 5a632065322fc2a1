//! What is known of the pods that are not as they should be, and what is worth saying of it. Pure: time comes from outside.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::time::{Duration, Instant};

use cni_core::pod_source::PodName;

use super::look::{Comparison, Trouble};

/// For how long the same difference of the same pod is no event again.
const EVENT_PAUSE: Duration = Duration::from_secs(6 * 3600);
/// The most events about one pod in that time. Somebody in the pod may make a new difference every second.
const MOST_EVENTS: usize = 4;

/// The pods that are not, or were not, as they should be, by their UIDs.
#[derive(Debug, Default)]
pub struct Ledger {
    records: BTreeMap<String, Record>,
}

#[derive(Debug)]
struct Record {
    name: PodName,
    /// The difference, while there is one.
    drift: Option<String>,
    /// The kind of trouble, while there is one.
    trouble: Option<&'static str>,
    /// Differences that were events, and when.
    events: Vec<(u64, Instant)>,
}

/// Something to be said about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It has drifted, or in another way than before.
    Drifted {
        /// The first difference.
        difference: String,
        /// Whether it is worth an event.
        event: bool,
    },
    /// It is as planned again.
    Recovered,
    /// It cannot be told.
    Trouble(Trouble),
    /// It can be told again.
    Visible,
}

impl Ledger {
    /// Whether a look says something new and bad, which has to be looked at again before it is believed.
    #[must_use]
    pub fn doubts(&self, uid: &str, look: &Comparison) -> bool {
        let record = self.records.get(uid);
        match look {
            Comparison::AsPlanned => false,
            Comparison::Different(now) | Comparison::NotRedirected(now) | Comparison::Interference(now) => {
                record.and_then(|record| record.drift.as_ref()) != Some(now)
            }
            Comparison::Trouble(now) => record.and_then(|record| record.trouble) != Some(now.word()),
        }
    }

    /// Takes note of what a look has shown, and returns what is worth saying.
    pub fn note(&mut self, uid: &str, name: &PodName, look: &Comparison, now: Instant) -> Option<Report> {
        if *look == Comparison::AsPlanned && !self.records.contains_key(uid) {
            return None;
        }
        let record = self.records.entry(uid.to_owned()).or_insert_with(|| Record::new(name.clone()));
        let said = match look {
            Comparison::AsPlanned => record.clear(),
            Comparison::Different(difference)
            | Comparison::NotRedirected(difference)
            | Comparison::Interference(difference) => record.differs(difference, now),
            Comparison::Trouble(trouble) => record.troubled(trouble),
        };
        record.events.retain(|(_, at)| now.duration_since(*at) < EVENT_PAUSE);
        if record.drift.is_none() && record.trouble.is_none() && record.events.is_empty() {
            self.records.remove(uid);
        }
        said
    }

    /// Forgets the pods that are not among these; returns the names of those that had drifted.
    pub fn keep(&mut self, uids: &BTreeSet<&str>) -> Vec<PodName> {
        let mut gone = Vec::new();
        self.records.retain(|uid, record| {
            let stays = uids.contains(uid.as_str());
            if !stays && record.drift.is_some() {
                gone.push(record.name.clone());
            }
            stays
        });
        gone
    }

    /// How many pods have drifted, as far as is known.
    #[must_use]
    pub fn drifted(&self) -> usize {
        self.records.values().filter(|record| record.drift.is_some()).count()
    }
}

impl Record {
    const fn new(name: PodName) -> Self {
        Self { name, drift: None, trouble: None, events: Vec::new() }
    }

    fn clear(&mut self) -> Option<Report> {
        let (drift, trouble) = (self.drift.take(), self.trouble.take());
        match (drift, trouble) {
            (Some(_), _) => Some(Report::Recovered),
            (None, Some(_)) => Some(Report::Visible),
            (None, None) => None,
        }
    }

    fn differs(&mut self, difference: &str, now: Instant) -> Option<Report> {
        self.trouble = None;
        if self.drift.as_deref() == Some(difference) {
            return None;
        }
        self.drift = Some(difference.to_owned());
        let hash = hash(difference);
        self.events.retain(|(_, at)| now.duration_since(*at) < EVENT_PAUSE);
        let event = self.events.len() < MOST_EVENTS && self.events.iter().all(|(other, _)| *other != hash);
        if event {
            self.events.push((hash, now));
        }
        Some(Report::Drifted { difference: difference.to_owned(), event })
    }

    /// What is not seen has not recovered.
    fn troubled(&mut self, trouble: &Trouble) -> Option<Report> {
        let is_new = self.trouble.replace(trouble.word()) != Some(trouble.word());
        is_new.then(|| Report::Trouble(trouble.clone()))
    }
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(ledger: &mut Ledger, look: &Comparison, now: Instant) -> Option<Report> {
        ledger.note("u", &PodName { namespace: "shop".into(), name: "web".into() }, look, now)
    }

    fn different(text: &str) -> Comparison {
        Comparison::Different(text.to_owned())
    }

    fn drifted(text: &str, event: bool) -> Option<Report> {
        Some(Report::Drifted { difference: text.to_owned(), event })
    }

    #[test]
    fn a_difference_is_said_once_and_its_end_too() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        assert_eq!(note(&mut ledger, &Comparison::AsPlanned, now), None);
        assert!(ledger.doubts("u", &different("a")));
        assert_eq!(note(&mut ledger, &different("a"), now), drifted("a", true));
        assert!(!ledger.doubts("u", &different("a")) && ledger.doubts("u", &different("b")));
        assert_eq!((note(&mut ledger, &different("a"), now), ledger.drifted()), (None, 1));
        assert_eq!(note(&mut ledger, &Comparison::AsPlanned, now), Some(Report::Recovered));
        assert_eq!((note(&mut ledger, &Comparison::AsPlanned, now), ledger.drifted()), (None, 0));
    }

    #[test]
    fn a_pod_that_comes_and_goes_is_no_stream_of_events() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        assert_eq!(note(&mut ledger, &different("a"), now), drifted("a", true));
        note(&mut ledger, &Comparison::AsPlanned, now);
        assert_eq!(note(&mut ledger, &different("a"), now), drifted("a", false), "said, but no event");
        let events = (0..100).filter(|count| {
            note(&mut ledger, &different(&count.to_string()), now) == drifted(&count.to_string(), true)
        });
        assert_eq!(events.count(), MOST_EVENTS - 1);
        assert_eq!(ledger.records["u"].events.len(), MOST_EVENTS);
        assert_eq!(
            note(&mut ledger, &different("a"), now + EVENT_PAUSE),
            drifted("a", true),
            "after a long while"
        );
    }

    #[test]
    fn what_is_not_seen_has_not_recovered() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        note(&mut ledger, &different("a"), now);
        let trouble = Trouble::NotFound("nowhere".into());
        assert_eq!(
            note(&mut ledger, &Comparison::Trouble(trouble.clone()), now),
            Some(Report::Trouble(trouble.clone()))
        );
        assert_eq!(
            (note(&mut ledger, &Comparison::Trouble(trouble.clone()), now), ledger.drifted()),
            (None, 1)
        );
        assert!(!ledger.doubts("u", &Comparison::Trouble(trouble)));
        assert!(ledger.doubts("u", &Comparison::Trouble(Trouble::Ambiguous("two".into()))));
        assert_eq!(note(&mut ledger, &Comparison::AsPlanned, now), Some(Report::Recovered));
        note(&mut ledger, &Comparison::Trouble(Trouble::Failed("no".into())), now);
        assert_eq!(note(&mut ledger, &Comparison::AsPlanned, now), Some(Report::Visible));
    }

    #[test]
    fn pods_that_are_gone_are_forgotten() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        for uid in ["a", "b"] {
            let name = PodName { namespace: "shop".into(), name: uid.into() };
            ledger.note(uid, &name, &different("x"), now);
        }
        let gone = ledger.keep(&BTreeSet::from(["b", "c"]));
        assert_eq!(gone.iter().map(ToString::to_string).collect::<Vec<_>>(), ["shop/a"]);
        assert_eq!((ledger.drifted(), ledger.records.len()), (1, 1));
        note(&mut ledger, &different("a"), now);
        note(&mut ledger, &Comparison::AsPlanned, now + EVENT_PAUSE);
        assert_eq!(ledger.records.len(), 1, "nothing is kept of a pod that is well and was so for long");
    }
}
