//! A real mesh on the tests' node: istiod, its injector, `pilot-agent` and Envoy, and what redirects pods: ours, or Istio's own.

pub mod checks;
pub mod cluster;
pub mod istiod;
pub mod load;
pub mod pods;
pub mod release;
pub mod restart;
pub mod same_port;
pub mod table;

use std::path::PathBuf;

use anyhow::{Context, Result};
use e2e::kube::{ApiServer, Controllers};
use e2e::node::Node;
use serde_json::{Value, json};

use crate::agent_support::{IMAGE, Linked, NAMESPACE, entries, import_image, wait_loaded, wait_rolled_out};
use crate::chart_support::{chart, helm_with};
use istiod::TAG;
use release::Release;

/// The namespace of meshed pods.
pub const APPS: &str = "apps";
/// The same, by a revision tag.
pub const TAGGED: &str = "tagged";
/// The service accounts of ztunnel and of its canary.
pub const ZTUNNELS: [&str; 2] = ["ztunnel", "ztunnel-canary"];
/// Our images in the places of Istio's, by a value of istiod's chart.
pub const INIT: &str = "localhost/proxy-init:test";
const VALIDATOR: &str = "localhost/validator:test";
/// The same by a name alone.
const INIT_NAME: &str = "proxy-init";

/// What redirects pods, and what looks whether they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// Our plugin; our `istio-validation`.
    OurPlugin,
    /// Istio's plugin; `pilot-agent`.
    IstiosPlugin,
    /// Our `istio-iptables` as the init container.
    OurInit,
    /// `pilot-agent` as the init container.
    IstiosInit,
    /// An image of which istiod's value has the name alone: ours since 1.31, and before as if there were no value.
    InitByName,
    /// Our plugin, and ztunnel instead of sidecars.
    Ambient,
}

impl Redirection {
    pub const ALL: [Self; 4] = [Self::OurPlugin, Self::IstiosPlugin, Self::OurInit, Self::IstiosInit];

    /// The head of its column.
    pub fn title(self) -> &'static str {
        match self {
            Self::OurPlugin => "this plugin",
            Self::IstiosPlugin => "Istio's plugin",
            Self::OurInit => "istio-iptables",
            Self::IstiosInit => "Istio's istio-init",
            Self::InitByName => "an image by its name",
            Self::Ambient => "this plugin, ambient mode",
        }
    }

    /// The chart of the agent and its image, if there is one.
    fn agent(self, release: &Release) -> Option<(PathBuf, String)> {
        match self {
            Self::OurPlugin | Self::Ambient => Some((chart(), IMAGE.to_owned())),
            Self::IstiosPlugin => Some((release.chart("istio-cni"), release.agent_image())),
            Self::OurInit | Self::IstiosInit | Self::InitByName => None,
        }
    }

    /// The values of istiod's chart that go with it.
    pub fn values(self) -> Value {
        let image = match self {
            Self::OurPlugin => json!(VALIDATOR),
            Self::OurInit => json!(INIT),
            Self::InitByName => json!(INIT_NAME),
            Self::IstiosPlugin | Self::IstiosInit | Self::Ambient => Value::Null,
        };
        let by_plugin = matches!(self, Self::OurPlugin | Self::IstiosPlugin | Self::Ambient);
        let mut values = json!({"pilot": {"cni": {"enabled": by_plugin}}, "cni": {"enabled": by_plugin}});
        if !image.is_null() {
            values["global"] = json!({"proxy_init": {"image": image}});
        }
        if self == Self::Ambient {
            let accounts = ZTUNNELS.map(|account| format!("{NAMESPACE}/{account}")).join(",");
            values["pilot"]["env"] =
                json!({"PILOT_ENABLE_AMBIENT": "true", "CA_TRUSTED_NODE_ACCOUNTS": accounts});
        }
        values
    }

    /// The image of a pod's first init container.
    pub fn first_image(self, release: &Release) -> String {
        match self {
            Self::OurPlugin => VALIDATOR.to_owned(),
            Self::OurInit => INIT.to_owned(),
            Self::InitByName if release.is_1_31_or_newer() => release.image(INIT_NAME),
            Self::IstiosPlugin | Self::IstiosInit | Self::InitByName | Self::Ambient => release.proxy_image(),
        }
    }
}

/// Controllers that services need.
pub const OF_SERVICES: [&str; 1] = ["endpointslice-controller"];

/// Gives the node every image that pods of the mesh and agents use.
pub fn import_images(node: &Node<'_>, release: &Release) -> Result<()> {
    release.import_proxy(node)?;
    release.import_agent(node)?;
    import_image(node)?;
    let programs = Linked::of(node, &["istio-iptables", "istio-validation"])?;
    programs.import(node, "proxy-init", INIT)?;
    programs.import(node, "proxy-init", &release.image(INIT_NAME))?;
    programs.import(node, "validator", VALIDATOR)
}

/// Installs the agent by its chart, if there is one, with further values, and waits until it has changed the node.
pub fn install_agent(
    redirection: Redirection,
    release: &Release,
    api: &ApiServer,
    node: &Node<'_>,
    controllers: &Controllers,
    values: &Value,
) -> Result<()> {
    if redirection.agent(release).is_none() {
        return Ok(());
    }
    helm_agent("install", redirection, release, api, values)?;
    wait_rolled_out(api, node, controllers)?;
    wait_loaded(node).with_context(|| entries(node).unwrap_or_default())
}

/// Runs Helm to install or upgrade the agent's release.
pub fn helm_agent(
    verb: &str,
    redirection: Redirection,
    release: &Release,
    api: &ApiServer,
    values: &Value,
) -> Result<()> {
    let (chart, image) = redirection.agent(release).context("no agent")?;
    // By the hub our chart knows that the image is not Istio's; Istio's chart takes the whole name.
    let base = json!({
        "hub": "localhost", "image": image, "pullPolicy": "Never", "excludeNamespaces": ["kube-system"],
    });
    let chart = chart.display().to_string();
    let args = [verb, "istio-cni", &chart, "--namespace", NAMESPACE];
    helm_with(Some(api), &args, &[&base, values])?.ok().map(drop)
}

/// Namespaces whose pods are injected.
pub fn create_apps(api: &ApiServer) -> Result<()> {
    for (namespace, label) in
        [(APPS, "istio-injection=enabled".to_owned()), (TAGGED, format!("istio.io/rev={TAG}"))]
    {
        api.create_namespace(namespace)?;
        api.kubectl(&["label", "namespace", namespace, &label])?;
    }
    Ok(())
}

/// mTLS or nothing, everywhere.
pub fn require_mutual_tls(api: &ApiServer) -> Result<()> {
    api.apply(
        &json!({
            "apiVersion": "security.istio.io/v1", "kind": "PeerAuthentication",
            "metadata": {"name": "default", "namespace": NAMESPACE},
            "spec": {"mtls": {"mode": "STRICT"}},
        })
        .to_string(),
    )
}
