//! The Helm chart: what its values make of the agent, and what an API server makes of it.
//!
//! `make test-cluster` and `make chart` build Helm and run this. `make manifests` writes what is generated from the chart.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::Path;

use crate::chart_support::{
    NAMESPACE, changes, chart, chart_file, daemon_set, environment, expect, find, helm, objects, rendered,
    rendered_with, rendered_without_tests, rendering, rendering_as_given, seen, values_files, yaml,
};
use anyhow::{Context, Result, ensure};
use e2e::privileges;
use e2e::tools;
use serde_json::{Value, json};
use test_support::process::{self, SHORT};
use test_support::project;

/// What the manifest has switched off: the mark of its lines, and the values that switch it on.
fn features() -> [(&'static str, Value); 8] {
    let repair = |name: &str| {
        let mut repair = json!({"repairPods": false});
        repair[name] = json!(true);
        json!({"repair": repair})
    };
    [
        ("drift-watch", json!({"repair": {"enabled": false}, "driftWatch": {"interval": "5m"}})),
        (
            "drift-heal",
            json!({"repair": {"enabled": false}, "driftWatch": {"interval": "10m", "heal": true}}),
        ),
        ("repair-in-place", repair("repairPods")),
        ("repair-delete", repair("deletePods")),
        ("repair-label", repair("labelPods")),
        ("node-taint", json!({"repair": {"enabled": false}, "nodeTaint": {"enabled": true}})),
        ("node-condition", json!({"repair": {"enabled": false}, "nodeCondition": {"enabled": true}})),
        ("ambient", json!({"repair": {"enabled": false}, "ambient": {"enabled": true}})),
    ]
}

/// The objects as text, without what only Helm has a use for.
fn plain(values: &Value) -> Result<Vec<String>> {
    Ok(without_helms(&rendered_without_tests(values)?))
}

/// Those of the cluster's taint controller alone.
fn controller(more: &Value) -> Result<Vec<String>> {
    let mut values = json!({"taintController": {"enabled": true}});
    for (name, value) in more.as_object().context("no values")? {
        values["taintController"][name] = value.clone();
    }
    Ok(without_helms(&rendered_with(&values, &["--show-only", "templates/taint-controller.yaml"])?))
}

/// The policy that confines agents to their nodes, for a namespace.
fn policy(values: &Value, namespace: &str) -> Result<Vec<String>> {
    let mut values = values.clone();
    values["ownNodePolicy"] = json!({"enabled": true});
    let only = ["--namespace", namespace, "--show-only", "templates/own-node-policy.yaml"];
    Ok(without_helms(&rendered_with(&values, &only)?))
}

fn without_helms(text: &str) -> Vec<String> {
    let helms = [
        "# Source: ",
        "release: ",
        "helm.sh/chart: ",
        "app.kubernetes.io/managed-by: ",
        "app.kubernetes.io/instance: ",
        "checksum/",
    ];
    let lines = text.lines().filter(|line| !helms.iter().any(|part| line.trim_start().starts_with(part)));
    lines.skip(1).map(str::to_owned).collect()
}

/// For each line of `base`, and for its end, the lines that `more` has before it; `more` has all lines of `base` in their order.
fn inserted(base: &[String], more: &[String]) -> Result<Vec<Vec<String>>> {
    let mut at = 0;
    let mut inserted = vec![Vec::new(); base.len() + 1];
    for line in more {
        if base.get(at) == Some(line) {
            at += 1;
        } else {
            inserted[at].push(line.clone());
        }
    }
    ensure!(at == base.len(), "a feature changes this line: {}", base[at]);
    Ok(inserted)
}

/// A manifest, below its head: what is there in any case, and the further lines of each feature as comments that have its mark.
fn manifest(base: &[String], features: &[(&str, Vec<String>)]) -> Result<String> {
    let mut marked = vec![Vec::new(); base.len() + 1];
    for (feature, with) in features {
        for (lines, added) in marked.iter_mut().zip(inserted(base, with)?) {
            let indent = added.iter().map(|line| line.len() - line.trim_start().len()).min().unwrap_or(0);
            let mark = |line: &String| format!("{}# {feature}: {}", &line[..indent], &line[indent..]);
            lines.extend(added.iter().map(mark));
        }
    }
    let mut lines = Vec::new();
    for (at, added) in marked.into_iter().enumerate() {
        lines.extend(added);
        lines.extend(base.get(at).cloned());
    }
    Ok(lines.join("\n") + "\n")
}

/// Holds a file to what it should be; with UPDATE_MANIFESTS, writes it.
fn compare(file: &Path, wanted: &str) -> Result<()> {
    if env::var_os("UPDATE_MANIFESTS").is_some() {
        return Ok(fs::write(file, wanted)?);
    }
    let text = fs::read_to_string(file)?;
    let lines = text.lines().zip(wanted.lines());
    let first = lines.enumerate().find(|(_, (is, wanted))| is != wanted);
    ensure!(text == wanted, "{} is not what the chart says: make manifests\n{first:#?}", file.display());
    Ok(())
}

#[test]
fn generated_the_manifest_is_the_chart_with_every_feature_off_but_marked() -> Result<()> {
    let features = features().map(|(feature, values)| Ok((feature, plain(&values)?)));
    let features: Vec<_> = features.into_iter().collect::<Result<_>>()?;
    generated("deploy/istio-cni-node.yaml", &plain(&json!({"repair": {"enabled": false}}))?, &features)
}

#[test]
fn generated_the_taint_controllers_manifest_is_the_charts() -> Result<()> {
    let agents =
        json!({"name": "istio-cni", "selector": "k8s-app=istio-cni-node", "namespace": "istio-system"});
    let configmap = ("configmap", controller(&json!({"selectors": [agents]}))?);
    generated("deploy/taint-controller.yaml", &controller(&json!({}))?, &[configmap])
}

#[test]
fn generated_the_policy_is_the_charts_for_any_namespace() -> Result<()> {
    generated("deploy/own-node-only.yaml", &policy(&json!({}), NAMESPACE)?, &[])?;
    // As the head of the file says.
    let text = fs::read_to_string(project::file("deploy/own-node-only.yaml"))?;
    let elsewhere = text.replace(&format!(":{NAMESPACE}:"), ":mesh:");
    ensure!(text.contains(&format!("sed 's/:{NAMESPACE}:/:mesh:/' deploy/own-node-only.yaml")));
    ensure!(objects(&elsewhere)? == objects(&policy(&json!({}), "mesh")?.join("\n"))?);
    // Keys and names of one's own take the place of the defaults.
    let own = json!({
        "env": {"TAINT_KEY": "example.com/t", "TAINT_OLD_KEYS": "old-1, old-2", "NODE_CONDITION_TYPE": "example.com/C"},
        "repair": {"repairPods": false, "labelPods": true, "brokenPodLabelKey": "example.com/l"},
    });
    let own = objects(&policy(&own, NAMESPACE)?.join("\n"))?;
    let text = own[0].to_string();
    for (with, without) in [
        (r#"[\"example.com/t\",\"old-1\",\"old-2\"]"#, "cni.istio.io/not-ready"),
        (r#"\"example.com/C\""#, "cni.istio.io/Ready"),
        (r#"[\"example.com/l\"]"#, "cni.istio.io/uninitialized"),
    ] {
        ensure!(text.contains(with) && !text.contains(without), "{with}: {text}");
    }
    let alias = json!({"env": {"PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME": "example.com/a"}});
    ensure!(policy(&alias, NAMESPACE)?.join("\n").contains(r#"["example.com/a"]"#));
    Ok(())
}

#[test]
fn generated_the_policy_about_the_proxys_user_is_the_charts() -> Result<()> {
    let on = json!({"proxyUserPolicy": {"enabled": true}});
    let only = ["--show-only", "templates/proxy-user-policy.yaml"];
    generated("deploy/proxy-user-only.yaml", &without_helms(&rendered_with(&on, &only)?), &[])
}

#[test]
fn the_taints_key_is_the_same_for_all_that_know_it() -> Result<()> {
    const KEY: &str = "startup-taint.cluster-autoscaler.kubernetes.io/istio-cni-not-ready";
    let mut values = json!({"nodeTaint": {"enabled": true, "key": KEY}, "taintController": {"enabled": true}, "ownNodePolicy": {"enabled": true}});
    let text = rendered_without_tests(&values)?;
    ensure!(!text.contains("cni.istio.io/not-ready"), "the default is left somewhere");
    let all = objects(&text)?;
    let config = find(&all, "ConfigMap", "istio-cni-config")?;
    ensure!(config["data"]["TAINT_KEY"] == KEY, "{config}");
    let controller =
        find(&all, "Deployment", "istio-cni-taint-controller")?["spec"]["template"]["spec"].to_string();
    ensure!(controller.contains(&json!({"key": KEY, "operator": "Exists"}).to_string()), "{controller}");
    ensure!(controller.contains(&json!({"name": "TAINT_KEY", "value": KEY}).to_string()), "{controller}");
    let policy = find(&all, "ValidatingAdmissionPolicy", "istio-cni-own-node-only")?.to_string();
    ensure!(policy.matches(KEY).count() == 2, "{policy}");
    // The variables of before stand for it.
    for name in ["TAINT_KEY", "PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME"] {
        values["nodeTaint"] = json!({"enabled": true});
        values["env"] = json!({name: KEY});
        ensure!(rendered_without_tests(&values)? == text, "{name}");
    }
    Ok(())
}

/// What `helm uninstall` starts once everything else is gone.
#[test]
fn nodes_are_cleaned_after_releases_that_write_on_them() -> Result<()> {
    let hook = |values: &Value| -> Result<Vec<Value>> {
        let mut objects = objects(&rendered(values)?)?;
        objects.retain(|object| object["metadata"]["name"] == "istio-cni-cleanup");
        Ok(objects)
    };
    let in_part = |scope: &str| json!({"nodeTaint": {"enabled": true}, "global": {"resourceScope": scope}});
    for without in [json!({}), in_part("namespace"), in_part("cluster")] {
        ensure!(hook(&without)?.is_empty(), "{without}");
    }
    for feature in ["nodeTaint", "nodeCondition", "taintController"] {
        let objects = hook(&json!({feature: {"enabled": true}}))?;
        let mut kinds: Vec<_> = objects.iter().filter_map(|object| object["kind"].as_str()).collect();
        kinds.sort_unstable();
        let all = ["ClusterRole", "ClusterRoleBinding", "Job", "Role", "RoleBinding", "ServiceAccount"];
        ensure!(kinds == all, "{feature}: {kinds:?}");
        for object in &objects {
            let annotations = &object["metadata"]["annotations"];
            ensure!(annotations["helm.sh/hook"] == "post-delete", "{object}");
            // One that failed before is in nobody's way.
            let policy = annotations["helm.sh/hook-delete-policy"].as_str().unwrap_or_default();
            ensure!(policy.starts_with("before-hook-creation,hook-succeeded"), "{object}");
        }
    }
    let rights = |values: &Value| -> Result<String> {
        Ok(find(&hook(values)?, "ClusterRole", "istio-cni-cleanup")?["rules"].to_string())
    };
    ensure!(!rights(&json!({"nodeTaint": {"enabled": true}}))?.contains("\"pods\""), "it touches no pods");
    let labels = json!({"repair": {"repairPods": false, "labelPods": true, "brokenPodLabelKey": "example.com/broken"}});
    let of_pods = r#"{"apiGroups":[""],"resources":["pods"],"verbs":["list","patch"]}"#;
    ensure!(rights(&labels)?.contains(of_pods), "{}", rights(&labels)?);
    let own = json!({
        "repair": labels["repair"],
        "nodeTaint": {"enabled": true, "key": "example.com/t"},
        "env": {"TAINT_OLD_KEYS": "old-1,old-2", "NODE_CONDITION_TYPE": "example.com/C"},
    });
    let objects = hook(&own)?;
    let spec = &find(&objects, "Job", "istio-cni-cleanup")?["spec"];
    let (pod, helms_patience) = (&spec["template"], 300);
    ensure!(spec["activeDeadlineSeconds"].as_u64().is_some_and(|seconds| seconds < helms_patience), "{spec}");
    ensure!(pod["metadata"]["labels"]["k8s-app"].is_null(), "it would wait for itself: {pod}");
    for (name, value) in [
        ("TAINT_KEY", "example.com/t"),
        ("TAINT_OLD_KEYS", "old-1,old-2"),
        ("NODE_CONDITION_TYPE", "example.com/C"),
        ("REPAIR_LABEL_PODS", "true"),
        ("REPAIR_BROKEN_POD_LABEL_KEY", "example.com/broken"),
        ("REPAIR_BROKEN_POD_LABEL_VALUE", "true"),
    ] {
        let env = pod["spec"]["containers"][0]["env"].as_array().context("no env")?;
        ensure!(env.contains(&json!({"name": name, "value": value})), "{env:?}");
    }
    Ok(())
}

#[test]
fn the_policy_needs_an_api_server_that_knows_it() -> Result<()> {
    let on = ["--set", "ownNodePolicy.enabled=true,proxyUserPolicy.enabled=true", "--kube-version"];
    let old = rendering(&[&on[..], &["v1.29.9"]].concat())?;
    for name in ["ownNodePolicy", "proxyUserPolicy"] {
        let words = format!("{name}.enabled: needs Kubernetes 1.30 or newer; this is v1.29.9");
        ensure!(old.stderr.contains(&words), "{}", old.stderr);
    }
    ensure!(!old.status.success());
    for version in ["v1.30.0", "v1.30.0-gke.1", "v1.34.1+k3s1"] {
        rendering(&[&on[..], &[version]].concat())?.ok()?;
    }
    rendering(&["--kube-version", "v1.29.9"])?.ok().map(drop)
}

/// Holds a manifest, below its head, to the chart.
fn generated(path: &str, base: &[String], features: &[(&str, Vec<String>)]) -> Result<()> {
    let file = project::file(path);
    let text = fs::read_to_string(&file)?;
    let (head, _) = text.split_once("\napiVersion: ").context("no objects")?;
    compare(&file, &format!("{head}\n{}", manifest(base, features)?))?;
    for (feature, with) in features {
        let switched_on = fs::read_to_string(&file)?.replace(&format!("# {feature}: "), "");
        ensure!(objects(&switched_on)? == objects(&with.join("\n"))?, "{feature}");
    }
    Ok(())
}

#[test]
fn generated_values_yaml_shows_every_default_as_a_comment() -> Result<()> {
    let head = "# Every value, with its default. Values are commented out so that platform defaults apply first.\n\
                # Values stand at the top level, or, as in files for several of Istio's charts, under `cni`; those win. null is the default; for\n\
                # a list, the empty one. A name that is nearly one of these fails the installation; any other is ignored, and listed at its end.\n\n";
    let is_comment = |line: &str| line.is_empty() || line.starts_with('#');
    let comment = |line: &str| format!("{}{line}\n", if is_comment(line) { "" } else { "#" });
    let defaults: String = chart_file("files/defaults.yaml")?.lines().map(comment).collect();
    compare(&chart().join("values.yaml"), &format!("{head}{defaults}"))
}

#[test]
fn the_charts_version_is_the_projects() -> Result<()> {
    let about = yaml(&chart_file("Chart.yaml")?)?;
    for field in ["version", "appVersion"] {
        ensure!(about[field] == env!("CARGO_PKG_VERSION"), "{field}: {}", about[field]);
    }
    Ok(())
}

#[test]
fn istios_values_come_to_what_its_chart_makes_of_them_also_under_cni() -> Result<()> {
    let table =
        include_str!("../../manifests/chart-values.yaml").replace("VERSION", env!("CARGO_PKG_VERSION"));
    let rows = yaml(&table)?;
    for mut row in rows.as_array().context("no rows")?.clone() {
        let values = row.as_object_mut().context("no row")?.remove("values").context("no values")?;
        let nests = values.get("global").is_none() && values.get("cni").is_none();
        for values in [Some(values.clone()), nests.then(|| json!({"cni": values}))].into_iter().flatten() {
            let seen = seen(&objects(&rendered(&values)?)?)?;
            expect(&seen, &row, "").with_context(|| values.to_string())?;
        }
    }
    Ok(())
}

/// A release's chart says where its documentation is; one from the repository does not know.
#[test]
fn alerts_link_to_the_documentation_of_a_released_chart() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let released = folder.path().join("istio-cni");
    let (from, to) = (chart().display().to_string(), released.display().to_string());
    process::run(&mut process::command("cp", ["-r", &from, &to]), SHORT)?.ok()?;
    let mut about = fs::read_to_string(released.join("Chart.yaml"))?;
    about.push_str("home: https://example.com/mesh/tree/v1\n");
    fs::write(released.join("Chart.yaml"), about)?;
    let set = "prometheusRule.enabled=true,ambient.enabled=false";
    for (more, link) in [
        ("", "https://example.com/mesh/tree/v1/docs/tasks/alerts.md#istiocniagentnotready"),
        (
            ",prometheusRule.runbookUrl=https://example.com/alerts",
            "https://example.com/alerts#istiocniagentnotready",
        ),
    ] {
        let output = helm(None, &["template", "istio-cni", &to, "--set", &format!("{set}{more}")])?.ok()?;
        ensure!(output.stdout.contains(&format!("runbook_url: {link}")), "{link}: {}", output.stdout);
    }
    Ok(())
}

#[test]
fn alerts_and_dashboard_are_those_of_the_files_and_come_when_asked_for() -> Result<()> {
    let on = json!({
        "prometheusRule": {"enabled": true, "labels": {"release": "x"}, "runbookUrl": "https://example.com/alerts"},
        "grafanaDashboard": {"enabled": true},
        "podMonitor": {"enabled": true},
    });
    let all = objects(&rendered(&on)?)?;
    let rule = find(&all, "PrometheusRule", "istio-cni")?;
    let text =
        chart_file("files/rules.yaml")?.replace("docs/tasks/alerts.md#", "https://example.com/alerts#");
    ensure!(rule["spec"] == yaml(&text)?, "{}", rule["spec"]);
    ensure!(rule["metadata"]["labels"]["release"] == "x");
    let board = find(&all, "ConfigMap", "istio-cni-dashboard")?;
    let data: Value =
        serde_json::from_str(board["data"]["istio-cni.json"].as_str().context("no dashboard")?)?;
    ensure!(data == serde_json::from_str::<Value>(&chart_file("files/dashboard.json")?)?);
    ensure!(board["metadata"]["labels"]["grafana_dashboard"] == "1");
    // Both speak of nodes by this label.
    let endpoint = &find(&all, "PodMonitor", "istio-cni")?["spec"]["podMetricsEndpoints"][0];
    ensure!(endpoint["relabelings"][0]["targetLabel"] == "node", "{endpoint}");
    for values in [
        json!({}),
        json!({"prometheusRule": on["prometheusRule"], "grafanaDashboard": {"enabled": true}, "monitoringPort": 0}),
    ] {
        let all = objects(&rendered(&values)?)?;
        ensure!(find(&all, "PrometheusRule", "istio-cni").is_err(), "{values}");
        ensure!(find(&all, "ConfigMap", "istio-cni-dashboard").is_err(), "{values}");
    }
    let own = rendered(&json!({"grafanaDashboard": {"enabled": true, "labels": {"board": "yes"}}}))?;
    let labels = find(&objects(&own)?, "ConfigMap", "istio-cni-dashboard")?["metadata"]["labels"].clone();
    ensure!(labels["board"] == "yes" && labels["grafana_dashboard"].is_null(), "{labels}");
    Ok(())
}

#[test]
fn gke_is_known_by_its_api_server() -> Result<()> {
    let output = rendering(&["--kube-version", "v1.33.5-gke.1080000"])?.ok()?;
    let objects = objects(&output.stdout)?;
    ensure!(
        daemon_set(&objects)?["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"]
            == "/home/kubernetes/bin"
    );
    find(&objects, "ResourceQuota", "istio-cni-resource-quota")?;
    Ok(())
}

#[test]
fn every_variable_is_a_setting_that_is_in_force() -> Result<()> {
    let reference = fs::read_to_string(project::file("docs/reference/agent.md"))?;
    let (_, settings) = reference.split_once("<!-- settings -->").context("no settings")?;
    let (in_force, _) = settings.split_once("Not in force:").context("no settings without effect")?;
    let items = in_force.lines().filter(|line| line.starts_with("- `"));
    let names = |item: &str| -> Vec<String> {
        let names = item.split(": ").next().unwrap_or_default();
        names
            .split(" (")
            .next()
            .unwrap_or_default()
            .split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect()
    };
    let known: BTreeSet<String> = items.flat_map(names).collect();
    ensure!(known.contains("REPAIR_REPAIR_PODS") && known.contains("AMBIENT_ENABLED"), "{known:?}");
    let variables = yaml(&chart_file("files/variables.yaml")?)?;
    let listed =
        |part: &str| -> Result<BTreeSet<String>> { Ok(serde_json::from_value(variables[part].clone())?) };
    let values: BTreeMap<String, String> = serde_json::from_value(variables["values"].clone())?;
    let mut told: BTreeSet<String> = values.into_keys().chain(listed("chart")?).collect();
    told.extend(listed("refused")?.into_iter().chain(listed("others")?));
    let named: BTreeSet<String> = known.iter().filter(|name| !name.starts_with("--")).cloned().collect();
    ensure!(told == named, "files/variables.yaml: {:?}", told.symmetric_difference(&named));
    let mut set = BTreeSet::new();
    for file in values_files()? {
        let output = rendering(&["--values", &file.display().to_string()])?.ok()?;
        let objects = objects(&output.stdout)?;
        if daemon_set(&objects).is_ok() {
            set.extend(environment(&objects)?.into_keys());
        }
    }
    ensure!(set.len() >= 25, "{set:?}");
    let unknown: Vec<&String> = set.difference(&known).collect();
    ensure!(unknown.is_empty(), "{unknown:?}");
    Ok(())
}

/// The words of a refusal.
fn refusal(set: &str) -> Result<String> {
    let output = rendering(&["--set", set])?;
    ensure!(!output.status.success(), "{set} is rendered");
    Ok(output.stderr)
}

#[test]
fn a_misspelt_value_fails_with_the_one_that_was_meant() -> Result<()> {
    for (given, meant) in [
        (
            "repair.repairPod=true",
            "repair.repairPod is not a value of this chart; did you mean repair.repairPods?",
        ),
        ("excludeNamespace={a}", "did you mean excludeNamespaces?"),
        ("cniBinDri=/x", "did you mean cniBinDir?"),
        ("cni_bin_dir=/x", "did you mean cniBinDir?"),
        ("cni.Chained=false", "cni.Chained is not a value of this chart; did you mean cni.chained?"),
        ("deletePods=true", "did you mean repair.deletePods?"),
        ("cni.deletePods=true", "did you mean cni.repair.deletePods?"),
        ("nativeNftables=true", "did you mean global.nativeNftables?"),
        ("global.platfrom=gke", "did you mean global.platform?"),
        ("driftWatch.intervall=5m", "did you mean driftWatch.interval?"),
        ("platform=k4s", "platform: \"k4s\" is not one of gke, k3d, k3s, microk8s, minikube, openshift"),
        ("profile=defualt", "profile: \"defualt\" is not one of ambient, default"),
        ("compatibilityVersion=1.12", "compatibilityVersion: \"1.12\" is not a minor version of Istio"),
        ("chained=no", "chained: Invalid type"),
        ("cniBinDir=opt/cni/bin", "cniBinDir: Does not match pattern"),
        ("podLabels.k8s-app=x", "podLabels: k8s-app is what the DaemonSet selects its pods by"),
        ("env.REPAIR_ENABLED=maybe", "env.REPAIR_ENABLED: \"maybe\" is not a value for repair.enabled"),
        ("env.MONITORING_PORT=x", "env.MONITORING_PORT: \"x\" is not a value for monitoringPort"),
        ("env.PLUGIN_SERVICE_ACCOUNT=x", "env.PLUGIN_SERVICE_ACCOUNT: set pluginToken.enabled"),
        ("defaults.cni.chained=false", "defaults: Istio's chart refuses this too"),
        ("taintControler.enabled=true", "did you mean taintController?"),
        (
            "taintController.enabled=true,taintController.healthPort=8000",
            "taintController.healthPort: the agents have port 8000",
        ),
        ("taintController.selectors[0].name=x", "selector"),
    ] {
        let words = refusal(given)?;
        ensure!(words.contains(meant), "{given}: {words}");
    }
    let both = refusal("excludeNamespace={a},repair.repairPod=true")?;
    ensure!(
        both.contains("did you mean excludeNamespaces") && both.contains("did you mean repair.repairPods"),
        "{both}"
    );
    Ok(())
}

#[test]
fn every_value_has_a_change_that_is_tried() -> Result<()> {
    let mut values = BTreeSet::new();
    leaves("", &yaml(&chart_file("files/defaults.yaml")?)?, &mut values);
    let tried: BTreeSet<String> = changes()?.keys().cloned().collect();
    let differ: Vec<_> = values.symmetric_difference(&tried).collect();
    ensure!(
        differ.is_empty(),
        "files/defaults.yaml or e2e/manifests/chart-changes.yaml alone has {differ:?}"
    );
    Ok(())
}

/// The paths of all values that hold no others.
fn leaves(at: &str, value: &Value, paths: &mut BTreeSet<String>) {
    match value.as_object().filter(|fields| !fields.is_empty()) {
        Some(fields) => {
            for (name, value) in fields {
                let dot = if at.is_empty() { "" } else { "." };
                leaves(&format!("{at}{dot}{name}"), value, paths);
            }
        }
        None => {
            paths.insert(at.to_owned());
        }
    }
}

#[test]
fn values_of_istios_other_charts_do_not_matter() -> Result<()> {
    let others = json!({
        "pilot": {"cni": {"enabled": true}}, "meshConfig": {"accessLogFile": "/dev/stdout"}, "istio_cni": {"chained": true},
        "sidecarInjectorWebhook": {}, "gateways": {}, "base": {}, "ztunnel": {}, "cni": {"enabled": true},
        "global": {"istioNamespace": "istio-system", "proxy": {"autoInject": "enabled"}, "network": "n", "meshID": "m"},
    });
    ensure!(rendered(&others)? == rendered(&json!({}))?, "they change something");
    Ok(())
}

/// What is rendered without a cluster may be applied to one whose pods are in ambient mode.
#[test]
fn without_a_cluster_helm_has_to_be_told_whether_ambient_mode_is_on() -> Result<()> {
    for values in ["profile=default", "ambient.dnsCapture=false", "ambient.enabled=null", "cni.ambient=null"]
    {
        let untold = rendering_as_given(&["--set", values])?;
        let words = untold.stderr;
        ensure!(
            !untold.status.success() && words.contains("set ambient.enabled=false if none is"),
            "{values}: {words}"
        );
    }
    for values in ["ambient.enabled=false", "cni.ambient.enabled=false", "env.AMBIENT_ENABLED=false"] {
        rendering_as_given(&["--set", values])?.ok().context(values)?;
    }
    Ok(())
}

/// Every way to switch ambient mode on brings the same, and all that it brings.
#[test]
fn ambient_mode_brings_its_rights_mounts_and_settings_and_nothing_is_left_without_it() -> Result<()> {
    let on = |set: &str| -> Result<Vec<Value>> {
        let args = ["--no-hooks", "--set", &format!("repair.enabled=false,{set}")];
        objects(&rendering_as_given(&args)?.ok()?.stdout)
    };
    let ambient = on("ambient.enabled=true")?;
    for set in
        ["cni.ambient.enabled=true", "profile=ambient", "global.profile=ambient", "env.AMBIENT_ENABLED=true"]
    {
        ensure!(on(set)? == ambient, "{set}");
    }
    let off = on("profile=default,ambient.enabled=false")?;
    ensure!(on("profile=ambient,ambient.enabled=false")? == off, "what is given wins over the profile");
    let rights = |objects: &[Value], role: &str| granted(objects, "ClusterRole", role);
    let more = |role: &str| -> Result<Vec<String>> {
        Ok(rights(&ambient, role)?.difference(&rights(&off, role)?).cloned().collect())
    };
    ensure!(more("istio-cni-plugin")? == ["namespaces: get"], "{:?}", more("istio-cni-plugin")?);
    let of_agent = [
        "events: create",
        "namespaces: get",
        "namespaces: list",
        "namespaces: watch",
        "pods/status: patch",
        "pods: list",
        "pods: watch",
    ];
    ensure!(more("istio-cni")? == of_agent, "{:?}", more("istio-cni")?);
    let pod = &daemon_set(&ambient)?["spec"]["template"]["spec"];
    let mounts = pod["containers"][0]["volumeMounts"].to_string();
    for mount in ["/var/run/ztunnel", "/host/proc", "/host/var/run/netns", "/var/run/istio-cni"] {
        ensure!(mounts.contains(&json!(mount).to_string()), "{mount}: {mounts}");
    }
    let before: BTreeMap<String, String> = environment(&off)?;
    let mut now = environment(&ambient)?;
    now.retain(|name, value| before.get(name) != Some(value));
    ensure!(now == BTreeMap::from([("AMBIENT_ENABLED".to_owned(), "true".to_owned())]), "{now:?}");
    ensure!(
        !format!("{off:?}").contains("ztunnel") && !rights(&off, "istio-cni")?.contains("namespaces: get")
    );
    let wrong = refusal("ambient.enabled=true,ambient.enablementSelectors[0].pods.matchLabels.a=b")?;
    ensure!(wrong.contains("enablementSelectors"), "{wrong}");
    Ok(())
}

#[test]
fn pods_roll_for_settings_that_are_read_at_the_start_and_for_no_others() -> Result<()> {
    let template = |values: Value| -> Result<Value> {
        Ok(daemon_set(&objects(&rendered(&values)?)?)?["spec"]["template"].clone())
    };
    let before = template(json!({}))?;
    for followed in [
        json!({"excludeNamespaces": ["x"]}),
        json!({"logging": {"level": "debug"}}),
        json!({"strictCapture": true}),
        json!({"global": {"nativeNftables": true}}),
        json!({"nftSets": true, "global": {"nativeNftables": true}}),
        // Where repairs are made in place, the agent may already what the watch needs.
        json!({"driftWatch": {"interval": "5m"}}),
        json!({"driftWatch": {"interval": "5m", "heal": true}}),
    ] {
        ensure!(template(followed.clone())? == before, "{followed} rolls the pods");
    }
    for fixed in [
        json!({"chained": false}),
        json!({"cniConfFileName": "x.conflist"}),
        json!({"readyBeforeCalled": true}),
        json!({"env": {"KUBECONFIG_MODE": "0640"}}),
        json!({"repair": {"initContainerName": "x"}}),
    ] {
        ensure!(template(fixed.clone())? != before, "{fixed} does not roll the pods");
    }
    Ok(())
}

/// Where something is the number that it should spell.
fn numbers(at: &str, value: &Value, number: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(is) if is.to_string() == number => found.push(at.to_owned()),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                numbers(&format!("{at}/{index}"), item, number, found);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                numbers(&format!("{at}/{name}"), field, number, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn a_namespace_release_or_revision_of_digits_stays_text() -> Result<()> {
    let (digits, others) = ("20260", "20261");
    let on = json!({"enabled": true});
    let values = json!({
        "platform": "openshift", "provider": "multus", "revision": digits, "ambient": on, "resourceQuotas": on,
        "podMonitor": on, "prometheusRule": on, "grafanaDashboard": on, "pluginToken": on, "nodeTaint": on,
        "ownNodePolicy": on, "global": {"networkPolicy": on},
        "taintController": {
            "enabled": true,
            "selectors": [{"name": "other", "selector": "app=other", "namespace": others}],
        },
    });
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), values.to_string())?;
    let (chart, file) = (chart().display().to_string(), file.path().display().to_string());
    let text =
        helm(None, &["template", digits, &chart, "--namespace", digits, "--values", &file])?.ok()?.stdout;
    let mut found = Vec::new();
    for object in objects(&text)? {
        let at = format!("{} {}", object["kind"], object["metadata"]["name"]);
        numbers(&at, &object, digits, &mut found);
        numbers(&at, &object, others, &mut found);
    }
    ensure!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

/// The value that switches a feature on, as docs/get-started/install.md names it; all values of which it takes; and what the agent does then, as docs/reference/privileges.md
/// has it.
fn privileged_features() -> [(&'static str, Value, &'static str); 8] {
    let [watch, heal, in_place, delete, label, taint, condition, ambient] =
        features().map(|(_, values)| values);
    let only_installs = "installs and keeps the plugin";
    [
        ("repair.repairPods", in_place, "repairs in place"),
        ("repair.deletePods", delete, only_installs),
        ("repair.labelPods", label, only_installs),
        ("driftWatch.interval", watch, "watches for drift"),
        ("driftWatch.heal", heal, "heals"),
        ("nodeTaint.enabled", taint, "probes for taint or condition"),
        ("nodeCondition.enabled", condition, "probes for taint or condition"),
        ("ambient.enabled", ambient, "heals"),
    ]
}

/// What a container may do beyond what any process may, as setpriv(1) has the names.
fn capabilities(container: &Value) -> Result<BTreeSet<String>> {
    let capabilities = &container["securityContext"]["capabilities"];
    ensure!(capabilities["drop"] == json!(["ALL"]), "{capabilities}");
    let added = capabilities["add"].as_array().cloned().unwrap_or_default();
    added.iter().map(|name| Ok(name.as_str().context("no name")?.to_lowercase())).collect()
}

fn agents_capabilities(values: &Value) -> Result<BTreeSet<String>> {
    let objects = objects(&rendered(values)?)?;
    capabilities(&daemon_set(&objects)?["spec"]["template"]["spec"]["containers"][0])
}

/// The table of docs/get-started/install.md: by value, the capabilities.
fn told_by_the_guide() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let page = fs::read_to_string(project::file("docs/get-started/install.md"))?;
    let lines = page.lines().skip_while(|line| !line.starts_with("| value | capabilities |")).skip(2);
    let row = |line: &str| -> Result<(String, BTreeSet<String>)> {
        let value = line.split('`').nth(1).context("no value")?;
        let told = line.split('|').nth(2).context("no capabilities")?.trim();
        let names = told.split(';').next().unwrap_or_default().split(", ").filter(|name| *name != "none");
        Ok((value.to_owned(), names.map(str::to_lowercase).collect()))
    };
    lines.take_while(|line| line.starts_with('|')).map(row).collect()
}

#[test]
fn the_agent_gets_the_capabilities_that_the_pages_name_and_no_others() -> Result<()> {
    let needs = |does: &str| anyhow::Ok(BTreeSet::from_iter(privileges::needs("install-cni", does)?));
    let off = json!({"repair": {"enabled": false}});
    ensure!(agents_capabilities(&off)? == needs("installs and keeps the plugin")?);
    let mut told = told_by_the_guide()?;
    let (mut together, mut of_all) = (json!({}), BTreeSet::new());
    for (value, values, does) in privileged_features() {
        let (is, needed) = (agents_capabilities(&values)?, needs(does)?);
        ensure!(
            is == needed,
            "{value}: the chart gives {is:?}, docs/reference/privileges.md says {needed:?}"
        );
        let told = told.remove(value);
        ensure!(
            told.as_ref() == Some(&is),
            "{value}: the chart gives {is:?}, docs/get-started/install.md says {told:?}"
        );
        for (name, fields) in values.as_object().context("no values")? {
            for (field, value) in fields.as_object().context("no fields")? {
                together[name][field] = value.clone();
            }
        }
        of_all.extend(needed);
    }
    // Of several repairs one is made; the last of the table is not the one with capabilities.
    together["repair"] = json!({"enabled": true, "repairPods": true});
    ensure!(agents_capabilities(&together)? == of_all, "{together}");
    let more = needs("the same where the node's directories belong to another user")?;
    let asked: Vec<String> = more.iter().map(|name| name.to_uppercase()).collect();
    ensure!(agents_capabilities(&json!({"repair": {"enabled": false}, "extraCapabilities": asked}))? == more);

    let controller = objects(&controller(&json!({}))?.join("\n"))?;
    let deployment =
        controller.iter().find(|object| object["kind"] == "Deployment").context("no Deployment")?;
    let is = capabilities(&deployment["spec"]["template"]["spec"]["containers"][0])?;
    ensure!(is == BTreeSet::from_iter(privileges::needs("install-cni taint-controller", "taints nodes")?));
    ensure!(told.remove("taintController.enabled") == Some(is) && told.is_empty(), "{told:?}");
    Ok(())
}

/// What the pages say of an agent with the chart's defaults.
#[test]
fn the_pages_name_the_capabilities_of_the_charts_defaults() -> Result<()> {
    let names: Vec<String> =
        agents_capabilities(&json!({}))?.iter().map(|name| name.to_uppercase()).collect();
    let (last, first) = names.split_last().context("no capabilities by default")?;
    let words = format!("by default {} and {last}", first.join(", "));
    for page in ["README.md", "docs/get-started/install.md"] {
        let text = fs::read_to_string(project::file(page))?;
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(text.contains(&words), "{page} does not say: {words}");
    }
    let table = fs::read_to_string(project::file("docs/get-started/install.md"))?;
    let default = table.lines().filter(|line| line.contains("` (default) |"));
    let default: Vec<&str> = default.filter_map(|line| line.split('`').nth(1)).collect();
    let environment = environment(&objects(&rendered(&json!({}))?)?)?;
    let switched_on =
        environment.iter().filter(|(name, value)| name.starts_with("REPAIR_") && *value == "true");
    let switched_on: Vec<&str> = switched_on.map(|(name, _)| name.as_str()).collect();
    ensure!(
        default == ["repair.repairPods"] && switched_on == ["REPAIR_REPAIR_PODS"],
        "{default:?} {switched_on:?}"
    );
    Ok(())
}

/// What a role lets its account do, in words: resources, verbs, and the namespace of those of a Role.
fn granted(objects: &[Value], kind: &str, name: &str) -> Result<BTreeSet<String>> {
    let Ok(role) = find(objects, kind, name) else { return Ok(BTreeSet::new()) };
    let list =
        |rule: &Value, part: &str| -> Result<Vec<String>> { Ok(serde_json::from_value(rule[part].clone())?) };
    let place = role["metadata"]["namespace"].as_str().map(|name| format!(" in namespace {name}"));
    let mut all = BTreeSet::new();
    for rule in role["rules"].as_array().context("no rules")? {
        for (resource, verb) in list(rule, "resources")?.iter().flat_map(|resource| {
            list(rule, "verbs").unwrap_or_default().into_iter().map(move |verb| (resource.clone(), verb))
        }) {
            all.insert(format!("{resource}{}: {verb}", place.as_deref().unwrap_or_default()));
        }
    }
    Ok(all)
}

/// The rights that a row of the table in docs/get-started/install.md names.
fn rights_of_row(row: &str) -> BTreeSet<String> {
    let cell = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default().trim();
    let rights = cell.split("; ").filter_map(|right| right.split_once(": "));
    let each = rights.flat_map(|(resources, verbs)| {
        resources
            .split(", ")
            .flat_map(move |resource| verbs.split(", ").map(move |verb| format!("{resource}: {verb}")))
    });
    each.collect()
}

#[test]
fn the_table_of_rights_is_what_the_roles_grant() -> Result<()> {
    let page = fs::read_to_string(project::file("docs/get-started/install.md"))?;
    let of = |values: &Value| -> Result<BTreeSet<String>> {
        let objects = objects(&rendered(values)?)?;
        let events = granted(&objects, "Role", "istio-cni-node-events")?;
        Ok(granted(&objects, "ClusterRole", "istio-cni")?.into_iter().chain(events).collect())
    };
    let off = of(&json!({"repair": {"enabled": false}}))?;
    for (value, values, _) in privileged_features() {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{value}`"))).context(value)?;
        let granted: BTreeSet<String> = of(&values)?.difference(&off).cloned().collect();
        ensure!(rights_of_row(row) == granted, "{value}: {granted:?}, the page says: {row}");
    }
    Ok(())
}

#[test]
fn the_base_for_kustomize_has_every_object_of_the_manifest() -> Result<()> {
    let folder = project::file("deploy");
    let kubectl = tools::built("kubectl")?;
    let mut command = process::command(kubectl, ["kustomize", &folder.display().to_string()]);
    let built = objects(&process::run(&mut command, SHORT)?.ok()?.stdout)?;
    let manifest = objects(&fs::read_to_string(folder.join("istio-cni-node.yaml"))?)?;
    for object in &manifest {
        ensure!(built.contains(object), "{object:#}");
    }
    ensure!(built.len() == manifest.len(), "{} instead of {}", built.len(), manifest.len());
    Ok(())
}
