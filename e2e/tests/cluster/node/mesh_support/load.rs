//! Calls and talk without a pause, and what of them is to be read on the wire.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::segments::{Segment, Wire};
use test_support::netns::Namespace;

/// How often each verdict was reached.
pub type Verdicts = BTreeMap<String, usize>;

/// Runs an action and meanwhile makes each of these calls again and again. An error of a call counts as a verdict.
pub fn while_calling<T>(
    calls: &[&(dyn Fn() -> Result<String> + Sync)],
    action: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Verdicts>)> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let callers: Vec<_> = calls.iter().map(|call| scope.spawn(|| again_and_again(call, &done))).collect();
        let result = action();
        done.store(true, Ordering::Relaxed);
        let verdicts =
            callers.into_iter().map(|caller| caller.join().map_err(|_| anyhow::anyhow!("a caller panicked")));
        let verdicts = verdicts.collect::<Result<_>>()?;
        Ok((result?, verdicts))
    })
}

fn again_and_again(call: &dyn Fn() -> Result<String>, done: &AtomicBool) -> Verdicts {
    let mut verdicts = Verdicts::new();
    while !done.load(Ordering::Relaxed) {
        *verdicts.entry(call().unwrap_or_else(|error| format!("{error:#}"))).or_default() += 1;
    }
    verdicts
}

/// How many segments that passed a wire hold a text.
pub fn heard(wire: &Wire, text: &str) -> Result<usize> {
    let holds = |segment: &Segment| segment.payload.windows(text.len()).any(|part| part == text.as_bytes());
    Ok(wire.forget()?.iter().filter(|segment| holds(segment)).count())
}

/// A connection that says the same line again and again to a server that echoes.
pub struct Stream {
    reader: BufReader<TcpStream>,
    line: String,
}

impl Stream {
    /// Connects from inside of a namespace and waits for the server's greeting.
    pub fn open(from: &Namespace, target: SocketAddr, line: &str) -> Result<Self> {
        let stream =
            from.enter(|| TcpStream::connect(target))?.with_context(|| format!("cannot reach {target}"))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut reader = BufReader::new(stream);
        let mut greeting = String::new();
        reader.read_line(&mut greeting)?;
        ensure!(greeting.contains("peer"), "{target} greets with {greeting:?}");
        Ok(Self { reader, line: format!("{line}\n") })
    }

    /// Says the line for a while, and hears it each time; how often.
    pub fn talk(&mut self, time: Duration) -> Result<usize> {
        let (begin, mut count) = (Instant::now(), 0);
        while begin.elapsed() < time {
            self.reader.get_mut().write_all(self.line.as_bytes())?;
            let mut echo = String::new();
            self.reader.read_line(&mut echo)?;
            ensure!(echo == self.line, "{echo:?} came back");
            count += 1;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(count)
    }
}
