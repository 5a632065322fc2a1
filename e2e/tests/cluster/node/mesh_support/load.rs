//! Calls and talk without a pause, and what of them is to be read on the wire.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use e2e::segments::{Segment, Wire};
use e2e::traffic::Stream;

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

/// Says a line on a connection for a while, and hears it each time; how often.
pub fn talk(stream: &mut Stream, line: &str, time: Duration) -> Result<usize> {
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < time {
        stream.echo(line)?;
        count += 1;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(count)
}
