//! Tests with a node: a kubelet and containerd. A machine runs one at a time.

mod agent_node;
mod agent_race;
mod agent_rollout;
mod agent_runtimes;
mod ambient_mesh;
mod ambient_node;
mod breakages;
mod chart_node;
mod guides_node;
mod harness;
mod images_node;
mod images_support;
mod kubectl_redirect;
mod mesh;
pub mod mesh_support;
mod networks;
mod plugin_node;
mod redirectctl_node;
mod validation_pod;
