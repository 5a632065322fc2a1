//! What needs a real API server, kubelet, containerd or Helm: `make test-cluster`.

mod agent_api;
mod agent_repair;
mod agent_scale;
mod agent_support;
mod agent_taint;
mod chart;
mod chart_cluster;
mod chart_support;
mod enrolment;
mod fleet;
mod guides_cluster;
mod guides_mesh;
mod harness;
mod kubectl_redirect;
mod kubectl_support;
mod monitoring;
mod monitoring_live;
mod monitoring_support;
mod net_dirs;
mod node;
mod own_node;
mod plugin_ambient;
mod plugin_api;
mod plugin_cnitool;
mod proxy_user;
mod redirectctl_api;
