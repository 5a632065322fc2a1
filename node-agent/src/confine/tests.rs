use super::*;
use settings_cli::LineRequest;

fn settings(env: &[(&str, &str)]) -> Settings {
    let required = [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_SERVICE_PORT", "443")];
    let env = required.iter().chain(env).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let Ok(LineRequest::Work(words)) = crate::settings::command_line().read([]) else {
        panic!("a command line")
    };
    Settings::read(&words, &env.collect::<Vec<_>>()).expect("settings").0
}

fn of(action: AgentCommand, env: &[(&str, &str)]) -> Vec<(String, PathAccess)> {
    let template = r#"{"type":"istio-cni","kubernetes":{"kubeconfig":"/srv/kubeconfig"},"pod_manifest_dir":"/srv/pods"}"#;
    let folder = Path::new("/etc/istio-cni");
    let all = allowed(action, &settings(env), Some(folder), Some(template), OsStr::new("/srv/bin:bin"));
    all.into_iter().map(|allowed| (allowed.path.display().to_string(), allowed.access)).collect()
}

fn with(all: &[(String, PathAccess)], wanted: &[PathAccess]) -> Vec<String> {
    all.iter().filter(|(_, access)| wanted.contains(access)).map(|(path, _)| path.clone()).collect()
}

#[test]
fn an_agent_writes_to_three_directories_and_no_others() {
    let all = of(AgentCommand::Run, &[]);
    let written = with(&all, &[PathAccess::Write, PathAccess::WriteAndRun, PathAccess::Device]);
    assert_eq!(written, ["/dev/null", "/host/etc/cni/net.d", "/host/opt/cni/bin", "/var/run/istio-cni"]);
    assert_eq!(with(&all, &[PathAccess::WriteAndRun]), ["/host/opt/cni/bin"]);
    let ambient = [("AMBIENT_ENABLED", "true"), ("ZTUNNEL_UDS_ADDRESS", "/srv/ztunnel/socket")];
    let mut in_ambient_mode =
        with(&of(AgentCommand::Run, &ambient), &[PathAccess::Write, PathAccess::WriteAndRun]);
    in_ambient_mode.retain(|path| !written.contains(path));
    assert_eq!(in_ambient_mode, ["/srv/ztunnel"]);
    let run = ["/bin", "/lib", "/lib64", "/opt/cni/bin", "/sbin", "/srv/bin", "/usr"];
    assert_eq!(with(&all, &[PathAccess::Run]), run);
}

#[test]
fn it_reads_what_its_settings_name() {
    let named = [
        ("CNI_NETWORK_CONFIG_FILE", "/srv/template/entry.json"),
        ("KUBE_CA_FILE", "/srv/authority/ca.crt"),
        ("MOUNTED_PROC_DIR", "/srv/proc"),
        ("MOUNTED_CNI_NETNS_DIR", "/srv/netns"),
        ("SERVICE_ACCOUNT_DIR", "/srv/account"),
    ];
    let all = of(AgentCommand::Run, &named);
    let read = with(&all, &[PathAccess::Read]);
    for path in [
        "/srv/template/entry.json",
        "/srv/authority/ca.crt",
        "/srv/proc",
        "/srv/netns",
        "/srv/account",
        "/srv/kubeconfig",
        "/srv/pods",
        "/etc/istio-cni",
        "/etc",
        "/proc",
        "/sys",
    ] {
        assert!(read.iter().any(|read| read == path), "{path}: {read:?}");
    }
}

#[test]
fn the_taint_controller_writes_nowhere() {
    let all = of(AgentCommand::TaintController, &[]);
    assert_eq!(with(&all, &[PathAccess::Write, PathAccess::WriteAndRun]), [""; 0]);
    assert!(!all.iter().any(|(path, _)| path.starts_with("/host")), "{all:?}");
}
