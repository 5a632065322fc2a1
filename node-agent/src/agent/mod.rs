//! The agent's loop: watch, compare, correct, wait.

mod api_tasks;
mod reload;
mod shutdown;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::metrics::WatchLabel;
use agent_runtime::supervisor::Supervisor;
use agent_runtime::{SCOPE, or_never};
use anyhow::anyhow;
use cni_core::plugin_event::SOCKET_NAME;
use reasons::{AgentReason, EventReason, ObstacleKind};
use tokio::sync::watch::{self, Receiver};
use tokio::task::AbortHandle;

use crate::ambient::add_event::AddEvents;
use crate::ambient::controller::{self as ambient, AmbientController};
use crate::cluster;
use crate::cluster::events::EventPublisher;
use crate::cluster::own::{self, WasReadable};
use crate::confine;
use crate::install::conflict::{Collisions, WriteConflict, suspect};
use crate::install::conflist_edits::{self, Edit, EntryObstacle};
use crate::install::disk::Real;
use crate::install::file_watch::{FileEvent, FileWatch, WatchedDir};
use crate::install::installer::{Installer, Pass};
use crate::install::plugin::PluginProgram;
use crate::install::plugin_health::AccessChecker;
use crate::install::plugin_token::{PluginToken, TokenRenewer};
use crate::install::ready::Phase;
use crate::install::reload::Reloader;
use crate::metrics::Metrics;
use crate::parts::AgentParts;
use crate::pod_watch::{self, Followers};
use crate::pods::drift::{self, NodeSummary};
use crate::pods::heal;
use crate::pods::held_pods::HeldPods;
use crate::pods::repair::RepairController;
use crate::serve::plugin_requests::PluginRequests;
use crate::serve::plugin_socket::PluginSocket;
use crate::serve::server::{self, AgentContext};
use crate::settings::{
    DriftSettings, EntryPlacement, KUBECONFIG, OWNED_FILE, Settings, TOKEN_FILE, TemplateSource, Trust,
};
use crate::taint;
pub use api_tasks::ApiTasks;
use shutdown::{ShutdownSignals, shut_down};

/// The least time between two events of a reason.
const EVENT_PAUSE: Duration = Duration::from_secs(60);
/// How long the first pass waits for the plugin's own token. Without one the plugin gets the agent's, to begin with.
const FIRST_TOKEN: Duration = Duration::from_secs(5);
/// How long the first pass waits until running pods of ambient mode were examined: on a node that has just booted, those that are created then come after them.
const FIRST_ENROLMENT: Duration = Duration::from_secs(5);
/// How often the node's files are checked if they cannot be watched, or one of them cannot be loaded.
const POLL: Duration = Duration::from_secs(5);
/// How often to check that the runtime that reads the entry beside the list still runs. A new one must not find the list without the entry.
const READER_TICK: Duration = Duration::from_secs(1);
/// How often to check that the node's directories are still the mounted ones, and the sockets this agent's. inotify does not report that.
const TICK: Duration = Duration::from_secs(10);
/// The longest wait after failures.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Runs the agent until a signal ends it. The reloader may change settings while it runs.
///
/// # Errors
/// When it cannot serve health or the log socket, when a directory of the node is not the one it sees any more, or when one of its tasks has ended. What
/// fails on the node is shown by readiness and tried again.
pub async fn run(
    settings: Settings,
    reloader: Option<Reloader>,
    logs: Option<logging::LogHandle>,
) -> anyhow::Result<()> {
    run_with(settings, reloader, logs, Supervisor::default()).await
}

async fn run_with(
    settings: Settings,
    reloader: Option<Reloader>,
    logs: Option<logging::LogHandle>,
    tasks: Supervisor,
) -> anyhow::Result<()> {
    let mut signals = ShutdownSignals::new()?;
    let (served, token, ambient) = served(&settings, logs.clone(), tasks.clone());
    let changes = Changes { reloader, levels: logs, drift: watch::Sender::new(settings.drift.clone()) };
    let mut sockets = vec![server::start(&settings, &served).await?];
    let renewer = Arc::new(renewer(&settings, &token, &served));
    let readable = start_lookup(&served);
    let mut working = start_work(&settings, &changes.drift, &served, (token.clone(), renewer.clone()));
    let (controller, adds) = ambient.unzip();
    let requests = PluginRequests { parts: served.parts.clone(), held: served.held.clone(), adds };
    sockets.push(requests.serve(&settings.paths, tasks.clone())?);
    working.extend(controller.map(|controller| tasks.spawn("ambient mode", controller.run())));
    let own = settings.clone();
    let mut agent = Agent {
        settings,
        served: served.clone(),
        sockets,
        token: token.clone(),
        changes,
        memory: LoopMemory::default(),
    };
    let end = tokio::select! {
        end = agent.work(&mut signals) => end,
        dead = tasks.death() => Err(anyhow!("{dead}; ending, so that the kubelet starts a new container")),
    };
    working.iter().for_each(AbortHandle::abort);
    end?;
    served.state.set(Phase::Leaving);
    tokio::select! {
        () = shut_down(&own, &served, &readable, &token, &renewer) => {}
        () = signals.next_signal() => log::warn!(target: SCOPE, "received a second signal; exiting without cleanup"),
    }
    Ok(())
}

/// What the agent's parts share, the plugin's token, and ambient mode, if it is on.
fn served(
    settings: &Settings,
    logs: Option<logging::LogHandle>,
    tasks: Supervisor,
) -> (Arc<AgentContext>, Arc<PluginToken>, Option<(AmbientController, AddEvents)>) {
    let token = Arc::new(PluginToken::new(&settings.plugin, &settings.identity));
    let installer = Installer::new(Arc::new(Real), Arc::new(PluginProgram), settings.clone());
    let (metrics, registry) = Metrics::new();
    let parts = AgentParts {
        connection: Arc::new(cluster::connection(settings)),
        installer: Arc::new(installer.with_token(token.clone())),
        handlers: Arc::default(),
        metrics: metrics.clone(),
    };
    let held = Arc::<HeldPods>::default();
    let ambient = ambient::link(settings, &parts, held.clone(), &tasks);
    let summary = NodeSummary::new(metrics.clone());
    if let Some(interval) = settings.drift.interval {
        // It is asked before the drift watch runs.
        summary.begin(interval);
    }
    let served = AgentContext {
        events: EventPublisher::start("agent events", parts.connection.clone(), metrics, &tasks),
        transitions: Mutex::default(),
        parts,
        plugin: Arc::default(),
        state: Arc::default(),
        held,
        ambient: ambient.as_ref().map(|(_, events)| events.state.clone()),
        summary: Arc::new(summary),
        registry,
        logs,
        tasks,
    };
    (Arc::new(served), token, ambient)
}

fn renewer(settings: &Settings, token: &Arc<PluginToken>, served: &AgentContext) -> TokenRenewer {
    let (connection, metrics) = (served.parts.connection.clone(), served.parts.metrics.clone());
    TokenRenewer { account: settings.plugin.clone(), token: token.clone(), connection, metrics }
}

/// Starts the lookup of the agent's DaemonSet.
fn start_lookup(served: &AgentContext) -> Arc<WasReadable> {
    let readable = Arc::new(WasReadable::default());
    let (connection, shared) = (served.parts.connection.clone(), readable.clone());
    served.tasks.spawn("DaemonSet lookup", async move { own::look_at_start(&connection, &shared).await });
    readable
}

/// Starts the tasks that work beside the agent's loop, and end with it.
fn start_work(
    settings: &Settings,
    drift: &watch::Sender<DriftSettings>,
    served: &Arc<AgentContext>,
    (token, renewer): (Arc<PluginToken>, Arc<TokenRenewer>),
) -> Vec<AbortHandle> {
    let AgentContext { parts, plugin, summary, held, tasks, .. } = &**served;
    let (handle, healer) = heal::link(settings, parts.connection.clone(), parts.metrics.clone(), tasks);
    let known = (summary.clone(), held.clone());
    let watch = drift::DriftWatch::new(settings.clone(), parts.clone(), known, handle);
    let taint = taint::NodeTaintManager::new(settings, drift.subscribe(), served.clone());
    let access = AccessChecker {
        health: plugin.clone(),
        installer: parts.installer.clone(),
        identity: settings.identity.clone(),
        token,
    };
    let repair = RepairController::new(settings.clone(), drift.subscribe(), parts.clone());
    let mut working = follow_pods(&settings.identity.node, served, repair.as_ref());
    working.extend(
        repair.map(|repair| tasks.spawn("repair controller", async move { match repair.work().await {} })),
    );
    working.extend([
        tasks.spawn("healer", healer.run()),
        tasks.spawn("drift watch", watch.run(drift.subscribe())),
        tasks.spawn("taint manager", taint.run()),
        tasks.spawn("plugin token renewer", async move { renewer.run().await }),
        tasks.spawn("plugin access checker", access.run()),
    ]);
    working
}

/// Follows the node's pods, where a part of the agent needs that.
fn follow_pods(
    own_node: &str,
    served: &Arc<AgentContext>,
    repair: Option<&Arc<RepairController>>,
) -> Vec<AbortHandle> {
    let follow = |name, selection, followers: Followers| {
        let connection = served.parts.connection.clone();
        served
            .tasks
            .spawn(name, async move { match pod_watch::run(&connection, selection, &followers).await {} })
    };
    // Repair may have another node than the agent.
    let (here, elsewhere) = match repair.cloned() {
        Some(repair) if repair.filter.node != own_node => (None, Some(repair)),
        repair => (repair, None),
    };
    let ambient = served.ambient.as_ref().filter(|_| !own_node.is_empty());
    let ambient = ambient.map(|state| state.inventory.clone());
    let mut working = Vec::new();
    if here.is_some() || ambient.is_some() {
        let (held, metrics) = (served.held.clone(), served.parts.metrics.clone());
        let followers = Followers { held, repair: here, ambient, metrics };
        working.push(follow("pod watch", cluster::pods::of_node(own_node), followers));
    }
    if let Some(repair) = elsewhere {
        let (selection, metrics) = (repair.filter.selection(), served.parts.metrics.clone());
        let followers = Followers { held: Arc::default(), repair: Some(repair), ambient: None, metrics };
        working.push(follow("watch of another node's pods", selection, followers));
    }
    working
}

/// A file that the agent does not change for a while, because another program does.
struct WriteBackoff {
    file: String,
    until: Instant,
    /// Who that may be, and what to do about it.
    who: String,
}

/// Where settings that change come from, and which parts receive them.
struct Changes {
    reloader: Option<Reloader>,
    levels: Option<logging::LogHandle>,
    drift: watch::Sender<DriftSettings>,
}

struct Agent {
    settings: Settings,
    served: Arc<AgentContext>,
    /// At which plugins reach the agent.
    sockets: Vec<PluginSocket>,
    token: Arc<PluginToken>,
    changes: Changes,
    memory: LoopMemory,
}

/// What the loop remembers of its passes.
#[derive(Default)]
struct LoopMemory {
    conflict: WriteConflict,
    backoff: Option<WriteBackoff>,
    failures: u32,
    collisions: Collisions,
    /// Why the node's files cannot be watched.
    blind: Option<String>,
    /// The file that had our entry when all was well, and the list that it was chained into or beside.
    settled: Option<(String, Option<String>)>,
    /// Why the entry is in the list where the settings would rather have it beside the list.
    inlined_because: Option<String>,
    obstacle: Option<EntryObstacle>,
    invalid: Vec<(String, String)>,
    /// When an event of each reason was sent last.
    events: BTreeMap<EventReason, Instant>,
}

impl Agent {
    /// Works until a signal ends it.
    ///
    /// # Errors
    /// Why it has to end before.
    async fn work(&mut self, signals: &mut ShutdownSignals) -> anyhow::Result<()> {
        let installer = self.served.parts.installer.clone();
        match tokio::task::spawn_blocking(move || installer.sweep()).await {
            Ok(Ok(0)) => {}
            Ok(Ok(count)) => {
                log::info!(target: SCOPE, files = count; "removed temporary files of an earlier agent");
            }
            Ok(Err(error)) => log::warn!(target: SCOPE, "{error}"),
            Err(error) => log::warn!(target: SCOPE, "sweeping panicked: {error}"),
        }
        tokio::select! {
            () = signals.next_signal() => return Ok(()),
            _ = tokio::time::timeout(FIRST_TOKEN, self.token.first_answer()) => {}
        }
        if let Some(ambient) = self.served.ambient.clone() {
            tokio::select! {
                () = signals.next_signal() => return Ok(()),
                _ = tokio::time::timeout(FIRST_ENROLMENT, ambient.begun()) => {}
            }
        }
        // What came until now is what the first pass chooses from.
        let mut tokens = self.token.changes();
        let mut watch = None;
        loop {
            // The watch comes before the pass, so that no change is missed in between.
            if watch.is_none() {
                watch = self.watch();
            }
            let again = self.reconcile().await;
            let again = if watch.is_none() { Some(again.map_or(POLL, |wait| wait.min(POLL))) } else { again };
            if let Some(end) = self.wait(&mut watch, &mut tokens, again, signals).await {
                return end;
            }
        }
    }

    /// Starts watching, if that is possible.
    fn watch(&mut self) -> Option<FileWatch> {
        let made = FileWatch::new(self.watched());
        self.served.parts.metrics.polling.set(i64::from(made.is_err()));
        let blind = made.as_ref().err().map(ToString::to_string);
        match &blind {
            Some(error) if self.memory.blind.as_ref() != Some(error) => {
                log::warn!(target: SCOPE, "cannot watch the node's directories; polling every {} s: {error}", POLL.as_secs());
            }
            None if self.memory.blind.is_some() => {
                log::info!(target: SCOPE, "watching the node's directories again");
            }
            Some(_) | None => {}
        }
        self.memory.blind = blind;
        made.ok()
    }

    /// Waits for a change, another token of the plugin's, or until the next pass is due; a signal, or what makes it end, cuts it short.
    async fn wait(
        &mut self,
        watch: &mut Option<FileWatch>,
        tokens: &mut Receiver<u64>,
        again: Option<Duration>,
        signals: &mut ShutdownSignals,
    ) -> Option<anyhow::Result<()>> {
        let next = again.map(|wait| tokio::time::Instant::now() + wait);
        loop {
            if let Some(lost) = self.served.parts.installer.lost_directory() {
                return Some(Err(anyhow!(
                    "the node's directory behind {} was recreated; exiting so that a new container mounts it",
                    lost.display()
                )));
            }
            if let Some(moved) = confine::moved() {
                return Some(Err(anyhow!(
                    "{} is another directory than the one that this process confined itself to (LANDLOCK), so it may not write there; ending, so that its supervisor starts another",
                    moved.display()
                )));
            }
            let pause = if self.relies_on_reader() { READER_TICK } else { TICK };
            let tick = tokio::time::Instant::now() + pause;
            let reader = &self.served.parts.installer.reader;
            tokio::select! {
                biased;
                () = signals.next_signal() => return Some(Ok(())),
                change = or_never(watch.as_mut().map(FileWatch::changed)) => {
                    if !matches!(change, Ok(FileEvent::Files)) {
                        *watch = None;
                        self.served.parts.metrics.watch_restarts.get_or_create(&WatchLabel { watch: "files" }).inc();
                    }
                    return None;
                },
                _ = tokens.changed() => return None,
                () = reader.changed() => return None,
                () = tokio::time::sleep_until(next.map_or(tick, |next| next.min(tick))) => {
                    // No change of a file shows that another agent is gone.
                    self.sockets.iter_mut().for_each(PluginSocket::keep);
                    if reader.is_gone() || next.is_some_and(|next| next <= tokio::time::Instant::now()) {
                        return None;
                    }
                }
            }
        }
    }

    /// Whether the entry is beside the list alone.
    fn relies_on_reader(&self) -> bool {
        matches!(&self.memory.settled, Some((file, Some(list))) if list != file)
    }

    /// The directories to be watched, and which names in them matter.
    fn watched(&self) -> Vec<WatchedDir> {
        let paths = &self.settings.paths;
        let binaries = self.served.parts.installer.source_names().unwrap_or_default();
        let mut watched = vec![
            WatchedDir { directory: paths.net.clone(), matters: Box::new(conflist_edits::matters) },
            WatchedDir {
                directory: paths.bin.clone(),
                matters: Box::new(move |name| binaries.iter().any(|binary| binary == name)),
            },
            WatchedDir {
                directory: paths.run.clone(),
                matters: Box::new(|name| {
                    [KUBECONFIG, TOKEN_FILE, logging::SOCKET_NAME, SOCKET_NAME].contains(&name)
                }),
            },
            WatchedDir::all(&paths.service_account),
        ];
        watched.extend(self.changes.reloader.iter().map(|reloader| WatchedDir::all(&reloader.folder())));
        if let Some(TemplateSource::File(file)) = &self.settings.entry.template
            && let (Some(directory), Some(name)) = (file.parent(), file.file_name())
        {
            let name = name.to_owned();
            // A mounted ConfigMap changes by its link `..data`.
            let matters = move |changed: &str| changed == "..data" || *changed == *name;
            watched.push(WatchedDir { directory: directory.to_owned(), matters: Box::new(matters) });
        }
        match &self.settings.kubeconfig.trust {
            Trust::Authority(file) => {
                let directory = file.parent().filter(|directory| **directory != *paths.service_account);
                watched.extend(directory.map(WatchedDir::all));
            }
            Trust::Unverified => {}
        }
        watched
    }

    /// One pass, and how long to wait for the next if nothing changes.
    async fn reconcile(&mut self) -> Option<Duration> {
        self.sockets.iter_mut().for_each(PluginSocket::keep);
        self.reload().await;
        let now = Instant::now();
        self.memory.backoff = self.memory.backoff.take().filter(|backoff| backoff.until > now);
        let left = self.memory.backoff.as_ref().map(|backoff| backoff.file.clone());
        let installer = self.served.parts.installer.clone();
        let done = tokio::task::spawn_blocking(move || installer.pass(left.as_deref())).await;
        self.served.parts.metrics.passes.inc();
        match done {
            Ok(Ok(pass)) => {
                self.memory.failures = 0;
                self.memory.collisions = Collisions::default();
                self.settle(&pass)
            }
            Ok(Err(error)) => {
                let wait = if error.is_collision() { self.memory.collisions.another() } else { None };
                Some(wait.unwrap_or_else(|| self.failed(error.reason(), error.to_string())))
            }
            Err(error) => {
                Some(self.failed(AgentReason::CreateCniConfigFailure, format!("the pass panicked: {error}")))
            }
        }
    }

    fn failed(&mut self, result: AgentReason, error: String) -> Duration {
        self.served.parts.metrics.installs.get_or_create(&result.into()).inc();
        let wait = Duration::from_secs(1 << self.memory.failures.min(6)).min(LONGEST_WAIT);
        self.memory.failures += 1;
        log::error!(target: SCOPE, next_attempt_in_s = wait.as_secs(); "{error}");
        self.served.state.set(Phase::Failed(error));
        wait
    }

    /// Reports, counts and remembers the result of a pass.
    fn settle(&mut self, pass: &Pass) -> Option<Duration> {
        if pass.kubeconfig {
            self.served.parts.metrics.token_refreshes.inc();
        }
        if pass.target.is_some() && (self.memory.settled.is_none() || pass.has_changed()) {
            self.served.parts.metrics.installs.get_or_create(&AgentReason::Installed.into()).inc();
        }
        self.served.plugin.note_pass(pass.kubeconfig || !pass.edits.is_empty());
        self.note_invalid(&pass.invalid);
        self.note_obstacle(pass.obstacle.as_ref());
        report(pass);
        if !pass.edits.is_empty() {
            // It is removed: the next one of its kind is another one.
            self.memory.obstacle = None;
        }
        self.note_place(pass);
        // A read that failed once, the target of a link, or the folder of a list: the kernel does not report when that is over.
        let is_in_folder = pass.target.as_deref().is_some_and(|target| target.contains('/'));
        let is_unseen = !pass.invalid.is_empty() || is_in_folder || pass.has_unread_folder;
        let may_heal_unseen = is_unseen.then_some(POLL);
        self.phase_after_pass().or(may_heal_unseen)
    }

    /// Reports where the entry is, if that has changed.
    fn note_place(&mut self, pass: &Pass) {
        let was = self.memory.settled.take();
        self.memory.settled =
            pass.target.clone().map(|target| (target, pass.list.clone())).or_else(|| was.clone());
        let because = std::mem::replace(&mut self.memory.inlined_because, pass.inlined_because.clone());
        match (was, &pass.target) {
            (Some((old, _)), Some(new)) if old == *new => {
                if !pass.edits.is_empty() {
                    self.contest(pass);
                }
            }
            (Some((_, Some(list))), Some(new)) if Some(&list) == pass.list.as_ref() => {
                self.note_move(&list, new);
            }
            (Some((old, _)), Some(new)) => {
                let text = format!(
                    "the runtime's network configuration is {new} instead of {old}; moving the entry there"
                );
                self.served.parts.metrics.obstacles.get_or_create(&ObstacleKind::Preempted.into()).inc();
                self.warn(EventReason::NetworkConfigPreempted, text);
                return;
            }
            (None, _) | (Some(_), None) => {}
        }
        if let (Some(why), Some(target)) = (&self.memory.inlined_because, &pass.target)
            && because.as_ref() != Some(why)
        {
            log::info!(target: SCOPE, file = target; "the entry is in the network's list: {why}");
        }
    }

    /// Reports that the entry has left a list for the file beside it, or the reverse.
    fn note_move(&mut self, list: &str, new: &str) {
        if new == list {
            let why = self.memory.inlined_because.as_deref().unwrap_or_default();
            let text = format!(
                "the entry beside {list} is not read any more: the entry is in the list again, {why}"
            );
            self.warn(EventReason::NetworkConfigInlined, text);
        } else {
            log::info!(target: SCOPE, file = new; "the runtime reads the entry beside {list}, which is as its owner wrote it");
        }
    }

    /// Another program undid our change.
    fn contest(&mut self, pass: &Pass) {
        let now = Instant::now();
        if let (Some(wait), Some(file)) = (self.memory.conflict.restored(now), &pass.target) {
            let is_copy =
                matches!(self.settings.placement, EntryPlacement::Owned { .. }) || file == OWNED_FILE;
            let who = suspect(file, &pass.neighbours, is_copy);
            self.memory.backoff =
                Some(WriteBackoff { file: file.clone(), until: now + wait, who: who.clone() });
            self.served.parts.metrics.conflicts.inc();
            self.warn(EventReason::NetworkConfigContested, who);
        }
    }

    fn phase_after_pass(&self) -> Option<Duration> {
        match &self.memory.backoff {
            Some(WriteBackoff { until, who, .. }) => {
                self.served.state.set(Phase::Fighting { who: who.clone(), until: *until });
                Some(until.saturating_duration_since(Instant::now()))
            }
            None => {
                self.served.state.set(Phase::Installed);
                None
            }
        }
    }

    fn note_invalid(&mut self, invalid: &[(String, String)]) {
        if self.memory.invalid != invalid {
            for (file, reason) in invalid {
                log::warn!(target: SCOPE, file = file; "this network configuration cannot be loaded, and some runtimes load none after it: {reason}");
            }
            self.memory.invalid = invalid.to_vec();
        }
    }

    fn note_obstacle(&mut self, obstacle: Option<&EntryObstacle>) {
        let is_preempted = matches!(obstacle, Some(EntryObstacle::Preempted { .. }));
        self.served.parts.metrics.preempted.set(i64::from(is_preempted));
        if self.memory.obstacle.as_ref() == obstacle {
            return;
        }
        self.memory.obstacle = obstacle.cloned();
        if let Some(obstacle) = obstacle {
            self.served.parts.metrics.obstacles.get_or_create(&obstacle.kind().into()).inc();
            if is_preempted {
                self.warn(EventReason::NetworkConfigPreempted, obstacle.to_string());
            } else if matches!(obstacle, EntryObstacle::Uncalled(_)) {
                log::warn!(target: SCOPE, "{obstacle}");
            } else {
                log::info!(target: SCOPE, "{obstacle}");
            }
        }
    }

    /// Logs a warning and sends it as an event, without waiting for the API server.
    fn warn(&mut self, reason: EventReason, text: String) {
        log::warn!(target: SCOPE, "{text}");
        let now = Instant::now();
        if self.memory.events.get(&reason).is_some_and(|last| now.duration_since(*last) < EVENT_PAUSE) {
            return;
        }
        self.memory.events.insert(reason, now);
        let about = self.served.parts.connection.own_pod();
        self.served.events.send(cluster::warning(about, reason, text));
    }
}

/// Logs the changes of a pass.
pub fn report(pass: &Pass) {
    for name in &pass.binaries {
        log::info!(target: SCOPE, binary = name; "installed the plugin");
    }
    if pass.kubeconfig {
        log::info!(target: SCOPE, "wrote the plugin's kubeconfig");
    }
    for edit in &pass.edits {
        match edit {
            Edit::Write { name, .. } => {
                log::info!(target: SCOPE, file = name; "wrote a network configuration");
            }
            Edit::Delete { name } => {
                log::info!(target: SCOPE, file = name; "removed a network configuration");
            }
        }
    }
}
