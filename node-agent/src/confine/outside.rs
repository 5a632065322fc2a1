//! One thread that is not shut in, for what a thread that is shut in may not do: looking at processes.

use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::thread;

type Job = Box<dyn FnOnce() + Send>;

/// Where work for the thread goes, if there is one.
static THREAD: OnceLock<Sender<Job>> = OnceLock::new();

/// Makes the thread. To be called before the process shuts itself in; what the caller may do, the thread may do ever after.
///
/// # Errors
/// No thread can be made.
pub fn start() -> std::io::Result<()> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let serve = move || {
        for job in jobs {
            // Whoever waits hears nothing, and says so; the next one is served.
            let _ = panic::catch_unwind(AssertUnwindSafe(job));
        }
    };
    thread::Builder::new().name("outside".to_owned()).spawn(serve)?;
    THREAD.get_or_init(|| sender);
    Ok(())
}

/// Does some work on that thread, and waits for it; right here, where there is none. None if it panicked.
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
