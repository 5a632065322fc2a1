//! The CNI plugin in real network namespaces, asked as a container runtime asks it.

mod plugin_ambient;
mod plugin_behaviour;
mod plugin_crowd;
mod plugin_malformed;
mod plugin_odd;
mod plugin_pods;
mod plugin_recordings;
mod plugin_requests;
