//! ADD and CHECK: both go from a pod to a plan; ADD puts it in force, CHECK compares it with the rules in force. Pods of ambient mode have their
//! plan from the node agent: ADD has it enrol them, CHECK leaves them alone.
//!
//! Nothing is kept outside the pod's network namespace: no file, no lock, no rule on the host. The namespace disappears
//! with the pod and takes the rules along. So DEL and GC have nothing to remove, and cannot fail.

use crate::{
    agent,
    conf::Conf,
    kernel::{KernelError, MachineNamespaces, Namespace, NamespaceComparison, PlanMismatch, WantedRules},
    logs::SCOPE,
    pod_source::{self, PodError, PodName, ReadPod},
    sandboxed::SandboxedPods,
    selection::base_settings,
    wire::{CniCommand, CniError, Code, Invocation, PodArgs},
};
use cni_core::logs::PodSource;
use cni_core::plugin_event::{AddEvent, PodRequest};
use log::Level;
use netns_apply::facts::NameFiles;
use reasons::AgentReason;
use redirect_core::{
    Redirect, RulePlan,
    accepted::AcceptedRules,
    pod::{Decision, PodFacts, SkipReason},
    settings::{NamespaceFacts, Notice},
};
use std::{
    ffi::OsString,
    fmt,
    path::Path,
    time::{Duration, Instant},
};

/// What a command works with.
pub struct Attachment<'a> {
    /// The environment, parsed.
    pub invocation: &'a Invocation,
    /// The configuration.
    pub conf: &'a Conf,
    /// Looks up an environment variable.
    pub env: &'a (dyn Fn(&str) -> Option<OsString> + Sync),
    /// The network namespaces.
    pub kernel: &'a dyn MachineNamespaces,
    /// When the process began its work.
    pub start: Instant,
}

/// ADD: programs the pod's network namespace, or leaves it alone for a reason.
///
/// # Errors
/// The pod should be redirected and is not. Its namespace is as it was, or the error says what is left in it.
pub fn add(job: &Attachment<'_>) -> Result<(), CniError> {
    let mut phases = Phases::new(job.start);
    let done = add_timed(job, &mut phases);
    phases.end("total");
    let pod = job.pod_label();
    match &done {
        Ok(Done::Skipped(reason)) => log::info!(
            target: SCOPE, pod = pod, uid = job.invocation.pod.uid, decision = AgentReason::Skip.word(), reason = reason.word(), source = phases.source.word(), ms = phases.text();
            "not redirected: {}", reason.explanation()
        ),
        Ok(Done::Redirected(applied)) => log::info!(
            target: SCOPE, pod = pod, decision = AgentReason::Redirect.word(), source = phases.source.word(), backend = applied.backend, because = applied.because,
            changed = applied.changed, ms = phases.text();
            "redirected"
        ),
        Ok(Done::Enrolled) => log::info!(
            target: SCOPE, pod = pod, decision = AgentReason::Enrol.word(), source = phases.source.word(), ms = phases.text();
            "enrolled in ambient mode"
        ),
        Err(error) => log::error!(
            target: SCOPE, pod = pod, decision = AgentReason::Fail.word(), code = error.code.number(), source = phases.source.word(), ms = phases.text();
            "{error}"
        ),
    }
    done.map(drop)
}

/// CHECK: derives the plan again and compares it with what is in force.
///
/// # Errors
/// What is not as planned, or other programs' rules that interfere with the plan (code 111); or why that cannot be determined.
pub fn check(job: &Attachment<'_>) -> Result<(), CniError> {
    let mut phases = Phases::new(job.start);
    let Ok(pod) = job.named_pod() else { return Ok(()) };
    // The newest: the agent may hold an older one.
    let read = job.read(&pod);
    phases.end("pod");
    let read = read?;
    // A pod of ambient mode has no sidecar.
    let Ok(sidecar) = job.sidecar(pod, read)? else { return Ok(()) };
    let accepted = job.accepted(&sidecar.facts);
    let compared = job.inside(|namespace| match job.plan(&sidecar, namespace)? {
        Ok(plan) => Ok(namespace.compare(&job.wanted(&plan, &accepted))?),
        Err(_) => Ok(NamespaceComparison::default()),
    })?;
    let pod = job.pod_label();
    for accepted in &compared.accepted {
        log::info!(target: SCOPE, pod = pod, accepted = compared.accepted.len(); "CHECK: {accepted}");
    }
    let Some(difference) = compared.difference else { return Ok(()) };
    let PlanMismatch { text, origin } = difference;
    log::warn!(target: SCOPE, pod = pod; "CHECK: {text}");
    let message = format!("pod {pod} is not redirected as planned: {text}");
    Err(CniError::new(Code::NotAsPlanned, message).with_details(origin))
}

enum Done {
    Skipped(SkipReason),
    Redirected(crate::kernel::Applied),
    Enrolled,
}

/// A pod that is to be redirected, as far as can be determined from outside its network namespace.
struct Sidecar {
    pod: PodName,
    facts: PodFacts,
}

fn add_timed(job: &Attachment<'_>, phases: &mut Phases) -> Result<Done, CniError> {
    // What needs no pod object is checked first: neither the kubeconfig nor the network is touched for it.
    let pod = match job.named_pod() {
        Ok(pod) => pod,
        Err(reason) => {
            if reason == SkipReason::NotInjected {
                phases.source = PodSource::Annotations;
            }
            return Ok(Done::Skipped(reason));
        }
    };
    let read = job.created(&pod, phases)?;
    if job.is_ambient(&pod, &read, phases)? {
        return job.enrol(&pod, &read, phases);
    }
    let sidecar = match job.sidecar(pod, read)? {
        Ok(sidecar) => sidecar,
        Err(reason) => return Ok(Done::Skipped(reason)),
    };
    let done = job.inside(|namespace| {
        let planned = job.plan(&sidecar, namespace);
        phases.end("plan");
        let plan = match planned? {
            Ok(plan) => plan,
            Err(reason) => return Ok(Done::Skipped(reason)),
        };
        let patience = job.deadline().saturating_duration_since(Instant::now());
        let accepted = job.accepted(&sidecar.facts);
        let applied = namespace.apply(&job.wanted(&plan, &accepted), patience);
        phases.end("apply");
        Ok(Done::Redirected(applied?))
    })?;
    if let Done::Redirected(applied) = &done {
        for warning in &applied.warnings {
            log::warn!(target: SCOPE, pod = job.pod_label(); "{warning}");
        }
    }
    Ok(done)
}

impl Attachment<'_> {
    /// The pod that is created. If the agent holds it, ADD needs neither the API server nor the plugin's token.
    fn created(&self, pod: &PodName, phases: &mut Phases) -> Result<ReadPod, CniError> {
        phases.end("read");
        let read = match self.given(pod) {
            Some(given) => {
                phases.source = PodSource::Agent;
                given
            }
            None => {
                let is_file = self.conf.manifest_dir.is_some();
                phases.source = if is_file { PodSource::Manifest } else { PodSource::Api };
                self.read(pod)
            }
        };
        phases.end("pod");
        Ok(read?)
    }

    /// The pod as the agent has it, if it has. Without a UID, another pod of this name could be taken for it.
    fn given(&self, pod: &PodName) -> Option<Result<ReadPod, PodError>> {
        let uid = &self.invocation.pod.uid;
        if self.conf.manifest_dir.is_some() || uid.is_empty() {
            return None;
        }
        let PodName { namespace, name } = pod.clone();
        let wanted = PodRequest { namespace, name, uid: uid.clone() };
        match agent::pod(&self.conf.run_dir, &wanted, self.deadline()) {
            Ok(given) => pod_source::given(pod, uid, given),
            Err(why) => {
                let level = if why.is_usual() { Level::Debug } else { Level::Info };
                log::log!(target: SCOPE, level, pod = self.pod_label(); "{why}; asking the API server");
                None
            }
        }
    }

    fn read(&self, pod: &PodName) -> Result<ReadPod, PodError> {
        pod_source::read(self.conf, pod, &self.invocation.pod.uid, self.deadline())
    }

    /// Whether the agent is to enrol the pod. Its namespace is read only where that can change the answer.
    fn is_ambient(&self, pod: &PodName, read: &ReadPod, phases: &mut Phases) -> Result<bool, CniError> {
        if !self.conf.ambient_enabled {
            return Ok(false);
        }
        let enablement = &self.conf.enablement;
        if let Some(decided) = enablement.selects_anywhere(&read.object) {
            return Ok(decided.is_ok());
        }
        // While selectors change, the agent may still watch by the usual label.
        if let Some(labels) = &read.namespace_labels
            && (enablement.is_usual() || !labels.is_empty())
        {
            return Ok(enablement.selects(&read.object, labels).is_ok());
        }
        let labels = pod_source::namespace_labels(self.conf, &pod.namespace, self.deadline());
        phases.end("namespace");
        Ok(enablement.selects(&read.object, &labels?).is_ok())
    }

    /// Has the agent enrol a pod.
    fn enrol(&self, pod: &PodName, read: &ReadPod, phases: &mut Phases) -> Result<Done, CniError> {
        if let Some(reason) = self.sandboxed(pod, read, AMBIENT_WAY_OUT)? {
            return Ok(Done::Skipped(reason));
        }
        let netns = self.netns()?;
        let Some(netns) = netns.to_str() else {
            let message = format!("CNI_NETNS: {} is not UTF-8", netns.display());
            return Err(CniError::new(Code::Environment, message));
        };
        let event = AddEvent {
            netns: netns.to_owned(),
            pod_name: pod.name.clone(),
            pod_namespace: pod.namespace.clone(),
            pod_uid: self.invocation.pod.uid.clone(),
            ips: self.conf.prev_result.ips(),
        };
        let done = agent::enrol(&self.conf.run_dir, &event, self.deadline());
        phases.end("enrol");
        done.map(|()| Done::Enrolled).map_err(|error| error.of(pod))
    }

    /// A pod with its facts, if it is redirected to its own proxy.
    fn sidecar(&self, pod: PodName, read: ReadPod) -> Result<Result<Sidecar, SkipReason>, CniError> {
        if let Some(reason) = read.facts.skip_reason() {
            return Ok(Err(reason));
        }
        if let Some(reason) = self.sandboxed(&pod, &read, SIDECAR_WAY_OUT)? {
            return Ok(Err(reason));
        }
        let facts = read.facts;
        Ok(Ok(Sidecar { pod, facts }))
    }

    /// The rules of other programs that are accepted in the pod.
    fn accepted(&self, facts: &PodFacts) -> AcceptedRules {
        let (accepted, why_not) = self.conf.acceptance.of_pod(&facts.annotations);
        if let Some(why_not) = why_not {
            self.warn(format_args!("{why_not}"));
        }
        accepted
    }

    fn wanted<'w>(&self, plan: &'w RulePlan, accepted: &'w AcceptedRules) -> WantedRules<'w> {
        WantedRules { plan, programming: self.conf.programming, accepted }
    }

    /// Why a pod is not redirected whose runtime is sandboxed, if it is; an error where such pods are refused.
    fn sandboxed(
        &self,
        pod: &PodName,
        read: &ReadPod,
        way_out: &str,
    ) -> Result<Option<SkipReason>, CniError> {
        let Some(class) = &read.facts.runtime_class else { return Ok(None) };
        if !self.is_sandboxed(class, read.runtime_handler.as_deref())? {
            return Ok(None);
        }
        match self.conf.sandboxed.pods {
            SandboxedPods::Skip => Ok(Some(SkipReason::SandboxedRuntime)),
            SandboxedPods::Refuse => Err(refused(pod, class, way_out)),
        }
    }

    /// Whether rules do not bind pods of a runtime class: by its name or, which takes another request, by its handler's.
    fn is_sandboxed(&self, class: &str, handler: Option<&str>) -> Result<bool, CniError> {
        let sandboxed = &self.conf.sandboxed;
        if sandboxed.names.is_empty() || sandboxed.has(class) {
            return Ok(sandboxed.has(class));
        }
        if let Some(handler) = handler {
            return Ok(sandboxed.has(handler));
        }
        let handler = pod_source::handler(self.conf, class, self.deadline())?;
        if handler.is_none() {
            self.warn(format_args!("RuntimeClass {class}: its handler is unknown, so its name alone decides whether the runtime is sandboxed; give the plugin's account \
                 the verb get on runtimeclasses (node.k8s.io), or list the name in sandboxed_runtimes if it is"));
        }
        Ok(handler.is_some_and(|handler| sandboxed.has(&handler)))
    }

    /// Does some work inside the pod's network namespace.
    fn inside<T: Send>(
        &self,
        work: impl FnOnce(&dyn Namespace) -> Result<T, CniError> + Send,
    ) -> Result<T, CniError> {
        let netns = self.netns()?;
        let (mut work, mut done) = (Some(work), None);
        self.kernel.inside(netns, &mut |namespace| done = work.take().map(|work| work(namespace)))?;
        done.unwrap_or_else(|| Err(CniError::new(Code::Internal, "the network namespace was not entered")))
    }

    fn netns(&self) -> Result<&Path, CniError> {
        let missing = || CniError::new(Code::Environment, "CNI_NETNS: missing");
        self.invocation.netns.as_deref().ok_or_else(missing)
    }

    /// The pod the runtime names, unless its name alone excludes it.
    fn named_pod(&self) -> Result<PodName, SkipReason> {
        let PodArgs { namespace, name, .. } = &self.invocation.pod;
        if namespace.is_empty() || name.is_empty() {
            return Err(SkipReason::NotAPod);
        }
        let pod = PodName { namespace: namespace.clone(), name: name.clone() };
        self.conf.skips(&pod).map_or(Ok(pod), Err)
    }

    fn plan(
        &self,
        Sidecar { pod, facts }: &Sidecar,
        namespace: &dyn Namespace,
    ) -> Result<Result<RulePlan, SkipReason>, CniError> {
        let addresses = namespace.addresses()?;
        let base = base_settings(self.conf.strict_capture, |name| (self.env)(name)?.into_string().ok());
        let facts_there =
            NamespaceFacts::new(&addresses).with_names(&NameFiles).with_ipv6(namespace.has_ipv6());
        match facts.decide_with(base, &facts_there) {
            Ok(Decision::Skip(reason)) => Ok(Err(reason)),
            Ok(Decision::Redirect(redirect)) => {
                collide(pod, &redirect)?;
                for notice in redirect.notices().iter().filter(|notice| !notice.concerns_all_pods()) {
                    self.warn(format_args!("{notice}"));
                }
                let plan = redirect.plan();
                self.explain(&plan);
                Ok(Ok(plan))
            }
            Err(errors) => {
                let details = "fix the pod's settings; nothing was changed";
                Err(CniError::new(Code::Pod, format!("pod {pod}: {errors}")).with_details(details))
            }
        }
    }

    /// Logs the plan at debug, a line a rule: a log line is one line.
    fn explain(&self, plan: &RulePlan) {
        if log::log_enabled!(target: SCOPE, Level::Debug) {
            for line in plan.explain().lines() {
                log::debug!(target: SCOPE, pod = self.pod_label(); "{line}");
            }
        }
    }

    /// Warns, once per pod: of what CHECK finds again, ADD has warned.
    fn warn(&self, what: fmt::Arguments<'_>) {
        let level = if self.invocation.command == CniCommand::Add { Level::Warn } else { Level::Debug };
        log::log!(target: SCOPE, level, pod = self.pod_label(); "{what}");
    }

    fn deadline(&self) -> Instant {
        self.start + self.conf.add_timeout
    }

    fn pod_label(&self) -> String {
        let PodArgs { namespace, name, .. } = &self.invocation.pod;
        format!("{namespace}/{name}")
    }
}

/// What its owner can do about a pod whose runtime is sandboxed.
const SIDECAR_WAY_OUT: &str = "take runtimeClassName, or the proxy, from the pod";
const AMBIENT_WAY_OUT: &str = "take runtimeClassName from the pod, or label it istio.io/dataplane-mode: none";

fn refused(pod: &PodName, class: &str, way_out: &str) -> CniError {
    let message = format!(
        "pod {pod}: the runtime of runtimeClassName {class} is sandboxed: rules in the pod's network namespace do not bind it, so its traffic would \
         bypass the proxy"
    );
    let details = format!(
        "{way_out}; or let the agent leave such pods alone with SANDBOXED_PODS=skip (chart: sandboxedPods), or count this runtime as an ordinary \
         one (SANDBOXED_RUNTIMES); nothing was changed"
    );
    CniError::new(Code::Sandboxed, message).with_details(details)
}

/// With strict capture, no other container may run as the proxy does.
fn collide(pod: &PodName, redirect: &Redirect) -> Result<(), CniError> {
    let collisions = redirect.notices().iter().filter_map(|notice| {
        if let Notice::RunsAsTheProxy(collision) = notice { Some(collision.to_string()) } else { None }
    });
    let words = collisions.collect::<Vec<_>>().join("; ");
    if words.is_empty() || !redirect.strict_capture() {
        return Ok(());
    }
    let message = format!(
        "pod {pod}: {words}, so its traffic would bypass the proxy; strict capture allows no other container to"
    );
    let details = "give it another runAsUser or runAsGroup, or set the annotation traffic.sidecar.istio.io/strictCapture: \"false\"; nothing was changed";
    Err(CniError::new(Code::Pod, message).with_details(details))
}

impl From<KernelError> for CniError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Namespace(_) => Self::new(Code::Environment, error.to_string()),
            KernelError::Failed(why) => Self::new(Code::NotProgrammed, why)
                .with_details("the pod's network namespace is as it was before"),
            KernelError::Left(why) => Self::new(Code::NotProgrammed, why).with_details(
                "the pod's network namespace was not restored; the runtime deletes it and retries with a new one",
            ),
        }
    }
}

/// What an ADD went through, and how long each part took.
struct Phases {
    source: PodSource,
    start: Instant,
    last: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl Phases {
    fn new(start: Instant) -> Self {
        Self { source: PodSource::Name, start, last: start, parts: Vec::new() }
    }

    fn end(&mut self, phase: &'static str) {
        let now = Instant::now();
        let since = if phase == "total" { self.start } else { self.last };
        self.parts.push((phase, now.duration_since(since)));
        self.last = now;
    }

    /// Such as `read:0.1 pod:4.2 plan:0.3 apply:6.0 total:10.6`.
    fn text(&self) -> String {
        let parts = self.parts.iter();
        parts
            .map(|(phase, time)| format!("{phase}:{:.1}", time.as_secs_f64() * 1000.0))
            .collect::<Vec<_>>()
            .join(" ")
    }
}
