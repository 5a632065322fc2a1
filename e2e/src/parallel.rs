//! Spreading work over a few threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::Result;

/// Runs `work` on every item, on a few threads; returns the problems in the order of the items.
pub fn in_parallel<T: Sync>(
    threads: usize,
    items: &[T],
    work: impl Fn(usize, &T) -> Result<Vec<String>> + Sync,
) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let found = work(index, item).unwrap_or_else(|error| vec![format!("{error:#}")]);
                    let found = found.into_iter().map(|problem| (index, problem));
                    problems.lock().unwrap_or_else(PoisonError::into_inner).extend(found);
                }
            });
        }
    });
    let mut problems = problems.into_inner().unwrap_or_else(PoisonError::into_inner);
    problems.sort();
    problems.into_iter().map(|(_, problem)| problem).collect()
}
