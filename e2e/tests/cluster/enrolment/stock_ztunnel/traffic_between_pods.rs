//! Connections from a pod, one after the other, and one that stays.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use test_support::netns::{self, Namespace};
use test_support::parallel::Worker;

/// How long anything may take before it counts as failed.
const PATIENCE: Duration = Duration::from_secs(5);

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
                if let Err(error) = Stream::connect(*target) {
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

/// A connection to a server that answers with its report, and then with what it is sent.
pub struct Stream(BufReader<TcpStream>);

impl Stream {
    pub fn open(pod: &Namespace, target: SocketAddr) -> io::Result<Self> {
        pod.enter(|| Self::connect(target)).map_err(io::Error::other)?
    }

    /// From the calling thread's network namespace.
    pub fn connect(target: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&target, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut stream = BufReader::new(stream);
        let mut report = String::new();
        stream.read_line(&mut report)?;
        if report.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self(stream))
    }

    pub fn echo(&mut self) -> io::Result<()> {
        self.0.get_mut().write_all(b"still there?")?;
        let mut answer = [0; 12];
        self.0.read_exact(&mut answer)
    }
}
