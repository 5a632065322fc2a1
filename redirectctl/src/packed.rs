//! Pods of a whole cluster, packed: each as its text, made a [`Pod`] again when it is checked. Twenty thousand read pods take a hundred
//! megabytes, their texts a third of that.

use std::collections::BTreeSet;
use std::net::IpAddr;

use presentation::manifest;
use serde_json::Value;

use crate::cluster::ClusterObjects;
use crate::error::PodInputError;
use crate::pod::Pod;

/// A pod as its text, and what must be known of it before it is checked.
#[derive(Debug)]
pub struct Packed {
    text: Box<str>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether it is on the host's network.
    pub host_network: bool,
    /// Whether its containers have ended.
    pub is_over: bool,
}

impl Packed {
    fn of(pod: &Pod, mut object: Value) -> Self {
        // Of no use here, and often most of the text.
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        Self {
            text: object.to_string().into(),
            addresses: pod.addresses.clone(),
            host_network: pod.host_network,
            is_over: pod.is_over(),
        }
    }

    /// The pod, with its context.
    #[must_use]
    pub fn unpacked(&self, cluster: &ClusterObjects) -> Option<Pod> {
        // What was a pod is one still.
        let mut pod = Pod::from_json(&serde_json::from_str(&self.text).ok()?).ok()?;
        cluster.tell(std::slice::from_mut(&mut pod));
        Some(pod)
    }
}

/// The pods of a manifest that may be on a node, packed, and what is around them.
#[derive(Debug, Default)]
pub struct PackedPods {
    /// The pods.
    pub pods: Vec<Packed>,
    /// One pod of each node, and all that are node agents.
    pub of_nodes: Vec<Pod>,
    /// What is around them.
    pub cluster: ClusterObjects,
    node: Option<String>,
    nodes: BTreeSet<Option<String>>,
    count: usize,
    wrong: Vec<String>,
}

impl PackedPods {
    /// None yet. If a node is named, pods of another one are passed over.
    #[must_use]
    pub fn of_node(node: Option<&str>) -> Self {
        Self { node: node.map(str::to_owned), ..Self::default() }
    }

    /// Takes in an object of the manifest.
    pub(crate) fn take(&mut self, object: Value) {
        if self.cluster.take(&object) {
            return;
        }
        match Pod::from_json(&object) {
            Ok(pod) => self.add(pod, object),
            Err(errors) => self.wrong.extend(manifest::faults(&object, &errors)),
        }
    }

    fn add(&mut self, pod: Pod, object: Value) {
        self.count += 1;
        if self.node.is_some() && pod.node.is_some() && pod.node != self.node {
            return;
        }
        self.pods.push(Packed::of(&pod, object));
        if self.nodes.insert(pod.node.clone()) || pod.is_agent {
            self.of_nodes.push(pod);
        }
    }

    /// All of them.
    ///
    /// # Errors
    /// Everything wrong with them.
    pub fn whole(mut self) -> Result<Self, PodInputError> {
        if !self.wrong.is_empty() {
            return Err(PodInputError(self.wrong));
        }
        if self.count == 0 {
            return Err(PodInputError::of("has no pod"));
        }
        self.cluster.tell(&mut self.of_nodes);
        Ok(self)
    }

    /// The pods as they were, and what is around them.
    #[must_use]
    pub fn unpacked(self) -> (Vec<Pod>, ClusterObjects) {
        (self.pods.iter().filter_map(|pod| pod.unpacked(&self.cluster)).collect(), self.cluster)
    }
}
