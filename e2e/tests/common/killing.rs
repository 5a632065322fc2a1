//! Programs that are killed at random moments.

use std::process::Child;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, bail};

/// Random numbers that can be had again: REDIRECT_SEED brings back those of another run.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "the seed is for messages")]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// Those of this test process.
    pub fn of_this_run() -> Self {
        let given = std::env::var("REDIRECT_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let seed = given.unwrap_or_else(now);
        Self { seed, state: seed }
    }

    /// Numbers of its own for one of many, whatever the others draw.
    pub fn branch(&self, index: usize) -> Self {
        let mut branch = self.clone();
        branch.state ^= (index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        branch.next();
        branch
    }

    /// SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// The moments at which runs of one kind are killed: from the beginning to about twice what a run takes, which depends on
/// what else the machine does, so that it is learnt from what became of the runs before.
#[derive(Debug)]
pub struct Moments {
    microseconds: AtomicU64,
}

impl Moments {
    /// From a run of this kind that was not killed. It begins and ends as quickly as the machine lets it.
    pub fn of(run: impl FnOnce() -> Result<()>) -> Result<Self> {
        let start = Instant::now();
        run()?;
        // The machine may have stood still meanwhile.
        let whole = start.elapsed().min(Duration::from_secs(1)) * 2;
        Ok(Self { microseconds: AtomicU64::new(u64::try_from(whole.as_micros())?) })
    }

    /// Kills a child at one of them; only itself: what it has started lives on. Returns the moment, or none if it had ended by then.
    pub fn kill(&self, child: &mut Child, random: &mut Random) -> Result<Option<Duration>> {
        let whole = self.microseconds.load(Ordering::Relaxed).max(100);
        let after = Duration::from_micros(random.next() % whole);
        let end = Instant::now() + after;
        // Sleeping is never shorter than some fifty microseconds, in which much happens.
        thread::sleep(after.saturating_sub(Duration::from_micros(200)));
        while Instant::now() < end {
            thread::yield_now();
        }
        let has_ended = child.try_wait()?.is_some();
        let _ = child.kill();
        child.wait()?;
        self.microseconds
            .store(if has_ended { whole * 95 / 100 } else { whole * 105 / 100 }, Ordering::Relaxed);
        Ok((!has_ended).then_some(after))
    }

    /// Starts and kills runs until one is killed before it ends.
    pub fn kill_one<T>(
        &self,
        random: &mut Random,
        mut start: impl FnMut() -> Result<(Child, T)>,
    ) -> Result<(Duration, T)> {
        for _ in 0..1000 {
            let (mut child, with) = start()?;
            if let Some(after) = self.kill(&mut child, random)? {
                return Ok((after, with));
            }
        }
        bail!("always ended before it was killed: {self:?}")
    }
}
