//! Running a plugin as a runtime does: it gets its input on standard input, and answers on standard output.

use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

/// How much of an answer is read at most.
const LARGEST: u64 = 1 << 20;
/// How many times to retry a program whose file is still open for writing: a process forked a moment ago may hold it that long.
const BUSY_ATTEMPTS: u32 = 20;

/// Runs a plugin with this input, and returns how it ended and what it printed. One that did not exit within `patience` is killed. Its standard
/// error goes where `command` says.
///
/// # Errors
/// It cannot be started or listened to, or has not ended in time ([`io::ErrorKind::TimedOut`]).
pub fn invoke(command: &mut Command, input: &str, patience: Duration) -> io::Result<(ExitStatus, String)> {
    let mut child = start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let feed = move || {
        // A program that ends without reading everything has its reasons.
        let _ = stdin.map(|mut stdin| stdin.write_all(input.as_bytes()));
    };
    let drain = move || {
        let mut bytes = Vec::new();
        let _ = stdout.map(|stdout| stdout.take(LARGEST).read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    };
    thread::scope(|scope| {
        let helper = || thread::Builder::new().name("plugin".to_owned());
        let ended = (|| {
            helper().spawn_scoped(scope, feed)?;
            let output = helper().spawn_scoped(scope, drain)?;
            Ok((wait(&mut child, patience)?, output))
        })();
        let (status, output) = ended.inspect_err(|_: &io::Error| {
            // If nothing listens to it, the program could wait for ever, and its threads with it.
            let _ = child.kill().and_then(|()| child.wait());
        })?;
        Ok((status, output.join().unwrap_or_default()))
    })
}

fn start(command: &mut Command) -> io::Result<Child> {
    let mut attempt = 0;
    loop {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && attempt < BUSY_ATTEMPTS => {
                attempt += 1;
                thread::sleep(Duration::from_millis(10));
            }
            started => return started,
        }
    }
}

/// Waits for the program to end. Does not go by the clock: while the machine stands still, no program can end.
fn wait(child: &mut Child, patience: Duration) -> io::Result<ExitStatus> {
    let (mut waited, mut pause) = (Duration::ZERO, Duration::from_micros(500));
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if waited >= patience {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("it did not exit within {patience:?}"),
            ));
        }
        thread::sleep(pause);
        waited += pause;
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}
