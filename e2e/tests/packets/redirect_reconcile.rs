//! One configuration after the other in a namespace whose connections never pause: not one of them may get past the proxy.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::{self, mesh::any};
use e2e::traffic::listener;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use test_support::netns::{Families, Namespace, Topology, pod_address, remote_address};
use test_support::parallel::Worker;
use test_support::process::{self, Patience};
use test_support::sample;

/// Steps of the tour where not all are asked for: each configuration comes and goes.
const FEW: usize = 24;
const APP: u16 = 8080;
const SERVICE: u16 = 80;
/// Where a client's connections come from, one port after the other, all above those that are listened on.
const PORTS: RangeInclusive<u16> = 16_100..=u16::MAX;
/// How long a port has to rest: what was lost is known to the pod for a minute, and what comes from the same port until then would share its fate, long
/// after the exchange that lost it; and the client's own kernel keeps the port of what has ended for a minute.
const REST: Duration = Duration::from_secs(62);
/// Between two connections of one client, so that each port rests for as long.
const PAUSE: Duration = REST.checked_div((*PORTS.end() - *PORTS.start()) as u32).expect("ports");
/// How long a connection may take, and then its answer, before it counts as lost, by a patience that a machine that stands still does not use
/// up: a packet lost to a busy machine is sent again after a second. Not longer, because some connections are lost; see below.
const VISIT: Duration = Duration::from_secs(3);

/// A configuration, and the proxy's ports it leads to.
struct Configuration {
    args: &'static str,
    inbound: u16,
    outbound: u16,
}

const CONFIGURATIONS: [Configuration; 9] = [
    Configuration { args: "-b * -i *", inbound: 15006, outbound: 15001 },
    Configuration {
        args: "--backend restore -b * -d 9999 -i * -x 192.0.2.0/24 -o 9998 -z 16006 -p 16001 --redirect-dns --capture-all-dns",
        inbound: 16006,
        outbound: 16001,
    },
    Configuration {
        args: "-b 8080 -i 198.51.100.1/32,2001:db8::1/128 -c dummy0 --drop-invalid",
        inbound: 15006,
        outbound: 15001,
    },
    Configuration { args: "--backend restore -m TPROXY -b * -i *", inbound: 15006, outbound: 15001 },
    Configuration {
        args: "-m TPROXY -b 8080 -i * -t 0x77 -r 200 -z 16006 -p 16001",
        inbound: 16006,
        outbound: 16001,
    },
    Configuration { args: "--native-nftables -b * -i *", inbound: 15006, outbound: 15001 },
    Configuration {
        args: "--native-nftables -m TPROXY -b * -i * -z 16006 -p 16001",
        inbound: 16006,
        outbound: 16001,
    },
    Configuration {
        args: "--force-iptables-binary legacy -b * -i * -z 16006 -p 16001",
        inbound: 16006,
        outbound: 16001,
    },
    Configuration {
        args: "--force-iptables-binary legacy -m TPROXY -b * -i *",
        inbound: 15006,
        outbound: 15001,
    },
];

/// Where a gap is left, thousands of visitors go through it. `redirect_swap.rs` looks for those that last a few instructions.
#[test]
fn no_connection_escapes_while_every_configuration_replaces_every_other() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let (pod, client) = (&topology.pod, &topology.client);
    let app = Door::open(pod, APP)?;
    let service = Door::open(client, SERVICE)?;
    let _proxy = [15006, 16006, 15001, 16001].map(|port| Door::open(pod, port).expect("opens"));

    configure(pod, &CONFIGURATIONS[0])?;
    let mut clients = Vec::new();
    for v6 in [false, true] {
        clients.push(Visitor::start(client, SocketAddr::new(pod_address(v6), APP))?);
        clients.push(Visitor::start(pod, SocketAddr::new(remote_address(v6), SERVICE))?);
    }
    let mut before = &CONFIGURATIONS[0];
    let steps = tour();
    let steps = &steps[..sample::times(FEW, steps.len())];
    for configuration in steps.iter().copied() {
        configure(pod, configuration)?;
        let step = format!("from {:?} to {:?}", before.args, configuration.args);
        for visitor in &clients {
            let port =
                if visitor.target.port() == APP { configuration.inbound } else { configuration.outbound };
            let lost = visitor.settle(port).context(step.clone())?;
            ensure!(lost.is_empty() || loses_connections(before, configuration), "{step}: {lost:?}");
        }
        ensure!(app.visitors() == 0, "the application was reached directly, {step}");
        ensure!(service.visitors() == 0, "the service was reached directly, {step}");
        before = configuration;
    }
    let visits: usize = clients.into_iter().map(|visitor| visitor.stop().visits).sum();
    ensure!(visits > 1000, "only {visits} connections: nothing is shown");
    ensure!(app.visitors() == 0 && service.visitors() == 0);
    Ok(())
}

/// Steps such that every configuration comes after every other at least once. Begins after the first.
fn tour() -> Vec<&'static Configuration> {
    let mut steps = Vec::new();
    for (index, configuration) in CONFIGURATIONS.iter().enumerate() {
        if index > 0 {
            steps.push(configuration);
        }
        for other in &CONFIGURATIONS[index + 1..] {
            steps.extend([other, configuration]);
        }
    }
    steps
}

/// For a moment two backends hand the same packets over. The second takes them for packets the proxy has marked, so their
/// connection remembers the mark and its answers go to loopback: such a connection is lost, and does not escape.
/// What REDIRECT translates is reset while TPROXY is in force as well: TPROXY looks for a socket of the address before the
/// translation, and finds the listener (docs/concepts/capture.md).
fn loses_connections(before: &Configuration, after: &Configuration) -> bool {
    match (before.is_tproxy(), after.is_tproxy()) {
        (true, true) => before.backend() != after.backend(),
        (before, after) => before || after,
    }
}

impl Configuration {
    fn is_tproxy(&self) -> bool {
        self.args.contains("-m TPROXY")
    }

    fn backend(&self) -> Option<&str> {
        self.args.split(' ').find(|word| matches!(*word, "--native-nftables" | "--force-iptables-binary"))
    }
}

fn configure(pod: &Namespace, configuration: &Configuration) -> Result<()> {
    iptables::apply(pod, &format!("--dual-stack --reconcile {}", configuration.args))?;
    Ok(())
}

/// A port that tells everybody who comes its number, on both families. It also accepts what TPROXY brings.
struct Door {
    visitors: Arc<AtomicUsize>,
    _accepting: Worker,
}

impl Door {
    fn open(namespace: &Namespace, port: u16) -> Result<Self> {
        let one = |v6| listener((any(v6), port).into(), true);
        let listeners = namespace.enter(|| -> Result<_> { Ok([one(false)?, one(true)?]) })??;
        let visitors = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&visitors);
        let accepting = Worker::start(move |stop| {
            // Visitors leave first: where we did, the address they came from would be ours to remember for a minute.
            let mut inside = VecDeque::new();
            while !stop.load(Ordering::Relaxed) {
                for listener in ready(&listeners) {
                    // A visitor that has gone again does not matter to the next.
                    let Ok((mut stream, _)) = listener.accept() else { continue };
                    counter.fetch_add(1, Ordering::Relaxed);
                    let _ = writeln!(stream, "{port}");
                    inside.push_back(stream);
                    if inside.len() > 16 {
                        inside.pop_front();
                    }
                }
            }
        });
        Ok(Self { visitors, _accepting: accepting })
    }

    fn visitors(&self) -> usize {
        self.visitors.load(Ordering::Relaxed)
    }
}

fn ready(listeners: &[TcpListener; 2]) -> Vec<&TcpListener> {
    let mut fds = listeners.each_ref().map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN));
    // Looks up twenty times a second whether the door is to be closed.
    if poll(&mut fds, PollTimeout::from(50_u8)).is_err() {
        return Vec::new();
    }
    let ready = fds.map(|fd| fd.any() == Some(true));
    listeners.iter().zip(ready).filter(|(_, ready)| *ready).map(|(listener, _)| listener).collect()
}

/// A client that connects to one address repeatedly and notes the answers.
struct Visitor {
    target: SocketAddr,
    notes: Arc<Mutex<Notes>>,
    visiting: Worker,
}

#[derive(Default)]
struct Notes {
    visits: usize,
    last: String,
    /// What came of visits that nobody answered, since somebody looked.
    lost: Vec<String>,
}

impl Visitor {
    fn start(namespace: &Namespace, target: SocketAddr) -> Result<Self> {
        let notes = Arc::new(Mutex::new(Notes::default()));
        let noting = Arc::clone(&notes);
        // The thread stays where the thread that starts it is.
        let visiting = namespace.enter(|| {
            Worker::start(move |stop| {
                for port in PORTS.cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let answer = visit(target, port);
                    noting.lock().unwrap_or_else(PoisonError::into_inner).add(answer);
                    thread::sleep(PAUSE);
                }
            })
        })?;
        Ok(Self { target, notes, visiting })
    }

    /// Waits until every visit that began before this call has ended, and a port answers. Returns what was lost.
    fn settle(&self, port: u16) -> Result<Vec<String>> {
        let visits = self.notes().visits;
        let what = format!("{} to lead to port {port}", self.target);
        process::until(&what, process::SHORT, &[], || {
            let notes = self.notes();
            Ok((notes.visits >= visits + 2 && notes.last == port.to_string()).then_some(()))
        })?;
        Ok(std::mem::take(&mut self.notes().lost))
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(self) -> Notes {
        self.visiting.end();
        std::mem::take(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Notes {
    fn add(&mut self, answer: std::io::Result<String>) {
        self.visits += 1;
        match answer {
            Ok(answer) if !answer.is_empty() => self.last = answer,
            other => self.lost.push(format!("{other:?}")),
        }
    }
}

fn visit(target: SocketAddr, from: u16) -> std::io::Result<String> {
    let family = if target.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    if target.is_ipv6() {
        // The visitor of the other family has the same ports.
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(any(target.is_ipv6()), from)))?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(fd);
    Patience::new(VISIT).wait_for(&stream, PollFlags::POLLOUT)?;
    stream.take_error()?.map_or(Ok(()), Err)?;
    // A connection may be lost even in the middle of an answer.
    let mut patience = Patience::new(VISIT);
    let (mut reader, mut answer) = (BufReader::new(stream), String::new());
    while !answer.ends_with('\n') {
        patience.wait_for(reader.get_ref(), PollFlags::POLLIN)?;
        match reader.read_line(&mut answer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(answer.trim_end().to_owned())
}
