//! Alerts and dashboard as they are shipped, what Prometheus' own programs make of them, and series as the programs print them.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use agent_runtime::metrics::exposition::ScrapeFormat;
use agent_runtime::metrics::{Described, process};
use install_cni::metrics::Metrics;
use serde_json::{Value, json};
use taint_controller::metrics::ControllerMetrics;
use test_support::process::{command, run, run_with_input};
use test_support::project;

/// Labels that Prometheus gives to a target, with the chart's PodMonitor and with deploy/monitoring/scrape.yaml.
pub const TARGET_LABELS: [&str; 3] = ["job", "instance", "node"];
const LONG: Duration = Duration::from_secs(600);

pub fn read(path: &str) -> String {
    fs::read_to_string(project::file(path)).expect(path)
}

/// The alerts, in their order.
pub fn alerts() -> Vec<Value> {
    let file: Value =
        serde_saphyr::from_str(&read("deploy/charts/istio-cni/files/rules.yaml")).expect("rules");
    let groups = file["groups"].as_array().expect("groups");
    groups.iter().flat_map(|group| group["rules"].as_array().expect("rules").clone()).collect()
}

pub fn name(alert: &Value) -> &str {
    alert["alert"].as_str().expect("a name")
}

/// The dashboard's panels that show something.
pub fn panels() -> Vec<Value> {
    let panels = dashboard()["panels"].as_array().expect("panels").clone();
    panels.into_iter().filter(|panel| panel["type"] != "row").collect()
}

pub fn dashboard() -> Value {
    serde_json::from_str(&read("deploy/charts/istio-cni/files/dashboard.json")).expect("JSON")
}

/// Expressions of the dashboard as Grafana sends them.
pub fn panel_queries() -> Vec<String> {
    let targets =
        panels().into_iter().flat_map(|panel| panel["targets"].as_array().expect("targets").clone());
    targets.map(|target| filled(target["expr"].as_str().expect("an expression"))).collect()
}

/// The expressions of the dashboard's variables, and the label that each lists.
pub fn variable_queries() -> Vec<(String, String)> {
    let variables = dashboard()["templating"]["list"].as_array().expect("variables").clone();
    let queries = variables.iter().filter(|variable| variable["type"] == "query").map(|variable| {
        let query = variable["definition"].as_str().expect("a query");
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (expression, label) = inner.and_then(|inner| inner.rsplit_once(", ")).expect(query);
        (filled(expression), label.to_owned())
    });
    queries.collect()
}

fn filled(expression: &str) -> String {
    let filled = expression.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$node", ".*");
    assert!(!filled.contains('$'), "a variable that is not there: {expression}");
    filled
}

/// What Prometheus' parser finds in expressions.
pub fn parsed(expressions: &[String]) -> Vec<Value> {
    let lines: Vec<String> = expressions.iter().map(|text| text.replace('\n', " ")).collect();
    let program = e2e::tools::built("promql-names").expect("promql-names");
    let output = run_with_input(&mut command(program, [""; 0]), &(lines.join("\n") + "\n"), LONG)
        .and_then(test_support::process::Output::ok)
        .expect("Prometheus' parser takes all of them");
    let parsed: Vec<Value> =
        output.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(parsed.len(), expressions.len());
    parsed
}

/// The metrics that are there, as they are scraped: the row of the reference, and the labels of the series.
pub fn known() -> BTreeMap<String, (Described, Vec<&'static str>)> {
    let mut known = BTreeMap::new();
    for row in Metrics::ROWS.iter().chain(ControllerMetrics::ROWS).chain(process::METRICS) {
        let labels: Vec<&str> = row.labels.split(',').filter(|label| !label.is_empty()).collect();
        if row.kind == "histogram" {
            for part in ["_sum", "_count"] {
                known.insert(format!("{}{part}", row.name), (*row, labels.clone()));
            }
            known.insert(format!("{}_bucket", row.name), (*row, [&labels[..], &["le"]].concat()));
        } else {
            known.insert(row.name.to_owned(), (*row, labels));
        }
    }
    known
}

/// Runs promtool on a file of this content; what it says if it refuses.
pub fn promtool(args: &[&str], content: &Value) -> Result<(), String> {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().expect("a file");
    fs::write(file.path(), content.to_string()).expect("writes");
    let path = file.path().display().to_string();
    let args: Vec<&str> = args.iter().copied().chain([path.as_str()]).collect();
    let output = run(&mut command("promtool", args), LONG).expect("promtool runs: scripts/setup-apt.sh");
    if output.code() == Some(0) { Ok(()) } else { Err(format!("{}{}", output.stdout, output.stderr)) }
}

/// What is scraped of a healthy leader of the taint controller.
pub fn controller() -> String {
    let metrics = ControllerMetrics::default();
    metrics.leader.set(1);
    metrics.nodes.set(10);
    ScrapeFormat::Text.write(&metrics.registry())
}

/// Series by their names with labels, as they are printed, and their values minute by minute in promtool's notation.
pub type Series = BTreeMap<String, String>;

/// What was scraped, at every minute up to one.
pub fn unchanged(text: &str, minutes: usize) -> Series {
    scraped(text).into_iter().map(|(name, value)| (name, format!("{value}+0x{minutes}"))).collect()
}

/// What was scraped, up to minute 30 and then.
pub fn changed(before: &str, after: &str, minutes: usize) -> Series {
    let before = scraped(before);
    let step = |(name, value): (String, String)| {
        let first = before.get(&name).map_or("_x29".to_owned(), |value| format!("{value}+0x29"));
        (name, format!("{first} {value}+0x{minutes}"))
    };
    scraped(after).into_iter().map(step).collect()
}

fn scraped(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let split = |line: &str| {
        let (name, value) = line.rsplit_once(' ').expect("a value");
        (name.to_owned(), value.to_owned())
    };
    lines.map(split).collect()
}

/// What the other agents of the fleet show of interest, while all is well.
pub fn others(minutes: usize) -> Series {
    let version = env!("CARGO_PKG_VERSION");
    unchanged(
        &format!(
            "up 1\nistio_cni_install_ready 1\nistio_cni_build_info{{version=\"{version}\"}} 1\nistio_cni_meshed_pods{{state=\"verified\"}} 20\n"
        ),
        minutes,
    )
}

/// The series of an agent, of each of eleven others, and of the taint controller.
pub struct Fleet {
    pub agent: Series,
    pub others: Series,
    pub controller: Series,
}

/// A test of promtool: these series, and at these minutes exactly these alerts, on whatever nodes.
pub fn alert_test(about: &str, fleet: Fleet, firing: &[(usize, &[&str])]) -> Value {
    let target = |node: usize| {
        format!(r#"job="istio-system/istio-cni",instance="10.0.0.{node}:15014",node="n{node}""#)
    };
    let controller = r#"job="istio-system/istio-cni-taint-controller",instance="10.1.0.7:15014""#.to_owned();
    let others = (2..=12).map(|node| (fleet.others.clone(), target(node)));
    let targets = [(fleet.agent, target(1)), (fleet.controller, controller)].into_iter().chain(others);
    let input: Vec<Value> = targets
        .flat_map(|(series, target)| {
            series.into_iter().map(move |(name, values)| {
                let name = match name.split_once('{') {
                    Some((name, labels)) => format!("{name}{{{target},{labels}"),
                    None => format!("{name}{{{target}}}"),
                };
                json!({"series": name, "values": values})
            })
        })
        .collect();
    let expected: Vec<Value> = firing
        .iter()
        .map(|(minute, alerts)| {
            let one = |alert: &&str| json!({"labels": format!("{{alertname=\"{alert}\"}}"), "value": 1});
            let samples: Vec<Value> = alerts.iter().map(one).collect();
            json!({"expr": "group by (alertname) (ALERTS{alertstate=\"firing\"})", "eval_time": format!("{minute}m"), "exp_samples": samples})
        })
        .collect();
    json!({"name": about, "interval": "1m", "input_series": input, "promql_expr_test": expected})
}

/// Which of these alerts Alertmanager would still send, by the rules of deploy/monitoring/inhibit.yaml.
pub fn sent<'a>(firing: &[BTreeMap<&'a str, &'a str>]) -> Vec<BTreeMap<&'a str, &'a str>> {
    let file: Value = serde_saphyr::from_str(&read("deploy/monitoring/inhibit.yaml")).expect("YAML");
    let rules = file["inhibit_rules"].as_array().expect("rules");
    let is_inhibited = |target: &BTreeMap<&str, &str>| {
        rules.iter().any(|rule| {
            let is_source = |source: &BTreeMap<&str, &str>| {
                let equal = rule["equal"].as_array().expect("labels");
                matches(rule, "source_matchers", source)
                    && equal
                        .iter()
                        .filter_map(Value::as_str)
                        .all(|label| source.get(label) == target.get(label))
            };
            matches(rule, "target_matchers", target) && firing.iter().any(is_source)
        })
    };
    firing.iter().filter(|alert| !is_inhibited(alert)).cloned().collect()
}

/// Whether an alert has the name that a rule asks for: each has one matcher, of the name.
fn matches(rule: &Value, side: &str, alert: &BTreeMap<&str, &str>) -> bool {
    inhibit_names(rule, side).iter().any(|name| name == alert["alertname"])
}

/// The alerts that one side of a rule names.
pub fn inhibit_names(rule: &Value, side: &str) -> Vec<String> {
    let [matcher] = &rule[side].as_array().expect("matchers")[..] else { panic!("one matcher: {rule}") };
    let matcher = matcher.as_str().expect("text").strip_prefix("alertname=").expect("of the name");
    let names = matcher.trim_start_matches('~').strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    names.expect("in quotes").split('|').map(str::to_owned).collect()
}

/// All tests in one run.
pub fn run_alert_tests(tests: &[Value]) {
    let rules = project::file("deploy/charts/istio-cni/files/rules.yaml");
    let file = json!({"rule_files": [rules], "evaluation_interval": "1m", "tests": tests});
    if let Err(report) = promtool(&["test", "rules"], &file) {
        panic!("{report}");
    }
}
