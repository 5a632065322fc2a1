//! The Helm chart on an API server: what is accepted, what is refused, and how it takes the place of Istio's.
//!
//! `make test-cluster` and `make chart` build Helm and run this.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::thread;

use crate::chart_support::{
    NAMESPACE, changes, chart, daemon_set, expect, helm, objects, release, release_with, rendered, rendering,
    seen, values_files, yaml,
};
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::sample;

const PLATFORMS: [&str; 6] = ["gke", "k3d", "k3s", "microk8s", "minikube", "openshift"];
const PROFILES: [&str; 5] = ["default", "demo", "preview", "remote", "stable"];
const ISTIO: &str = include_str!("../../manifests/istio-chart.yaml");

/// What the chart is rendered with: a values file, a platform or none, a profile.
type Choice = (PathBuf, &'static str, &'static str);

/// Every file with every platform and profile. Where a part is enough, every file, and every pair of platform and profile, twice at least: 17 and the
/// number of pairs have no common factor.
fn choices() -> Result<Vec<Choice>> {
    let files = values_files()?;
    ensure!(files.len() >= 20, "{} values files", files.len());
    let platforms: Vec<&str> = [""].into_iter().chain(PLATFORMS).collect();
    let mut choices = Vec::new();
    for file in &files {
        for platform in &platforms {
            choices.extend(PROFILES.map(|profile| (file.clone(), *platform, profile)));
        }
    }
    Ok(sample::part(choices, 17, 0))
}

/// Everything that is rendered for these choices, each object once.
fn every_object(choices: &[Choice]) -> Result<BTreeSet<String>> {
    let workers = thread::available_parallelism()?.get();
    let parts: Vec<Result<BTreeSet<String>>> = thread::scope(|scope| {
        let start = |part| scope.spawn(move || every_object_of(part));
        let started: Vec<_> = choices.chunks(choices.len().div_ceil(workers)).map(start).collect();
        started.into_iter().map(|worker| worker.join().expect("no panic")).collect()
    });
    let mut all = BTreeSet::new();
    for part in parts {
        all.extend(part?);
    }
    Ok(all)
}

/// What these choices come to.
fn every_object_of(choices: &[Choice]) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for (file, platform, profile) in choices {
        let file = file.display().to_string();
        let set = format!("platform={platform},profile={profile}");
        let output = rendering(&["--values", &file, "--set", &set])?.ok();
        let output = output.with_context(|| format!("{file} {set}"))?;
        let objects = objects(&output.stdout)?;
        ensure!(!objects.is_empty(), "{file} {set}: nothing");
        all.extend(objects.iter().map(Value::to_string));
    }
    Ok(all)
}

fn parsed(objects: &BTreeSet<String>) -> Result<Vec<Value>> {
    Ok(objects.iter().map(|object| serde_json::from_str(object)).collect::<Result<_, _>>()?)
}

/// Lets an API server judge objects without keeping them.
fn judge(api: &ApiServer, objects: &[Value]) -> Result<()> {
    for part in objects.chunks(100) {
        let file = tempfile::NamedTempFile::new()?;
        let list = json!({"apiVersion": "v1", "kind": "List", "items": part});
        fs::write(file.path(), list.to_string())?;
        let file = file.path().display().to_string();
        api.kubectl(&["create", "--dry-run=server", "--validate=strict", "-f", &file])?;
    }
    Ok(())
}

/// Kinds that others bring, as far as an API server has to know them.
fn bring_kinds(api: &ApiServer) -> Result<()> {
    let kinds = [
        ("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions"),
        ("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"),
        ("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules"),
    ];
    for (group, version, kind, plural) in kinds {
        let name = format!("{plural}.{group}");
        let schema =
            json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
        api.apply(&json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": name},
            "spec": {"group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
                "versions": [{"name": version, "served": true, "storage": true, "schema": schema}]},
        }).to_string())?;
        api.kubectl(&["wait", "--for=condition=Established", "--timeout=120s", "crd", &name])?;
    }
    Ok(())
}

#[test]
fn every_platform_profile_and_values_file_is_accepted_by_the_api_server() -> Result<()> {
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    bring_kinds(&api)?;
    let all = parsed(&every_object(&choices()?)?)?;
    judge(&api, &all)?;
    // The server judges a template leniently, and the pods it stands for strictly.
    api.kubectl(&["label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=privileged"])?;
    for account in ["istio-cni", "istio-cni-taint-controller"] {
        api.create_service_account(NAMESPACE, account)?;
    }
    let of_kind = |kind: &'static str| all.iter().filter(move |object| object["kind"] == kind);
    ensure!(of_kind("Deployment").count() > 0, "no taint controller");
    let pods = of_kind("DaemonSet").chain(of_kind("Deployment")).enumerate();
    let pods: Vec<Value> =
        pods.map(|(number, set)| pod(set, NAMESPACE, &format!("istio-cni-node-{number}"))).collect();
    ensure!(pods.len() >= 50, "{} DaemonSets", pods.len());
    judge(&api, &pods)
}

/// The pod that the DaemonSet's controller would make.
fn pod(set: &Value, namespace: &str, name: &str) -> Value {
    let mut pod = set["spec"]["template"].clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["namespace"] = json!(namespace);
    pod
}

#[test]
fn pod_security_forbids_the_pod_below_privileged_for_the_nodes_directories_and_network_alone() -> Result<()> {
    let api = ApiServer::shared()?;
    let namespace = api.fresh_namespace(NAMESPACE)?;
    api.create_service_account(&namespace, "istio-cni")?;
    api.kubectl(&["label", "namespace", &namespace, "pod-security.kubernetes.io/enforce=baseline"])?;
    let network = ["host namespaces", "hostPort"];
    let entering = ["non-default capabilities", "forbidden AppArmor profile"];
    let off = json!({"repair": {"enabled": false}});
    let off_on_pods_network = json!({"repair": {"enabled": false}, "hostNetwork": false});
    for (values, reasons) in
        [(off_on_pods_network, vec![]), (off, network.to_vec()), (json!({}), [network, entering].concat())]
    {
        let objects = objects(&rendered(&values)?)?;
        let refusal = judge(&api, &[pod(daemon_set(&objects)?, &namespace, "istio-cni-node-x")]);
        let refusal =
            format!("{:#}", refusal.err().context("baseline accepts a pod with directories of its node")?);
        let told: Vec<&str> =
            [network, entering].concat().into_iter().filter(|reason| refusal.contains(reason)).collect();
        ensure!(refusal.contains("hostPath volumes"), "{refusal}");
        ensure!(told == reasons, "{values}: {told:?}\n{refusal}");
    }
    Ok(())
}

/// An API server with the namespace of the mesh.
fn cluster() -> Result<ApiServer> {
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    Ok(api)
}

#[test]
fn every_value_changes_something_or_the_notes_say_that_it_does_not() -> Result<()> {
    let unchanged = objects(&rendered(&json!({}))?)?;
    let changes = changes()?;
    let mut without_effect = Vec::new();
    for (path, value) in &changes {
        let values = nested(path, value.clone());
        // Defaults as they are, but where others decide: all platforms have directories of their own.
        if objects(&rendered(&values)?)? == unchanged {
            without_effect.push((path, values));
        }
    }
    ensure!(changes.len() >= without_effect.len() + 45, "few have an effect: {without_effect:?}");
    // The notes name a value of `global` as the chart's own, so each of the two needs notes that the other is not in.
    let (global, own): (Vec<_>, Vec<_>) =
        without_effect.iter().partition(|(path, _)| path.starts_with("global."));
    let api = cluster()?;
    for together in [global, own] {
        let (_, notes) = installed(&api, &together.iter().map(|(_, values)| values).collect::<Vec<_>>())?;
        for (path, _) in together {
            let name = path.trim_start_matches("global.");
            ensure!(
                notes.contains(&format!("\n- {name}: ")),
                "{path} changes nothing, and the notes say: {notes}"
            );
        }
    }
    Ok(())
}

/// What an installation with these values would make, and its notes. Helm compares nothing with the server's schemas, which is half of its work.
fn installed(api: &ApiServer, values: &[&Value]) -> Result<(Vec<Value>, String)> {
    let chart = chart().display().to_string();
    let args = [&*chart, "--dry-run=server", "--disable-openapi-validation"];
    let output = release_with(api, "install", &args, values)?.ok().with_context(|| format!("{values:?}"))?;
    let (_, manifest) = output.stdout.split_once("MANIFEST:").context("no manifest")?;
    let (manifest, notes) = manifest.split_once("NOTES:").context("no notes")?;
    Ok((objects(manifest)?, notes.to_owned()))
}

#[test]
fn values_files_of_istio_are_accepted_and_the_notes_list_what_has_no_effect() -> Result<()> {
    let api = cluster()?;
    bring_kinds(&api)?;
    let table =
        include_str!("../../manifests/istio-values.yaml").replace("VERSION", env!("CARGO_PKG_VERSION"));
    let rows = yaml(&table)?;
    let rows = rows.as_array().context("no rows")?;
    ensure!(rows.len() >= 40, "{} rows", rows.len());
    let (mut all, mut failed) = (BTreeSet::new(), Vec::new());
    for row in rows {
        match installs_as_wanted(&api, row) {
            Ok(objects) => all.extend(objects.iter().map(Value::to_string)),
            Err(error) => failed.push(format!("{}: {error:#}", row["values"])),
        }
    }
    ensure!(failed.is_empty(), "{} of {}:\n{}", failed.len(), rows.len(), failed.join("\n"));
    judge(&api, &parsed(&all)?)
}

/// Holds a row of istio-values.yaml to an installation, and returns its objects.
fn installs_as_wanted(api: &ApiServer, row: &Value) -> Result<Vec<Value>> {
    let mut wanted = row.as_object().context("no row")?.clone();
    let mut field = |name: &str| wanted.remove(name).unwrap_or_default();
    let (values, ignored, named) = (field("values"), field("ignored"), field("named"));
    let (objects, notes) = installed(api, &[&values])?;
    let (_, list) = notes.split_once("These values have no effect:").unwrap_or_default();
    let lines = list.lines().filter_map(|line| line.strip_prefix("- ")?.split_once(": "));
    let mut told: Vec<&str> = lines.map(|(name, _)| name).collect();
    told.sort_unstable();
    ensure!(json!(told) == ignored, "{notes}");
    let named = named.as_str().unwrap_or_default();
    ensure!(notes.contains(named), "{named}: {notes}");
    expect(&seen(&objects)?, &Value::Object(wanted), "")?;
    Ok(objects)
}

/// `{"a": {"b": value}}` of `a.b`.
fn nested(path: &str, value: Value) -> Value {
    path.rsplit('.').fold(value, |inner, name| json!({name: inner}))
}

/// A chart with the facts of Istio's own.
fn istios_chart() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::create_dir(folder.path().join("templates"))?;
    fs::write(folder.path().join("Chart.yaml"), "{apiVersion: v2, name: cni, version: 1.30.3}")?;
    fs::write(folder.path().join("templates/all.yaml"), ISTIO)?;
    // Where that chart keeps its defaults; --reuse-values hands them on.
    fs::write(folder.path().join("values.yaml"), "{_internal_defaults_do_not_set: {chained: true}}")?;
    Ok(folder)
}

/// What a release may have made, by kind and name, without what the server and Helm note about it.
fn state(api: &ApiServer) -> Result<BTreeMap<String, Value>> {
    let namespaced = "daemonsets,deployments,configmaps,serviceaccounts,roles,rolebindings,resourcequotas,networkpolicies,secrets";
    let mut state = BTreeMap::new();
    for (kinds, namespace) in [(namespaced, NAMESPACE), ("clusterroles,clusterrolebindings", "")] {
        for mut object in api.list(kinds, namespace)? {
            let name = format!("{}/{}", object["kind"], object["metadata"]["name"]);
            let metadata =
                json!({"labels": object["metadata"]["labels"], "namespace": object["metadata"]["namespace"]});
            object["metadata"] = metadata;
            state.insert(name, object);
        }
    }
    state.retain(|name, _| !name.contains("sh.helm.release"));
    Ok(state)
}

#[test]
fn istios_chart_is_upgraded_and_rolled_back_and_leaves_nothing() -> Result<()> {
    let api = cluster()?;
    let (istio, ours) = (istios_chart()?, chart().display().to_string());
    let istio = istio.path().display().to_string();
    let empty = state(&api)?;

    release(&api, "install", &[&ours])?.ok()?;
    let fresh = state(&api)?;
    ensure!(fresh.len() > empty.len() + 8, "{:?}", fresh.keys());
    release(&api, "uninstall", &[])?.ok()?;
    ensure!(state(&api)? == empty, "the removal leaves something: {:?}", state(&api)?.keys());

    release(&api, "install", &[&istio])?.ok()?;
    let istios = state(&api)?;
    release(&api, "upgrade", &[&ours, "--reuse-values"])?.ok()?;
    let upgraded = state(&api)?;
    for (name, object) in &upgraded {
        let mut object = object.clone();
        if object["kind"] == "DaemonSet" {
            // The server counts the changes of the pods' template.
            object["status"] = fresh.get(name).map(|fresh| fresh["status"].clone()).unwrap_or_default();
        }
        ensure!(fresh.get(name) == Some(&object), "{name} is {object:#}\nbut fresh {:#?}", fresh.get(name));
    }
    ensure!(upgraded.keys().eq(fresh.keys()), "{:?} instead of {:?}", upgraded.keys(), fresh.keys());

    release(&api, "rollback", &["1"])?.ok()?;
    let back = state(&api)?;
    ensure!(back.keys().eq(istios.keys()), "{:?} instead of {:?}", back.keys(), istios.keys());
    for (name, object) in &back {
        ensure!(object["spec"] == istios[name]["spec"], "{name}");
        ensure!(object["data"] == istios[name]["data"], "{name}");
        ensure!(object["rules"] == istios[name]["rules"], "{name}");
    }
    release(&api, "uninstall", &[])?.ok()?;
    ensure!(state(&api)? == empty, "the removal leaves something: {:?}", state(&api)?.keys());
    ensure!(api.list("secrets", NAMESPACE)?.is_empty(), "Helm's own secrets are left");
    Ok(())
}

#[test]
fn a_cluster_with_ambient_is_only_taken_over_with_ambient_and_our_own_may_leave() -> Result<()> {
    let api = cluster()?;
    let (istio, ours) = (istios_chart()?, chart().display().to_string());
    let manifest = ISTIO.replace("AMBIENT_ENABLED: \"false\"", "AMBIENT_ENABLED: \"true\"");
    ensure!(manifest != ISTIO);
    fs::write(istio.path().join("templates/all.yaml"), manifest)?;
    release(&api, "install", &[&istio.path().display().to_string()])?.ok()?;
    let before = state(&api)?;
    let refused = |command: &str, why: &str| -> Result<()> {
        let refusal = release(&api, command, &[&ours, "--set", "ambient.enabled=false"])?;
        let words = refusal.stderr;
        ensure!(!refusal.status.success() && words.contains(why), "{words}");
        ensure!(words.contains("Set ambient.enabled=true"), "{words}");
        Ok(())
    };
    refused("upgrade", "has AMBIENT_ENABLED=true")?;
    ensure!(state(&api)? == before, "something was changed");
    release(&api, "upgrade", &[&ours, "--set", "ambient.enabled=true"])?.ok()?;
    release(&api, "upgrade", &[&ours, "--set", "ambient.enabled=false"])?.ok()?;
    release(&api, "uninstall", &[])?.ok()?;

    // Where platforms have it, and under whatever name.
    let ztunnel = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "ztunnel-stable", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"app": "ztunnel"}}, "template": {
            "metadata": {"labels": {"app": "ztunnel"}}, "spec": {"containers": [{"name": "x", "image": "x"}]}}},
    });
    api.create(&ztunnel)?;
    refused("install", "DaemonSet ztunnel-stable in namespace kube-system")?;
    release(&api, "install", &[&ours, "--set", "profile=ambient"])?.ok()?;
    refused("upgrade", "DaemonSet ztunnel-stable")
}

#[test]
fn helm_finds_nothing_to_say_about_the_chart() -> Result<()> {
    let chart = chart().display().to_string();
    for file in values_files()? {
        let file = file.display().to_string();
        let output =
            helm(None, &["lint", "--strict", &chart, "--namespace", NAMESPACE, "--values", &file])?.ok()?;
        let words = output.stdout.lines().filter(|line| line.starts_with('['));
        let other: Vec<&str> = words.filter(|line| !line.ends_with("icon is recommended")).collect();
        ensure!(other.is_empty(), "{file}: {other:?}");
    }
    Ok(())
}
