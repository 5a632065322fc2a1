//! Rendering the chart: Helm as its users run it, and what comes out as objects.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::tools;
use serde_json::{Map, Value, json};
use test_support::process::{self, Output, SHORT};
use test_support::project;

pub const NAMESPACE: &str = "istio-system";
pub const RELEASE: &str = "istio-cni";

pub fn chart() -> PathBuf {
    project::file("deploy/charts/istio-cni")
}

/// A file of the chart.
pub fn chart_file(path: &str) -> Result<String> {
    fs::read_to_string(chart().join(path)).with_context(|| path.to_owned())
}

/// Runs Helm, which neither sees the files of whoever runs the test nor, without a server, any cluster.
pub fn helm(api: Option<&ApiServer>, args: &[&str]) -> Result<Output> {
    let home = tempfile::tempdir()?;
    let mut command = process::command(tools::built("helm")?, args);
    command.env("HOME", home.path()).env_remove("KUBECONFIG");
    // It ends before its garbage is worth collecting, and tests beside it have the other processors.
    command.env("GOGC", "off").env("GOMAXPROCS", "1");
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(name, home.path().join(name));
    }
    let nowhere = home.path().join("no.kubeconfig");
    command.arg("--kubeconfig").arg(api.map_or(nowhere, ApiServer::admin_kubeconfig));
    process::run(&mut command, SHORT)
}

/// Runs Helm with these values, of which the later ones win.
pub fn helm_with(api: Option<&ApiServer>, args: &[&str], values: &[&Value]) -> Result<Output> {
    let folder = tempfile::tempdir()?;
    let mut args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    for (number, values) in values.iter().enumerate() {
        let file = folder.path().join(number.to_string());
        fs::write(&file, values.to_string())?;
        args.extend(["--values".to_owned(), file.display().to_string()]);
    }
    helm(api, &args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Has Helm do something with the release.
pub fn release(api: &ApiServer, command: &str, args: &[&str]) -> Result<Output> {
    release_with(api, command, args, &[])
}

/// The same with these values, of which the later ones win.
pub fn release_with(api: &ApiServer, command: &str, args: &[&str], values: &[&Value]) -> Result<Output> {
    let about = [command, RELEASE, "--namespace", NAMESPACE];
    helm_with(Some(api), &[&about, args].concat(), values)
}

/// The chart rendered with further arguments, however that ends. Where these do not turn ambient mode on, none is: no cluster shows it.
pub fn rendering(args: &[&str]) -> Result<Output> {
    let stated = tempfile::NamedTempFile::new()?;
    fs::write(stated.path(), json!({"ambient": {"enabled": false}}).to_string())?;
    let stated = stated.path().display().to_string();
    rendering_as_given(&[&["--values", &stated], args].concat())
}

/// The chart rendered with these arguments alone.
pub fn rendering_as_given(args: &[&str]) -> Result<Output> {
    let chart = chart().display().to_string();
    let mut all = vec!["template", RELEASE, &chart, "--namespace", NAMESPACE];
    all.extend(args);
    helm(None, &all)
}

/// The chart rendered with these values.
pub fn rendered(values: &Value) -> Result<String> {
    rendered_with(values, &[])
}

/// The same without what is for a part of a release's life: the pod of `helm test`, and what cleans nodes.
pub fn rendered_without_tests(values: &Value) -> Result<String> {
    rendered_with(values, &["--no-hooks"])
}

/// The pod of `helm test` alone.
pub fn test_pod(values: &Value) -> Result<Value> {
    yaml(&rendered_with(values, &["--show-only", "templates/tests/redirected.yaml"])?)
}

/// The same with further arguments.
pub fn rendered_with(values: &Value, more: &[&str]) -> Result<String> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), values.to_string())?;
    let file = file.path().display().to_string();
    let output = rendering(&[more, &["--values", &file]].concat())?.ok();
    Ok(output.with_context(|| values.to_string())?.stdout)
}

/// A change of every value, by the value's path.
pub fn changes() -> Result<Map<String, Value>> {
    let changes = yaml(include_str!("../../../manifests/chart-changes.yaml"))?;
    changes.as_object().cloned().context("chart-changes.yaml is not a mapping")
}

/// What YAML says.
pub fn yaml(text: &str) -> Result<Value> {
    serde_saphyr::from_str(text).with_context(|| text.to_owned())
}

/// Objects of a stream of YAML documents.
pub fn objects(text: &str) -> Result<Vec<Value>> {
    let documents = text
        .split("\n---")
        .filter(|document| document.lines().any(|line| !line.is_empty() && !line.starts_with(['#', '-'])));
    documents.map(|document| yaml(document.trim_start_matches('-'))).collect()
}

/// The object of a kind and a name.
pub fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    let mut all =
        objects.iter().filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let found = all.next().with_context(|| format!("no {kind} {name}"))?;
    ensure!(all.next().is_none(), "two of {kind} {name}");
    Ok(found)
}

pub fn daemon_set(objects: &[Value]) -> Result<&Value> {
    find(objects, "DaemonSet", "istio-cni-node")
}

/// The values files that come with the chart.
pub fn values_files() -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(chart().join("ci"))?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    Ok(files)
}

/// The container's variables: of the ConfigMap, and its own, which win.
pub fn environment(objects: &[Value]) -> Result<BTreeMap<String, String>> {
    let config = &find(objects, "ConfigMap", "istio-cni-config")?["data"];
    let mut environment: BTreeMap<String, String> = serde_json::from_value(config.clone())?;
    let own = &daemon_set(objects)?["spec"]["template"]["spec"]["containers"][0]["env"];
    for variable in own.as_array().context("no variables")? {
        let name = variable["name"].as_str().context("no name")?;
        let from = &variable["valueFrom"]["fieldRef"]["fieldPath"];
        let value = variable["value"].as_str().or(from.as_str()).context("no value")?;
        environment.insert(name.to_owned(), value.to_owned());
    }
    Ok(environment)
}

/// Holds all that an expectation names to it: null is what is not there.
pub fn expect(is: &Value, wanted: &Value, at: &str) -> Result<()> {
    let Value::Object(fields) = wanted else {
        ensure!(is == wanted, "{at} is {is} instead of {wanted}");
        return Ok(());
    };
    for (name, wanted) in fields {
        let field = if name.starts_with('/') { is.pointer(name) } else { is.get(name) };
        expect(field.unwrap_or(&Value::Null), wanted, &format!("{at} {name}"))?;
    }
    Ok(())
}

/// What an expectation is about: the agent's variables, its directories, pod, container, and all objects by kind and name.
pub fn seen(objects: &[Value]) -> Result<Value> {
    let named = |object: &Value| {
        let text = |at: &str| object.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
        (format!("{}/{}", text("/kind"), text("/metadata/name")), object.clone())
    };
    let mut seen = json!({"objects": objects.iter().map(named).collect::<serde_json::Map<_, _>>()});
    if let Ok(set) = daemon_set(objects) {
        let pod = &set["spec"]["template"]["spec"];
        let volumes = pod["volumes"].as_array().context("no volumes")?;
        let directory = |volume: &Value| {
            (volume["name"].as_str().unwrap_or_default().to_owned(), volume["hostPath"]["path"].clone())
        };
        seen["env"] = json!(environment(objects)?);
        seen["directories"] = volumes.iter().map(directory).collect::<serde_json::Map<_, _>>().into();
        seen["pod"] = pod.clone();
        seen["container"] = pod["containers"][0].clone();
    }
    Ok(seen)
}
