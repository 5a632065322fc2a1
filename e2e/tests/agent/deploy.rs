//! What is deployed: the manifest fits the program.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use install_cni::install::reload::RELOADED;
use install_cni::settings::table::SETTINGS;
use test_support::project;

fn manifest() -> String {
    fs::read_to_string(project::file("deploy/istio-cni-node.yaml")).expect("a manifest")
}

#[test]
fn the_manifest_uses_the_published_names() {
    let manifest = manifest();
    for part in [
        concat!("image: localhost/install-cni:", env!("CARGO_PKG_VERSION"), "\n"),
        "imagePullPolicy: IfNotPresent\n",
        "kind: DaemonSet\nmetadata:\n  name: istio-cni-node\n",
        "matchLabels: {k8s-app: istio-cni-node}",
        "kind: ConfigMap\nmetadata:\n  name: istio-cni-config\n",
        "kind: ServiceAccount\nmetadata:\n  name: istio-cni\n",
        "kind: ServiceAccount\nmetadata:\n  name: istio-cni-plugin\n",
        "serviceAccountName: istio-cni\n",
        "- name: install-cni\n",
        "readOnlyRootFilesystem: true",
        "allowPrivilegeEscalation: false",
        "hostNetwork: true\n",
        "- name: POD_IP\n              valueFrom: {fieldRef: {fieldPath: status.podIP}}\n",
        "- name: HOST_IP\n              valueFrom: {fieldRef: {fieldPath: status.hostIP}}\n",
        "capabilities:\n              drop: [ALL]\n",
        "httpGet: {host: 127.0.0.1, path: /readyz, port: health}",
        "httpGet: {host: 127.0.0.1, path: /healthz, port: health}",
        "- {name: HEALTH_ADDRESS, value: 127.0.0.1}",
        "{name: health, containerPort: 8000}",
        "{name: metrics, containerPort: 15014}",
    ] {
        assert!(manifest.contains(part), "{part}");
    }
    assert!(!manifest.contains('*'), "no role for everything");
    assert!(
        !manifest.lines().any(|line| !line.trim().starts_with('#') && line.contains("ADMIN")),
        "no capability"
    );
}

/// As the manifest's own head says it is switched on.
fn with_drift_watch() -> String {
    let done = Command::new("sed")
        .arg("s/# drift-watch: //")
        .arg(project::file("deploy/istio-cni-node.yaml"))
        .output()
        .expect("sed");
    String::from_utf8(done.stdout).expect("a manifest")
}

#[test]
fn the_drift_watch_is_switched_on_by_what_is_marked() {
    assert!(
        manifest()
            .contains("#   sed 's/# drift-watch: //' deploy/istio-cni-node.yaml | kubectl apply -f -\n")
    );
    let (manifest, marked) = (with_drift_watch(), manifest().matches("# drift-watch: ").count());
    assert!(!manifest.contains("# drift-watch: "));
    assert_eq!(marked, 8, "seven and the command");
    let directory =
        SETTINGS.iter().find(|setting| setting.name() == "MOUNTED_CNI_NETNS_DIR").expect("a setting");
    for part in [
        "\n  - {apiGroups: [\"\"], resources: [pods], verbs: [list]}\n",
        "\n  - {apiGroups: [\"\"], resources: [events], verbs: [create]}\n",
        "\n  DRIFT_WATCH_INTERVAL: 5m\n",
        "\n              add: [NET_ADMIN, SYS_ADMIN]\n",
        &format!("mountPath: {}, mountPropagation: HostToContainer, readOnly: true}}\n", directory.default),
        "\n        - name: cni-netns-dir\n          hostPath: {path: /var/run/netns, type: DirectoryOrCreate}\n",
    ] {
        assert!(manifest.contains(part), "{part}\n{manifest}");
    }
}

#[test]
fn healing_is_switched_on_by_what_is_marked() {
    const MARK: &str = "# drift-heal: ";
    assert_eq!(manifest().matches(MARK).count(), 13, "with the command");
    let switched = manifest().replace(MARK, "");
    for part in [
        "\n  - {apiGroups: [\"\"], resources: [pods], verbs: [list]}\n",
        "\n  - {apiGroups: [\"\"], resources: [events], verbs: [create]}\n",
        "\n  DRIFT_HEAL: \"true\"\n",
        "\n  DRIFT_WATCH_INTERVAL: 10m\n",
        "\n              add: [NET_ADMIN, SYS_ADMIN, SYS_PTRACE]\n",
        "mountPath: /host/proc, readOnly: true}\n",
        "mountPath: /host/var/run/netns, mountPropagation: HostToContainer, readOnly: true}\n",
        "\n        - name: cni-netns-dir\n          hostPath: {path: /var/run/netns, type: DirectoryOrCreate}\n",
        "\n        - name: host-proc\n          hostPath: {path: /proc, type: Directory}\n",
    ] {
        assert!(switched.contains(part), "{part}\n{switched}");
    }
}

#[test]
fn each_repair_is_switched_on_by_what_is_marked() {
    for (action, marked, parts) in [
        (
            "repair-in-place",
            12,
            [
                "REPAIR_REPAIR_PODS: \"true\"",
                "add: [NET_ADMIN, SYS_ADMIN, SYS_PTRACE]",
                "mountPath: /host/proc, readOnly: true}",
            ],
        ),
        (
            "repair-delete",
            4,
            [
                "REPAIR_DELETE_PODS: \"true\"",
                "resources: [pods], verbs: [list, watch, delete]}",
                "resources: [events], verbs: [create]}",
            ],
        ),
        (
            "repair-label",
            5,
            [
                "REPAIR_LABEL_PODS: \"true\"",
                "resources: [pods/status], verbs: [patch]}",
                "resources: [events], verbs: [create]}",
            ],
        ),
    ] {
        let mark = format!("# {action}: ");
        assert_eq!(manifest().matches(&mark).count(), marked, "{action}: with the command");
        let manifest = manifest().replace(&mark, "");
        for part in parts {
            let is_in_force = |line: &str| line.contains(part) && !line.trim().starts_with('#');
            assert!(manifest.lines().any(is_in_force), "{action}: {part}");
        }
    }
    let proc = SETTINGS.iter().find(|setting| setting.name() == "MOUNTED_PROC_DIR").expect("a setting");
    assert_eq!(proc.default, "/host/proc");
}

#[test]
fn the_nodes_taint_and_condition_are_switched_on_by_what_is_marked() {
    for (mark, marked, parts) in [
        (
            "node-taint",
            42,
            [
                "NODE_TAINT: \"true\"",
                "resources: [nodes, nodes/status], verbs: [patch]}",
                "add: [NET_ADMIN, SYS_ADMIN]",
            ],
        ),
        (
            "node-condition",
            4,
            [
                "NODE_CONDITION: \"true\"",
                "resources: [nodes/status], verbs: [patch]}",
                "add: [NET_ADMIN, SYS_ADMIN]",
            ],
        ),
    ] {
        let mark = format!("# {mark}: ");
        assert_eq!(manifest().matches(&mark).count(), marked, "{mark}: with the command");
        let manifest = manifest().replace(&mark, "");
        for part in parts {
            let is_in_force = |line: &str| line.contains(part) && !line.trim().starts_with('#');
            assert!(manifest.lines().any(is_in_force), "{mark} {part}");
        }
    }
}

#[test]
fn the_clusters_controller_is_deployed_with_what_it_knows_and_without_privilege() {
    let text = fs::read_to_string(project::file("deploy/taint-controller.yaml")).expect("a manifest");
    let known: BTreeSet<&str> = SETTINGS.iter().flat_map(|setting| setting.env.iter().copied()).collect();
    let named = text.split("name: ").filter_map(|rest| rest.split([',', '\n', '}']).next());
    let variables: Vec<&str> = named
        .filter(|name| name.len() > 3 && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_'))
        .collect();
    assert!(variables.len() == 7 && variables.iter().all(|name| known.contains(name)), "{variables:?}");
    for part in [
        "command: [install-cni, taint-controller]",
        "capabilities: {drop: [ALL]}",
        "runAsNonRoot: true",
        "readOnlyRootFilesystem: true",
        "{key: cni.istio.io/not-ready, operator: Exists}",
        "rollingUpdate: {maxUnavailable: 1, maxSurge: 0}",
        "resourceNames: [istio-taint-lock]",
    ] {
        assert!(text.contains(part), "{part}");
    }
    assert!(!text.contains('*') && !text.contains("ADMIN"));
}

#[test]
fn the_manifest_sets_only_what_the_agent_knows() {
    let known: BTreeSet<&str> = SETTINGS.iter().flat_map(|setting| setting.env.iter().copied()).collect();
    let manifest = with_drift_watch();
    let variables = manifest.lines().filter_map(|line| {
        let name = line.trim().trim_start_matches("- name: ").split(':').next()?;
        let is_variable =
            name.len() > 3 && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        is_variable.then_some(name)
    });
    let variables: Vec<&str> = variables.collect();
    assert!(variables.len() >= 6, "{variables:?}");
    assert!(variables.iter().all(|name| known.contains(name)), "{variables:?}");
}

/// The quoted words on the line of a template that has all of these parts.
fn words(template: &str, part: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(project::file("deploy/charts/istio-cni/templates").join(template))
        .expect(template);
    let line = text.lines().find(|line| line.contains(part)).expect(part);
    line.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_charts_checksum_leaves_out_what_the_agent_reloads_and_nothing_else() {
    let reloaded: BTreeSet<String> = RELOADED.iter().map(|key| key.row().name().to_owned()).collect();
    assert_eq!(words("_agent.tpl", "range list \"EXCLUDE_NAMESPACES\""), reloaded);
}

/// What the chart leaves out of the ConfigMap because it is the agent's own default.
#[test]
fn the_charts_defaults_are_the_agents() {
    let defaults =
        fs::read_to_string(project::file("deploy/charts/istio-cni/files/defaults.yaml")).expect("defaults");
    for (name, value) in [
        ("REPAIR_INIT_CONTAINER_NAME", "  initContainerName"),
        ("REPAIR_BROKEN_POD_LABEL_KEY", "  brokenPodLabelKey"),
        ("REPAIR_BROKEN_POD_LABEL_VALUE", "  brokenPodLabelValue"),
        ("PLUGIN_TOKEN_LIFETIME", "  lifetime"),
        ("HEALTH_PORT", "healthPort"),
        ("MONITORING_PORT", "monitoringPort"),
        ("CHAINED_CNI_PLUGIN", "chained"),
    ] {
        let setting = SETTINGS.iter().find(|setting| setting.name() == name).expect("a setting");
        let value_line = |line: &&str| line.starts_with(&format!("{value}: "));
        let line = defaults.lines().find(value_line).expect(value);
        assert_eq!(line.split_once(": ").expect("a value").1.trim_matches('"'), setting.default, "{name}");
    }
    for name in [
        "NFT_SETS",
        "STRICT_CAPTURE",
        "READY_BEFORE_CALLED",
        "ISTIO_OWNED_CNI_CONFIG",
        "REPAIR_REPAIR_PODS",
        "REPAIR_DELETE_PODS",
        "REPAIR_LABEL_PODS",
    ] {
        let setting = SETTINGS.iter().find(|setting| setting.name() == name).expect("a setting");
        assert_eq!(setting.default, "false", "{name} is left out where it is off");
    }
}

#[test]
fn the_manifest_mounts_the_defaults() {
    let manifest = manifest();
    for name in ["MOUNTED_CNI_BIN_DIR", "MOUNTED_CNI_NET_DIR", "CNI_AGENT_RUN_DIR"] {
        let setting = SETTINGS.iter().find(|setting| setting.name() == name).expect("a setting");
        assert!(manifest.contains(&format!("mountPath: {}}}", setting.default)), "{name}");
    }
}
