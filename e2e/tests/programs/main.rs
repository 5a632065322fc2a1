//! What all programs have in common, what documents say of them, and redirectctl.

mod autoscalers;
mod browser_support;
mod command_line;
mod faults;
mod faults_support;
mod fuzz_seeds;
mod guides;
mod harness;
mod kept_capabilities;
mod least_privilege;
mod page_answers;
mod page_browser;
mod page_support;
mod plugin_docs;
mod redirectctl_bundle;
mod redirectctl_cni;
mod redirectctl_listeners;
mod redirectctl_net_dirs;
mod redirectctl_scan;
mod redirectctl_states;
mod redirectctl_terminal;
mod redirectctl_watch;
