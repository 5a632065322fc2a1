//! The columns of the matrix.

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A call is forbidden.
    Forbidden,
    /// The kernel has no memory for a call.
    NoMemory,
    /// A device or a file system fails.
    InputOutput,
    /// A call finds no more descriptors.
    TooManyFiles,
    /// A call finds no space.
    NoSpace,
    /// A signal interrupts a call.
    Interrupted,
    /// A call is to be tried again.
    TryAgain,
    /// A socket's buffer overflows.
    NoBuffers,
    /// Another program has what a call wants.
    Busy,
    /// The kernel does not have what a call is about: an older kernel, a missing module, a seccomp profile.
    Unsupported,
    /// The kernel reports that its list changed concurrently.
    DumpInterrupted,
    /// No thread or process can be made.
    NoProcess,
    /// SIGKILL at a call.
    Killed,
    /// SIGTERM at a call.
    Terminated,
    /// SIGHUP, SIGINT, SIGPIPE and SIGUSR1 at a call.
    OtherSignal,
    /// SIGSTOP at a call; it goes on later.
    Standstill,
    /// The clock of the day is decades off.
    Clock,
    /// A limit on memory, below what the program needs or near to it.
    MemoryLimit,
    /// A limit on descriptors.
    FileLimit,
    /// A limit on the size of files.
    SizeLimit,
    /// Nothing reads what the program writes to standard output or standard error.
    ClosedOutput,
    /// The file system is full, or nearly so.
    FullDisk,
    /// The file system, or a part, is read-only.
    ReadOnly,
    /// A file is something else: gone, a directory, a pipe, a link, garbage.
    Replaced,
    /// The API server refuses, fails, hangs, or is something else.
    Api,
}

/// Every kind, in the order of the columns.
pub const KINDS: [Kind; 25] = [
    Kind::Forbidden,
    Kind::NoMemory,
    Kind::InputOutput,
    Kind::TooManyFiles,
    Kind::NoSpace,
    Kind::Interrupted,
    Kind::TryAgain,
    Kind::NoBuffers,
    Kind::Busy,
    Kind::Unsupported,
    Kind::DumpInterrupted,
    Kind::NoProcess,
    Kind::Killed,
    Kind::Terminated,
    Kind::OtherSignal,
    Kind::Standstill,
    Kind::Clock,
    Kind::MemoryLimit,
    Kind::FileLimit,
    Kind::SizeLimit,
    Kind::ClosedOutput,
    Kind::FullDisk,
    Kind::ReadOnly,
    Kind::Replaced,
    Kind::Api,
];

/// The heads of the columns.
const HEADS: [&str; KINDS.len()] = [
    "EPERM", "ENOMEM", "EIO", "EMFILE", "ENOSPC", "EINTR", "EAGAIN", "ENOBUFS", "EBUSY", "ENOSYS", "dump",
    "fork", "KILL", "TERM", "signal", "STOP", "clock", "memory", "nofile", "fsize", "output", "full", "ro",
    "files", "API",
];

impl Kind {
    /// The head of its column.
    pub const fn name(self) -> &'static str {
        HEADS[self as usize]
    }

    /// Whether a single call fails, and all goes well again after it: what has begun can be undone. The first columns are of this kind.
    pub fn strikes_once(self) -> bool {
        self <= Self::DumpInterrupted
    }

    /// Whether a program may die of it without a word of its own. An allocation that fails ends a program by SIGABRT; a file that grows too large,
    /// by SIGXFSZ.
    pub const fn may_kill(self) -> bool {
        matches!(
            self,
            Self::Killed
                | Self::Terminated
                | Self::OtherSignal
                | Self::MemoryLimit
                | Self::NoMemory
                | Self::SizeLimit
        )
    }
}

/// One fault that system calls show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// What kind it is of.
    pub kind: Kind,
    /// What happens, for people.
    pub what: String,
    /// In the words of `strace -e inject=`.
    pub tampering: String,
    /// The call, in the words of `strace -e trace=`.
    pub call: String,
    /// What a message about it says, in any of these words.
    pub causes: Vec<String>,
}
