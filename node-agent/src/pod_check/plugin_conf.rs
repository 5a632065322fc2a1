//! The plugin's configuration on this node, read by the plugin's own parser.

use cni_core::conf::{Conf, Envelope};
use cni_core::wire::Command;
use serde_json::Value;

use crate::install::Installer;

/// The plugin's configuration, as the runtime hands it over.
///
/// # Errors
/// The entry does not exist now, or the plugin would reject it.
pub fn plugin_conf(installer: &Installer) -> Result<Conf, String> {
    let wrong = |error: &dyn std::fmt::Display| error.to_string();
    let entry = installer.want().map_err(|error| wrong(&error))?.entry;
    let mut entry: Value = serde_json::from_str(&entry.standalone()).map_err(|error| wrong(&error))?;
    // In a list, the list's name counts.
    entry["name"] = "istio-cni".into();
    let entry = entry.to_string();
    let envelope = Envelope::read(entry.as_bytes(), Command::Add).map_err(|error| wrong(&error))?;
    envelope.conf().map_err(|error| wrong(&error))
}
