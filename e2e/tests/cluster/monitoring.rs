//! The alerts and the dashboard: Prometheus takes them, what they name exists, and each alert fires for its cause.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter;
use std::os::unix::net::UnixStream;

use crate::monitoring_support::{
    Fleet, TARGET_LABELS, alert_test, alerts, changed, controller, dashboard, inhibit_names, known, name,
    others, panel_queries, panels, parsed, promtool, read, run_alert_tests, sent, unchanged,
    variable_queries,
};
use e2e::agent::{Agent, CALICO, Node, exchange, get};
use serde::Deserialize;
use serde_json::{Value, json};
use test_support::project;

fn metrics(agent: &Agent<'_>) -> String {
    (0..5).find_map(|_| get(agent.node.monitoring, "/metrics")).expect("metrics").1
}

/// What is scraped of an agent with its default settings, on a node where all is well.
fn healthy() -> String {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    metrics(&agent)
}

#[test]
fn prometheus_takes_the_alerts_and_every_query() {
    let rules: Value =
        serde_saphyr::from_str(&read("deploy/charts/istio-cni/files/rules.yaml")).expect("YAML");
    assert_eq!(promtool(&["check", "rules"], &rules), Ok(()));
    // promtool parses expressions of rules only, so the dashboard's are made rules.
    let queries = panel_queries().into_iter().chain(variable_queries().into_iter().map(|(query, _)| query));
    let rules: Vec<Value> = queries
        .enumerate()
        .map(|(number, query)| json!({"record": format!("query_{number}"), "expr": query}))
        .collect();
    assert!(rules.len() > 50, "{}", rules.len());
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    assert_eq!(promtool(&["check", "rules"], &rules), Ok(()));
    let broken = json!({"groups": [{"name": "x", "rules": [{"record": "x", "expr": "sum by (x"}]}]});
    assert!(promtool(&["check", "rules"], &broken).is_err());
}

/// Debian's promtool knows nothing of Kubernetes, so that part is held to the manifests instead.
#[test]
fn prometheus_takes_the_scrape_configuration() {
    let text = read("deploy/monitoring/scrape.yaml");
    let mut file: Value = serde_saphyr::from_str(&text).expect("YAML");
    let rules = project::file("deploy/monitoring").join(file["rule_files"][0].as_str().expect("a file"));
    file["rule_files"] = json!([rules]);
    let jobs = file["scrape_configs"].as_array_mut().expect("jobs");
    for (job, manifest) in jobs.iter_mut().zip(["istio-cni-node.yaml", "taint-controller.yaml"]) {
        let found = job.as_object_mut().expect("a job").remove("kubernetes_sd_configs").expect("pods");
        let label = found[0]["selectors"][0]["label"].as_str().expect("a label").replace('=', ": ");
        let manifest = read(&format!("deploy/{manifest}"));
        assert!(manifest.contains(&label), "{label}");
        assert!(manifest.contains("{name: metrics, containerPort: "), "a port of that name");
        assert!(manifest.contains("namespace: istio-system"));
    }
    assert_eq!(promtool(&["check", "config"], &file), Ok(()));
}

#[test]
fn queries_name_no_metric_label_or_value_that_does_not_exist() {
    let scraped = healthy() + &controller();
    let expressions = alerts().into_iter().map(|alert| alert["expr"].as_str().expect("text").to_owned());
    let expressions: Vec<String> = expressions.chain(panel_queries()).collect();
    let wrong: Vec<String> = expressions
        .iter()
        .zip(parsed(&expressions))
        .flat_map(|(expression, names)| {
            misnamed(&names, &scraped).into_iter().map(move |what| format!("{what}: {expression}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    // It sees what is wrong.
    for (query, wrong) in [
        ("istio_cni_install_readi", "istio_cni_install_readi"),
        (r#"istio_cni_meshed_pods{stat="drifted"}"#, "stat"),
        (r#"istio_cni_meshed_pods{state=~"drifted|lost"}"#, "lost"),
        ("sum by (reason) (istio_cni_meshed_pods)", "reason"),
        ("up and on (version) istio_cni_build_info", "version"),
    ] {
        let names = parsed(&[query.to_owned()]).remove(0);
        assert_eq!(misnamed(&names, &scraped), [wrong], "{query}");
    }
    for (query, label) in variable_queries() {
        let known = known();
        assert!(known.keys().any(|metric| query.contains(metric.as_str())), "{query}");
        assert!(TARGET_LABELS.contains(&label.as_str()), "{label}");
    }
}

/// What an expression names and does not exist.
fn misnamed(names: &Value, scraped: &str) -> Vec<String> {
    let known = known();
    let labels = |metric: &str| -> Option<Vec<&str>> {
        let own = if metric == "up" { Vec::new() } else { known.get(metric)?.1.clone() };
        Some([&own[..], &TARGET_LABELS].concat())
    };
    let mut wrong = BTreeSet::new();
    for selector in names["selectors"].as_array().expect("selectors") {
        let metric = selector["metric"].as_str().expect("a metric");
        let Some(labels) = labels(metric) else {
            wrong.insert(metric.to_owned());
            continue;
        };
        for matcher in selector["matchers"].as_array().expect("matchers") {
            let label = matcher["label"].as_str().expect("a label");
            if !labels.contains(&label) {
                wrong.insert(label.to_owned());
            } else if !TARGET_LABELS.contains(&label) {
                let values = matcher["value"].as_str().expect("a value").split('|');
                let help = known.get(metric).map_or_else(String::new, |(row, _)| (row.help)());
                let missing = values.filter(|value| !is_value(metric, label, value, &help, scraped));
                wrong.extend(missing.map(str::to_owned));
            }
        }
    }
    for grouping in names["groupings"].as_array().expect("groupings") {
        let metrics: Vec<&str> = texts(&grouping["metrics"]);
        for label in texts(&grouping["labels"]) {
            let has = |metric: &&str| labels(metric).is_none_or(|labels| labels.contains(&label));
            if !metrics.iter().all(has) {
                wrong.insert(label.to_owned());
            }
        }
    }
    wrong.into_iter().collect()
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().map(|list| list.iter().filter_map(Value::as_str).collect()).unwrap_or_default()
}

/// Whether a label has the value in what was scraped, or, where that only comes with an event, by the reference.
fn is_value(metric: &str, label: &str, value: &str, help: &str, scraped: &str) -> bool {
    let pair = format!("{label}=\"{value}\"");
    let mut series = scraped.lines().filter(|line| line.split('{').next() == Some(metric));
    let is_word = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
    series.any(|line| line.contains(&pair))
        || help.split(|byte| !is_word(byte)).any(|word| word == value)
        || metric == "istio_cni_plugin_add_total"
            && read("docs/reference/cni-plugin.md").contains(&format!("\n- {value}: "))
}

#[test]
fn the_dashboard_shows_every_metric() {
    let shown: BTreeSet<String> = parsed(&panel_queries())
        .iter()
        .flat_map(|names| names["selectors"].as_array().expect("selectors").clone())
        .map(|selector| selector["metric"].as_str().expect("a metric").trim_end_matches("_bucket").to_owned())
        .collect();
    let missing: Vec<String> = known()
        .into_values()
        .map(|(row, _)| row.name.to_owned())
        .filter(|metric| !shown.contains(metric))
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn panels_say_what_they_show_and_do_not_overlap() {
    let mut taken = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in dashboard()["panels"].as_array().expect("panels") {
        assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{panel}");
        let [x, y, width, height] =
            ["x", "y", "w", "h"].map(|field| panel["gridPos"][field].as_u64().expect("a place"));
        assert!(x + width <= 24, "{panel}");
        for place in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
            assert!(taken.insert(place), "{panel}");
        }
    }
    for panel in panels() {
        assert!(panel["description"].as_str().is_some_and(|text| text.len() > 10), "{}", panel["title"]);
        for target in panel["targets"].as_array().expect("targets") {
            assert!(
                target["legendFormat"].as_str().is_some_and(|text| !text.is_empty()),
                "{}",
                panel["title"]
            );
        }
    }
}

/// What the taint controller counts is the cluster's.
#[test]
fn panels_show_the_node_that_is_chosen() {
    for panel in panels() {
        for target in panel["targets"].as_array().expect("targets") {
            let query = target["expr"].as_str().expect("a query");
            let (all, chosen) = (query.matches("{job=~").count(), query.matches("node=~\"$node\"").count());
            assert!(all == chosen || query.contains("istio_cni_taint_controller_"), "{query}");
        }
    }
}

/// A page is for the fleet, and for traffic that bypasses the proxy altogether; all else is a ticket.
#[test]
fn five_alerts_at_most_page_somebody() {
    let critical = alerts().into_iter().filter(|alert| alert["labels"]["severity"] == "critical");
    let critical: Vec<String> = critical.map(|alert| name(&alert).to_owned()).collect();
    assert!(critical.len() <= 5, "{critical:?}");
    let is_of_a_fleet = |name: &&String| name.starts_with("IstioCniFleet") || *name == "IstioCniNoAgents";
    let others: Vec<&String> = critical.iter().filter(|name| !is_of_a_fleet(name)).collect();
    assert_eq!(others, ["IstioCniPodsNotRedirected"]);
}

#[test]
fn every_alert_has_a_section_in_the_runbook_and_every_section_an_alert() {
    let text = read("docs/tasks/alerts.md");
    let sections: BTreeMap<&str, &str> =
        text.split("\n### ").skip(1).filter_map(|section| section.split_once('\n')).collect();
    let named: BTreeSet<String> = alerts().iter().map(|alert| name(alert).to_owned()).collect();
    assert_eq!(sections.keys().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(), named);
    for alert in alerts() {
        let name = name(&alert);
        let anchor = format!("docs/tasks/alerts.md#{}", name.to_lowercase());
        assert_eq!(alert["annotations"]["runbook_url"], json!(anchor));
        let severity = alert["labels"]["severity"].as_str().expect("a severity");
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        let section = sections[name];
        let after = alert["for"].as_str().unwrap_or("at once");
        assert!(
            section.starts_with(&format!("\n{severity}, {after}\n")),
            "{name}: {severity}, {after}: {section}"
        );
        for part in ["**First**: ", "**Causes**: ", "**Remedy**: "] {
            assert!(section.contains(part), "{name} lacks {part}");
        }
    }
}

/// The values of series, by their names.
type Series = BTreeMap<String, String>;

/// A cause: the alert it raises, a minute before and one after the alert fires, and the series that show it.
#[derive(Deserialize)]
struct Cause {
    /// What a ticket is about.
    #[serde(default)]
    about: String,
    alert: String,
    /// Alerts on nodes that fire beside that of the fleet and are silenced.
    #[serde(default)]
    beside: Vec<String>,
    minutes: (usize, usize),
    series: Series,
}

#[derive(Deserialize)]
struct Harmless {
    about: String,
    series: Series,
}

#[derive(Deserialize)]
struct Causes {
    causes: Vec<Cause>,
    fleet: Vec<Cause>,
    harmless: Vec<Harmless>,
    tickets: Vec<Cause>,
}

fn causes() -> Causes {
    let text = include_str!("../../fixtures/alert-causes.yaml");
    serde_saphyr::from_str(&text.replace("VERSION", env!("CARGO_PKG_VERSION"))).expect("YAML")
}

#[test]
fn each_alert_fires_for_its_cause_and_no_other_does() {
    let Causes { causes, fleet, harmless, tickets } = causes();
    let of_fleet = fleet.iter().map(|cause| &*cause.alert).collect::<BTreeSet<_>>();
    let all = alerts();
    let caused: Vec<&str> = causes.iter().map(|cause| &*cause.alert).chain(of_fleet).collect();
    assert_eq!(caused, all.iter().map(name).collect::<Vec<_>>(), "one cause for each alert, in their order");
    let healthy = healthy();
    let mut tests = Vec::new();
    for Cause { about, alert, minutes: (quiet, fires), series, .. } in causes.iter().chain(&tickets) {
        let about = if about.is_empty() { alert } else { about };
        tests.push(alert_test(about, with(&healthy, series, *fires), &[(*quiet, &[]), (*fires, &[alert])]));
    }
    for Cause { alert, beside, minutes: (quiet, fires), series, .. } in &fleet {
        // Those of nodes do not wait for it; they are asked for once it fires.
        let firing: Vec<&str> = iter::once(alert).chain(beside).map(String::as_str).collect();
        tests.push(alert_test(alert, with(&healthy, series, *fires), &[(29, &[]), (*fires, &firing)]));
        tests.push(alert_test(alert, with(&healthy, series, *quiet), &[(*quiet, &[])]));
    }
    for Harmless { about, series } in &harmless {
        tests.push(alert_test(about, with(&healthy, series, 120), &[(29, &[]), (60, &[]), (120, &[])]));
    }
    run_alert_tests(&tests);
}

/// A healthy agent, eleven others and a healthy taint controller, but for some series; `others/` marks those of the others.
fn with(healthy: &str, series: &Series, minutes: usize) -> Fleet {
    let mut fleet = Fleet {
        agent: unchanged(&format!("{healthy}up 1\n"), minutes),
        others: others(minutes),
        controller: unchanged(&format!("{}up 1\n", controller()), minutes),
    };
    let known = known();
    for (name, values) in series {
        let (target, name) = match name.strip_prefix("others/") {
            Some(name) => (&mut fleet.others, name),
            None if name.starts_with("istio_cni_taint_controller") => (&mut fleet.controller, name.as_str()),
            None => (&mut fleet.agent, name.as_str()),
        };
        let metric = name.split('{').next().expect("a name");
        assert!(metric == "up" || known.contains_key(metric), "{metric}");
        target.insert(name.to_owned(), values.clone());
    }
    fleet
}

#[test]
fn an_alert_on_the_fleet_silences_those_on_its_nodes_and_a_cause_its_consequence() {
    let agents = ("job", "istio-system/istio-cni");
    let of_fleet = |name| BTreeMap::from([("alertname", name), agents]);
    let of_node = |name, node| BTreeMap::from([("alertname", name), agents, ("node", node)]);
    let Causes { fleet, .. } = causes();
    for Cause { alert, beside, .. } in &fleet {
        let nodes = beside.iter().flat_map(|name| [of_node(&**name, "n1"), of_node(&**name, "n2")]);
        let nodes: Vec<_> = nodes.collect();
        assert_eq!(sent(&nodes), nodes, "alone");
        let elsewhere = BTreeMap::from([("alertname", &*beside[0]), ("job", "another"), ("node", "n1")]);
        let firing = [nodes, vec![elsewhere.clone(), of_fleet(alert)]].concat();
        assert_eq!(sent(&firing), [elsewhere, of_fleet(alert)], "{alert}");
    }
    let preempted = of_node("IstioCniPreempted", "n1");
    let [same, other] = ["n1", "n2"].map(|node| of_node("IstioCniAgentNotReady", node));
    let changed = of_node("IstioCniConfigurationChanged", "n1");
    assert_eq!(sent(&[changed.clone(), same.clone(), preempted.clone(), other.clone()]), [preempted, other]);
    let [failing, slow] = ["IstioCniPluginFailing", "IstioCniPluginSlow"].map(|name| of_node(name, "n1"));
    let elsewhere = of_node("IstioCniPluginSlow", "n2");
    assert_eq!(
        sent(&[slow, failing.clone(), elsewhere.clone()]),
        [failing, elsewhere],
        "a failed ADD is slow"
    );
    assert_eq!(sent(&[changed, same.clone()]), [same]);
    // Rules name alerts that exist, and nothing silences what it comes from.
    let all: BTreeSet<String> = alerts().iter().map(|alert| name(alert).to_owned()).collect();
    let file: Value = serde_saphyr::from_str(&read("deploy/monitoring/inhibit.yaml")).expect("YAML");
    for rule in file["inhibit_rules"].as_array().expect("rules") {
        let [source, target] = ["source_matchers", "target_matchers"].map(|side| inhibit_names(rule, side));
        assert!(source.iter().chain(&target).all(|name| all.contains(name)), "{rule}");
        assert!(source.iter().all(|name| !target.contains(name)), "{rule}");
        assert!(rule["equal"].as_array().is_some_and(|equal| equal.contains(&json!("job"))), "{rule}");
    }
}

/// The same with real agents: what they print, once they are in that state, is what the alert is asked about.
#[test]
fn agents_in_trouble_raise_their_alerts() {
    let mut tests = Vec::new();
    let mut add = |about: &str, before: &str, after: &str, firing: &[&str]| {
        let [before, after] = [before, after].map(|text| format!("{text}up 1\n"));
        let controller = unchanged(&format!("{}up 1\n", controller()), 60);
        let fleet = Fleet { agent: changed(&before, &after, 30), others: others(60), controller };
        tests.push(alert_test(about, fleet, &[(29, &[]), (38, firing)]));
    };

    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    let agent = node.start_ready();
    let before = metrics(&agent);
    add("all is well", &before, &before, &[]);
    fs::remove_file(node.path("net.d/10-calico.conflist")).expect("removes");
    agent.wait_not_ready("");
    agent.wait_metric("istio_cni_conflist_obstacles_total{kind=\"no_network\"}", 1.0);
    let firing = ["IstioCniAgentNotReady", "IstioCniConfigurationChanged"];
    add("no network configuration", &before, &metrics(&agent), &firing);
    node.write_conf("10-calico.conflist", CALICO);
    agent.wait_ready();
    // What the agent counts when its entry is removed, as often as makes no fight: an hour of it, once a minute, is a cause above.
    let restored = "istio_cni_installs_total{result=\"SUCCESS\"}";
    let before = agent.metric(restored);
    node.write_conf("10-calico.conflist", CALICO);
    agent.wait_metric(restored, before + 1.0);

    // A failure is a series of its own, whose first value is not a rise.
    let line = r#"{"level":"error","time":"2026-11-21T07:26:50.000001Z","msg":"x","pod":"shop/cart-0","decision":"fail","code":110,"ms":"total:9.5"}"#;
    let fail = || {
        let body = serde_json::to_vec(&[line]).expect("JSON");
        let connect = || UnixStream::connect(node.path("run/log.sock")).expect("connects");
        (0..5).find_map(|_| exchange(connect(), "POST", "/log", &body)).expect("answers");
        metrics(&agent)
    };
    let once = fail();
    assert!(once.contains("{outcome=\"fail\",reason=\"110\"}"), "{once}");
    add("pods fail", &once, &fail(), &["IstioCniPluginFailing"]);

    let mut pinned = Node::new(&[("20-calico.conflist", CALICO)]);
    pinned.set("CNI_CONF_NAME", "20-calico.conflist");
    fs::create_dir(pinned.path("settings")).expect("makes");
    let settings = pinned.path("settings");
    pinned.set("SETTINGS_DIR", &settings.display().to_string());
    let agent = pinned.start_ready();
    let before = metrics(&agent);
    fs::write(settings.join("NATIVE_NFTABLES"), "maybe").expect("writes");
    agent.wait_metric("istio_cni_settings_refused", 1.0);
    add("settings that are wrong", &before, &metrics(&agent), &["IstioCniSettingsRefused"]);
    fs::remove_file(settings.join("NATIVE_NFTABLES")).expect("removes");
    agent.wait("settings", || agent.metric("istio_cni_settings_refused") == 0.0);
    pinned.write_conf("10-other.conflist", CALICO);
    agent.wait_metric("istio_cni_preempted", 1.0);
    agent.wait_metric("istio_cni_conflist_obstacles_total{kind=\"preempted\"}", 1.0);
    let firing = ["IstioCniAgentNotReady", "IstioCniConfigurationChanged", "IstioCniPreempted"];
    add("preempted", &before, &metrics(&agent), &firing);
    run_alert_tests(&tests);
}
