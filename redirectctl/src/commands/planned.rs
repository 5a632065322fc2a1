//! Commands about what settings and pods ask for: `plan`, `trace` and `diff`.

use std::path::Path;

use logging::DEFAULT_SCOPE;
use netns_apply::facts::{self, Ipv6, NameFiles};
use netns_apply::netns::Netns;
use netns_apply::{ApplyOptions, Live};
use packet_trace::{Packet, TraceRules};
use presentation::decision::left_alone;
use presentation::{NO_ADDRESS, Printable, SOMEWHERE, flags};
use redirect_core::options::BackendChoice;
use redirect_core::pod::SkipReason;
use redirect_core::settings::{Key, NamespaceFacts, RawSettings};
use redirect_core::{AmbientRedirect, Redirect, RulePlan};
use settings_cli::RunOptions;

use super::{CommandOutput, Given, target};
use crate::error::PodInputError;
use crate::input;
use crate::node::NodeConfiguration;
use crate::packet::{PacketQuestion, packet};
use crate::picture;
use crate::plan::{self, PlanLanguage};
use crate::pod::Pod;
use crate::traffic::{self, PlanComparison, Programmed};
use crate::{FINE, FOUND};

/// What flags begin with where a manifest could stand.
const FLAGS: &str = "flags:";

/// `plan`
pub(super) fn plan(given: &Given) -> Result<CommandOutput, PodInputError> {
    let format = if given.is_json() { "json" } else { given.flag("format").unwrap_or("text") };
    let format = PlanLanguage::named(format).unwrap_or(PlanLanguage::Text);
    let native = RunOptions::parse(&given.input.settings)?.native_form;
    let plan = match asked_for(given, given.pod()?.as_ref())? {
        Ok(plan) => plan,
        Err(answer) => return Ok(answer),
    };
    let text = plan::written(&plan, format, native, given.layout);
    Ok(CommandOutput { text, code: FINE })
}

/// The plan that settings or a pod ask for; the answer for a pod that is not redirected.
fn asked_for(given: &Given, pod: Option<&Pod>) -> Result<Result<RulePlan, CommandOutput>, PodInputError> {
    if given.is_ambient() {
        return Ok(Ok(ambient(given, pod)?.0.plan()));
    }
    Ok(match pod {
        Some(pod) => decide(pod, given)?.map_err(|reason| skipped(pod, reason, given)),
        None => Ok(settings_here(given)?.plan()),
    })
}

/// What ambient mode's flags ask for, and the annotations of the pod that is named, if one is; with the settings behind it.
pub(super) fn ambient(
    given: &Given,
    pod: Option<&Pod>,
) -> Result<(AmbientRedirect, RawSettings), PodInputError> {
    let mut settings = given.input.settings.clone();
    if let Some(pod) = pod {
        settings.read_ambient_annotations(|name| pod.facts.annotations.get(name).map(String::as_str));
    }
    let redirect = AmbientRedirect::parse(&settings)?;
    Ok((redirect, settings))
}

/// The plan of a pod, or why it has none.
pub(super) fn decide(pod: &Pod, given: &Given) -> Result<Result<RulePlan, SkipReason>, PodInputError> {
    let mut addresses = given.addresses().map_err(PodInputError::of)?;
    if addresses.is_empty() {
        addresses.clone_from(&pod.addresses);
    }
    if addresses.is_empty() {
        log::warn!(target: DEFAULT_SCOPE, "{NO_ADDRESS}");
        addresses.push(SOMEWHERE);
    }
    let node = given.node_if_named()?;
    node.decide(pod, &NamespaceFacts::new(&addresses)).settled().map_err(PodInputError)
}

pub(super) fn skipped(pod: &Pod, reason: SkipReason, given: &Given) -> CommandOutput {
    let is_json = given.is_json() || given.flag("format") == Some("json");
    let text = left_alone(&pod.name, reason, is_json);
    CommandOutput { text, code: FINE }
}

/// What the settings ask for in the network namespace that they name, or this runs in.
fn settings_here(given: &Given) -> Result<Box<Redirect>, PodInputError> {
    let settings = &given.input.settings;
    let said = given.addresses().map_err(PodInputError::of)?;
    let (addresses, has_ipv6) = if said.is_empty() {
        let (path, source) = settings.get(Key::NetworkNamespace);
        let there = Netns::run_in(path, || (facts::addresses(), Ipv6::here().is_everywhere()));
        let (addresses, has_ipv6) = there.map_err(|error| PodInputError::of(format!("{source}: {error}")))?;
        let addresses =
            addresses.map_err(|error| PodInputError::of(format!("network namespace: {error}")))?;
        (addresses, has_ipv6)
    } else {
        (said, true)
    };
    let redirect = of_settings(settings, &NamespaceFacts::new(&addresses).with_ipv6(has_ipv6))?;
    for notice in redirect.notices() {
        log::warn!(target: DEFAULT_SCOPE, "{notice}");
    }
    Ok(redirect)
}

/// What settings ask for, with the name servers and the names of this machine's files.
pub(super) fn of_settings(
    settings: &RawSettings,
    facts: &NamespaceFacts<'_>,
) -> Result<Box<Redirect>, PodInputError> {
    let servers = NameFiles::dns_servers(settings)
        .map_err(|error| PodInputError::of(format!("cannot read /etc/resolv.conf: {error}")))?;
    let facts = facts.with_nameservers(&servers).with_names(&NameFiles);
    Ok(Box::new(Redirect::parse(settings, &facts)?))
}

/// `trace`
pub(super) fn trace(given: &Given) -> Result<CommandOutput, PodInputError> {
    let text = |flag: &str| given.flag(flag).unwrap_or_default().to_owned();
    let said = PacketQuestion {
        sender: text("as"),
        to: text("to"),
        from: text("from"),
        interface: text("interface"),
        mark: text("mark"),
        state: text("state"),
        every: given.flag("every") == Some("true"),
    };
    if said.to.is_empty() {
        return Err(PodInputError::of("flag --to: is missing; write --to IP:PORT, or --to IP:PORT/udp"));
    }
    let pod = given.pod()?;
    let (rules, packet, unexamined) = match target::named(given, pod.as_ref())? {
        Some(path) => in_namespace(&path, pod.as_ref(), &said, given)?,
        None => {
            let plan = match asked_for(given, pod.as_ref())? {
                Ok(plan) => plan,
                Err(answer) => return Ok(answer),
            };
            let packet = packet(&said, Some(&plan), &given.addresses().map_err(PodInputError::of)?)
                .map_err(PodInputError)?;
            (
                TraceRules::of_plan_in(&plan, packet.family(), backend(&given.input.settings)?),
                packet,
                Vec::new(),
            )
        }
    };
    let trace = rules.trace(&packet);
    let text = if given.is_json() {
        let mut trace = serde_json::to_value(&trace).unwrap_or_default();
        if !unexamined.is_empty() {
            trace["unexamined"] = unexamined.into();
        }
        Printable::json(&trace)
    } else {
        match given.flag("format") {
            Some("svg") => Printable::lines(&picture::of_trace(&trace, said.detail())),
            Some(_) | None => {
                let report = traffic::report(&trace, said.detail());
                [report, traffic::not_examined(&unexamined)].into_iter().collect()
            }
        }
    };
    Ok(CommandOutput { text, code: FINE })
}

/// All rules of a network namespace, of any program; those of the given pod know their settings. Also lists what is not examined.
fn in_namespace(
    path: &Path,
    pod: Option<&Pod>,
    said: &PacketQuestion,
    given: &Given,
) -> Result<(TraceRules, Packet, Vec<String>), PodInputError> {
    let ambient = if given.is_ambient() { Some(ambient(given, pod)?.0.plan()) } else { None };
    let netns = Netns::open(path).map_err(PodInputError::of)?;
    let read = netns.run(|| {
        let options = ApplyOptions::default().most_read(Some(ApplyOptions::MOST_READ));
        let there = facts::addresses().map_err(PodInputError::of)?;
        let decided =
            |pod: &Pod| NodeConfiguration::default().decide(pod, &facts::of_namespace(&there)).plan();
        let plan = ambient.or_else(|| pod.and_then(decided));
        let live = Live::now(plan.as_ref(), &options);
        let live = live.map_err(PodInputError::of)?;
        let packet = packet(said, plan.as_ref(), &live.addresses).map_err(PodInputError)?;
        Ok((live.rules(packet.family(), plan.as_ref()), packet, live.unexamined))
    });
    read.map_err(PodInputError::of)?
}

/// `diff`
pub(super) fn diff(given: &Given) -> Result<CommandOutput, PodInputError> {
    let (mut plans, mut wrong) = (Vec::new(), Vec::new());
    for operand in &given.operands {
        match side(operand, given) {
            Ok(plan) => plans.push(plan),
            Err(PodInputError(all)) => wrong.extend(all.into_iter().map(|what| format!("{operand}: {what}"))),
        }
    }
    let [before, after] = plans.as_slice() else { return Err(PodInputError(wrong)) };
    let compared = PlanComparison::of(before, after);
    let text = if given.is_json() { Printable::json(&compared.json()) } else { compared.text(given.layout) };
    Ok(CommandOutput { text, code: if compared.traffic.is_empty() { FINE } else { FOUND } })
}

/// The plan of one side: of a manifest, or of flags. A pod that is not redirected has an empty plan.
fn side(operand: &str, given: &Given) -> Result<Programmed, PodInputError> {
    let Some(words) = operand.strip_prefix(FLAGS) else {
        let plan = decide(&input::pod_of_file(operand)?, given)?.unwrap_or_else(|_| RulePlan::empty());
        return Ok(Programmed { plan, backend: backend(&given.input.settings)? });
    };
    let typed = flags::typed(words).map_err(PodInputError::of)?;
    let settings = flags::input(typed).map_err(PodInputError::of)?.settings;
    let mut wrong = flags::refused(&settings);
    wrong.extend(flags::wrong(&settings, &NameFiles));
    if !wrong.is_empty() {
        return Err(PodInputError(wrong));
    }
    let plan = if flags::is_ambient(&settings) {
        AmbientRedirect::parse(&settings)?.plan()
    } else {
        let mut addresses = given.addresses().map_err(PodInputError::of)?;
        if addresses.is_empty() {
            addresses.push(SOMEWHERE);
        }
        of_settings(&settings, &NamespaceFacts::new(&addresses))?.plan()
    };
    Ok(Programmed { plan, backend: backend(&settings)? })
}

/// What programs the rules, as the settings say.
fn backend(settings: &RawSettings) -> Result<BackendChoice, PodInputError> {
    Ok(RunOptions::parse(settings)?.backend)
}
