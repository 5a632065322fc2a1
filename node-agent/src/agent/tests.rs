//! The agent in this process, with everything switched on, on a node that is a folder. What it asks the API server is refused.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use super::*;

/// For what must come, however slow the machine.
const LONG: Duration = Duration::from_secs(600);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// All tasks that an agent may have.
const TASKS: [&str; 18] = [
    "agent events",
    "DaemonSet lookup",
    "drift watch",
    "ambient mode",
    "events of ambient mode",
    "events of healing",
    "events of plugins",
    "healer",
    "health server",
    "log socket",
    "metrics server",
    "plugin access checker",
    "plugin event socket",
    "plugin token renewer",
    "pod watch",
    "repair controller",
    "run-time control",
    "taint manager",
];

/// The variables that name the node's directories, and what they are called in the folder.
const DIRECTORIES: [(&str, &str); 5] = [
    ("MOUNTED_CNI_NET_DIR", "net.d"),
    ("MOUNTED_CNI_BIN_DIR", "bin"),
    ("SOURCE_CNI_BIN_DIR", "image"),
    ("CNI_AGENT_RUN_DIR", "run"),
    ("SERVICE_ACCOUNT_DIR", "account"),
];

fn settings(folder: &Path) -> Settings {
    let mut env: Vec<(String, String)> = [
        ("KUBERNETES_SERVICE_HOST", "127.0.0.1"),
        ("KUBERNETES_SERVICE_PORT", "1"),
        ("KUBERNETES_SERVICE_PROTOCOL", "http"),
        ("SKIP_TLS_VERIFY", "true"),
        ("POD_NAMESPACE", "istio-system"),
        ("POD_NAME", "istio-cni-node-x"),
        ("NODE_NAME", "node-1"),
        ("DRIFT_WATCH_INTERVAL", "1h"),
        ("DRIFT_HEAL", "true"),
        ("REPAIR_REPAIR_PODS", "true"),
        ("NODE_TAINT", "true"),
        ("AMBIENT_ENABLED", "true"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    env.push(("ZTUNNEL_UDS_ADDRESS".to_owned(), folder.join("ztunnel.sock").display().to_string()));
    for (name, part) in DIRECTORIES {
        fs::create_dir(folder.join(part)).expect("makes");
        env.push((name.to_owned(), folder.join(part).display().to_string()));
    }
    fs::write(folder.join("account/token"), "token-1").expect("writes");
    let (mut settings, _) = Settings::read(&settings_cli::ParsedArgs::default(), &env).expect("settings");
    settings.serve.health = (Some(LOCALHOST), 0);
    settings.serve.monitoring = Some((Some(LOCALHOST), 0));
    settings.serve.control = Some((LOCALHOST, 0));
    settings
}

#[tokio::test]
async fn an_agent_ends_when_any_of_its_tasks_does_and_names_it() {
    for name in TASKS {
        let folder = tempfile::tempdir().expect("a folder");
        let tasks = Supervisor::default();
        let started = || tasks.sabotage.started.lock().expect("names").clone();
        let strike = async {
            while started() != BTreeSet::from(TASKS) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(
                *tasks.sabotage.unneeded.lock().expect("names"),
                BTreeSet::new(),
                "all is switched on"
            );
            tasks.sabotage.strike(name);
            std::future::pending::<()>().await;
        };
        let agent = run_with(settings(folder.path()), None, None, tasks.clone());
        let ended = tokio::select! {
            ended = tokio::time::timeout(LONG, agent) => ended,
            () = strike => unreachable!("it waits for ever"),
        };
        let ended = ended.unwrap_or_else(|_| panic!("goes on without {name}, with {:?}", started()));
        let error = ended.expect_err("no orderly end").to_string();
        assert_eq!(
            error,
            format!(
                "the task {name:?} has ended: it panicked: on purpose; ending, so that the kubelet starts a new container"
            )
        );
    }
}
