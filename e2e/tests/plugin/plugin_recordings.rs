//! The recorded runs of the reference plugin, played back to `istio-cni` in fresh namespaces: it must answer with the
//! recorded result, or fail where the reference failed, and the kernel must end in the recorded state.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use e2e::plugin::{Answer, Invocation, PodApi, RunDir, plain_kubeconfig};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, State};
use test_support::sample;

/// Recorded runs at least; so that a lost fixture does not look like success.
const RECORDINGS: usize = 180;
const THREADS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// The recorded result and state.
    Recorded,
    /// An error object, and nothing changed.
    Failure,
    /// Success, and nothing changed.
    Skip,
    /// Anything: what the reference does makes no sense.
    Anything,
}

fn divergences() -> Result<BTreeMap<String, Expect>> {
    let all: Value = serde_json::from_str(include_str!("../../fixtures/divergences.json"))?;
    let list = all["plugin"].as_array().context("no divergences of the plugin")?;
    let read = |entry: &Value| {
        let name = entry["case"].as_str().context("a divergence without a case")?;
        let expect = match entry["expect"].as_str() {
            Some("free") => Expect::Anything,
            Some("reject") => Expect::Failure,
            Some("skip") => Expect::Skip,
            other => anyhow::bail!("divergence {name}: {other:?}"),
        };
        Ok((name.to_owned(), expect))
    };
    list.iter().map(read).collect()
}

#[test]
fn every_recording_is_reproduced() -> Result<()> {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../../fixtures/plugin.json"))?;
    assert!(cases.len() >= RECORDINGS, "{} recordings", cases.len());
    let cases = sample::of(cases);
    let (divergences, api) = (divergences()?, PodApi::start());
    let (next, problems) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = case["name"].as_str().unwrap_or_default();
                    let expect = match divergences.get(name) {
                        Some(expect) => *expect,
                        None if case["exit"] == 0 => Expect::Recorded,
                        None => Expect::Failure,
                    };
                    if let Err(problem) = play(case, expect, &api) {
                        let problem = format!("{name}: {problem:#}");
                        problems.lock().expect("nobody panics with it").push(problem);
                    }
                }
            });
        }
    });
    let problems = problems.into_inner()?;
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

fn play(case: &Value, expect: Expect, api: &PodApi) -> Result<()> {
    let namespace = Namespace::pod(Families::from_digits(case["families"].as_str().unwrap_or("46"))?)?;
    let run_dir = RunDir::new()?;
    run_dir.write_kubeconfig(&plain_kubeconfig(api.port))?;
    let answer = invocation(case, &namespace, &run_dir, api)?.run()?;
    let state = namespace.state_with_nft()?;
    match expect {
        Expect::Anything => Ok(()),
        Expect::Failure => {
            answer.error()?;
            ensure!(state.is_pristine(), "it failed and left {state:?}");
            Ok(())
        }
        Expect::Skip => {
            answer.result()?;
            ensure!(state.is_pristine(), "it skipped the pod and left {state:?}");
            Ok(())
        }
        Expect::Recorded => {
            compare_result(answer, &case["stdout"])?;
            let differences = state.without_routes_and_addresses().differences(&State::recorded(case)?);
            ensure!(differences.is_empty(), "{}", differences.join("\n"));
            Ok(())
        }
    }
}

fn invocation(case: &Value, namespace: &Namespace, run_dir: &RunDir, api: &PodApi) -> Result<Invocation> {
    // One API server serves all cases, so each has a Kubernetes namespace of its own, unless it needs one by name.
    let own = namespace.name().to_owned();
    let pod_namespace = case["podns"].as_str().unwrap_or(&own);
    if case["pod"].is_object() {
        let mut pod = case["pod"].clone();
        pod["kind"] = json!("Pod");
        pod["metadata"]["name"] = json!("pod-1");
        pod["metadata"]["namespace"] = json!(pod_namespace);
        api.add(pod_namespace, "pod-1", &pod);
    }
    let mut conf = case["conf"].clone();
    conf["cni_agent_run_dir"] = json!(run_dir.path());
    conf["plugin_log_level"] = json!("error");
    conf["add_timeout"] = json!("5s");
    let command = case["command"].as_str().unwrap_or("ADD");
    let mut invocation = Invocation::new(command, &conf).netns(namespace).pod(pod_namespace, "pod-1");
    if let Some(args) = case["cni_args"].as_str() {
        invocation = invocation.env("CNI_ARGS", args);
    }
    for (name, value) in case["env"].as_object().into_iter().flatten() {
        invocation = invocation.env(name, value.as_str().context("a variable that is not text")?);
    }
    Ok(invocation)
}

/// Empty fields count as missing: the reference writes some of them.
fn compare_result(answer: Answer, want: &Value) -> Result<()> {
    if want.is_null() {
        return answer.silence();
    }
    let without_empty = |value: &Value| {
        let empty = |value: &Value| *value == json!({}) || *value == json!([]) || value.is_null();
        let mut object = value.as_object().cloned().unwrap_or_default();
        object.retain(|_, value| !empty(value));
        object
    };
    let result = answer.result()?;
    ensure!(without_empty(&result) == without_empty(want), "result:\n   want {want}\n   got  {result}");
    Ok(())
}
