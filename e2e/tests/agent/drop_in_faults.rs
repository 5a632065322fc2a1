//! The agent, killed at each write that moves the entry from the network's list to the file beside it, and back; and a folder that it cannot read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use cni_core::net_dir::is_loaded;
use e2e::agent::{CALICO, DEADLINE, Node};
use e2e::net_dirs::plugins_run;
use e2e::strace::{Call, Strace};
use install_cni::install::conflist_edits::{FOLDER_FILE, ORIGINAL};
use test_support::parallel::in_threads;
use test_support::process::Patience;

const LIST: &str = "10-calico.conflist";
/// One that no runtime uses, because it comes later. Writing it causes a pass.
const OTHER: &str = "99-other.conflist";
/// The name of Calico's network.
const FOLDER: &str = "k8s-pod-network";
/// What makes, fills, moves and removes files. Not each machine has all of them.
const WRITES: &str = "?mkdir,?mkdirat,openat,write,?fchmod,?fchown,fsync,?rename,?renameat,?renameat2,?unlink,?unlinkat,?rmdir";
/// Those of them between which what a runtime sees differs: after each rename the directory is synced.
const MOVES: &str = "fsync,?unlink,?unlinkat,?rmdir";
const THREADS: usize = 3;

/// A setting, and whether the process still runs that was seen to read the file beside the list.
type Situation = (&'static str, bool);

/// A change of where the entry is.
#[derive(Clone, Copy)]
struct Change {
    name: &'static str,
    from: &'static [Situation],
    to: Situation,
    /// Whether the runtime may be one that reads the list alone.
    may_be_older: bool,
}

const IN_LIST: &[Situation] = &[("inline", false)];
const IN_BOTH: &[Situation] = &[("inline", false), ("drop-in", false)];
const BESIDE: &[Situation] = &[("drop-in", true)];

const fn change(name: &'static str, from: &'static [Situation], to: Situation, may_be_older: bool) -> Change {
    Change { name, from, to, may_be_older }
}

impl Change {
    /// A node before it, with the settings that ask for it.
    fn node(self) -> Node {
        let mut node = Node::new(&[(LIST, CALICO), (OTHER, CALICO)]);
        node.set("PLUGIN_SERVICE_ACCOUNT", "");
        node.set("MOUNTED_PROC_DIR", "/proc");
        for before in self.from {
            set(&mut node, *before);
            let done = install(&node, &[]);
            assert!(done.status.success(), "{}: {done:?}", self.name);
        }
        set(&mut node, self.to);
        node
    }

    /// What holds whenever the agent has been killed: the runtime calls the plugin, and each file that it loads is as it was or as it will be.
    fn assert_sound(self, node: &Node, [before, after]: [&Files; 2], when: &str) {
        let newer = called(node, true);
        assert!(newer.iter().any(|kind| kind == "istio-cni"), "{}, {when}: {newer:?}", self.name);
        let older = called(node, false);
        let is_called = older.iter().any(|kind| kind == "istio-cni");
        assert!(is_called || !self.may_be_older, "{}, {when}: {older:?}", self.name);
        for (name, text) in files(node).iter().filter(|(name, _)| is_loaded(name)) {
            let is_known = [before, after].into_iter().any(|files| files.get(name) == Some(text));
            assert!(is_known, "{}, {when}: {name}: {text:?}", self.name);
        }
    }
}

fn set(node: &mut Node, (install, is_read): Situation) {
    node.set("CNI_INSTALL", install);
    let stat = fs::read_to_string("/proc/self/stat").expect("this process");
    let (_, fields) = stat.rsplit_once(") ").expect("a name");
    let start = fields.split(' ').nth(19).expect("a start");
    // Otherwise one of this id that has ended.
    let start = if is_read { start } else { "1" };
    fs::write(node.path("run/drop-in-reader"), format!("{} {start}\n", std::process::id())).expect("writes");
}

/// Runs one pass to its end, after these words.
fn install(node: &Node, prefix: &[String]) -> Output {
    let once = node.command(&["install", "--once"]);
    let words: Vec<_> = prefix.iter().map(AsRef::as_ref).chain([once.get_program()]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args(once.get_args()).env_clear().envs(&node.env);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").output().expect("runs")
}

type Files = BTreeMap<String, String>;

/// The network configurations, with those in folders; texts without what is another one on each node.
fn files(node: &Node) -> Files {
    fn add(folder: &Path, prefix: &str, found: &mut Files) {
        for entry in fs::read_dir(folder).expect("lists") {
            let path = entry.expect("an entry").path();
            let name = format!("{prefix}{}", path.file_name().expect("a name").to_string_lossy());
            if path.is_dir() {
                add(&path, &format!("{name}/"), found);
            } else if let Ok(text) = fs::read_to_string(path) {
                // Temporary files come and go.
                found.insert(name, text);
            }
        }
    }
    let (mut found, own) = (Files::new(), node.path("").display().to_string());
    add(&node.path("net.d"), "", &mut found);
    found.values_mut().for_each(|text| *text = text.replace(&own, "NODE/"));
    found
}

/// The plugins that a runtime calls, as its libcni loads them: with or without those of the folder.
fn called(node: &Node, reads_folders: bool) -> Vec<String> {
    let files = files(node);
    let in_folder = |name: &&String| name.starts_with(&format!("{FOLDER}/")) && name.ends_with(".conf");
    let beside =
        files.iter().filter(|(name, _)| reads_folders && in_folder(name)).map(|(_, text)| text.as_str());
    plugins_run(&files[LIST], beside)
}

/// The calls that change the network configurations.
fn changes(strace: &Strace) -> Vec<Call> {
    let mut calls = strace.calls().expect("a trace");
    calls.retain(|call| call.text.contains("/net.d"));
    calls.retain(|call| call.name != "openat" || call.text.contains("O_CREAT"));
    calls
}

/// One pass without threads, so that each write is met.
#[test]
fn a_pass_killed_at_any_write_leaves_the_plugin_in_one_place() {
    for change in [
        change("out of the list", IN_LIST, ("drop-in", true), false),
        change("back into the list", BESIDE, ("inline", true), false),
        change("into both", IN_LIST, ("drop-in", false), true),
        change("out of both", IN_BOTH, ("inline", false), true),
    ] {
        let node = change.node();
        let (strace, before) = (Strace::noting(WRITES).expect("strace").alone(), files(&node));
        let done = install(&node, strace.words());
        assert!(done.status.success(), "{done:?}");
        let (calls, after) = (changes(&strace), files(&node));
        assert!(calls.len() >= 10, "{}: {calls:?}", change.name);
        let kill = |call: &Call| {
            let (node, Call { name, nth, text, .. }) = (change.node(), call);
            let strace = Strace::noting(name).expect("strace").alone();
            let strace = strace.tampering(&format!("{name}:signal=KILL:when={nth}"));
            let when = format!("killed at {name} {text}");
            assert_eq!(install(&node, strace.words()).status.signal(), Some(9), "{}, {when}", change.name);
            change.assert_sound(&node, [&before, &after], &when);
            assert!(install(&node, &[]).status.success());
            assert_eq!(files(&node), after, "{}, {when}", change.name);
        };
        in_threads(THREADS, calls.iter().map(|call| || kill(call)).collect());
    }
}

/// Starts an agent that is killed when one of its threads calls for this time, and waits for that, or until it has settled; returns whether it was killed.
fn is_killed(node: &Node, strace: &Strace, after: &Files) -> bool {
    let words: Vec<&str> = strace.words().iter().map(String::as_str).collect();
    let (mut agent, mut patience) = (node.start_as(&words), Patience::new(DEADLINE));
    let mut passes_before = None;
    while !agent.has_ended() {
        // What a pass does can be seen before its last call: with one more, that one has ended.
        let has_settled = agent.readyz().is_some_and(|(status, _)| status == 200) && files(node) == *after;
        let passes = agent.find_metric("istio_cni_passes_total").filter(|_| has_settled);
        match (passes_before, passes) {
            (None, Some(_)) => {
                passes_before = passes;
                node.write_conf(OTHER, CALICO);
            }
            (Some(before), Some(passes)) if passes > before => return false,
            (Some(_), Some(_)) | (_, None) => {}
        }
        assert!(!patience.is_over(), "{:?}\n{}", agent.readyz(), node.log());
        thread::sleep(Duration::from_millis(10));
    }
    // It notes the end after it.
    while !strace.trace().expect("a trace").contains(" = ?\n") {
        assert!(!patience.is_over(), "{:?}", strace.trace());
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Notes these calls of an agent on what a runtime reads, which its other threads leave alone: each thread counts its own.
fn noting(node: &Node, calls: &str) -> Strace {
    let names = ["", LIST, &format!("{LIST}{ORIGINAL}"), FOLDER, &format!("{FOLDER}/{FOLDER_FILE}")];
    let paths =
        names.map(|name| node.path("net.d").components().chain(Path::new(name).components()).collect());
    Strace::noting(calls).expect("strace").beside().on(&paths)
}

#[test]
fn an_agent_killed_while_it_moves_the_entry_is_followed_by_one_that_ends_the_move() {
    for change in [
        change("seen to be read", IN_LIST, ("auto", true), false),
        change("its reader ended", BESIDE, ("auto", false), false),
    ] {
        let node = change.node();
        let (before, agent) = (files(&node), node.start_ready());
        agent.passes_at_rest();
        agent.kill();
        let after = files(&node);
        assert_ne!(before, after);
        let node = change.node();
        let strace = noting(&node, MOVES);
        assert!(!is_killed(&node, &strace, &after), "{}", node.log());
        let noted = changes(&strace);
        let names: BTreeSet<&str> = noted.iter().map(|call| call.name.as_str()).collect();
        let kill_each = |name: &str| {
            let mut met = 0;
            for nth in 1.. {
                let node = change.node();
                let strace = noting(&node, name).tampering(&format!("{name}:signal=KILL:when={nth}"));
                if !is_killed(&node, &strace, &after) {
                    break;
                }
                let when = format!("killed at {name} {nth}");
                met += changes(&strace).iter().filter(|call| call.nth == nth).count();
                change.assert_sound(&node, [&before, &after], &when);
                let agent = node.start_ready();
                agent.wait("the end of the change", || files(&node) == after);
            }
            met
        };
        let met = in_threads(THREADS, names.iter().map(|name| || kill_each(name)).collect());
        assert!(noted.len() >= 3, "{noted:?}");
        assert_eq!(met.iter().sum::<usize>(), noted.len(), "{}: {names:?} {met:?} {noted:#?}", change.name);
    }
}

/// The kernel does not report when a folder can be used again.
#[test]
fn a_folder_that_could_not_be_used_for_a_while_is_used_again() {
    let node = change("as it was", BESIDE, ("auto", true), false).node();
    let (before, folder, aside) = (files(&node), node.path("net.d").join(FOLDER), node.path("aside"));
    let agent = node.start_ready();
    fs::rename(&folder, &aside).expect("moves");
    symlink(&aside, &folder).expect("links");
    agent.wait("the entry in the list", || files(&node)[LIST] != CALICO);
    agent.passes_at_rest();
    fs::remove_file(&folder).expect("removes");
    fs::rename(&aside, &folder).expect("moves");
    agent.wait("the entry beside the list alone", || files(&node) == before);
}
