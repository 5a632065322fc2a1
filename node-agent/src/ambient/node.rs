//! What enrolment does on a node: in pods' network namespaces, in the node's own, and with ztunnel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use agent_runtime::lock;
use cni_core::selection::Programming;
use netns_apply::ApplyOptions;
use netns_apply::netlink::NftConnection;
use netns_apply::netns::{Netns, NetnsId};
use netns_apply::routes::RouteSocket;
use pod_netns::{Outside, ProcessIndex};
use redirect_core::AmbientRedirect;
use redirect_core::accepted::AcceptedRules;
use redirect_core::ambient::ProbeSources;
use zds::socket::{ServerHandle, SocketEvent, serve};
use zds::{NetnsInode, Newcomer, PodState, ZdsWorkload};

use super::annotations::AnnotationQueue;
use super::decision::Redirection;
use super::enrolment::Effects;
use super::pod::AmbientPod;
use crate::ambient_rules::{self as rules, RulesCheck};
use crate::confine::outside;
use crate::pods::check::{census, find, options, pod_addresses};
use crate::settings::Paths;

/// How many bytes of routing are read at most: far more than the table `local` of a node comes to.
const MOST_ROUTING: usize = 1 << 20;

/// How many pods' rules are changed at the same time.
const AT_ONCE: usize = 8;

/// The pods that ztunnel received, and its answers. By UID: the network namespace, the path that opens it, and the state.
type Announced = BTreeMap<String, (NetnsInode, PathBuf, PodState)>;

/// The node's ztunnel, at its socket.
pub struct ZtunnelLink {
    handle: ServerHandle,
    thread: JoinHandle<()>,
    announced: Arc<Mutex<Announced>>,
}

impl ZtunnelLink {
    /// Serves ztunnel at this socket file. No ztunnel receives anything before [`begin`](Self::begin). `observe` learns whatever changes, on a thread that
    /// it must not hold up.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn serve(
        path: &Path,
        newcomer: Newcomer,
        mut observe: impl FnMut(&SocketEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let announced: Arc<Mutex<Announced>> = Arc::default();
        let (opened, noted) = (announced.clone(), announced.clone());
        let open = move |uid: &str, netns: NetnsInode| {
            let path = lock(&opened).get(uid).filter(|pod| pod.0 == netns).map(|(_, path, _)| path.clone());
            let path = path.ok_or(io::ErrorKind::NotFound)?;
            // A confined thread sees no processes.
            outside::run(move || File::open(path)).unwrap_or_else(|| Err(io::ErrorKind::Other.into()))
        };
        let observe = move |event: SocketEvent| {
            // What is about an earlier sandbox comes too late.
            if let SocketEvent::Pod(uid, netns, state) = &event
                && let Some(pod) = lock(&noted).get_mut(uid).filter(|pod| Some(pod.0) == *netns)
            {
                pod.2 = state.clone();
            }
            observe(&event);
        };
        let (handle, thread) = serve(path, newcomer, Box::new(open), Box::new(observe))?;
        Ok(Self { handle, thread, announced })
    }

    /// These are the node's pods: from now on ztunnel receives them, and drops all others. Those without a network namespace it keeps if it has them.
    pub fn begin(&self, pods: Vec<(ZdsWorkload, Option<NetnsInode>)>) {
        self.handle.pods(pods);
    }

    /// Ends it, and waits until it has.
    ///
    /// # Errors
    /// It had panicked.
    pub fn end(self) -> Result<(), &'static str> {
        drop(self.handle);
        self.thread.join().map_err(|_| "the server of ztunnel panicked")
    }
}

/// Network namespaces that the container runtime named when it set up pods, by UID. Nothing of them is held open.
#[derive(Debug, Default)]
pub struct NamedNamespaces(BTreeMap<String, (PathBuf, NetnsId)>);

impl NamedNamespaces {
    /// Notes the namespace of a pod, at this path of the agent's file system, if it has the pod's addresses.
    ///
    /// # Errors
    /// It is not the pod's, or cannot be opened.
    pub fn note(&mut self, uid: &str, addresses: &[IpAddr], path: &Path) -> Result<(), String> {
        let netns = open_outside(path).map_err(|error| error.to_string())?;
        let there = pod_addresses(&netns)?.ok_or_else(|| {
            format!("{} is the node's network namespace, which is never redirected", path.display())
        })?;
        match addresses.iter().find(|address| !there.contains(address)) {
            Some(missing) => Err(format!("{} does not have the pod's address {missing}", path.display())),
            None if addresses.is_empty() => Err("the pod has no address".to_owned()),
            None => {
                self.0.insert(uid.to_owned(), (path.to_owned(), netns.id()));
                Ok(())
            }
        }
    }

    /// Forgets pods that this does not keep.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| keep(uid));
    }

    /// Opens the namespace of a pod, unless its path leads to another one now.
    fn open(&mut self, uid: &str) -> Option<Netns> {
        let (path, id) = self.0.get(uid)?;
        let netns = open_outside(path).ok().filter(|netns| netns.id() == *id);
        if netns.is_none() {
            self.0.remove(uid);
        }
        netns
    }
}

/// A confined thread does not see namespaces of processes.
fn open_outside(path: &Path) -> io::Result<Netns> {
    let path = path.to_owned();
    let opened = outside::run(move || Netns::open(path));
    opened.map_or_else(|| Err(io::ErrorKind::Other.into()), |opened| opened.map_err(io::Error::other))
}

/// Works in a pod's network namespace.
fn in_namespace<T: Send>(
    netns: &Netns,
    programming: Programming,
    accepted: &AcceptedRules,
    work: impl FnOnce(&ApplyOptions) -> T + Send,
) -> Result<T, String> {
    let outside = Outside::of_this_process();
    let done = netns.run(|| {
        let options = options(programming, accepted.clone(), outside.finds_this_foreign());
        work(&options)
    });
    done.map_err(|error| error.to_string())
}

/// How the node's probes reach pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbePath {
    /// The sources that they get.
    pub sources: ProbeSources,
    /// Whether those of pods with branch interfaces get routes of their own.
    pub routes_branches: bool,
}

/// What passes work with.
pub struct NodeTools {
    /// Where processes and network namespaces are.
    pub paths: Paths,
    /// How probes reach pods.
    pub path: ProbePath,
    /// The node's network namespace.
    pub host: Netns,
    /// Receives pods.
    pub ztunnel: ZtunnelLink,
    /// Receives annotations.
    pub annotations: Arc<AnnotationQueue>,
    /// The namespaces of pods that were set up.
    pub named: NamedNamespaces,
}

/// The effects of one pass over the pods. Network namespaces are open only as long as it exists: an open one outlives its pod.
pub struct NodePass<'a> {
    node: &'a mut NodeTools,
    programming: Programming,
    processes: Option<Arc<ProcessIndex>>,
    found: BTreeMap<String, Netns>,
    /// What was seen of pods' rules in this pass, unless they were changed since.
    conditions: BTreeMap<String, RulesCheck>,
    /// As they were read, or set, in this pass.
    probes: Option<BTreeSet<IpAddr>>,
}

impl<'a> NodePass<'a> {
    /// Reads nothing yet.
    #[must_use]
    pub const fn new(node: &'a mut NodeTools, programming: Programming) -> Self {
        Self {
            node,
            programming,
            processes: None,
            found: BTreeMap::new(),
            conditions: BTreeMap::new(),
            probes: None,
        }
    }

    /// The namespaces in which pods were found.
    #[must_use]
    pub fn found(&self) -> BTreeMap<String, NetnsId> {
        self.found.iter().map(|(uid, netns)| (uid.clone(), netns.id())).collect()
    }

    /// Removes the rules and ipsets by which Istio's agent lets probes through. Returns whether any existed.
    ///
    /// # Errors
    /// Why it is not removed.
    pub fn remove_istios(&self) -> Result<bool, String> {
        in_namespace(
            &self.node.host,
            self.programming,
            &AcceptedRules::default(),
            rules::remove_istios_of_node,
        )?
    }

    /// The node's processes, read once for all pods.
    fn processes(&mut self) -> Result<Arc<ProcessIndex>, String> {
        if let Some(processes) = &self.processes {
            return Ok(processes.clone());
        }
        let paths = self.node.paths.clone();
        let processes =
            outside::run(move || census(&paths)).ok_or("reading the node's processes panicked")?;
        let processes = Arc::new(processes.map_err(|error| error.to_string())?);
        self.processes = Some(processes.clone());
        Ok(processes)
    }

    fn find_by_processes(&mut self, pod: &AmbientPod) -> Result<Netns, String> {
        let (processes, paths) = (self.processes()?, self.node.paths.clone());
        let (uid, addresses) = (pod.workload.uid().to_owned(), pod.addresses.clone());
        let found = outside::run(move || find(&uid, &addresses, &processes, &paths));
        let found = found.ok_or("the search for the pod's network namespace panicked")?;
        found.map_err(|error| error.to_string())
    }

    /// Works in the pod's network namespace.
    fn inside<T: Send>(
        &self,
        pod: &AmbientPod,
        work: impl FnOnce(&ApplyOptions) -> T + Send,
    ) -> Result<T, String> {
        let netns = self.found.get(pod.workload.uid()).ok_or("the pod's network namespace is not open")?;
        in_namespace(netns, self.programming, &pod.accepted, work)
    }

    /// Puts rules in force where they lack; several namespaces at the same time, because each waits for the kernel most of the time.
    fn prepare_rules(&mut self, pods: &[&AmbientPod]) {
        let jobs: Vec<_> = pods.iter().filter_map(|pod| Some((*pod, pod.wanted.as_ref().ok()?))).collect();
        let (next, seen) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let (programming, found) = (self.programming, &self.found);
        let work = || {
            while let Some((pod, redirect)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let uid = pod.workload.uid();
                let Some(netns) = found.get(uid) else { continue };
                let ensure = |options: &ApplyOptions| rules::ensure_in_force(redirect, pod.keeps(), options);
                // If that fails, the pod's own step does, and says why.
                if let Ok(Ok(condition)) = in_namespace(netns, programming, &pod.accepted, ensure) {
                    lock(&seen).insert(uid.to_owned(), condition);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..jobs.len().min(AT_ONCE) {
                scope.spawn(work);
            }
        });
        self.conditions.append(&mut seen.into_inner().unwrap_or_else(PoisonError::into_inner));
    }

    /// Adds the addresses of all pods that lack nothing else.
    fn prepare_probes(&mut self, pods: &[&AmbientPod]) {
        let Ok(before) = self.probes() else { return };
        let mut probes = before.clone();
        for pod in pods {
            let has_rules = self.conditions.get(pod.workload.uid()) == Some(&Ok(true));
            let found = self.found.get(pod.workload.uid()).map(|netns| NetnsInode(netns.id().inode()));
            let is_served = self
                .ztunnel(pod)
                .is_some_and(|(netns, state)| Some(netns) == found && state == PodState::Acknowledged);
            if has_rules && is_served {
                probes.extend(&pod.addresses);
            }
        }
        if probes != before {
            // If that fails, the pods' own steps do.
            let _ = self.set_probes(&probes);
        }
    }

    fn on_node<T: Send>(&self, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
        let done = self.node.host.run(work).map_err(|error| error.to_string())?;
        done.map_err(|error| format!("the addresses of probes: {error}"))
    }
}

impl Effects for NodePass<'_> {
    fn find(&mut self, pod: &AmbientPod) -> Result<NetnsInode, String> {
        if let Some(netns) = self.found.get(pod.workload.uid()) {
            return Ok(NetnsInode(netns.id().inode()));
        }
        let netns = match self.node.named.open(pod.workload.uid()) {
            Some(netns) => netns,
            None => self.find_by_processes(pod)?,
        };
        let inode = NetnsInode(netns.id().inode());
        // The process by which it was found before may have ended.
        if let Some(announced) = lock(&self.node.ztunnel.announced).get_mut(pod.workload.uid())
            && announced.0 == inode
        {
            netns.path().clone_into(&mut announced.1);
        }
        self.found.insert(pod.workload.uid().to_owned(), netns);
        Ok(inode)
    }

    fn prepare(&mut self, pods: &[&AmbientPod]) {
        let found: Vec<&AmbientPod> =
            pods.iter().copied().filter(|pod| pod.wanted.is_ok() && self.find(pod).is_ok()).collect();
        if !found.is_empty() {
            self.prepare_rules(&found);
            self.prepare_probes(&found);
        }
    }

    fn rules(&mut self, pod: &AmbientPod, redirect: Option<&AmbientRedirect>) -> RulesCheck {
        if let Some(seen) = self.conditions.get(pod.workload.uid()) {
            return seen.clone();
        }
        let seen = self.inside(pod, |options| match redirect {
            Some(redirect) => rules::are_in_force(redirect, options),
            None => rules::exist(options),
        });
        let seen = seen.unwrap_or_else(Err);
        self.conditions.insert(pod.workload.uid().to_owned(), seen.clone());
        seen
    }

    fn change_rules(&mut self, pod: &AmbientPod, redirect: Option<&AmbientRedirect>) -> Result<(), String> {
        self.conditions.remove(pod.workload.uid());
        self.inside(pod, |options| match redirect {
            Some(redirect) => rules::put_in_force(redirect, pod.keeps(), options),
            None => rules::remove(options).map(drop),
        })?
    }

    fn ztunnel(&self, pod: &AmbientPod) -> Option<(NetnsInode, PodState)> {
        let announced = lock(&self.node.ztunnel.announced);
        announced.get(pod.workload.uid()).map(|(netns, _, state)| (*netns, state.clone()))
    }

    fn announce(&mut self, pod: &AmbientPod, netns: NetnsInode) {
        let uid = pod.workload.uid();
        let Some(path) = self.found.get(uid).map(|netns| netns.path().to_owned()) else { return };
        lock(&self.node.ztunnel.announced).insert(uid.to_owned(), (netns, path, PodState::Waiting));
        self.node.ztunnel.handle.add(pod.workload.clone(), netns);
    }

    fn withdraw(&mut self, uid: &str) {
        lock(&self.node.ztunnel.announced).remove(uid);
        self.node.ztunnel.handle.remove(uid.to_owned());
    }

    fn probes(&mut self) -> Result<BTreeSet<IpAddr>, String> {
        if let Some(probes) = &self.probes {
            return Ok(probes.clone());
        }
        let ProbePath { sources, routes_branches } = self.node.path;
        let probes = self.on_node(|| {
            let table = NftConnection::open()
                .and_then(|mut connection| connection.probe_addresses(sources))
                .map_err(|error| error.to_string())?;
            // A table that does not work lets no probe through.
            let mut probes = if table.works() { table.addresses().clone() } else { BTreeSet::new() };
            let mut routes = RouteSocket::open(MOST_ROUTING).map_err(|error| error.to_string())?;
            let mut lost =
                routes.missing_probe_routes(&probes, sources).map_err(|error| error.to_string())?;
            if routes_branches {
                lost.extend(routes.missing_branch_rules(&probes).map_err(|error| error.to_string())?);
            }
            probes.retain(|address| !lost.contains(address));
            Ok(probes)
        })?;
        Ok(self.probes.insert(probes).clone())
    }

    fn set_probes(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<(), String> {
        self.probes = None;
        let ProbePath { sources, routes_branches } = self.node.path;
        let none = BTreeSet::new();
        self.on_node(|| {
            // First the way back.
            let mut routes = RouteSocket::open(MOST_ROUTING).map_err(|error| error.to_string())?;
            routes.set_probe_routes(addresses, sources).map_err(|error| error.to_string())?;
            let mut connection = NftConnection::open().map_err(|error| error.to_string())?;
            connection.set_probe_addresses(addresses, sources).map_err(|error| error.to_string())?;
            let routed = if routes_branches { addresses } else { &none };
            routes.set_branch_rules(routed).map_err(|error| error.to_string())
        })?;
        self.probes = Some(addresses.clone());
        Ok(())
    }

    fn annotate(&mut self, pod: &AmbientPod, annotation: Option<Redirection>) {
        self.node.annotations.add(pod, annotation);
    }
}
