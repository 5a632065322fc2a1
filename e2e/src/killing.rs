//! Programs that are killed at random moments.

use std::process::Child;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use test_support::dice::Dice;

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
        // The machine may have stood still in between.
        let whole = start.elapsed().min(Duration::from_secs(1)) * 2;
        Ok(Self { microseconds: AtomicU64::new(u64::try_from(whole.as_micros())?) })
    }

    /// Kills a child at one of them; only itself: what it has started lives on. Returns the moment, or none if it had ended by then.
    pub fn kill(&self, child: &mut Child, dice: &mut Dice) -> Result<Option<Duration>> {
        let whole = self.microseconds.load(Ordering::Relaxed).max(100);
        let after = Duration::from_micros(dice.next() % whole);
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
        dice: &mut Dice,
        mut start: impl FnMut() -> Result<(Child, T)>,
    ) -> Result<(Duration, T)> {
        for _ in 0..1000 {
            let (mut child, with) = start()?;
            if let Some(after) = self.kill(&mut child, dice)? {
                return Ok((after, with));
            }
        }
        bail!("always ended before it was killed: {self:?}")
    }
}
