//! How fast broken pods are deleted. Pure: time comes from outside.
//!
//! A deletion helps where the next pod of the same owner is redirected. Where it fails as well, another deletion changes nothing, and without
//! a limit a controller that replaces pods at once and an agent that deletes them at once would load the API server and the node for ever.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How many pods of a node are deleted at once, and then one in each pause: after a reboot a whole node of 110 pods takes three minutes.
const BURST: u32 = 20;
const PAUSE: Duration = Duration::from_secs(2);
/// The pauses before replacements of one owner that fail as well.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How long an owner is remembered after a round.
const MEMORY: Duration = Duration::from_secs(1200);

/// The limit of one node.
#[derive(Debug)]
pub struct DeletionLimit {
    /// Deletions that are left, at a time.
    left: u32,
    filled: Instant,
    owners: BTreeMap<String, OwnerHistory>,
}

#[derive(Debug)]
struct OwnerHistory {
    /// When the deletion of the present round's first pod was asked for: all that were broken by then are deleted at once.
    round: Instant,
    /// How many rounds of replacements failed one after the other.
    failed: u32,
}

impl OwnerHistory {
    /// A pod that was first found broken in the present round is a replacement.
    fn is_replacement(&self, since: Instant) -> bool {
        since > self.round
    }

    fn pause(&self) -> Duration {
        FIRST_PAUSE.saturating_mul(1 << self.failed.min(8)).min(LONGEST_PAUSE)
    }
}

/// Why a deletion has to wait, and how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Throttled {
    /// Why.
    pub why: String,
    /// How long to wait.
    pub wait: Duration,
}

impl DeletionLimit {
    /// A node on which nothing was deleted yet.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { left: BURST, filled: now, owners: BTreeMap::new() }
    }

    /// Whether a pod of an owner may be deleted, which was found broken first at `since`.
    ///
    /// # Errors
    /// It has to wait.
    pub fn ask(&mut self, owner: &str, since: Instant, now: Instant) -> Result<(), Throttled> {
        self.refill(now);
        if let Some(history) = self.owners.get(owner).filter(|history| history.is_replacement(since)) {
            let wait = (history.round + history.pause()).saturating_duration_since(now);
            if !wait.is_zero() {
                let failed = history.failed.saturating_add(1);
                let why = format!("replacements of deleted pods failed as well, {failed} times in a row");
                return Err(Throttled { why, wait });
            }
        }
        if self.left == 0 {
            let wait = (self.filled + PAUSE).saturating_duration_since(now);
            return Err(Throttled { why: "many pods of this node were deleted".to_owned(), wait });
        }
        Ok(())
    }

    /// Notes that a deletion was asked for at this time, and is done or may be.
    pub fn deleted(&mut self, owner: &str, since: Instant, asked: Instant) {
        self.left = self.left.saturating_sub(1);
        self.owners.retain(|_, history| asked.duration_since(history.round) < MEMORY);
        let history = self.owners.entry(owner.to_owned()).or_insert(OwnerHistory { round: asked, failed: 0 });
        if history.is_replacement(since) {
            *history = OwnerHistory { round: asked, failed: history.failed.saturating_add(1) };
        }
    }

    fn refill(&mut self, now: Instant) {
        while self.left < BURST && now.duration_since(self.filled) >= PAUSE {
            self.left += 1;
            self.filled += PAUSE;
        }
        if self.left == BURST {
            self.filled = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    /// A controller that replaces each deleted pod after a second, and pods that all fail.
    #[test]
    fn replacements_that_fail_as_well_are_deleted_ever_more_slowly() {
        let start = Instant::now();
        let mut limit = DeletionLimit::new(start);
        let mut pods = [0_u64; 3];
        let mut deletions = Vec::new();
        for second in 0..3600 {
            for since in &mut pods {
                let (since_then, now) = (at(start, *since), at(start, second));
                if *since <= second && limit.ask("rs", since_then, now).is_ok() {
                    limit.deleted("rs", since_then, now);
                    deletions.push(second);
                    *since = second + 1;
                }
            }
        }
        let rounds = deletions.chunks(3).map(|round| round[0]).collect::<Vec<_>>();
        assert_eq!(&rounds[..7], [0, 10, 30, 70, 150, 310, 610]);
        assert!(deletions.len() <= 51, "{deletions:?}");
        assert!(limit.ask("another", at(start, 3600), at(start, 3600)).is_ok());
    }

    #[test]
    fn the_first_pods_of_an_owner_do_not_wait_for_each_other() {
        let start = Instant::now();
        let mut limit = DeletionLimit::new(start);
        for second in 0..5 {
            assert_eq!(limit.ask("rs", start, at(start, second)), Ok(()));
            limit.deleted("rs", start, at(start, second));
        }
        let late = limit.ask("rs", at(start, 6), at(start, 6)).expect_err("it waits");
        assert_eq!(late.wait, Duration::from_secs(4));
        assert!(late.why.contains("failed as well, 1 times in a row"), "{}", late.why);
    }

    #[test]
    fn a_node_has_a_burst_and_then_one_deletion_at_a_time() {
        let start = Instant::now();
        let mut limit = DeletionLimit::new(start);
        let mut deleted = 0;
        for second in 0..60 {
            for _ in 0..200 {
                let owner = format!("owner-{deleted}");
                if limit.ask(&owner, start, at(start, second)).is_ok() {
                    limit.deleted(&owner, start, at(start, second));
                    deleted += 1;
                }
            }
        }
        assert_eq!(deleted, BURST + 29);
        let late = limit.ask("x", start, at(start, 59)).expect_err("it waits");
        assert_eq!(
            (late.why.as_str(), late.wait),
            ("many pods of this node were deleted", Duration::from_secs(1))
        );
        assert!(limit.ask("x", start, at(start, 60)).is_ok());
    }

    #[test]
    fn owners_are_forgotten() {
        let start = Instant::now();
        let mut limit = DeletionLimit::new(start);
        limit.deleted("old", start, start);
        limit.deleted("new", at(start, 1200), at(start, 1200));
        assert_eq!(limit.owners.keys().collect::<Vec<_>>(), ["new"]);
    }
}
