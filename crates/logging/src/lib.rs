//! Log lines in the format of the mesh's own tools, behind the `log` facade.
//!
//! A record's target is its *scope*; [`DEFAULT_SCOPE`] is never printed. Key-values become labels:
//!
//! ```
//! # fn main() -> Result<(), logging::InitError> {
//! let handle = logging::init(logging::Config::default())?;
//! log::info!(target: "cni-agent", pod = "shop/cart-0", milliseconds = 3; "repaired");
//! // 2026-11-21T07:26:50.123456Z  info  cni-agent  repaired  pod=shop/cart-0 milliseconds=3   (tabs between the fields)
//! handle.set_levels("cni-agent:debug".parse().expect("a level"));
//! # Ok(()) }
//! ```
//!
//! Text of other programs is escaped: a console line is one line, and free of control characters. It is impossible to log a
//! structure as a whole, so nothing secret gets in by accident.

mod entry;
mod flags;
mod level;
#[cfg(unix)]
mod rolling;
mod sink;
#[cfg(unix)]
mod socket;

use std::sync::{Arc, PoisonError, RwLock};

pub use entry::{LineFormat, LogEntry, escaped};
pub use flags::ConfigError;
pub use level::{Level, LevelError, Levels};
#[cfg(unix)]
pub use rolling::RollingFile;
pub use sink::{LogTarget, Sink};
#[cfg(unix)]
pub use socket::{AgentSocket, SOCKET_NAME};

/// The scope that is not printed, and that a bare level means.
pub const DEFAULT_SCOPE: &str = "default";

/// How and where a program logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Which levels are logged, by scope.
    pub levels: Levels,
    /// How lines look on `targets`.
    pub format: LineFormat,
    /// Where lines go. None is possible.
    pub targets: Vec<LogTarget>,
    /// Whether lines name the place in the source they come from.
    pub caller: bool,
}

impl Default for Config {
    /// Info and above, console format, standard error.
    fn default() -> Self {
        Self {
            levels: Levels::default(),
            format: LineFormat::Console,
            targets: vec![LogTarget::Stderr],
            caller: false,
        }
    }
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A log file cannot be opened.
    #[error("cannot open the log file {path:?}: {error}")]
    Target {
        /// The file.
        path: std::path::PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// The process logs already.
    #[error("logging is set up already")]
    Twice(#[from] log::SetLoggerError),
}

/// Sets logging up for the process.
///
/// # Errors
/// When a log file cannot be opened, or on a second call.
pub fn init(config: Config) -> Result<LogHandle, InitError> {
    let sinks = config
        .targets
        .iter()
        .map(|target| sink::open(target, config.format))
        .collect::<Result<Vec<Box<dyn Sink>>, _>>()?;
    let max = config.levels.max_filter();
    let handle = LogHandle(Arc::new(Shared {
        levels: RwLock::new(config.levels),
        sinks: RwLock::new(sinks),
        caller: config.caller,
    }));
    #[cfg(unix)]
    outlive_full_files();
    log::set_boxed_logger(Box::new(Logger(handle.clone())))?;
    log::set_max_level(max);
    Ok(handle)
}

/// Holds SIGXFSZ back, from this thread and those it makes: a line that goes beyond the largest file allowed (ulimit -f) is
/// lost like one that goes to a full disk. The signal would end the program between what it has done and saying so.
#[cfg(unix)]
fn outlive_full_files() {
    use nix::sys::signal::{SigSet, Signal};
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Changes logging at run time. Clones share the same state.
#[derive(Clone)]
pub struct LogHandle(Arc<Shared>);

struct Shared {
    levels: RwLock<Levels>,
    sinks: RwLock<Vec<Box<dyn Sink>>>,
    caller: bool,
}

impl std::fmt::Debug for LogHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("levels", &self.levels()).finish_non_exhaustive()
    }
}

impl LogHandle {
    /// The levels that hold.
    #[must_use]
    pub fn levels(&self) -> Levels {
        self.0.levels.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces all levels.
    pub fn set_levels(&self, levels: Levels) {
        log::set_max_level(levels.max_filter());
        *self.0.levels.write().unwrap_or_else(PoisonError::into_inner) = levels;
    }

    /// Sends lines to one more place from now on.
    pub fn add_sink(&self, sink: Box<dyn Sink>) {
        self.0.sinks.write().unwrap_or_else(PoisonError::into_inner).push(sink);
    }

    /// Logs an entry that was made elsewhere, such as one received from another process, with its own time. The
    /// levels of its scope hold.
    pub fn emit(&self, entry: &LogEntry) {
        let scope = entry.scope.as_deref().unwrap_or(DEFAULT_SCOPE);
        if self.0.levels.read().unwrap_or_else(PoisonError::into_inner).allow(scope, entry.level) {
            self.write(entry);
        }
    }

    /// Sends what sinks hold back to where it belongs.
    pub fn flush(&self) {
        for sink in self.0.sinks.read().unwrap_or_else(PoisonError::into_inner).iter() {
            sink.flush();
        }
    }

    fn write(&self, entry: &LogEntry) {
        for sink in self.0.sinks.read().unwrap_or_else(PoisonError::into_inner).iter() {
            sink.write(entry);
        }
    }
}

struct Logger(LogHandle);

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        let levels = self.0.0.levels.read().unwrap_or_else(PoisonError::into_inner);
        levels.allow(metadata.target(), metadata.level().into())
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.write(&LogEntry::of(record, self.0.0.caller));
        }
    }

    fn flush(&self) {
        self.0.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    struct Kept(Arc<Mutex<Vec<String>>>);

    impl Sink for Kept {
        fn write(&self, entry: &LogEntry) {
            self.0.lock().unwrap().push(entry.console());
        }
    }

    // One test, because a process has one logger.
    #[test]
    fn levels_change_at_run_time() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let handle = init(Config { targets: Vec::new(), ..Config::default() }).unwrap();
        handle.add_sink(Box::new(Kept(kept.clone())));
        log::debug!(target: "cni-agent", "not yet");
        log::info!(target: DEFAULT_SCOPE, n = 1, text = "a b\n"; "first\nline");
        let mut levels = handle.levels();
        levels.set("cni-agent", Level::Debug);
        handle.set_levels(levels);
        log::debug!(target: "cni-agent", "now");
        handle.set_levels("none".parse().unwrap());
        log::error!(target: DEFAULT_SCOPE, "never");
        let other = LogEntry::from_json(
            r#"{"level":"warn","time":"2026-11-21T07:26:50.000001Z","msg":"from afar","pod":"a/b"}"#,
        );
        handle.emit(&LogEntry { scope: Some("cni-plugin".into()), ..other.unwrap() });

        let lines = kept.lock().unwrap();
        let without_time: Vec<&str> = lines.iter().map(|line| line.split_once('\t').unwrap().1).collect();
        assert_eq!(
            without_time,
            [
                "info\tfirst\\nline\tn=1 text=\"a b\\n\"",
                "debug\tcni-agent\tnow",
                "warn\tcni-plugin\tfrom afar\tpod=a/b"
            ]
        );
        assert_eq!(lines[2].split('\t').next(), Some("2026-11-21T07:26:50.000001Z"));
        assert!(matches!(init(Config::default()), Err(InitError::Twice(_))));
    }
}
