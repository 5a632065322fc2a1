//! The node agent: puts the istio-cni plugin on the node and keeps it there.
//!
//! ```text
//! flags, environment ──► settings ──┐
//! conf directory ──► Directory ─────┼─► plan ──► edits ──► install ──► disk
//! image, service account ───────────┘     └──► obstacle ──► ready
//! ```
//!
//! [`conflist`] and [`plan`] are pure; [`install`] and [`leave`] carry their plans out, through the seam of [`disk`]; [`plugin`] queries the plugin, [`plugin_health`] the API server as the plugin does; [`agent`] is
//! the loop; [`once`] does the same a single time. [`pod_check`] compares and redirects a pod. [`repair`] handles pods that started before the plugin was installed;
//! [`taint`] keeps pods off nodes where they would not be redirected;
//! [`drift`] compares the node's pods with what the plugin made of them; [`heal`] repairs drifted ones as soon as the kernel reports a change;
//! `pod-netns` finds their namespaces. [`ambient_command`] programs one namespace by hand. [`rights`] decides which privileges an agent keeps, and [`confine`] which files it may use.

pub mod agent;
pub mod ambient;
pub mod ambient_command;
pub mod ambient_rules;
pub mod cluster;
pub mod confine;
pub mod conflict;
pub mod conflist;
pub mod disk;
pub mod drift;
pub mod file_watch;
pub mod heal;
pub mod held_pods;
pub mod install;
pub mod kubeconfig;
pub mod leave;
pub mod log_socket;
pub mod metrics;
pub mod netns_changes;
pub mod once;
pub mod plan;
pub mod plugin;
pub mod plugin_health;
pub mod plugin_requests;
pub mod plugin_socket;
pub mod plugin_token;
pub mod pod_check;
pub mod pod_watch;
pub mod ready;
pub mod reload;
pub mod repair;
pub mod rights;
pub mod seen_calls;
pub mod serve;
pub mod settings;
pub mod taint;
