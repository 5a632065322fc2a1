//! Spreading work over a few threads, and work that goes on until the test ends it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::Result;

/// Asks another thread to stop when it is dropped, also where a test fails.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Work on a thread of its own, which is asked to stop when the value is dropped, and waited for.
#[derive(Debug)]
pub struct Worker<T = ()> {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts it. It is to look often whether it is to stop.
    pub fn start(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        Self { stop, thread: Some(thread::spawn(move || work(&told))) }
    }
}

impl<T> Worker<T> {
    /// Ends it; what came of it.
    ///
    /// # Panics
    /// It panicked.
    pub fn end(mut self) -> T {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it runs");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || !matches!(ended, Some(Err(_))), "a worker panicked");
    }
}

/// Runs a closure on a thread of its own, which may leave this one's namespaces or identity. A panic is passed on.
pub fn on_a_thread<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(action).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

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
