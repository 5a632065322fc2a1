//! Pods broken in every way, and sound in every way.

use super::*;
use cni_core::selector::{FieldSelector, LabelSelector};
use proptest::prelude::*;
use serde_json::json;

/// What people who set nothing get.
fn usual() -> BrokenPodFilter {
    BrokenPodFilter {
        node: "node-1".into(),
        labels: LabelSelector::default(),
        fields: FieldSelector::default(),
        annotation: "sidecar.istio.io/status".into(),
        container: "istio-validation".into(),
        message: String::new(),
        exit_code: 126,
    }
}

fn pod(statuses: &Value) -> Value {
    json!({
        "metadata": {"namespace": "shop", "name": "web", "uid": "u-1", "resourceVersion": "7",
            "labels": {"app": "web"}, "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"nodeName": "node-1", "restartPolicy": "Always"},
        "status": {"phase": "Pending", "initContainerStatuses": statuses},
    })
}

fn ended(code: i64, reason: &str, message: &str) -> Value {
    json!({"terminated": {"exitCode": code, "reason": reason, "message": message, "containerID": "c-1", "finishedAt": "t-1"}})
}

fn failed() -> Value {
    ended(126, "Error", "")
}

fn waiting() -> Value {
    json!({"waiting": {"reason": "CrashLoopBackOff"}})
}

fn done() -> Value {
    ended(0, "Completed", "")
}

fn validation(state: Value, last: Value) -> Value {
    status("istio-validation", state, last)
}

#[expect(clippy::needless_pass_by_value, reason = "tests read better")]
fn status(name: &str, state: Value, last: Value) -> Value {
    json!({"name": name, "state": state, "lastState": last})
}

fn is_broken(filter: &BrokenPodFilter, pod: &Value) -> bool {
    filter.check(pod).is_ok()
}

fn sound(filter: &BrokenPodFilter, pod: &Value) -> NotBroken {
    filter.check(pod).expect_err("sound")
}

/// The cases of the reference's own suite, in its order: by exit code, by annotation, by container, by message.
#[test]
fn the_seventeen_cases_of_the_reference() {
    let by_code = BrokenPodFilter { annotation: String::new(), container: String::new(), ..usual() };
    let by_annotation = BrokenPodFilter { annotation: "is.it/meshed".into(), ..by_code.clone() };
    let by_name = BrokenPodFilter { annotation: String::new(), ..usual() };
    let by_message = BrokenPodFilter { exit_code: 0, message: "  no rules here\n".into(), ..by_name.clone() };
    let says = |text: &str| ended(126, "Error", text);
    let annotated = |mut pod: Value| {
        pod["metadata"]["annotations"] = json!({"is.it/meshed": "whatever it says"});
        pod
    };
    let one = |state: Value, last: Value| pod(&json!([validation(state, last)]));
    let waits = one(waiting(), failed());
    let stands = one(failed(), failed());
    let recovered = one(done(), failed());
    let fine = one(done(), json!({}));
    let other_code = one(waiting(), ended(1, "Error", ""));
    let beside = pod(&json!([status("other", waiting(), failed()), validation(done(), json!({}))]));
    let cases: [(&str, &BrokenPodFilter, Value, bool); 17] = [
        ("a container that ended well, by code", &by_code, fine.clone(), false),
        ("one that failed before and then ended well", &by_code, recovered.clone(), false),
        ("one that waits after its failure", &by_code, waits.clone(), true),
        ("one that stands in its failure", &by_code, stands.clone(), true),
        ("one that failed with another code", &by_code, other_code.clone(), false),
        ("the annotation is there, and the failure", &by_annotation, annotated(waits.clone()), true),
        ("the annotation is there, and no failure", &by_annotation, annotated(fine.clone()), false),
        ("the annotation is not there, but the failure", &by_annotation, waits.clone(), false),
        ("the annotation is there, all was repaired", &by_annotation, annotated(recovered.clone()), false),
        ("the named container failed", &by_name, waits, true),
        ("another container failed", &by_name, beside, false),
        ("the named container ended well", &by_name, fine.clone(), false),
        (
            "the message is the one, but for white space",
            &by_message,
            one(waiting(), says("no rules here \n")),
            true,
        ),
        (
            "the message is the one, and it stands in it",
            &by_message,
            one(says(" no rules here"), says("no rules here")),
            true,
        ),
        ("the message is another", &by_message, one(waiting(), says("no rules")), false),
        (
            "the message was the one, and then all was well",
            &by_message,
            one(done(), says("no rules here")),
            false,
        ),
        ("no message where one is wanted", &by_message, fine, false),
    ];
    for (name, filter, pod, broken) in cases {
        assert_eq!(is_broken(filter, &pod), broken, "{name}");
    }
}

#[test]
fn the_first_failure_counts() {
    // The kubelet does not restart a container of such a pod: its last state stays empty.
    for policy in ["Never", "OnFailure", "Always"] {
        let mut first = pod(&json!([validation(failed(), json!({}))]));
        first["spec"]["restartPolicy"] = json!(policy);
        first["status"]["phase"] = json!(if policy == "Never" { "Failed" } else { "Pending" });
        let Ok(broken) = usual().check(&first) else { panic!("{policy}") };
        let failure = ContainerFailure {
            container: "istio-validation".into(),
            exit_code: 126,
            id: "c-1".into(),
            finished: "t-1".into(),
        };
        assert_eq!((broken.failure, broken.observed.name.to_string().as_str()), (failure, "shop/web"));
        assert_eq!((broken.observed.uid.as_str(), broken.observed.version.as_str()), ("u-1", "7"));
    }
}

#[test]
fn a_native_sidecar_is_judged_as_any_init_container() {
    let sidecar = BrokenPodFilter { container: "istio-proxy".into(), ..usual() };
    let beside = |state, last| {
        let mut status = status("istio-proxy", state, last);
        status["started"] = json!(true);
        pod(&json!([validation(done(), json!({})), status]))
    };
    assert!(is_broken(&sidecar, &beside(json!({"running": {}}), failed())));
    assert_eq!(sound(&sidecar, &beside(json!({"running": {}}), json!({}))), NotBroken::NotEnded);
    let any = BrokenPodFilter { container: String::new(), ..usual() };
    assert!(is_broken(&any, &beside(waiting(), failed())), "one that ended well hides no other");
}

#[test]
fn any_exit_code_is_any_but_success() {
    let any = BrokenPodFilter { exit_code: 0, ..usual() };
    assert!(is_broken(&any, &pod(&json!([validation(ended(1, "Error", ""), json!({}))]))));
    let restarted = pod(&json!([validation(json!({"running": {}}), done())]));
    assert_eq!(sound(&any, &restarted), NotBroken::FailedOtherwise, "it ended well before, and runs again");
}

#[test]
fn every_reason_for_being_sound() {
    let broken = pod(&json!([validation(waiting(), failed())]));
    assert!(is_broken(&usual(), &broken));
    let changes: [(&str, Value, NotBroken); 12] = [
        ("/metadata/uid", json!(""), NotBroken::Unnamed),
        ("/metadata/resourceVersion", Value::Null, NotBroken::Unnamed),
        ("/spec/nodeName", json!("node-2"), NotBroken::OtherNode),
        ("/spec/nodeName", Value::Null, NotBroken::OtherNode),
        ("/metadata/deletionTimestamp", json!("2026-11-21T00:00:00Z"), NotBroken::BeingDeleted),
        ("/metadata/annotations", json!({"sidecar.istio.io/inject": "true"}), NotBroken::NotAnnotated),
        ("/metadata/annotations", Value::Null, NotBroken::NotAnnotated),
        ("/status/initContainerStatuses", Value::Null, NotBroken::NeverRan),
        ("/status/initContainerStatuses", json!([status("x", waiting(), failed())]), NotBroken::NeverRan),
        ("/status/initContainerStatuses", json!([validation(waiting(), json!({}))]), NotBroken::NotEnded),
        ("/status/initContainerStatuses", json!([validation(done(), failed())]), NotBroken::EndedWell),
        (
            "/status/initContainerStatuses",
            json!([validation(ended(1, "Error", ""), json!({}))]),
            NotBroken::FailedOtherwise,
        ),
    ];
    for (pointer, value, why) in changes {
        let mut pod = broken.clone();
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        pod.pointer_mut(parent).expect("a parent")[key] = value;
        assert_eq!(sound(&usual(), &pod), why, "{pointer}");
    }
    assert_eq!(sound(&BrokenPodFilter { node: String::new(), ..usual() }, &broken), NotBroken::OtherNode);
    let labels = LabelSelector::parse("app=shop").expect("a selector");
    assert_eq!(sound(&BrokenPodFilter { labels, ..usual() }, &broken), NotBroken::NotSelected);
    let fields = FieldSelector::parse("metadata.namespace!=shop").expect("a selector");
    assert_eq!(sound(&BrokenPodFilter { fields, ..usual() }, &broken), NotBroken::NotSelected);
    assert_eq!(sound(&usual(), &json!(7)), NotBroken::Unnamed);
}

fn any_state() -> impl Strategy<Value = Value> {
    let ended = (
        prop_oneof![Just(0), Just(1), Just(126)],
        prop_oneof![Just("Completed"), Just("Error")],
        "[ab ]{0,2}",
    );
    prop_oneof![
        Just(json!({})),
        Just(waiting()),
        Just(json!({"running": {"startedAt": "t"}})),
        ended.prop_map(|(code, reason, message)| super::tests::ended(code, reason, &message)),
    ]
}

fn any_pod() -> impl Strategy<Value = Value> {
    let status = ("istio-validation|other", any_state(), any_state())
        .prop_map(|(name, state, last)| status(&name, state, last));
    (prop::collection::vec(status, 0..4), any::<bool>(), any::<bool>()).prop_map(
        |(statuses, ending, annotated)| {
            let mut pod = pod(&json!(statuses));
            if ending {
                pod["metadata"]["deletionTimestamp"] = json!("t");
            }
            if !annotated {
                pod["metadata"]["annotations"] = json!({});
            }
            pod
        },
    )
}

fn any_filter() -> impl Strategy<Value = BrokenPodFilter> {
    let code = prop_oneof![Just(0), Just(1), Just(126)];
    ("istio-validation|", "[ab ]{0,2}", code, "sidecar.istio.io/status|").prop_map(
        |(container, message, exit_code, annotation)| BrokenPodFilter {
            container,
            message,
            exit_code,
            annotation,
            ..usual()
        },
    )
}

proptest! {
    #[test]
    fn a_pod_that_is_being_deleted_is_never_broken(filter in any_filter(), mut pod in any_pod()) {
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-21T00:00:00Z");
        prop_assert!(!is_broken(&filter, &pod));
    }

    #[test]
    fn a_broken_pod_has_a_container_that_failed_as_configured_and_did_not_end_well_since(filter in any_filter(), pod in any_pod()) {
        let Ok(broken) = filter.check(&pod) else { return Ok(()) };
        prop_assert!(broken.failure.exit_code != 0);
        prop_assert!(filter.exit_code == 0 || broken.failure.exit_code == filter.exit_code);
        prop_assert!(filter.container.is_empty() || broken.failure.container == filter.container);
        let statuses = pod["status"]["initContainerStatuses"].as_array().expect("statuses");
        let unmended = statuses.iter().any(|status| {
            let now = &status["state"]["terminated"];
            status["name"] == broken.failure.container.as_str()
                && !(now.is_object() && (now["exitCode"] == 0 || now["reason"] == "Completed"))
        });
        prop_assert!(unmended);
    }

    #[test]
    fn a_looser_filter_finds_no_fewer(filter in any_filter(), pod in any_pod()) {
        let looser = [
            BrokenPodFilter { container: String::new(), ..filter.clone() },
            BrokenPodFilter { message: String::new(), ..filter.clone() },
            BrokenPodFilter { exit_code: 0, ..filter.clone() },
            BrokenPodFilter { annotation: String::new(), ..filter.clone() },
        ];
        for looser in looser {
            prop_assert!(!is_broken(&filter, &pod) || is_broken(&looser, &pod));
        }
    }

    #[test]
    fn what_is_no_pod_is_not_broken(pointer in "/(metadata|spec|status)", value in "[a-z]{0,3}", mut pod in any_pod()) {
        *pod.pointer_mut(&pointer).expect("a part") = json!(value);
        prop_assert!(!is_broken(&usual(), &pod));
    }
}
