//! One unconfined thread, for what a confined thread may not do: reading processes.

use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::thread;

type OutsideJob = Box<dyn FnOnce() + Send>;

/// Where work for the thread goes, if it exists.
static THREAD: OnceLock<Sender<OutsideJob>> = OnceLock::new();

/// Starts the thread. Call it before the process confines itself; the thread keeps the caller's rights.
///
/// # Errors
/// No thread can be made.
pub fn start() -> std::io::Result<()> {
    let (sender, jobs) = mpsc::channel::<OutsideJob>();
    let serve = move || {
        for job in jobs {
            // The caller gets nothing, and reports that; the next job runs.
            let _ = panic::catch_unwind(AssertUnwindSafe(job));
        }
    };
    thread::Builder::new().name("outside".to_owned()).spawn(serve)?;
    THREAD.get_or_init(|| sender);
    Ok(())
}

/// Runs a job on that thread and waits for it; on the calling thread if that thread does not exist. None if the job panicked.
pub fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let Some(thread) = THREAD.get() else { return Some(work()) };
    let (sender, done) = mpsc::sync_channel(1);
    let job = move || {
        let _ = sender.send(work());
    };
    thread.send(Box::new(job)).ok()?;
    done.recv().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_elsewhere_also_after_a_panic() {
        let here = thread::current().id();
        assert_eq!(run(|| thread::current().id()), Some(here));
        start().expect("a thread");
        assert_eq!(run(|| -> u8 { panic!("on purpose") }), None);
        let there = run(|| thread::current().id()).expect("done");
        assert_ne!(there, here);
    }
}
