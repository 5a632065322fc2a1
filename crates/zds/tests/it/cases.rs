//! What the protocol has for single cases: order, texts, and times.

use std::time::Duration;

use zds::{
    CloseReason, ConnectionId, DEADLINE, LONGEST_RETRY, MOST_CONNECTIONS, NetnsInode, Newcomer, PodState,
    Server, ServerAction, ServerInput, ZdsWorkload, wire,
};

const HELLO: &[u8] = &[8, 1];
const ACK: &[u8] = &[0x0a, 0];
/// An error of which the text is `no`.
const NACK: &[u8] = b"\x0a\x04\x0a\x02no";
const FIRST: ConnectionId = ConnectionId(1);
const SECOND: ConnectionId = ConnectionId(2);

fn pod(uid: &str) -> ZdsWorkload {
    ZdsWorkload::new(uid.into(), "web".into(), "shop".into(), "account".into()).expect("short")
}

/// A server with a clock, whose outputs are in words.
#[derive(Default)]
struct Desk {
    server: Server,
    now: Duration,
}

impl Desk {
    fn with(pods: &[(&str, Option<u64>)]) -> Self {
        let mut desk = Self::default();
        let pods = pods.iter().map(|(uid, netns)| (pod(uid), netns.map(NetnsInode))).collect();
        desk.handle(ServerInput::Pods(pods));
        desk
    }

    /// One whose newest ztunnel receives new pods alone.
    fn canary(pods: &[(&str, Option<u64>)]) -> Self {
        let server = Server::new().with(Newcomer::NewPods);
        let mut desk = Self { server, ..Self::default() };
        let pods = pods.iter().map(|(uid, netns)| (pod(uid), netns.map(NetnsInode))).collect();
        desk.handle(ServerInput::Pods(pods));
        desk
    }

    /// Connects ztunnel and receives its hello.
    fn greet(&mut self, id: ConnectionId) -> Vec<String> {
        self.handle(ServerInput::Accepted(id));
        self.handle(ServerInput::Received(id, HELLO))
    }

    fn handle(&mut self, input: ServerInput<'_>) -> Vec<String> {
        self.server.handle(self.now, input).into_iter().map(words).collect()
    }

    fn wait(&mut self, time: Duration) -> Vec<String> {
        self.now += time;
        self.handle(ServerInput::Tick)
    }
}

fn words(output: ServerAction) -> String {
    match output {
        ServerAction::Close { connection, reason } => format!("{} closed: {reason}", connection.0),
        ServerAction::Report { uid, state, .. } => format!("{uid}: {state:?}"),
        ServerAction::Send { connection, datagram, descriptor } => {
            let uid = |content: &[u8]| String::from_utf8_lossy(&content[4..]).into_owned();
            let message = match datagram.first() {
                Some(0x0a) => "add".to_owned(),
                Some(0x12) => format!("del {}", uid(&datagram)),
                Some(0x1a) => "snapshot".to_owned(),
                Some(0x2a) => format!("keep {}", uid(&datagram)),
                other => panic!("{other:?}"),
            };
            let descriptor = descriptor.map(|(uid, netns)| format!(" {uid} in {}", netns.0));
            format!("{} {message}{}", connection.0, descriptor.unwrap_or_default())
        }
    }
}

#[test]
fn a_snapshot_has_all_pods_and_changes_follow_it() {
    let mut desk = Desk::with(&[("a", Some(7)), ("b", None)]);
    assert_eq!(desk.greet(FIRST), ["1 add a in 7", "a: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 keep b", "a: Acknowledged"]);
    // What comes and goes during the snapshot waits for its end.
    assert_eq!(desk.handle(ServerInput::Remove("a".into())), [""; 0]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 snapshot"]);
    assert_eq!(desk.handle(ServerInput::Add(pod("c"), NetnsInode(8))), ["c: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 del a"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 add c in 8"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["c: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Add(pod("b"), NetnsInode(9))), ["1 add b in 9", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["b: Acknowledged"]);
    assert_eq!(desk.server.next_deadline(), None);
}

#[test]
fn a_pod_with_another_network_namespace_is_a_del_and_an_add() {
    let mut desk = Desk::with(&[("a", Some(7))]);
    desk.greet(FIRST);
    desk.handle(ServerInput::Received(FIRST, ACK));
    desk.handle(ServerInput::Received(FIRST, ACK));
    assert_eq!(desk.handle(ServerInput::Add(pod("a"), NetnsInode(8))), ["1 del a", "a: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 add a in 8"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["a: Acknowledged"]);
}

#[test]
fn the_newest_ztunnel_receives_adds_all_receive_dels_and_the_one_left_takes_over() {
    let mut desk = Desk::with(&[("a", Some(7))]);
    for id in [FIRST, SECOND] {
        desk.greet(id);
        desk.handle(ServerInput::Received(id, ACK));
        desk.handle(ServerInput::Received(id, ACK));
    }
    assert_eq!(desk.handle(ServerInput::Add(pod("b"), NetnsInode(8))), ["2 add b in 8", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["b: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Remove("a".into())), ["1 del a", "2 del a"]);
    desk.handle(ServerInput::Received(FIRST, ACK));
    // The first ztunnel never had it.
    assert_eq!(desk.handle(ServerInput::Disconnected(SECOND)), ["1 add b in 8", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Disconnected(FIRST)), ["b: NoZtunnel"]);
}

#[test]
fn a_second_ztunnel_has_to_acknowledge_a_pod_by_itself() {
    let mut desk = Desk::with(&[("a", Some(7))]);
    desk.greet(FIRST);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 snapshot", "a: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Accepted(SECOND)), [""; 0], "without a hello it counts for nothing");
    assert_eq!(desk.handle(ServerInput::Received(SECOND, HELLO)), ["2 add a in 7", "a: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, NACK)), ["2 snapshot", "a: Refused(\"no\")"]);
    assert_eq!(desk.handle(ServerInput::Disconnected(SECOND)), ["a: Acknowledged"]);
}

#[test]
fn a_canary_receives_new_pods_alone_and_the_others_when_their_ztunnel_ends() {
    let mut desk = Desk::canary(&[("a", Some(7))]);
    desk.greet(FIRST);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 snapshot", "a: Acknowledged"]);
    desk.handle(ServerInput::Received(FIRST, ACK));
    // A ztunnel that comes back and serves the pod must not drop it.
    assert_eq!(desk.greet(SECOND), ["2 keep a"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["2 snapshot"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), [""; 0], "a stays where it is");
    assert_eq!(desk.handle(ServerInput::Add(pod("b"), NetnsInode(8))), ["2 add b in 8", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["b: Acknowledged"]);
    // A sandbox that is made again is new.
    assert_eq!(
        desk.handle(ServerInput::Add(pod("a"), NetnsInode(9))),
        ["1 del a", "2 add a in 9", "a: Waiting"]
    );
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["a: Acknowledged"]);
    desk.handle(ServerInput::Received(FIRST, ACK));
    assert_eq!(desk.handle(ServerInput::Disconnected(SECOND)), ["1 add a in 9", "a: Waiting", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 add b in 8", "a: Acknowledged"]);
}

#[test]
fn a_pod_that_a_canary_refuses_or_never_answers_goes_to_the_ztunnel_that_is_left() {
    for ends in [false, true] {
        let mut desk = Desk::canary(&[]);
        for id in [FIRST, SECOND] {
            desk.greet(id);
            desk.handle(ServerInput::Received(id, ACK));
        }
        assert_eq!(desk.handle(ServerInput::Add(pod("a"), NetnsInode(7))), ["2 add a in 7", "a: Waiting"]);
        if ends {
            assert_eq!(desk.handle(ServerInput::Disconnected(SECOND)), ["a: Unanswered"]);
            assert_eq!(desk.wait(Duration::from_millis(5)), ["1 add a in 7"]);
        } else {
            assert_eq!(desk.handle(ServerInput::Received(SECOND, NACK)), ["2 del a", "a: Refused(\"no\")"]);
            assert_eq!(desk.wait(Duration::from_millis(5)), [""; 0], "the first is not asked for new pods");
            assert_eq!(desk.handle(ServerInput::Disconnected(SECOND)), ["1 add a in 7"]);
        }
        assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["a: Acknowledged"]);
    }
}

#[test]
fn after_a_restart_no_ztunnel_beside_another_drops_a_pod_and_each_pod_is_served() {
    let mut desk = Desk { server: Server::new().with(Newcomer::NewPods), ..Desk::default() };
    for id in [FIRST, SECOND] {
        desk.greet(id);
    }
    // Which one has which pod, only they know.
    let pods = ["a", "b"].map(|uid| (pod(uid), Some(NetnsInode(7))));
    let first = desk.handle(ServerInput::Pods(pods.into()));
    assert_eq!(first, ["1 add a in 7", "2 keep a", "a: Waiting", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 add b in 7", "a: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["2 keep b"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 snapshot", "b: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["2 snapshot"]);
    for id in [FIRST, SECOND] {
        assert_eq!(desk.handle(ServerInput::Received(id, ACK)), [""; 0]);
    }
    assert_eq!(desk.server.next_deadline(), None);
}

#[test]
fn a_refused_pod_leaves_ztunnels_queue_and_is_tried_again_with_longer_and_longer_pauses() {
    let mut desk = Desk::with(&[("a", Some(7)), ("b", Some(8))]);
    desk.greet(FIRST);
    // A del in the snapshot would not reach the queue of every ztunnel.
    assert_eq!(desk.handle(ServerInput::Received(FIRST, NACK)), ["1 add b in 8", "a: Refused(\"no\")"]);
    desk.handle(ServerInput::Received(FIRST, ACK));
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 del a"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), [""; 0], "the pause is not over");
    let mut pauses = Vec::new();
    for _ in 0..14 {
        let due = desk.server.next_deadline().expect("a try is due");
        pauses.push(due - desk.now);
        assert_eq!(
            desk.wait(due - desk.now),
            ["1 add a in 7"],
            "and no report: it is refused until it is not"
        );
        assert_eq!(desk.handle(ServerInput::Received(FIRST, NACK)), ["1 del a"]);
        assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), [""; 0]);
    }
    assert!(pauses.is_sorted() && pauses[0] == Duration::from_millis(5), "{pauses:?}");
    assert_eq!(pauses.last(), Some(&LONGEST_RETRY));
    // Others do not wait for it.
    assert_eq!(desk.handle(ServerInput::Add(pod("c"), NetnsInode(9))), ["1 add c in 9", "c: Waiting"]);
    desk.handle(ServerInput::Received(FIRST, ACK));
    assert_eq!(desk.wait(LONGEST_RETRY), ["1 add a in 7"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["a: Acknowledged"]);
}

#[test]
fn a_pod_that_was_refused_is_added_to_the_next_ztunnel_after_the_snapshot() {
    let mut desk = Desk::with(&[("a", Some(7)), ("b", Some(8))]);
    desk.greet(FIRST);
    desk.handle(ServerInput::Received(FIRST, NACK));
    desk.handle(ServerInput::Received(FIRST, ACK));
    desk.handle(ServerInput::Disconnected(FIRST));
    // The keep takes nothing from a ztunnel that serves it, and puts nothing into the queue of one that does not.
    assert_eq!(desk.greet(SECOND), ["2 keep a", "a: Refused(\"no\")", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["2 add b in 8"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["2 snapshot", "b: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), [""; 0]);
    assert_eq!(desk.wait(LONGEST_RETRY), ["2 add a in 7"]);
}

#[test]
fn a_pod_whose_add_ends_a_connection_comes_after_the_next_snapshot() {
    let mut desk = Desk::with(&[("a", Some(7)), ("b", Some(8))]);
    desk.greet(FIRST);
    desk.handle(ServerInput::Disconnected(FIRST));
    assert_eq!(desk.greet(SECOND), ["2 keep a", "a: Unanswered", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), ["2 add b in 8"]);
    assert_eq!(desk.wait(DEADLINE).len(), 3, "closed, and two pods without a ztunnel");
    let third = ConnectionId(3);
    assert_eq!(desk.greet(third)[0], "3 keep a");
    assert_eq!(desk.handle(ServerInput::Received(third, ACK)), ["3 keep b"]);
    assert_eq!(desk.handle(ServerInput::Received(third, ACK)), ["3 snapshot"]);
    assert_eq!(desk.handle(ServerInput::Received(third, ACK)), ["3 add a in 7"]);
    assert_eq!(desk.handle(ServerInput::Received(third, ACK)), ["a: Acknowledged"]);
    assert_eq!(desk.wait(Duration::from_millis(5)), ["3 add b in 8"]);
    assert_eq!(desk.handle(ServerInput::Received(third, ACK)), ["b: Acknowledged"]);
}

#[test]
fn a_namespace_that_cannot_be_opened_is_kept_in_a_snapshot_and_tried_again() {
    let mut desk = Desk::with(&[("a", Some(7))]);
    desk.greet(FIRST);
    let unopened = || ServerInput::Unopened(FIRST, "Too many open files".into());
    let report = "a: Unopened(\"Too many open files\")";
    assert_eq!(desk.handle(unopened()), ["1 keep a", report]);
    desk.handle(ServerInput::Received(FIRST, ACK));
    desk.wait(Duration::from_millis(5));
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 add a in 7"]);
    assert_eq!(desk.handle(unopened()), [""; 0]);
    assert_eq!(desk.wait(Duration::from_millis(10)), ["1 add a in 7"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["a: Acknowledged"]);
    // What was is over for the next ztunnel.
    assert_eq!(desk.greet(SECOND), ["2 add a in 7", "a: Waiting"]);
}

#[test]
fn a_ztunnel_that_lets_a_deadline_pass_is_disconnected() {
    let mut desk = Desk::with(&[("a", Some(7))]);
    desk.handle(ServerInput::Accepted(FIRST));
    desk.now += Duration::from_secs(1);
    assert_eq!(desk.greet(SECOND), ["2 add a in 7", "a: Waiting"]);
    assert_eq!(desk.server.next_deadline(), Some(DEADLINE));
    assert_eq!(desk.wait(Duration::from_secs(4)), ["1 closed: ztunnel sent no hello within 5 s"]);
    let late = desk.wait(Duration::from_secs(1));
    assert_eq!(late, ["2 closed: ztunnel did not answer an added pod within 5 s", "a: NoZtunnel"]);
    assert_eq!(desk.handle(ServerInput::Received(SECOND, ACK)), [""; 0], "it is gone");
}

#[test]
fn errors_of_the_protocol_end_a_connection() {
    let mut desk = Desk::with(&[]);
    desk.handle(ServerInput::Accepted(FIRST));
    let closed = desk.handle(ServerInput::Received(FIRST, &[8, 2]));
    assert_eq!(closed, [format!("1 closed: {}", CloseReason::Version(2))]);
    assert!(closed[0].contains("update the agent"), "{closed:?}");
    assert_eq!(desk.greet(SECOND), ["2 snapshot"]);
    assert_eq!(
        desk.handle(ServerInput::Received(SECOND, NACK)),
        ["2 closed: ztunnel refused the snapshot: no"]
    );
    let third = ConnectionId(3);
    desk.greet(third);
    desk.handle(ServerInput::Received(third, ACK));
    let unasked = desk.handle(ServerInput::Received(third, ACK));
    assert_eq!(unasked, [format!("3 closed: {}", CloseReason::Unasked)]);
    let long = vec![0; wire::LARGEST_RESPONSE + 1];
    desk.handle(ServerInput::Accepted(ConnectionId(4)));
    let long = desk.handle(ServerInput::Received(ConnectionId(4), &long));
    assert!(long[0].starts_with("4 closed: a message has 4097 bytes"), "{long:?}");
}

#[test]
fn there_are_not_more_connections_than_a_node_needs() {
    let mut desk = Desk::with(&[]);
    let most = u64::try_from(MOST_CONNECTIONS).expect("few");
    for number in 0..most {
        assert_eq!(desk.handle(ServerInput::Accepted(ConnectionId(number))), [""; 0]);
    }
    let closed = desk.handle(ServerInput::Accepted(ConnectionId(most)));
    assert_eq!(closed, [format!("{most} closed: {}", CloseReason::TooMany)]);
}

#[test]
fn a_list_of_all_pods_replaces_what_was_wanted_before() {
    let mut desk = Desk::default();
    desk.handle(ServerInput::Add(pod("a"), NetnsInode(7)));
    assert_eq!(desk.greet(FIRST), ["a: Waiting"], "a snapshot of one pod would drop the others");
    let pods = vec![(pod("b"), Some(NetnsInode(8)))];
    assert_eq!(desk.handle(ServerInput::Pods(pods)), ["1 add b in 8", "b: Waiting"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), ["1 snapshot", "b: Acknowledged"]);
    assert_eq!(desk.handle(ServerInput::Received(FIRST, ACK)), [""; 0]);
    assert_eq!(PodState::Acknowledged.to_string(), "ztunnel acknowledged the pod");
}

#[test]
fn ztunnels_words_are_one_short_line() {
    let mut desk = Desk::with(&[("a", Some(7))]);
    desk.greet(FIRST);
    let words = [b"\x1b[2J\n".as_slice(), "\u{202e}".as_bytes(), &[b'x'; 500]].concat();
    let length = |length: usize| [(length & 0x7f | 0x80) as u8, (length >> 7) as u8];
    let ack = [&[0x0a], length(words.len()).as_slice(), &words].concat();
    let response = [&[0x0a], length(ack.len()).as_slice(), &ack].concat();
    let state = format!("a: Refused(\" [2J  {}\")", "x".repeat(250));
    assert_eq!(desk.handle(ServerInput::Received(FIRST, &response)), ["1 snapshot", &state]);
}
