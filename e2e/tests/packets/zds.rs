//! Serving ztunnel at a socket, with clients that end the connection where ztunnel does: two at once, one that dies, one that is slow, another
//! agent's socket, and network namespaces that come and go.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::ztunnel::{Message, Ztunnel};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use test_support::netns::{Families, Namespace};
use test_support::process::{self, SHORT};
use zds::socket::{ServerHandle, SocketEvent, serve};
use zds::{NetnsInode, Newcomer, PodState, ZdsWorkload, wire};

/// Names the socket for the test that runs as another user.
const STRANGERS_SOCKET: &str = "E2E_ZDS_SOCKET";

/// A server under test, with files in place of network namespaces unless said otherwise.
struct Agent {
    folder: tempfile::TempDir,
    handle: Option<ServerHandle>,
    thread: Option<JoinHandle<()>>,
    events: Receiver<SocketEvent>,
    /// What is opened for a pod.
    netns: Arc<Mutex<BTreeMap<String, PathBuf>>>,
}

impl Agent {
    fn start() -> Result<Self> {
        Self::start_with(Newcomer::AllPods)
    }

    fn start_with(newcomer: Newcomer) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let netns = Arc::new(Mutex::new(BTreeMap::new()));
        let (handle, thread, events) = start_at(&folder.path().join("ztunnel.sock"), newcomer, &netns)?;
        Ok(Self { folder, handle: Some(handle), thread: Some(thread), events, netns })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("ztunnel.sock")
    }

    fn handle(&self) -> &ServerHandle {
        self.handle.as_ref().expect("it serves")
    }

    /// A file for a pod, and its inode.
    fn file(&self, uid: &str) -> Result<NetnsInode> {
        let path = self.folder.path().join(uid);
        fs::write(&path, uid)?;
        self.opens(uid, &path)
    }

    /// What is opened for a pod from now on, and its inode now.
    fn opens(&self, uid: &str, path: &Path) -> Result<NetnsInode> {
        let inode = fs::metadata(path)?.ino();
        self.netns.lock().expect("not poisoned").insert(uid.to_owned(), path.to_owned());
        Ok(NetnsInode(inode))
    }

    /// Serves these pods from the beginning.
    fn serve(&self, uids: &[&str]) -> Result<()> {
        let pods: Result<Vec<_>> = uids.iter().map(|uid| Ok((pod(uid), Some(self.file(uid)?)))).collect();
        self.handle().pods(pods?);
        Ok(())
    }

    fn add(&self, uid: &str) -> Result<()> {
        self.handle().add(pod(uid), self.file(uid)?);
        Ok(())
    }

    /// Waits for an event.
    fn wait_for(&self, wanted: impl Fn(&SocketEvent) -> bool) -> Result<SocketEvent> {
        let mut seen = Vec::new();
        loop {
            match self.events.recv_timeout(SHORT) {
                Ok(event) if wanted(&event) => return Ok(event),
                Ok(event) => seen.push(event),
                Err(_) => bail!("it never came; instead: {seen:?}"),
            }
        }
    }

    fn wait_for_state(&self, uid: &str, state: &PodState) -> Result<SocketEvent> {
        self.wait_for(|event| matches!(event, SocketEvent::Pod(of, _, seen) if of == uid && seen == state))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.handle.take());
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking(), "the server panicked");
        }
    }
}

fn start_at(
    path: &Path,
    newcomer: Newcomer,
    netns: &Arc<Mutex<BTreeMap<String, PathBuf>>>,
) -> Result<(ServerHandle, JoinHandle<()>, Receiver<SocketEvent>)> {
    let (sender, events) = mpsc::channel();
    let netns = netns.clone();
    let open = move |uid: &str, _: NetnsInode| {
        let path = netns.lock().expect("not poisoned").get(uid).cloned();
        File::open(path.ok_or(io::ErrorKind::NotFound)?)
    };
    let observe = move |event| drop(sender.send(event));
    let (handle, thread) = serve(path, newcomer, Box::new(open), Box::new(observe))?;
    Ok((handle, thread, events))
}

fn pod(uid: &str) -> ZdsWorkload {
    ZdsWorkload::new(uid.into(), "web".into(), "shop".into(), "account".into()).expect("short")
}

fn add(uid: &str) -> Message {
    Message::Add(uid.to_owned())
}

fn del(uid: &str) -> Message {
    Message::Del(uid.to_owned())
}

/// Sends a datagram with this many descriptors, as no agent should.
fn send_with(socket: &OwnedFd, datagram: &[u8], descriptors: usize) -> Result<()> {
    let file = File::open("/dev/null")?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = vec![file.as_fd(); descriptors];
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    sendmsg(socket, &[IoSlice::new(datagram)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[test]
fn the_client_is_as_strict_as_ztunnel() -> Result<()> {
    let (long, snapshot) = (wire::keep(&"u".repeat(1100)), wire::snapshot_sent());
    let web = pod("u").add();
    /// What is acknowledged first, what ends the connection, how many descriptors come with the latter, and the error.
    type Case<'a> = (&'a [&'a [u8]], &'a [u8], usize, &'a str);
    let cases: [Case<'_>; 9] = [
        (&[&snapshot], &wire::keep("u"), 0, "after the snapshot"),
        (&[&snapshot], &snapshot, 0, "after the snapshot"),
        (&[], &wire::del("u"), 0, "a del in the snapshot"),
        (&[], &web, 0, "an add without a descriptor"),
        (&[], &web, 2, "2 descriptors"),
        (&[], &snapshot, 1, "a descriptor with SnapshotSent"),
        (&[], &long, 0, "truncated"),
        (&[], b"\x22\x00", 0, "field 4"),
        (&[], b"\x0a", 0, "no field"),
    ];
    for (before, datagram, descriptors, error) in cases {
        let (mut ztunnel, agent) = Ztunnel::pair()?;
        for message in before {
            send_with(&agent, message, 0)?;
            ztunnel.obey(SHORT)?;
        }
        send_with(&agent, datagram, descriptors)?;
        let refused = ztunnel.receive(SHORT).err().with_context(|| format!("{error}: accepted"))?;
        ensure!(format!("{refused:#}").contains(error), "{error}: {refused:#}");
    }
    let (mut ztunnel, agent) = Ztunnel::pair()?;
    send_with(&agent, &web, 1)?;
    send_with(&agent, &snapshot, 0)?;
    ztunnel.receive(SHORT)?;
    ensure!(ztunnel.receive(SHORT).is_err(), "two messages at once");
    Ok(())
}

#[test]
fn two_ztunnels_at_once_receive_the_snapshot_and_the_newer_one_what_is_new() -> Result<()> {
    let agent = Agent::start()?;
    let mut old = Ztunnel::greet(&agent.socket())?;
    agent.serve(&["a", "b"])?;
    assert_eq!(old.obey_snapshot(SHORT)?, [add("a"), add("b"), Message::SnapshotSent]);
    agent.wait_for_state("b", &PodState::Acknowledged)?;

    let mut new = Ztunnel::greet(&agent.socket())?;
    agent.wait_for_state("a", &PodState::Waiting)?;
    assert_eq!(new.obey_snapshot(SHORT)?.len(), 3);
    agent.wait_for_state("b", &PodState::Acknowledged)?;
    agent.add("c")?;
    assert_eq!(new.obey(SHORT)?, Some(add("c")));
    agent.wait_for_state("c", &PodState::Acknowledged)?;
    agent.handle().remove("a".into());
    assert_eq!(new.obey(SHORT)?, Some(del("a")));
    assert_eq!(old.obey(SHORT)?, Some(del("a")), "and nothing before");

    // The new one fails its start, and the old one goes on.
    drop(new);
    assert_eq!(old.obey(SHORT)?, Some(add("c")));
    agent.wait_for_state("c", &PodState::Acknowledged)?;
    assert_eq!(old.state.served.keys().collect::<Vec<_>>(), ["b", "c"]);
    Ok(())
}

#[test]
fn a_canary_receives_what_is_new_and_the_rest_when_the_other_ends() -> Result<()> {
    let agent = Agent::start_with(Newcomer::NewPods)?;
    let mut old = Ztunnel::greet(&agent.socket())?;
    agent.serve(&["a", "b"])?;
    old.obey_snapshot(SHORT)?;
    let mut new = Ztunnel::greet(&agent.socket())?;
    let kept = ["a", "b"].map(|uid| Message::Keep(uid.to_owned()));
    assert_eq!(new.obey_snapshot(SHORT)?, [kept.as_slice(), &[Message::SnapshotSent]].concat());
    agent.add("c")?;
    assert_eq!(new.obey(SHORT)?, Some(add("c")));
    agent.wait_for_state("c", &PodState::Acknowledged)?;
    assert!(old.is_quiet(), "it receives nothing new");
    drop(old);
    let follow = [new.obey(SHORT)?, new.obey(SHORT)?];
    assert_eq!(follow, ["a", "b"].map(|uid| Some(add(uid))));
    agent.wait_for_state("b", &PodState::Acknowledged)?;
    Ok(())
}

#[test]
fn two_ztunnels_that_come_back_to_the_next_agent_drop_nothing() -> Result<()> {
    for newcomer in [Newcomer::AllPods, Newcomer::NewPods] {
        let agent = Agent::start_with(newcomer)?;
        let mut ztunnels = [Ztunnel::greet(&agent.socket())?, Ztunnel::greet(&agent.socket())?];
        // Neither can tell the agent which pod it has.
        for (ztunnel, own) in ztunnels.iter_mut().zip(["a", "b"]) {
            ztunnel.state.served.insert(own.to_owned(), agent.file(own)?.0);
        }
        agent.serve(&["a", "b"])?;
        for (ztunnel, own) in ztunnels.iter_mut().zip(["a", "b"]) {
            ztunnel.obey_snapshot(SHORT)?;
            assert!(ztunnel.state.served.contains_key(own), "{newcomer:?}: {own} was dropped");
        }
        for uid in ["a", "b"] {
            agent.wait_for_state(uid, &PodState::Acknowledged)?;
        }
    }
    Ok(())
}

#[test]
fn a_ztunnel_that_dies_in_the_snapshot_leaves_nothing_and_the_next_one_receives_all() -> Result<()> {
    let agent = Agent::start()?;
    agent.serve(&["a", "b", "c"])?;
    let mut killed = Ztunnel::greet(&agent.socket())?;
    killed.obey(SHORT)?;
    // It dies with a message that it has not read.
    agent.wait_for_state("a", &PodState::Acknowledged)?;
    drop(killed);
    agent.wait_for(|event| matches!(event, SocketEvent::Closed(_)))?;
    agent.wait_for_state("a", &PodState::NoZtunnel)?;
    let mut next = Ztunnel::greet(&agent.socket())?;
    assert_eq!(next.obey_snapshot(SHORT)?.len(), 4);
    agent.wait_for_state("c", &PodState::Acknowledged)?;
    let kept = open_files_of(agent.folder.path())?;
    assert!(kept.is_empty(), "descriptors of namespaces are kept: {kept:?}");
    Ok(())
}

/// The open files of this process below a folder, without sockets.
fn open_files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let links = fs::read_dir("/proc/self/fd")?.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    Ok(links.filter(|path| path.starts_with(folder)).collect())
}

#[test]
fn a_slow_ztunnel_is_disconnected_at_its_deadline_and_the_next_one_is_served() -> Result<()> {
    let agent = Agent::start()?;
    agent.serve(&["a"])?;
    let mut slow = Ztunnel::greet(&agent.socket())?;
    let silent = Ztunnel::connect(&agent.socket())?;
    assert_eq!(slow.receive(SHORT)?, Some(add("a")));
    for reason in ["did not answer an added pod", "no hello"] {
        agent.wait_for(|event| matches!(event, SocketEvent::Closed(closed) if closed.contains(reason)))?;
    }
    // What it answers now is not taken for an answer to something else.
    assert!(slow.answer(false).is_err() || slow.receive(SHORT)?.is_none());
    let mut quick = Ztunnel::greet(&agent.socket())?;
    let kept = [Message::Keep("a".into()), Message::SnapshotSent];
    assert_eq!(quick.obey_snapshot(SHORT)?, kept, "what held one up comes after the others");
    assert_eq!(quick.obey(SHORT)?, Some(add("a")));
    agent.wait_for_state("a", &PodState::Acknowledged)?;
    drop(silent);
    Ok(())
}

#[test]
fn the_next_agent_takes_the_socket_over_and_a_removed_one_is_made_again() -> Result<()> {
    let first = Agent::start()?;
    first.serve(&["a"])?;
    let mut ztunnel = Ztunnel::greet(&first.socket())?;
    ztunnel.obey_snapshot(SHORT)?;

    let (second, thread, events) = start_at(&first.socket(), Newcomer::AllPods, &first.netns)?;
    second.pods(vec![(pod("a"), None)]);
    first.wait_for(|event| matches!(event, SocketEvent::Failed(why) if why.contains("another agent's")))?;
    let mut again = Ztunnel::greet(&first.socket())?;
    let keep = Message::Keep("a".into());
    assert_eq!(again.obey_snapshot(SHORT)?, [keep, Message::SnapshotSent], "the second agent answers");
    drop((second, events));
    ensure!(thread.join().is_ok(), "it panicked");
    assert_eq!(again.receive(SHORT)?, None, "the second agent has ended");

    // Its socket stays, and nobody is behind it.
    first.wait_for(|event| *event == SocketEvent::Restored)?;
    Ztunnel::greet(&first.socket())?.obey_snapshot(SHORT)?;
    fs::remove_file(first.socket())?;
    first.wait_for(|event| *event == SocketEvent::Restored)?;
    assert_eq!(fs::metadata(first.socket())?.permissions().mode() & 0o777, 0o600);
    Ztunnel::greet(&first.socket())?.obey_snapshot(SHORT)?;
    Ok(())
}

#[test]
fn ztunnel_receives_the_pods_namespace_which_ends_with_its_pod() -> Result<()> {
    let agent = Agent::start()?;
    let namespace = Namespace::empty(Families::V4)?;
    let inode = agent.opens("a", &namespace.path())?;
    agent.handle().pods(vec![(pod("a"), Some(inode))]);
    let mut ztunnel = Ztunnel::greet(&agent.socket())?;
    ztunnel.obey_snapshot(SHORT)?;
    assert_eq!(ztunnel.state.served.get("a"), Some(&inode.0));

    // The sandbox is made again, and its file names another namespace: the old one's number must not go with it.
    let next = Namespace::empty(Families::V4)?;
    let next_inode = agent.opens("a", &next.path())?;
    let mut second = Ztunnel::greet(&agent.socket())?;
    assert_eq!(second.obey_snapshot(SHORT)?, [Message::Keep("a".into()), Message::SnapshotSent]);
    let unopened = agent.wait_for(|event| matches!(event, SocketEvent::Pod(_, _, PodState::Unopened(_))))?;
    assert!(format!("{unopened:?}").contains("another network namespace"), "{unopened:?}");
    agent.handle().add(pod("a"), next_inode);
    assert_eq!(ztunnel.obey(SHORT)?, Some(del("a")));
    assert_eq!(second.obey(SHORT)?, Some(add("a")));
    assert_eq!(second.state.served.get("a"), Some(&next_inode.0));
    agent.wait_for_state("a", &PodState::Acknowledged)?;

    agent.handle().remove("a".into());
    second.obey(SHORT)?;
    let path = namespace.path();
    drop((namespace, next));
    assert!(!path.exists());
    let kept = fs::read_dir("/proc/self/fd")?.filter_map(|entry| fs::metadata(entry.ok()?.path()).ok());
    let inodes = [inode.0, next_inode.0];
    assert_eq!(kept.filter(|file| inodes.contains(&file.ino())).count(), 0, "a namespace is kept");
    Ok(())
}

#[test]
fn only_root_and_the_agents_user_may_connect() -> Result<()> {
    if let Some(socket) = std::env::var_os(STRANGERS_SOCKET) {
        // This is the process of another user, which the test below started.
        let refused = Ztunnel::greet(Path::new(&socket)).and_then(|mut ztunnel| ztunnel.receive(SHORT));
        ensure!(matches!(refused, Err(_) | Ok(None)), "it was served: {refused:?}");
        return Ok(());
    }
    let agent = Agent::start()?;
    agent.serve(&["a"])?;
    // Even if the mode of file and folder were changed.
    fs::set_permissions(agent.folder.path(), fs::Permissions::from_mode(0o777))?;
    fs::set_permissions(agent.socket(), fs::Permissions::from_mode(0o777))?;
    let program = agent.folder.path().join("stranger");
    fs::copy(std::env::current_exe()?, &program)?;
    let mut stranger =
        process::command(&program, ["--exact", "zds::only_root_and_the_agents_user_may_connect"]);
    stranger.env(STRANGERS_SOCKET, agent.socket()).current_dir(agent.folder.path()).uid(65534).gid(65534);
    let output = process::run(&mut stranger, SHORT)?.ok()?;
    ensure!(output.stdout.contains("1 passed"), "no test has this name: {output:?}");
    agent.wait_for(|event| matches!(event, SocketEvent::Closed(why) if why.contains("user 65534")))?;
    Ok(())
}

#[test]
fn a_pod_that_ztunnel_refuses_does_not_keep_it_from_being_ready() -> Result<()> {
    let agent = Agent::start()?;
    let uids: Vec<String> = (0..20).map(|number| format!("pod-{number}")).collect();
    agent.serve(&[&["broken"], uids.iter().map(String::as_str).collect::<Vec<_>>().as_slice()].concat())?;
    let refuses = |message: &Message| *message == add("broken");
    for reconnects in [false, true] {
        let mut ztunnel = Ztunnel::greet(&agent.socket())?;
        let mut messages = Vec::new();
        while !ztunnel.state.is_ready() {
            messages.extend(ztunnel.answer_next(SHORT, refuses)?);
            ensure!(messages.len() <= 23, "it is never ready: {messages:?}");
        }
        let last = if reconnects { Message::SnapshotSent } else { del("broken") };
        assert_eq!(messages.last(), Some(&last), "{messages:?}");
        assert_eq!(ztunnel.state.served.len(), 20, "{messages:?}");
        agent.wait_for_state("broken", &PodState::Refused("no".into()))?;
        // Its next try leaves nothing in the queue either.
        while ztunnel.answer_next(SHORT, refuses)? != Some(del("broken")) {}
        assert!(ztunnel.state.is_ready());
        if reconnects {
            while ztunnel.obey(SHORT)? != Some(add("broken")) {}
            agent.wait_for_state("broken", &PodState::Acknowledged)?;
            assert_eq!(ztunnel.state.served.len(), 21);
        }
    }
    Ok(())
}

#[test]
fn five_hundred_pods_reach_a_ztunnel() -> Result<()> {
    let agent = Agent::start()?;
    let uids: Vec<String> = (0..500).map(|number| format!("pod-{number}")).collect();
    agent.serve(&uids.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut ztunnel = Ztunnel::greet(&agent.socket())?;
    assert_eq!(ztunnel.obey_snapshot(Duration::from_secs(60))?.len(), 501);
    agent.wait_for_state("pod-99", &PodState::Acknowledged)?;
    Ok(())
}
