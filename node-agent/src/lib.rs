//! The node agent: puts the istio-cni plugin on the node and keeps it there, and watches over the node's pods.
//!
//! - [`install`]: the plugin and its configuration on the node.
//! - [`pods`]: the node's pods with a sidecar: drift, healing, repair.
//! - [`ambient`]: its pods without one, which ztunnel serves.
//! - [`taint`]: keeps pods off nodes where they would not be redirected.
//! - [`serve`]: probes, metrics, and what plugins ask and report.
//!
//! Beside them are [`settings`], [`cluster`] (the API server), [`pod_watch`] (the one watch of the node's pods), [`conflist`] (the network's configuration,
//! pure), [`metrics`], [`parts`] (what the rooms share) and [`confine`] (what the agent may do); [`ambient_command`] programs one namespace by hand. [`agent`] is the loop.

pub mod agent;
pub mod ambient;
pub mod ambient_command;
pub mod ambient_rules;
pub mod cluster;
pub mod confine;
pub mod conflist;
pub mod install;
pub mod metrics;
pub mod parts;
pub mod pod_watch;
pub mod pods;
pub mod serve;
pub mod settings;
pub mod taint;
