//! What is in each image.

use anyhow::{Context, Result};

/// An image: its programs, and what surrounds them.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) description: &'static str,
    /// Package and path. The first is a container's default command.
    pub(crate) programs: &'static [(&'static str, &'static str)],
    /// Other names of programs: path and target.
    pub(crate) links: &'static [(&'static str, &'static str)],
    /// Folders beside those of the programs: where a read-only container gets something mounted.
    pub(crate) folders: &'static [&'static str],
    /// A container's default user.
    pub(crate) user: &'static str,
}

/// As the injector's other templates call the program of the image that they were written for.
const INJECTED_NAME: &str = "usr/local/bin/pilot-agent";

impl Image {
    pub(crate) const ALL: [Self; 3] = [
        Self {
            name: "install-cni",
            title: "sidecar-cni node agent",
            description: "Puts the CNI plugin istio-cni on a node and keeps it in the container runtime's configuration.",
            programs: &[
                ("install-cni", "usr/local/bin/install-cni"),
                ("istio-cni", "opt/cni/bin/istio-cni"),
                // Not beside the plugin: the agent copies the programs of that folder to the node.
                ("redirectctl", "usr/local/bin/redirectctl"),
            ],
            links: &[],
            folders: &[
                "host/opt/cni/bin",
                "host/etc/cni/net.d",
                "var/run/istio-cni",
                "var/run/secrets",
                "tmp",
            ],
            user: "0:0",
        },
        Self {
            name: "proxy-init",
            title: "sidecar-cni init container",
            description: "Redirects a pod's traffic to its sidecar proxy, in the place of istio-init.",
            programs: &[("istio-iptables", "usr/local/bin/istio-iptables")],
            links: &[(INJECTED_NAME, "istio-iptables")],
            folders: &["run", "tmp"],
            user: "0:0",
        },
        Self {
            name: "validator",
            title: "sidecar-cni validation",
            description: "Proves by traffic that a pod is redirected to its sidecar proxy, in the place of istio-validation.",
            programs: &[("istio-validation", "usr/local/bin/istio-validation")],
            links: &[
                ("usr/local/bin/istio-iptables", "istio-validation"),
                (INJECTED_NAME, "istio-validation"),
            ],
            folders: &["tmp"],
            user: "1337:1337",
        },
    ];

    pub(crate) fn named(name: &str) -> Result<&'static Self> {
        const ALL: &[Image] = &Image::ALL;
        let names = || ALL.iter().map(|image| image.name).collect::<Vec<_>>().join(", ");
        ALL.iter()
            .find(|image| image.name == name)
            .with_context(|| format!("{name} is not an image of ours: {}", names()))
    }
}

/// The users that a pod's settings may name.
pub(crate) const FILES: [(&str, &str); 2] = [
    ("etc/passwd", "root:x:0:0:root:/:/sbin/nologin\nistio-proxy:x:1337:1337:istio-proxy:/:/sbin/nologin\n"),
    ("etc/group", "root:x:0:\nistio-proxy:x:1337:\n"),
];
