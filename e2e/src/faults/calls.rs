//! Which system calls of a run are made to fail, and how.

use super::kind::{Injection, Kind};
use crate::strace::Call;

/// Calls by what they are about, with a space between; a call is in as many groups as it belongs to.
const NETLINK: &str = "socket bind connect sendto sendmsg recvfrom recvmsg";
const PATHS: &str = "openat mkdir mkdirat unlink unlinkat rename renameat renameat2 fchmod fchown chmod statx \
    readlink flock setns";
const CONTENT: &str = "read write writev pread64 pwrite64 fsync fdatasync getdents64 openat rename unlink";
const GROWTH: &str = "write writev pwrite64 fsync mkdir rename openat";
const DESCRIPTORS: &str = "openat socket pipe2 epoll_create1 eventfd2 accept4 dup inotify_init1";
const MEMORY: &str = "socket sendto sendmsg recvfrom openat read setns connect epoll_create1 mmap";
const WAITS: &str = "read write recvfrom recvmsg sendto sendmsg poll ppoll epoll_wait openat connect flock fsync \
    wait4 waitid accept4 pread64 writev";
const UNSUPPORTED: &str = "socket sendto statx setns flock fsync inotify_init1 copy_file_range";

/// All calls that are noted in a run without a fault.
pub fn noted() -> String {
    let groups =
        [NETLINK, PATHS, CONTENT, GROWTH, DESCRIPTORS, MEMORY, WAITS, UNSUPPORTED, FORKS, "getrandom execve"];
    let mut names: Vec<&str> = groups.iter().flat_map(|group| group.split(' ')).collect();
    names.sort_unstable();
    names.dedup();
    // strace refuses what the machine does not have; a question mark lets it pass.
    names.iter().map(|name| format!("?{name}")).collect::<Vec<_>>().join(",")
}

const FORKS: &str = "clone clone3 vfork";

/// Errors by their kinds: which calls fail with what, and how a message may call that.
const ERRORS: [(Kind, &str, &str, &[&str]); 15] = [
    (Kind::Forbidden, NETLINK, "EPERM", FORBIDDEN),
    (Kind::Forbidden, PATHS, "EACCES", FORBIDDEN),
    (Kind::NoMemory, MEMORY, "ENOMEM", &["cannot allocate memory", "out of memory", "memory"]),
    (Kind::InputOutput, CONTENT, "EIO", &["input/output error", "i/o error"]),
    (Kind::TooManyFiles, DESCRIPTORS, "EMFILE", &["too many open files"]),
    (Kind::NoSpace, GROWTH, "ENOSPC", &["no space left"]),
    (Kind::Interrupted, WAITS, "EINTR", &["interrupted"]),
    (Kind::TryAgain, "recvfrom recvmsg sendto sendmsg getrandom read", "EAGAIN", AGAIN),
    (Kind::TryAgain, "flock", "EWOULDBLOCK", AGAIN),
    (Kind::NoBuffers, "sendto sendmsg recvfrom recvmsg", "ENOBUFS", &["no buffer space"]),
    (Kind::Busy, "rename unlink unlinkat openat setns bind sendto", "EBUSY", &["busy"]),
    (Kind::Unsupported, "socket", "EPROTONOSUPPORT", &["protocol not supported", "not support"]),
    (Kind::Unsupported, "sendto sendmsg", "EOPNOTSUPP", &["not supported"]),
    (Kind::Unsupported, UNSUPPORTED, "ENOSYS", &["not implemented", "not support"]),
    (Kind::NoProcess, FORKS, "EAGAIN", AGAIN),
];

const FORBIDDEN: &[&str] = &["not permitted", "permission denied", "privilege", "cap_"];
const AGAIN: &[&str] = &["temporarily unavailable", "try again", "would block", "wouldblock", "in time"];

/// What is injected into a run whose calls are these: of each kind at most `most`, spread over the run.
pub fn injections(calls: &[Call], kind: Kind, most: usize) -> Vec<Injection> {
    let steps = own(calls);
    if let Some((_, names)) = SIGNALS.iter().find(|(known, _)| *known == kind) {
        return signals(&steps, kind, names, most);
    }
    if kind == Kind::DumpInterrupted {
        // The answer of this number is changed in every thread, and another thread's may be no dump.
        let is_alone = |call: &&&Call| {
            let like = |other: &&&Call| other.name == call.name && other.nth == call.nth;
            steps.iter().filter(like).all(|other| other.process == call.process)
        };
        let alone = steps.iter().filter(is_alone);
        return spread(&alone.filter_map(|call| interrupted_dump(call)).collect::<Vec<_>>(), most);
    }
    let failing = |call: &&Call| {
        let fits = |(of, names, ..): &&(Kind, &str, _, _)| {
            *of == kind && names.split(' ').any(|name| name == call.name)
        };
        let (.., error, causes) = ERRORS.iter().find(fits)?;
        Some(fails(call, kind, error, causes))
    };
    spread(&steps.iter().filter_map(failing).collect::<Vec<_>>(), most)
}

/// The signals of the kinds that are signals.
const SIGNALS: [(Kind, &[&str]); 4] = [
    (Kind::Killed, &["KILL"]),
    (Kind::Terminated, &["TERM"]),
    (Kind::Standstill, &["STOP"]),
    (Kind::OtherSignal, &["HUP", "INT", "PIPE", "USR1"]),
];

/// What the loader does before the program runs, and what ran before it in its process, is not the program's. Rust's runtime begins with a check the
/// standard streams. Nor are those of programs that it starts.
fn own(calls: &[Call]) -> Vec<&Call> {
    let begins = |call: &Call| call.name == "poll" && call.text.starts_with("[{fd=0");
    let first = calls.iter().position(begins).map_or(0, |first| first + 1);
    let main = calls.first().map(|call| call.process);
    let is_started = |call: &Call| call.name == "execve" && Some(call.process) != main;
    let started: Vec<u32> = calls.iter().filter(|call| is_started(call)).map(|call| call.process).collect();
    calls[first..].iter().filter(|call| call.name != "execve" && !started.contains(&call.process)).collect()
}

fn fails(call: &Call, kind: Kind, error: &str, causes: &[&str]) -> Injection {
    let Call { name, nth, .. } = call;
    Injection {
        kind,
        what: format!("{name} {nth} fails with {error} ({})", start(&call.text)),
        tampering: format!("{name}:error={error}:when={nth}"),
        call: name.clone(),
        causes: causes.iter().map(|cause| (*cause).to_owned()).collect(),
    }
}

fn signals(steps: &[&Call], kind: Kind, signals: &[&str], most: usize) -> Vec<Injection> {
    let at = |(number, call): (usize, &&Call)| {
        let (Call { name, nth, .. }, signal) = (call, signals[number % signals.len()]);
        Injection {
            kind,
            what: format!("SIG{signal} at {name} {nth} ({})", start(&call.text)),
            tampering: format!("{name}:signal={signal}:when={nth}"),
            call: name.clone(),
            causes: Vec::new(),
        }
    };
    spread(steps, most).iter().enumerate().map(at).collect()
}

/// The first message of an answer gets the flag for it, in its header: length, type and flags.
fn interrupted_dump(call: &Call) -> Option<Injection> {
    let number = |field: &str| -> Option<u32> {
        let text = call.text.split_once(field)?.1;
        let digits: String = text.chars().take_while(char::is_ascii_alphanumeric).collect();
        digits.strip_prefix("0x").map_or_else(|| digits.parse().ok(), |hex| u32::from_str_radix(hex, 16).ok())
    };
    const MULTI: u32 = 0x2;
    const INTERRUPTED: u32 = 0x10;
    if call.name != "recvfrom" {
        return None;
    }
    let (length, kind, flags) = (number("nlmsg_len=")?, number("nlmsg_type=")?, number("nlmsg_flags=")?);
    if flags & MULTI == 0 {
        return None;
    }
    let (kind, flags) = (u16::try_from(kind).ok()?, u16::try_from(flags | INTERRUPTED).ok()?);
    let header = [&length.to_le_bytes()[..], &kind.to_le_bytes(), &flags.to_le_bytes()].concat();
    let header: String = header.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(Injection {
        kind: Kind::DumpInterrupted,
        what: format!("answer {} is interrupted", call.nth),
        tampering: format!("recvfrom:poke_exit=@arg2={header}:when={}", call.nth),
        call: call.name.clone(),
        causes: vec!["chang".to_owned(), "interrupted".to_owned()],
    })
}

/// The beginning of a call's arguments.
fn start(text: &str) -> String {
    text.chars().take(90).collect::<String>().replace('\n', " ")
}

/// At most so many of them, from the first to the last.
pub fn spread<T: Clone>(all: &[T], most: usize) -> Vec<T> {
    if all.len() <= most {
        return all.to_vec();
    }
    (0..most).map(|number| all[number * (all.len() - 1) / (most - 1).max(1)].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, nth: usize, text: &str) -> Call {
        Call { process: 1, name: name.to_owned(), nth, text: text.to_owned() }
    }

    #[test]
    fn what_the_loader_does_is_left_alone() {
        let calls = [
            call("openat", 1, "AT_FDCWD, \"/etc/ld.so.cache\""),
            call("poll", 1, "[{fd=0, events=0}"),
            call("openat", 2, "AT_FDCWD, \"/own\""),
        ];
        let found = injections(&calls, Kind::TooManyFiles, 9);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].tampering, "openat:error=EMFILE:when=2");
    }

    #[test]
    fn an_interrupted_dump_keeps_length_and_type() {
        let text = "3, [{nlmsg_len=20, nlmsg_type=0xa03, nlmsg_flags=0x2, nlmsg_seq=1";
        let found = injections(&[call("recvfrom", 4, text)], Kind::DumpInterrupted, 9);
        assert_eq!(found[0].tampering, "recvfrom:poke_exit=@arg2=14000000030a1200:when=4");
        let single = text.replace("flags=0x2", "flags=0");
        assert_eq!(injections(&[call("recvfrom", 4, &single)], Kind::DumpInterrupted, 9), []);
        let of_another_thread = Call { process: 2, ..call("recvfrom", 4, "9, \"HTTP/1.1 200 OK\"") };
        assert_eq!(injections(&[call("recvfrom", 4, text), of_another_thread], Kind::DumpInterrupted, 9), []);
    }

    #[test]
    fn a_spread_goes_from_the_first_to_the_last() {
        assert_eq!(spread(&[1, 2, 3], 5), [1, 2, 3]);
        assert_eq!(spread(&(0..100).collect::<Vec<_>>(), 4), [0, 33, 66, 99]);
        assert_eq!(spread(&[1, 2, 3], 1), [1]);
    }
}
