//! What the plugin and the node agent share.
//!
//! [`wire`] is the protocol of the Container Network Interface, [`conf`] the plugin's configuration ([`keys`] lists its keys), and [`selection`] what decides
//! about a pod besides the pod itself. [`pod_source`] reads pods.
//! [`enablement`], [`plugin_event`] and [`enrolment_report`] are ambient mode's. The agent parses the entry it writes, and
//! takes facts from pods, with the same code as the plugin: they cannot disagree. [`net_dir`] is which network configuration a runtime runs.

pub mod agent_notes;
pub mod conf;
pub mod enablement;
pub mod enrolment_report;
pub mod fields;
pub mod invoke;
pub mod keys;
pub mod logs;
pub mod net_dir;
pub mod plugin_event;
pub mod pod_name;
#[cfg(feature = "pod-source")]
pub mod pod_source;
pub mod sandboxed;
pub mod selection;
pub mod selector;
pub mod wire;
pub mod yaml;
