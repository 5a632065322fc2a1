//! The plugin and its configuration on the node: put there, kept there, and taken away.
//!
//! In: the settings, the image's programs, the network's configuration, the service account's token. Out: files, events of the runtime's folder,
//! and whether pods can start by them. It may not know pods, nor what their rules are.

pub mod conflict;
pub mod conflist_edits;
pub mod disk;
pub mod drop_in_reader;
pub mod file_watch;
pub mod installer;
pub mod kubeconfig;
pub mod leave;
pub mod once;
pub mod plugin;
pub mod plugin_health;
pub mod plugin_token;
pub mod ready;
pub mod reload;
pub mod seen_calls;
