//! The process that called the plugin by the entry beside the network's list: a runtime that reads folders of lists.
//!
//! What it reads is known as long as it runs: a runtime is replaced by another, perhaps older one only by ending. The process is kept in the run
//! directory, so that a restarted agent knows it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use agent_runtime::{SCOPE, lock};
use tokio::sync::Notify;

use crate::install::disk::{self, Disk, FileAttributes};

/// The file in the run directory: the process's id and its start.
pub const FILE_NAME: &str = "drop-in-reader";
/// Which field behind the name in `/proc/PID/stat` is the start of the process (proc_pid_stat(5)), in ticks since the boot.
const START_FIELD: usize = 19;

/// Which process reads the entry beside the list.
pub struct DropInReader {
    state: Mutex<State>,
    reported: Notify,
    disk: Arc<dyn Disk>,
    proc: PathBuf,
    path: PathBuf,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the file was read, which an earlier agent may have written.
    is_read: bool,
    process: Option<RuntimeProcess>,
}

/// A process, which its id alone does not name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RuntimeProcess {
    id: u64,
    start: String,
}

impl DropInReader {
    /// None yet, or the one that an earlier agent knew: kept at `path`. Processes are read in `proc`.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, proc: PathBuf, path: PathBuf) -> Self {
        Self { state: Mutex::default(), reported: Notify::new(), disk, proc, path }
    }

    /// Notes that the plugin was called by the entry beside the list, by the process of this id. One that was reported before and still runs stays:
    /// other programs than the node's runtime may use its network, and end at once.
    pub fn report(&self, id: u64) {
        let mut state = lock(&self.state);
        if state.process.as_ref().is_some_and(|process| self.runs(process)) {
            return;
        }
        let process = self.process(id);
        if process.is_some() {
            *state = State { is_read: true, process };
            self.reported.notify_one();
        }
    }

    /// Waits until another process is reported.
    pub async fn changed(&self) {
        self.reported.notified().await;
    }

    /// Whether a process is known that still runs. Keeps it beyond the agent's end, and forgets one that is gone.
    pub fn is_there(&self) -> bool {
        let mut state = lock(&self.state);
        let kept = disk::read_text(&*self.disk, &self.path).ok();
        if !state.is_read {
            *state = State { is_read: true, process: kept.as_deref().and_then(RuntimeProcess::parse) };
        }
        state.process.take_if(|process| !self.runs(process));
        let text = state.process.as_ref().map(RuntimeProcess::text);
        if text != kept {
            self.keep(text.as_deref());
        }
        state.process.is_some()
    }

    /// Whether the process has ended.
    pub fn is_gone(&self) -> bool {
        let process = lock(&self.state).process.clone();
        process.is_some_and(|process| !self.runs(&process))
    }

    fn runs(&self, process: &RuntimeProcess) -> bool {
        self.process(process.id).as_ref() == Some(process)
    }

    /// Without the file a later agent waits for another call.
    fn keep(&self, text: Option<&str>) {
        let kept = match text {
            Some(text) => {
                disk::replace(&*self.disk, &self.path, &mut text.as_bytes(), FileAttributes::Mode(0o600))
            }
            None => disk::remove(&*self.disk, &self.path),
        };
        if let Err(error) = kept {
            log::warn!(target: SCOPE, "a restarted agent may not know which runtime reads the entry beside the list: {error}");
        }
    }

    /// The process of an id; none if none has it, or it is not seen from here.
    fn process(&self, id: u64) -> Option<RuntimeProcess> {
        let path = self.proc.join(id.to_string()).join("stat");
        let stat = disk::read_text(&*self.disk, &path).ok()?;
        let start = start(&stat)?;
        Some(RuntimeProcess { id, start })
    }
}

impl RuntimeProcess {
    fn text(&self) -> String {
        format!("{} {}\n", self.id, self.start)
    }

    fn parse(text: &str) -> Option<Self> {
        let (id, start) = text.trim_end().split_once(' ')?;
        Some(Self { id: id.parse().ok()?, start: start.to_owned() })
    }
}

/// When a process started. Its name, in brackets, may have any characters.
fn start(stat: &str) -> Option<String> {
    let behind_name = &stat[stat.rfind(')')? + 1..];
    behind_name.split_whitespace().nth(START_FIELD).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::disk::Real;
    use std::fs;
    use std::path::Path;

    fn reader(folder: &Path) -> DropInReader {
        DropInReader::new(Arc::new(Real), folder.join("proc"), folder.join(FILE_NAME))
    }

    fn start_process(folder: &Path, id: u64, start: u64) {
        let place = folder.join("proc").join(id.to_string());
        fs::create_dir_all(&place).expect("makes");
        let fields: Vec<String> =
            (3..=52).map(|field| if field == 22 { start } else { 7 }.to_string()).collect();
        fs::write(place.join("stat"), format!("{id} (a) b (c) {}\n", fields.join(" "))).expect("writes");
    }

    fn end_process(folder: &Path, id: u64) {
        fs::remove_dir_all(folder.join("proc").join(id.to_string())).expect("removes");
    }

    #[test]
    fn the_start_of_a_process_is_the_kernels() {
        let stat = fs::read_to_string("/proc/self/stat").expect("a process");
        let start = start(&stat).expect("a start");
        let boot = fs::read_to_string("/proc/uptime").expect("an uptime");
        let uptime: f64 = boot.split(' ').next().and_then(|text| text.parse().ok()).expect("seconds");
        let seconds = start.parse::<f64>().expect("a number") / 100.0;
        assert!(seconds <= uptime + 1.0 && seconds > uptime - 3600.0, "{seconds} of {uptime}");
    }

    #[test]
    fn a_reader_is_there_until_its_process_ends_also_for_the_next_agent() {
        let folder = tempfile::tempdir().expect("a folder");
        let one = reader(folder.path());
        one.report(42);
        assert!(!one.is_there(), "no such process");
        start_process(folder.path(), 42, 100);
        one.report(42);
        assert!(one.is_there() && !one.is_gone() && reader(folder.path()).is_there());
        // Another process of the same id.
        start_process(folder.path(), 42, 200);
        assert!(one.is_gone() && !reader(folder.path()).is_there() && !one.is_there() && !one.is_gone());
        assert!(!folder.path().join(FILE_NAME).exists(), "it is forgotten");
        one.report(42);
        assert!(one.is_there());
    }

    #[test]
    fn a_process_that_ends_at_once_does_not_replace_the_runtime() {
        let folder = tempfile::tempdir().expect("a folder");
        let one = reader(folder.path());
        start_process(folder.path(), 42, 100);
        start_process(folder.path(), 43, 300);
        one.report(42);
        one.report(43);
        end_process(folder.path(), 43);
        assert!(one.is_there());
        start_process(folder.path(), 43, 300);
        end_process(folder.path(), 42);
        one.report(43);
        assert!(one.is_there(), "the new runtime");
    }

    #[test]
    fn junk_proves_nothing_and_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        start_process(folder.path(), 42, 100);
        for junk in [&b""[..], b"42", b"42 ", b"x 100\n", b"42 101\n", b"\xff\xfe 1\n", &[b'4'; 5 << 20]] {
            fs::write(folder.path().join(FILE_NAME), junk).expect("writes");
            assert!(
                !reader(folder.path()).is_there(),
                "{:?}",
                String::from_utf8_lossy(&junk[..junk.len().min(9)])
            );
        }
        let stats = ["", "42", "42 (a", "42 (a)", "42 (a) S 1 2 3"];
        for stat in stats {
            assert_eq!(start(stat), None, "{stat}");
        }
    }

    /// The run directory may be full: the agent that received the report knows it all the same.
    #[test]
    fn what_cannot_be_kept_counts_for_this_agent() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join(FILE_NAME)).expect("makes");
        start_process(folder.path(), 42, 100);
        let one = reader(folder.path());
        one.report(42);
        assert!(one.is_there() && !reader(folder.path()).is_there());
    }
}
