//! Spreading work over a few threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::Result;

/// Does all work on a few threads; the results in the order of the work.
///
/// # Panics
/// A piece of work panics.
pub fn in_threads<T: Send, F: FnOnce() -> T + Send>(threads: usize, work: Vec<F>) -> Vec<T> {
    let work: Vec<Mutex<Option<F>>> = work.into_iter().map(|one| Mutex::new(Some(one))).collect();
    let done: Vec<Mutex<Option<T>>> = work.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = work.get(at) else { return };
                    let one = one.lock().ok().and_then(|mut one| one.take());
                    if let (Some(one), Ok(mut done)) = (one, done[at].lock()) {
                        *done = Some(one());
                    }
                }
            });
        }
    });
    done.into_iter().filter_map(|one| one.into_inner().ok().flatten()).collect()
}

/// Runs `work` on every item, on a few threads; returns the problems in the order of the items.
pub fn in_parallel<T: Sync>(
    threads: usize,
    items: &[T],
    work: impl Fn(usize, &T) -> Result<Vec<String>> + Sync,
) -> Vec<String> {
    let work = &work;
    let all = items.iter().enumerate().map(|(index, item)| move || work(index, item)).collect();
    in_threads(threads, all)
        .into_iter()
        .flat_map(|found| found.unwrap_or_else(|error| vec![format!("{error:#}")]))
        .collect()
}
