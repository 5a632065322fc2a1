//! The agent where the kernel makes no more threads: a limit on processes is that of its container, which others in it may have used up.

use std::fs;
use std::thread;
use std::time::Duration;

use e2e::agent::{Agent, CALICO, Node};

/// Fails these of the main thread's attempts to make one, in the words of strace.
fn start<'n>(node: &'n Node, which: &str) -> Agent<'n> {
    let tampering = format!("inject=clone3,clone:error=EAGAIN:when={which}");
    let trace = node.path("trace").display().to_string();
    // Beside the program, so that the signals of this test reach that.
    node.start_as(&["strace", "-D", "-qq", "-o", &trace, "-e", "trace=clone3,clone", "-e", &tampering])
}

#[test]
fn an_agent_without_threads_reports_that_and_exits() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    // The first one that the agent needs; no other comes of that.
    assert_eq!(start(&node, "1").wait_end(), Some(1));
    let log = node.log();
    assert!(!log.contains("panicked"), "{log}");
    for words in ["\terror\t", "cannot create a thread", "temporarily unavailable", "limit"] {
        assert!(log.contains(words), "{words:?} is not in {log}");
    }
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
}

/// Whatever it needs a thread for later waits for the one it has, also when that had nothing to do for longer than threads are kept by default.
#[test]
fn an_agent_that_can_make_no_more_threads_goes_on_with_the_one_it_has() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = start(&node, "2+");
    agent.wait_ready();
    let threads = || fs::read_dir(format!("/proc/{}/task", agent.id())).map_or(0, Iterator::count);
    for _ in 0..12 {
        thread::sleep(Duration::from_secs(1));
        assert!(threads() >= 2, "it has given up its thread\n{}", node.log());
    }
    node.write_conf("10-calico.conflist", CALICO);
    agent.wait("the entry", || node.calls_us());
    assert_eq!(agent.end(), Some(0));
    assert!(!node.log().contains("panicked"), "{}", node.log());
}
