//! One cluster with a mesh and one kind of redirection.

use anyhow::{Context, Result};
use e2e::kube::{ApiServer, Controllers};
use e2e::node::Node;
use serde_json::Value;
use test_support::port::free_port;

use super::istiod::Istiod;
use super::release::Release;
use super::{OF_SERVICES, Redirection, create_apps, import_images, install_agent, require_mutual_tls};
use crate::agent_support::{NAMESPACE, import_image};

/// A cluster whose control plane and agent are up, with mTLS required.
pub struct Cluster<'a> {
    pub api: &'a ApiServer,
    pub node: &'a Node<'a>,
    pub istiod: &'a Istiod,
    pub controllers: &'a Controllers,
    pub release: &'a Release,
    pub redirection: Redirection,
    /// A port of the node that nobody has.
    pub endpoint_outside: u16,
}

impl Cluster<'_> {
    /// Installs the agent with further values, if pods are redirected by one.
    pub fn install_agent(&self, values: &Value) -> Result<()> {
        install_agent(self.redirection, self.release, self.api, self.node, self.controllers, values)
    }
}

/// Runs something on a cluster of its own, still without an agent; an error shows the end of istiod's log.
pub fn on_cluster<T>(
    redirection: Redirection,
    release: &Release,
    action: impl FnOnce(&Cluster<'_>) -> Result<T>,
) -> Result<T> {
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    let controllers = Controllers::start_with(&api, &OF_SERVICES)?;
    let node = Node::joined(&api)?;
    let _service = node.as_usual()?;
    if redirection == Redirection::Ambient {
        import_image(&node)?;
        release.import_ztunnel(&node)?;
    } else {
        import_images(&node, release)?;
    }
    let (istiod, _reached) = Istiod::start_on(release, &api, &node, &redirection.values())?;
    create_apps(&api)?;
    require_mutual_tls(&api)?;
    let cluster = Cluster {
        api: &api,
        node: &node,
        istiod: &istiod,
        controllers: &controllers,
        release,
        redirection,
        endpoint_outside: free_port()?,
    };
    action(&cluster).with_context(|| istiod.tail())
}
