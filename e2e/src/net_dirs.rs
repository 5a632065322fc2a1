//! Configuration directories, and whether the next pod gets the plugin: what the agent and `redirectctl` both have to say.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use Expected::{Called, NotCalled, Open};

/// Whether the next pod gets the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// It does.
    Called,
    /// It does not; a part of the reason.
    NotCalled(&'static str),
    /// The files leave it open; a part of the reason.
    Open(&'static str),
}

/// A directory with the plugin's entry in its place, and what follows from it.
pub struct NetDir {
    /// What it is.
    pub name: &'static str,
    /// Settings of the agent that has the entry there.
    pub env: &'static [(&'static str, &'static str)],
    /// Its files: names below it and texts, or the target of a symbolic link behind `-> `.
    pub files: &'static [(&'static str, &'static str)],
    /// Whether the next pod gets the plugin.
    pub expected: Expected,
    /// The finding of `redirectctl`, if any.
    pub finding: Option<&'static str>,
}

const CALICO: &str = r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"}]}"#;
const WITH: &str =
    r#"{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"},{"type":"istio-cni"}]}"#;
const OTHER: &str = r#"{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge"}]}"#;
const LOOPBACK: &str = r#"{"cniVersion":"1.0.0","name":"lo","type":"loopback"}"#;
const ALONE: &str = r#"{"cniVersion":"1.0.0","name":"istio-cni","type":"istio-cni"}"#;
const BESIDE: &str = r#"{"name":"istio-cni","type":"istio-cni","drop_in":true}"#;
const ONLY_INLINED: &str =
    r#"{"cniVersion":"1.1.0","name":"k8s","loadOnlyInlinedPlugins":true,"plugins":[{"type":"calico"}]}"#;
const ONLY_INLINED_WITH: &str = r#"{"cniVersion":"1.1.0","name":"k8s","loadOnlyInlinedPlugins":true,"plugins":[{"type":"calico"},{"type":"istio-cni"}]}"#;
const PINNED: &[(&str, &str)] = &[("CNI_CONF_NAME", "10-calico.conflist")];
const STANDALONE: &[(&str, &str)] = &[("CHAINED_CNI_PLUGIN", "false")];

/// Multus with further keys.
macro_rules! multus {
    ($type:literal, $keys:literal) => {
        concat!(r#"{"cniVersion":"1.0.0","name":"multus-cni-network","type":""#, $type, "\",", $keys, "}")
    };
}

const fn dir(
    name: &'static str,
    env: &'static [(&'static str, &'static str)],
    files: &'static [(&'static str, &'static str)],
    expected: Expected,
    finding: &'static str,
) -> NetDir {
    NetDir { name, env, files, expected, finding: if finding.is_empty() { None } else { Some(finding) } }
}

/// All of them.
pub const ALL: &[NetDir] = &[
    dir("a list", &[], &[("10-calico.conflist", WITH), ("87-podman.conflist", OTHER)], Called, ""),
    dir(
        "another file first",
        PINNED,
        &[("05-other.conflist", OTHER), ("10-calico.conflist", WITH)],
        NotCalled("the runtime uses 05-other.conflist"),
        "no-plugin-entry",
    ),
    dir(
        "nothing",
        &[],
        &[("99-loopback.conf", LOOPBACK)],
        NotCalled("the plugin loopback alone"),
        "no-plugin-entry",
    ),
    dir(
        "loopback first",
        &[],
        &[("00-loopback.conf", LOOPBACK), ("10-calico.conflist", WITH)],
        NotCalled("loopback alone"),
        "no-plugin-entry",
    ),
    dir(
        "an empty first file",
        &[],
        &[("00-x.conf", ""), ("10-calico.conflist", WITH)],
        Open("00-x.conf comes first"),
        "entry-unreadable",
    ),
    dir(
        "a first file that is cut off",
        &[],
        &[("00-x.conflist", "{\"cniVersion\":\"1.0.0\",\"name\":"), ("10-calico.conflist", WITH)],
        Open("00-x.conflist comes first"),
        "entry-unreadable",
    ),
    dir(
        "a broken first file",
        &[],
        &[("00-x.conf", "{broken"), ("10-calico.conflist", WITH)],
        Open("00-x.conf comes first"),
        "entry-unreadable",
    ),
    dir(
        "a link that leads somewhere on the node alone",
        &[],
        &[
            ("10-flannel.conflist", "-> /nix/store/of-the-node/10-flannel.conflist"),
            ("87-podman.conflist", OTHER),
        ],
        NotCalled(
            "10-flannel.conflist comes first and cannot be read (a symbolic link to /nix/store/of-the-node/10-flannel.conflist",
        ),
        "entry-unreadable",
    ),
    dir(
        "a list with its plugins in its folder",
        &[],
        &[
            ("10-k8s.conflist", r#"{"cniVersion":"1.1.0","name":"k8s"}"#),
            ("k8s/10-bridge.conf", r#"{"type":"bridge"}"#),
            ("k8s/zz-istio-cni.conf", ALONE),
        ],
        Called,
        "",
    ),
    dir(
        "a list with the entry, and beside it",
        &[("CNI_INSTALL", "auto")],
        &[("10-calico.conflist", WITH), ("k8s/zz-istio-cni.conf", BESIDE)],
        Called,
        "",
    ),
    dir(
        "a list with the entry that forbids others beside it",
        &[("CNI_INSTALL", "auto")],
        &[("10-calico.conflist", ONLY_INLINED_WITH), ("k8s/zz-istio-cni.conf", BESIDE)],
        Called,
        "",
    ),
    dir(
        "the entry beside a list that forbids it",
        &[("CNI_INSTALL", "drop-in")],
        &[("10-calico.conflist", ONLY_INLINED), ("k8s/zz-istio-cni.conf", BESIDE)],
        NotCalled("10-calico.conflist"),
        "no-plugin-entry",
    ),
    dir(
        "a list with the entry, and another program's file beside it",
        &[("CNI_INSTALL", "auto")],
        &[("10-calico.conflist", WITH), ("k8s/10-bandwidth.conf", r#"{"type":"bandwidth"}"#)],
        Called,
        "",
    ),
    dir(
        "standalone without a reader",
        STANDALONE,
        &[("YYY-istio-cni.conf", ALONE)],
        Open("only Multus reads it"),
        "plugin-not-seen-called",
    ),
    dir(
        "thin Multus, another network inlined",
        PINNED,
        &[
            (
                "00-multus.conf",
                multus!(
                    "multus",
                    r#""delegates":[{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"}]}]"#
                ),
            ),
            ("10-calico.conflist", WITH),
        ],
        NotCalled("Multus (00-multus.conf) runs its own delegates (k8s: calico)"),
        "no-plugin-entry",
    ),
    dir(
        "thin Multus, the entry inlined",
        PINNED,
        &[
            (
                "00-multus.conf",
                multus!(
                    "multus",
                    r#""delegates":[{"cniVersion":"1.0.0","name":"k8s","plugins":[{"type":"calico"},{"type":"istio-cni"}]}]"#
                ),
            ),
            ("10-calico.conflist", WITH),
        ],
        Called,
        "",
    ),
    dir(
        "thick Multus, by path",
        PINNED,
        &[
            (
                "00-multus.conf",
                multus!("multus-shim", r#""clusterNetwork":"/host/etc/cni/net.d/10-calico.conflist""#),
            ),
            ("10-calico.conflist", WITH),
        ],
        Called,
        "",
    ),
    dir(
        "thick Multus, by name",
        PINNED,
        &[
            ("00-multus.conf", multus!("multus-shim", r#""clusterNetwork":"k8s""#)),
            ("10-calico.conflist", WITH),
        ],
        Called,
        "",
    ),
    dir(
        "thick Multus, another network",
        PINNED,
        &[
            (
                "00-multus.conf",
                multus!("multus-shim", r#""clusterNetwork":"/host/etc/cni/net.d/20-other.conflist""#),
            ),
            ("10-calico.conflist", WITH),
            ("20-other.conflist", OTHER),
        ],
        NotCalled("runs 20-other.conflist (bridge)"),
        "no-plugin-entry",
    ),
    dir(
        "thick Multus, a definition of the cluster",
        PINNED,
        &[
            ("00-multus.conf", multus!("multus-shim", r#""clusterNetwork":"tenant""#)),
            ("10-calico.conflist", WITH),
        ],
        Open("runs the network tenant"),
        "plugin-not-seen-called",
    ),
    dir(
        "thick Multus, another directory",
        PINNED,
        &[
            (
                "00-multus.conf",
                multus!("multus-shim", r#""clusterNetwork":"/run/multus/cni/net.d/10-calico.conflist""#),
            ),
            ("10-calico.conflist", WITH),
        ],
        Open("which these files do not show"),
        "plugin-not-seen-called",
    ),
    dir(
        "the plugin behind Multus",
        &[],
        &[
            (
                "00-multus.conflist",
                r#"{"cniVersion":"1.0.0","name":"m","plugins":[{"type":"multus","delegates":[{"type":"bridge"}]},{"type":"istio-cni"}]}"#,
            ),
            ("10-calico.conflist", CALICO),
        ],
        Called,
        "",
    ),
    dir(
        "OVN-Kubernetes, which depends on its file's name",
        &[],
        &[
            (
                "10-ovn-kubernetes.conf",
                r#"{"cniVersion":"0.4.0","name":"ovn-kubernetes","type":"ovn-k8s-cni-overlay"}"#,
            ),
            ("02-istio-cni.conflist.istio-cni-owned", ""),
            (
                "02-istio-cni.conflist",
                r#"{"cniVersion":"0.4.0","name":"ovn-kubernetes","plugins":[{"cniVersion":"0.4.0","name":"ovn-kubernetes","type":"ovn-k8s-cni-overlay"},{"type":"istio-cni"}]}"#,
            ),
        ],
        Called,
        "",
    ),
];

/// The types of the plugins that a runtime runs, as libcni loads a list; `beside` has the texts of the files in the folder of its name, in their order,
/// or none where libcni is older than 1.3.
///
/// # Panics
/// A text cannot be loaded, with which libcni fails.
pub fn plugins_run<'t>(list: &str, beside: impl IntoIterator<Item = &'t str>) -> Vec<String> {
    let parsed = |text: &str| -> Value {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    };
    let kind = |plugin: &Value| plugin["type"].as_str().expect("a type").to_owned();
    let inlined = parsed(list)["plugins"].as_array().cloned().unwrap_or_default();
    inlined.into_iter().chain(beside.into_iter().map(parsed)).map(|plugin| kind(&plugin)).collect()
}

impl NetDir {
    /// Writes its files into a folder.
    ///
    /// # Panics
    /// They cannot be written.
    pub fn write(&self, folder: &Path) {
        for (name, text) in self.files {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("makes");
            match text.strip_prefix("-> ") {
                Some(target) => symlink(target, path).expect("links"),
                None => fs::write(path, text).expect("writes"),
            }
        }
    }
}
