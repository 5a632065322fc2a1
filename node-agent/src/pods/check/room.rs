//! How large a plan may be for the memory that the agent may use: a pod's annotations may ask for any number of rules.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use reasons::AgentReason;
use redirect_core::plan::RulePlan;
use redirect_core::pod::PodFacts;

use super::PodProblem;

/// What the agent's container may use (`memory.max`), by the versions of cgroups.
const LIMITS: [&str; 2] = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
/// What the agent takes without any plan, and for each rule of one that it reads and follows; docs/internals/performance.md has them
/// measured.
const OF_AGENT: u64 = 24 << 20;
const OF_RULE: u64 = 1_600;
/// From so many rules on, plans take their turns: each of the pods that are checked at once may have such a plan.
const LARGE: u64 = 2_048;
/// Settings of fewer bytes make no such plan: a value has two with its comma, and makes four rules at most.
const LONG: usize = 1_024;

static LIMIT: OnceLock<Option<u64>> = OnceLock::new();
static TURN: Mutex<()> = Mutex::new(());

/// The turn of a large plan, as long as it is made, read, followed or put in force.
pub(super) type Turn = Option<MutexGuard<'static, ()>>;

/// Remembers how much memory this container may use. Comes before this process gives up the right to read files.
pub fn remember_memory() {
    LIMIT.get_or_init(|| {
        let read = LIMITS.into_iter().find_map(|path| fs::read_to_string(path).ok())?;
        read.trim().parse().ok()
    });
}

/// The turn of a pod's plan. Comes before the plan is made: one that waits takes no memory.
pub(super) fn turn_of(facts: &PodFacts) -> Turn {
    let of_proxy = facts.proxy.iter().flat_map(|proxy| proxy.env.values());
    let settings: usize = facts.annotations.values().chain(of_proxy).map(String::len).sum();
    (settings >= LONG).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether a plan fits.
///
/// # Errors
/// It needs more memory than the agent may use.
pub(super) fn require_room(plan: &RulePlan) -> Result<(), PodProblem> {
    let rules = rules_of(plan);
    let limit = LIMIT.get().copied().flatten();
    match limit.filter(|limit| rules > most_rules(*limit)) {
        Some(limit) => Err(PodProblem::new(AgentReason::Unverifiable, too_large(plan, limit))),
        None => Ok(()),
    }
}

const fn most_rules(limit: u64) -> u64 {
    let most = limit.saturating_sub(OF_AGENT) / OF_RULE;
    if most > LARGE { most } else { LARGE }
}

/// How many rules of all families a plan has.
fn rules_of(plan: &RulePlan) -> u64 {
    let of_one = |family| plan.planned_rules().iter().filter(move |one| one.scope().covers(family)).count();
    plan.families().iter().map(|family| of_one(*family) as u64).sum()
}

fn too_large(plan: &RulePlan, limit: u64) -> String {
    let mut sources: BTreeMap<String, usize> = BTreeMap::new();
    for planned in plan.planned_rules() {
        *sources.entry(planned.source().to_string()).or_default() += 1;
    }
    let most = sources.into_iter().max_by_key(|(_, rules)| *rules).map(|(source, _)| source);
    let rules = rules_of(plan);
    format!(
        "its plan has {rules} rules, most of them because of {}; the agent's memory limit of {} MiB is enough for {}: write ranges there, or raise resources.limits.memory to {}Mi",
        most.unwrap_or_default(),
        limit >> 20,
        most_rules(limit),
        (OF_AGENT + rules * OF_RULE).div_ceil(1 << 20)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::Redirect;
    use redirect_core::settings::{Key, NamespaceFacts, RawSettings, Source};

    fn plan(ports: usize) -> RulePlan {
        plan_of(ports, false)
    }

    fn plan_of(ports: usize, is_dual: bool) -> RulePlan {
        let name = "traffic.sidecar.istio.io/excludeOutboundPorts";
        let ports: Vec<String> = (1..=ports).map(|port| (2 * port).to_string()).collect();
        let mut raw = RawSettings::for_pod();
        raw.set(Key::OutboundExcludePorts, ports.join(","), Source::Annotation(name));
        raw.set(Key::DualStack, is_dual.to_string(), Source::Annotation("x"));
        let there = ["10.1.0.2".parse().expect("an address"), "fd00::2".parse().expect("an address")];
        Redirect::parse(&raw, &NamespaceFacts::new(&there)).expect("a plan").plan()
    }

    #[test]
    fn a_plan_that_is_too_large_is_refused_by_what_asked_for_it() {
        let text = too_large(&plan(10_000), 64 << 20);
        assert!(text.starts_with("its plan has 20"), "{text}");
        assert!(
            text.contains("most of them because of annotation traffic.sidecar.istio.io/excludeOutboundPorts; the agent's memory limit of 64 MiB is enough for 26214"),
            "{text}"
        );
    }

    #[test]
    fn the_default_limit_is_enough_for_ten_thousand_ports_and_any_limit_for_usual_plans() {
        assert!(rules_of(&plan(10_000)) <= most_rules(64 << 20));
        assert_eq!([most_rules(0), most_rules(24 << 20)], [LARGE; 2]);
    }

    #[test]
    fn the_limit_that_is_named_is_enough_and_no_larger_than_needed() {
        let dual = plan_of(10_000, true);
        let rules = rules_of(&dual);
        assert!(rules > most_rules(64 << 20), "{rules}");
        let text = too_large(&dual, 64 << 20);
        let named =
            text.rsplit_once(" to ").and_then(|(_, limit)| limit.strip_suffix("Mi")?.parse::<u64>().ok());
        let named = named.expect("a limit");
        assert!(
            text.contains("raise resources.limits.memory to") && rules <= most_rules(named << 20),
            "{text}"
        );
        assert!(rules > most_rules((named - 1) << 20), "{text}");
    }

    #[test]
    fn large_plans_take_turns_and_small_ones_none() {
        let facts = |text: String| {
            PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPorts", text.as_str())])
        };
        assert!(turn_of(&facts("80,443".to_owned())).is_none());
        // As many as fit into what takes no turn, of the setting that makes the most rules of each.
        let ports: Vec<String> = (1..=283).map(|port| port.to_string()).collect();
        let ports = ports.join(",");
        assert!(ports.len() + 4 > LONG && turn_of(&facts(ports.clone())).is_none());
        let mut raw = RawSettings::for_pod();
        raw.set(Key::InterceptionMode, "TPROXY", Source::Annotation("x"));
        raw.set(Key::DualStack, "true", Source::Annotation("x"));
        raw.set(Key::InboundPorts, ports, Source::Annotation("x"));
        let there = ["10.1.0.2".parse().expect("an address"), "fd00::2".parse().expect("an address")];
        let plan = Redirect::parse(&raw, &NamespaceFacts::new(&there)).expect("a plan").plan();
        assert!((1_100..LARGE).contains(&rules_of(&plan)), "{}", rules_of(&plan));
        let turn = turn_of(&facts("15000,".repeat(200)));
        assert!(turn.is_some() && TURN.try_lock().is_err());
        drop(turn);
        assert!(TURN.try_lock().is_ok());
    }
}
