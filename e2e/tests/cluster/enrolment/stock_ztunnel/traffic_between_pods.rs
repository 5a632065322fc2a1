//! Connections from a pod, one after the other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use e2e::traffic::Stream;
use test_support::netns::{self, Namespace};
use test_support::parallel::Worker;

/// How long anything may take before it counts as failed.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// When a connection was tried, and what became of it.
pub type Failures = Vec<(Instant, String)>;

/// Connections that are made one after the other until this ends.
pub struct Traffic {
    count: Arc<AtomicUsize>,
    connecting: Worker<Failures>,
}

impl Traffic {
    pub fn begin(pod: &Namespace, targets: &[SocketAddr]) -> Self {
        let count = Arc::<AtomicUsize>::default();
        let (counted, pod, targets) = (count.clone(), pod.path(), targets.to_vec());
        let connect = move |stopped: &AtomicBool| {
            let mut failed = Vec::new();
            for target in targets.iter().cycle() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let begin = Instant::now();
                if let Err(error) = Stream::connect(*target, PATIENCE) {
                    failed.push((begin, format!("{target}: {error}")));
                }
                counted.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
            failed
        };
        let connecting =
            Worker::start(move |stopped| netns::enter(&pod, || connect(stopped)).expect("enters"));
        Self { count, connecting }
    }

    /// How many there were.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Which ones failed, when and why.
    pub fn end(self) -> Failures {
        self.connecting.end()
    }
}
