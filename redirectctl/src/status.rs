//! What a pod's own status and events say: its validation, and what the runtime and the node agent had to do with it.

use reasons::{COULD_NOT_BE, EventReason};

use crate::cause::{Cause, PodFinding};
use crate::object::PodEvent;
use crate::pod::Pod;

/// The exit code of a validation that holds its pod back.
const HELD_BACK: i64 = 126;
/// What the kubelet calls a network that could not be set up.
const SANDBOX_FAILED: &str = "FailedCreatePodSandBox";

/// What status and events say.
#[must_use]
pub fn findings(pod: &Pod) -> Vec<PodFinding> {
    let mut all = Vec::new();
    if let Some(validation) = &pod.validation {
        let cause = if validation.code == HELD_BACK { Cause::HeldBack } else { Cause::ValidationEnded };
        all.push(PodFinding { cause, seen: validation.seen() });
    }
    let last = |reasons: &[EventReason]| {
        pod.events.iter().rev().find_map(|event| {
            let reason = EventReason::of(&event.reason).filter(|reason| reasons.contains(reason))?;
            Some((reason, event))
        })
    };
    let finding = |cause: Cause, event: &PodEvent| {
        PodFinding::new(cause, format!("{}: {}", event.reason, event.message))
    };
    if pod.addresses.is_empty() && !pod.is_over() && !pod.host_network {
        all.push(match pod.events.iter().rfind(|event| event.reason == SANDBOX_FAILED) {
            Some(event) => finding(Cause::NotSetUp, event),
            None => PodFinding::new(Cause::NotStarted, "the pod has no address"),
        });
    }
    if let Some((_, event)) = last(&EventReason::OF_REPAIR) {
        let has_failed = event.message.contains(COULD_NOT_BE);
        // An earlier failure of a pod that now runs is of no interest.
        if !has_failed || pod.validation.is_some() {
            all.push(finding(if has_failed { Cause::NotRepaired } else { Cause::Repaired }, event));
        }
    }
    let of_healing =
        [EventReason::RedirectHealed, EventReason::RedirectNotHealed, EventReason::RedirectContested];
    if let Some((reason, event)) = last(&of_healing) {
        let is_healed = reason == EventReason::RedirectHealed;
        all.push(finding(if is_healed { Cause::Healed } else { Cause::NotHealed }, event));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(status: &Value, events: &[(&str, &str)]) -> Pod {
        let spec = json!({"containers": [{"name": "app"}]});
        let mut pod = Pod::from_json(&json!({"spec": spec, "status": status})).expect("a pod");
        pod.events = events
            .iter()
            .map(|(reason, message)| PodEvent {
                time: String::new(),
                reason: (*reason).to_owned(),
                message: (*message).to_owned(),
            })
            .collect();
        pod
    }

    fn validated(state: &Value, last: &Value) -> Value {
        json!({"podIP": "10.1.0.2", "initContainerStatuses": [
            {"name": "other", "state": {"terminated": {"exitCode": 1}}},
            {"name": "istio-validation", "state": state, "lastState": last},
        ]})
    }

    fn ended(code: i64, message: &str) -> Value {
        json!({"terminated": {"exitCode": code, "message": message}})
    }

    fn codes(pod: &Pod) -> Vec<&'static str> {
        findings(pod).iter().map(|finding| finding.cause.code()).collect()
    }

    #[test]
    fn the_last_end_of_the_validation_counts() {
        let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        for (state, last, wanted) in [
            (ended(126, ""), json!({}), vec!["held-back"]),
            (waits.clone(), ended(126, ""), vec!["held-back"]),
            (json!({"running": {}}), ended(126, ""), vec!["held-back"]),
            (waits, ended(137, ""), vec!["validation-ended"]),
            (ended(0, ""), ended(126, ""), vec![]),
            (json!({"running": {}}), json!({}), vec![]),
        ] {
            assert_eq!(codes(&pod(&validated(&state, &last), &[])), wanted, "{state} {last}");
        }
    }

    #[test]
    fn the_reason_of_a_validation_is_read_from_its_message() {
        let message = json!({"reason": "no-rules", "message": "x"}).to_string();
        let [finding] = &findings(&pod(&validated(&ended(126, &message), &json!({})), &[]))[..] else {
            panic!("one finding")
        };
        assert!(finding.seen[1].starts_with("no-rules: ") && !finding.seen[2].is_empty(), "{finding:?}");
        let odd = findings(&pod(&validated(&ended(126, "[1]\u{1b}"), &json!({})), &[]));
        assert_eq!(odd[0].seen, ["istio-validation ended with exit code 126: [1]\u{1b}"]);
    }

    #[test]
    fn the_last_event_of_a_kind_counts() {
        let here = json!({"podIP": "10.1.0.2"});
        let failed = ("RepairBrokenPod", "pod detected as broken (x), but it could not be redirected: y");
        let done = ("RepairBrokenPod", "pod detected as broken (x), redirected");
        assert_eq!(codes(&pod(&here, &[failed, done])), ["repaired"]);
        assert_eq!(codes(&pod(&here, &[failed])), Vec::<&str>::new(), "it runs now");
        let broken = validated(&ended(126, ""), &json!({}));
        assert_eq!(codes(&pod(&broken, &[done, failed])), ["held-back", "not-repaired"]);
        assert_eq!(codes(&pod(&here, &[("RedirectContested", ""), ("RedirectHealed", "")])), ["healed"]);
        assert_eq!(codes(&pod(&here, &[("RedirectHealed", ""), ("RedirectNotHealed", "")])), ["not-healed"]);
    }

    #[test]
    fn a_pod_without_an_address_waits_or_has_failed() {
        let event = ("FailedCreatePodSandBox", "plugin istio-cni failed (100)");
        assert_eq!(codes(&pod(&json!({"phase": "Pending"}), &[event])), ["not-set-up"]);
        assert_eq!(codes(&pod(&json!({"phase": "Pending"}), &[])), ["not-started"]);
        assert_eq!(codes(&pod(&json!({"podIP": "10.1.0.2"}), &[event])), Vec::<&str>::new());
        assert_eq!(codes(&pod(&json!({"phase": "Succeeded"}), &[event])), Vec::<&str>::new());
    }
}
