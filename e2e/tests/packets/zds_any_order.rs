//! Whatever happens in whatever order, no ztunnel sees an error of the protocol, nothing is acknowledged that the newest ztunnel does not serve, or any
//! if it is a canary, and all ends as wanted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use e2e::ztunnel::{Message, State};
use proptest::prelude::*;
use zds::{ConnectionId, NetnsInode, Newcomer, PodState, Server, ServerAction, ServerInput, ZdsWorkload};

/// What happens.
#[derive(Debug, Clone)]
enum Event {
    Start,
    Add(u8, u64),
    Remove(u8),
    /// The namespaces of this pod can be opened, or not.
    Openable(u8, bool),
    /// A ztunnel connects that has these pods of an earlier agent.
    Connect(Vec<(u8, u64)>),
    /// A connection, by its index among those that are open, sends a hello of this version.
    Hello(usize, u8),
    /// It answers; adds may fail.
    Answer(usize, bool),
    /// It sends garbage.
    Garbage(usize, Vec<u8>),
    Disconnect(usize),
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let (pod, netns, which) = (0..4_u8, 0..3_u64, 0..4_usize);
    prop_oneof![
        1 => Just(Event::Start),
        6 => (pod.clone(), netns.clone()).prop_map(|(pod, netns)| Event::Add(pod, netns)),
        4 => pod.clone().prop_map(Event::Remove),
        2 => (pod.clone(), any::<bool>()).prop_map(|(pod, is_openable)| Event::Openable(pod, is_openable)),
        2 => prop::collection::vec((pod, netns), 0..4).prop_map(Event::Connect),
        4 => (which.clone(), prop_oneof![9 => Just(1_u8), 1 => 0..3_u8]).prop_map(|(which, version)| Event::Hello(which, version)),
        20 => (which.clone(), prop::bool::weighted(0.2)).prop_map(|(which, fails)| Event::Answer(which, fails)),
        1 => (which.clone(), prop::collection::vec(any::<u8>(), 0..5)).prop_map(|(which, bytes)| Event::Garbage(which, bytes)),
        1 => which.prop_map(Event::Disconnect),
        3 => (1..7000_u64).prop_map(Event::Wait),
    ]
}

/// The server, what is wanted of it, and the ztunnels.
#[derive(Default)]
struct World {
    newcomer: Newcomer,
    server: Server,
    now: Duration,
    has_started: bool,
    wanted: BTreeMap<String, Option<NetnsInode>>,
    unopenable: BTreeSet<String>,
    /// In the order in which they connected.
    open: Vec<(ConnectionId, Option<State>)>,
    /// Those that have sent no hello yet, with what they serve.
    silent: BTreeMap<ConnectionId, State>,
    /// The order of hellos.
    greeted: Vec<ConnectionId>,
    states: BTreeMap<String, PodState>,
    connected: u64,
}

fn workload(pod: u8) -> ZdsWorkload {
    ZdsWorkload::new(format!("u{pod}"), format!("p{pod}"), "default".into(), "a".into()).expect("short")
}

impl World {
    fn happen(&mut self, event: &Event) {
        match event {
            Event::Start => self.start(),
            Event::Add(pod, netns) => {
                self.wanted.insert(format!("u{pod}"), Some(NetnsInode(*netns)));
                self.handle(ServerInput::Add(workload(*pod), NetnsInode(*netns)));
            }
            Event::Remove(pod) => {
                let uid = format!("u{pod}");
                self.wanted.remove(&uid);
                self.states.remove(&uid);
                self.handle(ServerInput::Remove(uid));
            }
            Event::Openable(pod, is_openable) => {
                let uid = format!("u{pod}");
                self.unopenable.retain(|other| *other != uid);
                self.unopenable.extend((!is_openable).then_some(uid));
            }
            Event::Connect(pods) => self.connect(pods),
            Event::Hello(which, version) => self.hello(*which, *version),
            Event::Answer(which, fails) => self.answer(*which, *fails),
            Event::Garbage(which, bytes) => {
                if let Some(id) = self.id(*which) {
                    // A hello or an answer is none.
                    let bytes = [b"\x0a\xff", bytes.as_slice()].concat();
                    self.handle(ServerInput::Received(id, &bytes));
                    assert!(self.open.iter().all(|(other, _)| *other != id), "garbage ends a connection");
                }
            }
            Event::Disconnect(which) => {
                if let Some(id) = self.id(*which) {
                    self.forget(id);
                    self.handle(ServerInput::Disconnected(id));
                }
            }
            Event::Wait(milliseconds) => {
                self.now += Duration::from_millis(*milliseconds);
                self.handle(ServerInput::Tick);
            }
        }
        self.check();
    }

    fn start(&mut self) {
        self.has_started = true;
        let number = |uid: &str| uid[1..].parse::<u8>().expect("a number");
        let pods = self.wanted.iter().map(|(uid, netns)| (workload(number(uid)), *netns)).collect();
        self.handle(ServerInput::Pods(pods));
    }

    fn connect(&mut self, pods: &[(u8, u64)]) {
        self.connected += 1;
        let id = ConnectionId(self.connected);
        let served = pods.iter().map(|(pod, netns)| (format!("u{pod}"), *netns)).collect();
        self.silent.insert(id, State::serving(served));
        self.open.push((id, None));
        self.handle(ServerInput::Accepted(id));
    }

    fn id(&self, which: usize) -> Option<ConnectionId> {
        self.open.get(which % self.open.len().max(1)).map(|(id, _)| *id)
    }

    fn hello(&mut self, which: usize, version: u8) {
        let Some(id) = self.id(which) else { return };
        let Some(ztunnel) = self.silent.remove(&id) else { return };
        if version == 1 {
            self.greeted.push(id);
            self.ztunnel(id, |slot| *slot = Some(ztunnel));
        }
        self.handle(ServerInput::Received(id, &[8, version]));
        assert!(version == 1 || self.open.iter().all(|(other, _)| *other != id), "another version");
    }

    fn answer(&mut self, which: usize, fails: bool) {
        let Some(id) = self.id(which) else { return };
        let answer = self.ztunnel(id, |ztunnel| ztunnel.as_mut()?.answer(fails)).flatten();
        if let Some(answer) = answer {
            self.handle(ServerInput::Received(id, answer));
        }
    }

    fn ztunnel<T>(&mut self, id: ConnectionId, with: impl FnOnce(&mut Option<State>) -> T) -> Option<T> {
        self.open.iter_mut().find(|(other, _)| *other == id).map(|(_, ztunnel)| with(ztunnel))
    }

    fn forget(&mut self, id: ConnectionId) {
        self.open.retain(|(other, _)| *other != id);
        self.silent.remove(&id);
        self.greeted.retain(|other| *other != id);
    }

    fn handle(&mut self, input: ServerInput<'_>) {
        let mut outputs: VecDeque<ServerAction> = self.server.handle(self.now, input).into();
        while let Some(output) = outputs.pop_front() {
            match output {
                ServerAction::Report { uid, netns, state } => {
                    assert_eq!(Some(&netns), self.wanted.get(&uid), "a report about another namespace");
                    assert!(self.wanted.contains_key(&uid), "a report of a pod that is gone");
                    self.states.insert(uid, state);
                }
                ServerAction::Close { connection, reason } => {
                    assert!(!reason.to_string().is_empty());
                    assert!(self.open.iter().any(|(id, _)| *id == connection), "closed already");
                    self.forget(connection);
                }
                ServerAction::Send { connection, descriptor: Some((uid, _)), .. }
                    if self.unopenable.contains(&uid) =>
                {
                    let input = ServerInput::Unopened(connection, "No such file".into());
                    outputs.extend(self.server.handle(self.now, input));
                }
                ServerAction::Send { connection, datagram, descriptor } => {
                    assert!(self.has_started, "a message before all pods are known");
                    self.deliver(connection, &datagram, descriptor.map(|(_, netns)| netns));
                }
            }
        }
    }

    fn deliver(&mut self, id: ConnectionId, datagram: &[u8], netns: Option<NetnsInode>) {
        let wanted: Vec<String> = self.wanted.keys().cloned().collect();
        self.ztunnel(id, |ztunnel| {
            let ztunnel = ztunnel.as_mut().expect("no message before a hello");
            let descriptors: Vec<u64> = netns.into_iter().map(|netns| netns.0).collect();
            ztunnel.receive(datagram, &descriptors).expect("ztunnel accepts it");
            if matches!(ztunnel.inbox, Some((Message::SnapshotSent, _))) {
                let missing = wanted.iter().find(|uid| !ztunnel.named.contains(*uid));
                assert_eq!(missing, None, "missing in the snapshot");
            }
        })
        .expect("no message after the end");
    }

    /// What holds at any time.
    fn check(&self) {
        let counts = |id: &ConnectionId| match self.newcomer {
            Newcomer::AllPods => self.greeted.last() == Some(id),
            Newcomer::NewPods => true,
        };
        let counted = || self.open.iter().filter(|(id, _)| counts(id)).filter_map(|(_, one)| one.as_ref());
        assert_eq!(self.server.ztunnels(), self.greeted.len());
        for (uid, netns) in &self.wanted {
            let state = self.states.get(uid).expect("every pod has a state");
            if *state == PodState::Acknowledged {
                let netns = netns.map(|netns| netns.0);
                let serves = |ztunnel: &State| ztunnel.served.get(uid).copied() == netns;
                let leaves = |ztunnel: &State| {
                    let message = ztunnel.inbox.as_ref().map(|(message, _)| message);
                    message == Some(&Message::Del(uid.clone()))
                };
                let is_served = counted().any(|ztunnel| serves(ztunnel) && !leaves(ztunnel));
                assert!(is_served, "{uid} is acknowledged, and not served or being removed");
            }
        }
    }

    /// All is answered, and the first pod always refused, until nothing more comes before time passes.
    fn refuse_first(&mut self) {
        let is_first = |message: &Message| *message == Message::Add("u0".to_owned());
        for _ in 0..1000 {
            let asked = self.open.iter().enumerate().find_map(|(which, (_, ztunnel))| {
                let (message, _) = ztunnel.as_ref()?.inbox.as_ref()?;
                Some((which, is_first(message)))
            });
            let Some((which, fails)) = asked else { return };
            self.answer(which, fails);
            self.check();
        }
        panic!("it never settles");
    }

    /// A pod that is refused keeps no ztunnel from being ready.
    fn check_readiness(&self) {
        for (id, ztunnel) in &self.open {
            let Some(ztunnel) = ztunnel.as_ref().filter(|_| self.has_started) else { continue };
            assert!(ztunnel.is_ready(), "{id:?}: {ztunnel:?}");
        }
    }

    /// From now on all goes well: everything is answered, opened and waited for.
    fn settle(&mut self) {
        self.unopenable.clear();
        if !self.has_started {
            self.start();
        }
        for which in 0..self.open.len() {
            self.hello(which, 1);
        }
        for _ in 0..1000 {
            let mut is_quiet = true;
            for which in 0..self.open.len() {
                let asked = |(_, ztunnel): &(ConnectionId, Option<State>)| {
                    ztunnel.as_ref().is_some_and(|ztunnel| ztunnel.inbox.is_some())
                };
                if self.open.get(which).is_some_and(asked) {
                    is_quiet = false;
                    self.answer(which, false);
                    self.check();
                }
            }
            if is_quiet {
                let Some(deadline) = self.server.next_deadline() else { return };
                assert!(deadline < self.now + Duration::from_secs(6), "no pod waits longer");
                self.now = self.now.max(deadline);
                self.handle(ServerInput::Tick);
            }
        }
        panic!("it never settles");
    }

    /// What holds in the end.
    fn check_end(&self) {
        for (id, ztunnel) in &self.open {
            let ztunnel = ztunnel.as_ref().expect("all have sent a hello");
            assert!(ztunnel.has_snapshot, "{id:?}");
            for (uid, netns) in ztunnel.served.iter().chain(&ztunnel.pending) {
                match self.wanted.get(uid) {
                    None => panic!("{id:?} has {uid}, which is removed"),
                    Some(Some(wanted)) if self.newcomer == Newcomer::AllPods => {
                        assert_eq!(*netns, wanted.0, "{id:?} serves {uid} where it was");
                    }
                    // What ztunnel had stays.
                    Some(_) => {}
                }
            }
        }
        for (uid, netns) in &self.wanted {
            let expected = match (netns, self.greeted.is_empty()) {
                (None, _) => PodState::NamespaceUnknown,
                (_, true) => PodState::NoZtunnel,
                (_, false) => PodState::Acknowledged,
            };
            assert_eq!(self.states.get(uid), Some(&expected), "{uid}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn the_protocol_holds_and_all_ends_as_wanted(
        newcomer in prop_oneof![Just(Newcomer::AllPods), Just(Newcomer::NewPods)],
        early in prop::collection::vec(event(), 0..8),
        is_early in any::<bool>(),
        late in prop::collection::vec(event(), 0..80),
    ) {
        let server = Server::new().with(newcomer);
        let mut world = World { newcomer, server, ..World::default() };
        for event in &early {
            world.happen(event);
        }
        // Most runs are about what comes after the start.
        if is_early {
            world.happen(&Event::Start);
        }
        for event in &late {
            world.happen(event);
        }
        world.refuse_first();
        world.check_readiness();
        world.settle();
        world.check_end();
    }
}
