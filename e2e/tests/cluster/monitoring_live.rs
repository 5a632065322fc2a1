//! A real Prometheus scrapes a real agent and is asked everything the dashboard asks.

use std::fmt::Write;
use std::fs;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::monitoring_support::{controller, panel_queries, variable_queries};
use e2e::agent::{CALICO, DEADLINE, Node, exchange, get};
use e2e::http::StandIn;
use serde_json::{Value, json};
use test_support::port::free_port;
use test_support::process::{Killed, Patience};
use test_support::project;

/// Prometheus while it runs. It is killed when dropped.
struct Prometheus {
    port: u16,
    _child: Killed,
    folder: tempfile::TempDir,
}

impl Prometheus {
    /// Scrapes each second what listens at these ports, under these names.
    fn start(targets: &[(&str, u16)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let job = |(name, port): &(&str, u16)| {
            let target = json!({"targets": [format!("127.0.0.1:{port}")], "labels": {"node": "n1"}});
            json!({"job_name": name, "static_configs": [target]})
        };
        let jobs: Vec<Value> = targets.iter().map(job).collect();
        let config = json!({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs});
        fs::write(folder.path().join("prometheus.yaml"), config.to_string()).expect("writes");
        let port = free_port().expect("a port");
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let child = Command::new("prometheus")
            .args(["--config.file=prometheus.yaml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus runs: scripts/setup-apt.sh");
        Self { port, _child: Killed(child), folder }
    }

    /// How many series a query finds.
    fn found(&self, query: &str) -> Option<usize> {
        let mut encoded = String::new();
        for byte in query.bytes() {
            let _ = write!(encoded, "%{byte:02x}");
        }
        let (status, body) = get(self.port, &format!("/api/v1/query?query={encoded}"))?;
        // Until it has read its data it serves nothing.
        if status == 503 {
            return None;
        }
        assert_eq!(status, 200, "{query}: {body}");
        let answer: Value = serde_json::from_str(unchunked(&body)).expect(&body);
        Some(answer["data"]["result"].as_array().expect("a result").len())
    }
}

/// Go sends short answers whole and long ones in one chunk.
fn unchunked(body: &str) -> &str {
    body.find('{').and_then(|start| Some(&body[start..=body.rfind('}')?])).unwrap_or(body)
}

#[test]
fn every_query_of_the_dashboard_finds_series() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    // What is off has no series of its own.
    for name in ["REPAIR_ENABLED", "REPAIR_LABEL_PODS", "NODE_TAINT", "AMBIENT_ENABLED"] {
        node.set(name, "true");
    }
    let socket = node.path("ztunnel.sock").display().to_string();
    node.set("ZTUNNEL_UDS_ADDRESS", &socket);
    // In ambient mode it is not ready before the API server has listed the node's pods.
    let agent = node.start();
    agent.wait("to serve", || get(node.monitoring, "/metrics").is_some());
    agent.wait_metric("istio_cni_passes_total", 1.0);
    for (decision, reason) in [("redirect", ""), ("skip", "no_proxy"), ("fail", "")] {
        report(&node, decision, reason, 9.5);
    }
    let port = StandIn::of((), |_, ()| (200, controller())).port;
    let prometheus =
        Prometheus::start(&[("istio-cni", node.monitoring), ("istio-cni-taint-controller", port)]);
    // Some panels show only values other than 0; this test is about whether they show something.
    let panels = panel_queries().into_iter().map(|query| query.replace(" > 0", ""));
    let mut waiting: Vec<String> =
        panels.chain(variable_queries().into_iter().map(|(query, _)| query)).collect();
    let mut patience = Patience::new(DEADLINE);
    loop {
        waiting.retain(|query| prometheus.found(query).unwrap_or_default() == 0);
        if waiting.is_empty() {
            break;
        }
        let log = || fs::read_to_string(prometheus.folder.path().join("log")).unwrap_or_default();
        assert!(!patience.is_over(), "nothing is found by {waiting:#?}\n{}\n{}", log(), node.log());
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(prometheus.found("istio_cni_no_such_metric"), Some(0));
    if let Some(picture) = std::env::var_os("DASHBOARD_PICTURE") {
        live(&node);
        let script = project::file("docs/monitoring/picture.py");
        let url = format!("http://127.0.0.1:{}", prometheus.port);
        let mut python = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()));
        python.arg(script).arg(url).arg(project::file("deploy/monitoring/dashboard.json")).arg(picture);
        assert!(python.status().expect("python").success());
    }
    drop(agent);
}

/// What the plugin reports of one ADD.
fn report(node: &Node, decision: &str, reason: &str, milliseconds: f64) {
    let line = json!({"level": "info", "time": "2026-11-21T07:26:50.000001Z", "msg": "x", "pod": "shop/cart-0",
        "decision": decision, "reason": reason, "code": 110, "ms": format!("total:{milliseconds}")});
    let body = json!([line.to_string()]).to_string();
    let connect = || UnixStream::connect(node.path("run/log.sock")).expect("connects");
    (0..5).find_map(|_| exchange(connect(), "POST", "/log", body.as_bytes())).expect("answers");
}

/// Two minutes of a node, for the picture: pods start; some fail for a while; the network configuration goes and comes back, and another program
/// edits it.
fn live(node: &Node) {
    let without_entry = CALICO;
    for second in 0_u32..120 {
        for pod in 0..second % 4 {
            report(node, "redirect", "", 2.0 + f64::from(pod) * 1.5);
        }
        if second % 3 == 0 {
            report(node, "skip", "no_proxy", 0.9);
        }
        if (70..90).contains(&second) {
            report(node, "fail", "", 120.0);
        }
        match second {
            30 => fs::remove_file(node.path("net.d/10-calico.conflist")).expect("removes"),
            45 | 100 | 101 | 102 | 103 => node.write_conf("10-calico.conflist", without_entry),
            _ => {}
        }
        thread::sleep(Duration::from_secs(1));
    }
}
