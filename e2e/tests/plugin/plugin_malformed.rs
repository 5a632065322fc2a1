//! Malformed standard input, environment and pod objects: each gives a CNI error that names the field, exit code 1, and
//! changes nothing.

use anyhow::{Context, Result, ensure};
use e2e::plugin::{self, Invocation, PodApi, RunDir, plain_kubeconfig, sidecar};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};

/// Rows of all tables together, at least.
const ROWS: usize = 60;

/// Standard input as it is: the text, the code, what the error names.
const INPUTS: [(&str, u64, &str); 16] = [
    ("", 6, "standard input: is empty"),
    (" \n", 6, "standard input: is empty"),
    ("null", 6, "standard input: is not a JSON object"),
    ("[]", 6, "standard input: is not a JSON object"),
    ("7", 6, "standard input: is not a JSON object"),
    ("\"text\"", 6, "standard input: is not a JSON object"),
    ("{", 6, "line 1"),
    ("{\"name\": \"net\",}", 6, "column 16"),
    ("{\"name\": nul}", 6, "standard input"),
    ("{\"name\": \"a\\ud800\"} {}", 6, "standard input"),
    ("{} trailing", 6, "standard input"),
    ("{'name': 'net'}", 6, "standard input"),
    ("{\"cniVersion\": 1.0, \"name\": \"net\"}", 6, "cniVersion"),
    ("{\"cniVersion\": \"9.9.9\", \"name\": \"net\"}", 1, "cniVersion \"9.9.9\""),
    ("{\"cniVersion\": \"1.0\", \"name\": \"net\"}", 1, "cniVersion \"1.0\""),
    ("{\"cniVersion\": \"1.0.0\"}", 7, "name: missing"),
];

/// Variables of the environment: which, its value, the code, what the error names.
const VARIABLES: [(&str, &str, u64, &str); 21] = [
    ("CNI_COMMAND", "", 4, "CNI_COMMAND"),
    ("CNI_COMMAND", "FROB", 4, "CNI_COMMAND: \"FROB\""),
    ("CNI_COMMAND", "add", 4, "CNI_COMMAND: \"add\""),
    ("CNI_CONTAINERID", "", 4, "CNI_CONTAINERID: missing"),
    ("CNI_CONTAINERID", "../../etc", 4, "CNI_CONTAINERID: \"../../etc\""),
    ("CNI_CONTAINERID", "-abc", 4, "CNI_CONTAINERID: \"-abc\""),
    ("CNI_IFNAME", "", 4, "CNI_IFNAME: missing"),
    ("CNI_IFNAME", "a/b", 4, "CNI_IFNAME: \"a/b\""),
    ("CNI_IFNAME", "..", 4, "CNI_IFNAME: \"..\""),
    ("CNI_IFNAME", "sixteen-bytes-xx", 4, "CNI_IFNAME"),
    ("CNI_PATH", "", 4, "CNI_PATH: missing"),
    ("CNI_NETNS", "", 4, "CNI_NETNS: missing"),
    ("CNI_NETNS", "/nonexistent", 4, "CNI_NETNS"),
    ("CNI_NETNS", "/etc/hostname", 4, "CNI_NETNS: /etc/hostname is not a network namespace"),
    ("CNI_NETNS", "/proc/self/ns/net", 4, "CNI_NETNS"),
    ("CNI_NETNS", "/proc/self/ns/mnt", 4, "CNI_NETNS"),
    ("CNI_ARGS", "FOO=bar", 4, "CNI_ARGS: \"FOO\""),
    ("CNI_ARGS", "IgnoreUnknown=perhaps", 4, "CNI_ARGS: IgnoreUnknown"),
    ("CNI_ARGS", "K8S_POD_NAME", 4, "CNI_ARGS: \"K8S_POD_NAME\""),
    ("CNI_ARGS", "K8S_POD_NAMESPACE=a/../b;K8S_POD_NAME=c", 4, "CNI_ARGS: K8S_POD_NAMESPACE"),
    ("CNI_ARGS", "K8S_POD_NAMESPACE=a;K8S_POD_NAME=%2e%2e", 4, "CNI_ARGS: K8S_POD_NAME"),
];

/// Keys of the configuration, all code 7 and named by themselves.
fn keys() -> Vec<(&'static str, Value)> {
    vec![
        ("name", json!(5)),
        ("name", json!("a b")),
        ("type", json!([])),
        ("plugin_log_level", json!("loud")),
        ("plugin_log_level", json!(1)),
        ("log_level", json!("verbose")),
        ("cni_agent_run_dir", json!("relative")),
        ("cni_agent_run_dir", json!(true)),
        ("exclude_namespaces", json!("kube-system")),
        ("exclude_namespaces", json!(["a", {}])),
        ("pod_namespace", json!(0)),
        ("native_nftables", json!("true")),
        ("add_timeout", json!("soon")),
        ("add_timeout", json!("0s")),
        ("add_timeout", json!(-1)),
        ("add_timeout", json!("2h")),
        ("pod_manifest_dir", json!({})),
        ("pod_manifest_dir", json!("manifests")),
        ("kubernetes", json!("x")),
        ("kubernetes", json!({"kubeconfig": 1})),
        ("kubernetes", json!({"kubeconfig": "relative"})),
        ("kubernetes", json!({"exclude_namespaces": {}})),
        ("prevResult", json!("x")),
        ("prevResult", json!({"cniVersion": "x"})),
        ("prevResult", json!({"interfaces": {}})),
        ("prevResult", json!({"ips": [{"address": "10.0.0.1"}]})),
        ("prevResult", json!({"ips": [{"address": "10.0.0.1/24", "interface": "eth0"}]})),
        ("prevResult", json!({"routes": [{"dst": "everywhere"}]})),
        ("prevResult", json!({"dns": []})),
    ]
}

/// Pods: a pointer into a good one, the value put there, what the error names. All code 100. What is not even a pod of the name is the API
/// server's fault.
fn pods() -> Vec<(&'static str, Value, &'static str)> {
    let annotation = |name: &str| format!("/metadata/annotations/{}", name.replace('/', "~1"));
    let annotation = |name: &str| -> &'static str { Box::leak(annotation(name).into_boxed_str()) };
    let inbound = "traffic.sidecar.istio.io/includeInboundPorts";
    let ranges = "traffic.sidecar.istio.io/excludeOutboundIPRanges";
    let interfaces = "traffic.sidecar.istio.io/excludeInterfaces";
    let mode = "sidecar.istio.io/interceptionMode";
    vec![
        ("/spec", json!(null), "spec: missing"),
        ("/spec", json!("x"), "spec: is a string"),
        ("/metadata/labels", json!(["a"]), "metadata.labels: is a list"),
        ("/metadata/labels", json!({"a": 1}), "metadata.labels[\"a\"]: is a number"),
        ("/metadata/annotations", json!("x"), "metadata.annotations: is a string"),
        ("/spec/containers", json!({}), "spec.containers: is an object"),
        ("/spec/containers/0", json!("app"), "spec.containers[0]: is a string"),
        ("/spec/containers/0", json!({}), "spec.containers[0].name: missing"),
        ("/spec/containers/0/name", json!(7), "spec.containers[0].name: is a number"),
        ("/spec/containers/1/args", json!("proxy"), "spec.containers[1].args: is a string"),
        ("/spec/containers/1/env", json!([{"name": "A", "value": 1}]), "spec.containers[1].env[0].value"),
        ("/spec/containers/1/securityContext", json!({"runAsUser": "root"}), "securityContext.runAsUser"),
        ("/spec/initContainers", json!(1), "spec.initContainers: is a number"),
        (annotation(inbound), json!("80,http"), inbound),
        (annotation(inbound), json!("70000"), inbound),
        (annotation(inbound), json!("80;reboot"), inbound),
        (annotation(ranges), json!("10.0.0.0/33"), ranges),
        (annotation(ranges), json!("10.0.0.0/8, ::/0"), ranges),
        (annotation(interfaces), json!("eth0 -j ACCEPT"), interfaces),
        (annotation(mode), json!("none\n"), mode),
    ]
}

struct Bench {
    namespace: Namespace,
    run_dir: RunDir,
    api: PodApi,
}

impl Bench {
    fn new() -> Result<Self> {
        let bench = Self {
            namespace: Namespace::pod(Families::Dual)?,
            run_dir: RunDir::new()?,
            api: PodApi::start(),
        };
        bench.run_dir.write_kubeconfig(&plain_kubeconfig(bench.api.port))?;
        bench.api.add("default", "web", &sidecar("web", &[]));
        Ok(bench)
    }

    fn good(&self, conf: &Value) -> Invocation {
        Invocation::new("ADD", conf).netns(&self.namespace).pod("default", "web")
    }

    /// Problems of an invocation that had to fail.
    fn refused(&self, what: &str, invocation: &Invocation, code: u64, named: &str) -> Result<Option<String>> {
        let answer = invocation.run()?;
        Ok(match answer.error() {
            Ok((found, text)) if found == code && text.contains(named) => None,
            Ok((found, text)) => Some(format!("{what}: want code {code} and {named:?}, got {found}: {text}")),
            Err(problem) => Some(format!("{what}: {problem:#}")),
        })
    }

    fn all(&self) -> Result<(usize, Vec<String>)> {
        let conf = self.run_dir.conf();
        let mut found = Vec::new();
        for (input, code, named) in INPUTS {
            found.push(self.refused(input, &self.good(&conf).input(input), code, named)?);
        }
        for (name, value, code, named) in VARIABLES {
            let what = format!("{name}={value}");
            found.push(self.refused(&what, &self.good(&conf).env(name, value), code, named)?);
        }
        for (key, value) in keys() {
            let mut conf = conf.clone();
            conf[key] = value;
            let what = format!("{key}: {}", conf[key]);
            found.push(self.refused(&what, &self.good(&conf), 7, key)?);
        }
        for (index, (pointer, value, named)) in pods().into_iter().enumerate() {
            let name = format!("web-{index}");
            self.api.add("default", &name, &with(sidecar(&name, &[]), pointer, value)?);
            let invocation = self.good(&conf).pod("default", &name);
            found.push(self.refused(&format!("pod {pointer} {named}"), &invocation, 100, named)?);
        }
        Ok((found.len(), found.into_iter().flatten().collect()))
    }
}

/// Puts a value where a JSON pointer says, making the last step where it is missing.
fn with(mut pod: Value, pointer: &str, value: Value) -> Result<Value> {
    let Some((parent, key)) = pointer.rsplit_once('/') else { return Ok(value) };
    let parent = pod.pointer_mut(parent).context("no such place")?;
    match parent {
        Value::Array(items) => items[key.parse::<usize>()?] = value,
        Value::Object(fields) => {
            fields.insert(key.replace("~1", "/"), value);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => anyhow::bail!("no such place"),
    }
    Ok(pod)
}

#[test]
fn every_malformed_input_is_refused_by_name_and_changes_nothing() -> Result<()> {
    let bench = Bench::new()?;
    let (rows, problems) = bench.all()?;
    assert!(rows >= ROWS, "{rows} rows");
    assert!(problems.is_empty(), "{} of {rows}:\n{}", problems.len(), problems.join("\n"));
    let state = bench.namespace.state_with_nft()?;
    assert!(state.is_pristine() && !state.lo.iter().any(|address| address == "::6/128"), "{state:?}");
    Ok(())
}

#[test]
fn the_same_bench_accepts_what_is_well_formed() -> Result<()> {
    let bench = Bench::new()?;
    let mut conf = bench.run_dir.conf();
    conf["unknown_key"] = json!({"tolerated": true});
    bench.good(&conf).run()?.result()?;
    ensure!(!bench.namespace.state()?.is_pristine(), "nothing was programmed");
    Ok(())
}

#[test]
fn input_that_never_ends_is_refused() -> Result<()> {
    let bench = Bench::new()?;
    let input = format!("{{\"name\": \"{}\"}}", "x".repeat(17 << 20));
    let (code, text) = bench.good(&json!({})).input(&input).run()?.error()?;
    assert!(code == 5 && text.contains("standard input: is longer than"), "{code} {text}");
    Ok(())
}

#[test]
fn bytes_that_are_no_text_are_refused() -> Result<()> {
    use std::os::unix::ffi::OsStringExt;
    let no_text = std::ffi::OsString::from_vec(vec![0xff, 0xfe]);
    let mut command = test_support::process::command(plugin::istio_cni(), [""; 0]);
    command.env_clear().env("CNI_COMMAND", "ADD").env("CNI_CONTAINERID", no_text);
    let answer = plugin::Answer(test_support::process::run(&mut command, test_support::process::SHORT)?);
    let (code, text) = answer.error()?;
    assert!(code == 4 && text.contains("CNI_CONTAINERID: ") && text.contains("is not UTF-8"), "{text}");
    Ok(())
}

#[test]
fn a_configuration_that_is_wrong_does_not_keep_a_pod_from_being_removed() -> Result<()> {
    let bench = Bench::new()?;
    let mut conf = bench.run_dir.conf();
    conf["native_nftables"] = json!("yes");
    bench.good(&conf).env("CNI_COMMAND", "DEL").run()?.silence()
}
