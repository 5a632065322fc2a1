//! Numbers that look random and are the same every time.

use std::time::SystemTime;

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Dice {
    seed: u64,
    state: u64,
}

impl Dice {
    /// The same numbers for the same seed, and others for another.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, state: seed.wrapping_mul(0x5851_f42d_4c95_7f2d) }
    }

    /// Others in every run, unless an environment variable brings back those of another run by their seed.
    #[must_use]
    pub fn of_this_run(variable: &str) -> Self {
        let given = std::env::var(variable).ok().and_then(|seed| seed.parse().ok());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
        Self::new(given.unwrap_or_else(now))
    }

    /// Numbers of its own for one of many, whatever the others draw.
    #[must_use]
    pub const fn branch(&self, index: usize) -> Self {
        let mut branch = Self { seed: self.seed, state: self.state };
        branch.state ^= (index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        branch.next();
        branch
    }

    /// What brings these numbers back.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to one less than this.
    ///
    /// # Panics
    /// If that is nothing.
    pub fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % most as u64).expect("less than a usize")
    }

    /// True once in so many times.
    pub fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
