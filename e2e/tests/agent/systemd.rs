//! The units in deploy/systemd: as systemd reads them, and doing what they say.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use e2e::agent::{CALICO, Node};
use install_cni::settings::table::SETTINGS;
use test_support::project;

const SERVICE: &str = "istio-cni-install.service";
const PATH: &str = "istio-cni-install.path";
const PROGRAM: &str = "/usr/local/bin/install-cni";

fn unit(name: &str) -> String {
    let folder = project::file("deploy/systemd");
    fs::read_to_string(folder.join(name)).expect("a unit")
}

/// What a key is given, in order.
fn values<'u>(unit: &'u str, key: &str) -> Vec<&'u str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

fn environment(unit: &str) -> BTreeMap<String, String> {
    let pairs = values(unit, "Environment").into_iter().filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// What systemd has to say against units.
fn verify(units: &[(&str, &str)]) -> (bool, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let paths: Vec<PathBuf> = units.iter().map(|(name, _)| folder.path().join(name)).collect();
    for (path, (_, text)) in paths.iter().zip(units) {
        // It must exist, and is not installed here.
        let program = folder.path().join("install-cni");
        fs::copy("/bin/true", &program).expect("copies");
        fs::write(path, text.replace(PROGRAM, &program.display().to_string())).expect("writes");
    }
    let done = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(&paths).output();
    let done = done.expect("systemd-analyze runs; scripts/setup-apt.sh installs it");
    (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
fn systemd_has_nothing_against_the_units() {
    let (service, path) = (unit(SERVICE), unit(PATH));
    let (is_good, said) = verify(&[(SERVICE, &service), (PATH, &path)]);
    assert!(is_good && !said.contains(SERVICE) && !said.contains(PATH), "{said}");
    // So that its silence means something.
    let wrong = service.replace("RestartSec=", "RestartSecs=");
    let (_, said) = verify(&[(SERVICE, &wrong)]);
    assert!(said.contains("RestartSecs"), "{said}");
}

#[test]
fn the_service_runs_a_command_and_settings_that_are_known() {
    let service = unit(SERVICE);
    assert_eq!(values(&service, "ExecStart"), [format!("{PROGRAM} install --once")]);
    let known = |name: &String| SETTINGS.iter().any(|setting| setting.env.contains(&name.as_str()));
    let environment = environment(&service);
    assert!(environment.len() >= 5 && environment.keys().all(known), "{environment:?}");
    let watched = unit(PATH);
    assert_eq!(values(&watched, "PathChanged"), [environment["MOUNTED_CNI_NET_DIR"].as_str()]);
    let before = values(&service, "Before").join(" ");
    for runtime in ["containerd.service", "crio.service", "kubelet.service"] {
        assert!(before.split(' ').any(|unit| unit == runtime), "{runtime}");
    }
}

/// The service's command line and environment, on a node whose root is elsewhere, at two boots.
#[test]
fn the_service_installs_at_each_boot() {
    let node = Node::new(&[]);
    let root = node.path("root");
    let service = unit(SERVICE);
    let on_node = |path: &str| PathBuf::from(format!("{}{path}", root.display()));
    for folder in ["/usr/local/lib/istio-cni", "/opt/cni/bin", "/etc/cni/net.d"] {
        fs::create_dir_all(on_node(folder)).expect("makes");
    }
    fs::copy(node.path("image/istio-cni"), on_node("/usr/local/lib/istio-cni/istio-cni")).expect("copies");
    let boot = || {
        let environment = environment(&service).into_iter().map(|(name, value)| {
            let is_path = value.starts_with('/');
            (name, if is_path { on_node(&value).display().to_string() } else { value })
        });
        let command = values(&service, "ExecStart")[0].to_owned();
        let args: Vec<&str> = command.split(' ').skip(1).collect();
        let mut command = node.command(&args);
        command.env_clear().envs(environment).output().expect("runs").status.code()
    };
    assert_eq!(boot(), Some(1), "the network configuration does not exist yet");
    let list = on_node("/etc/cni/net.d/10-calico.conflist");
    fs::write(&list, CALICO).expect("writes");
    assert_eq!(boot(), Some(0));
    let installed = fs::read_to_string(&list).expect("a list");
    for part in
        ["\"type\":\"istio-cni\"", "\"istio-system\",\"kube-system\"", "\"pod_namespace\":\"istio-system\""]
    {
        assert!(installed.contains(part), "{part}: {installed}");
    }
    assert!(on_node("/opt/cni/bin/istio-cni").exists());
    // What is in /run is gone after a boot.
    fs::remove_dir_all(on_node("/var/run")).expect("is there");
    assert_eq!(boot(), Some(0));
    assert_eq!(fs::read_to_string(&list).expect("a list"), installed);
}
