//! Settings of ambient mode.

use std::path::PathBuf;

use cni_core::enablement::Enablement;
use serde_json::Value;

use super::raw::Raw;
use crate::ambient::pod::AmbientDefaults;

/// Settings of ambient mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmbientSettings {
    /// Which pods are in it, apart from excluded namespaces, which may change while the agent runs: the selectors as they were given, or none for the usual ones.
    pub selectors: Option<Value>,
    /// What holds for all pods, unless their annotations decide.
    pub defaults: AmbientDefaults,
    /// Where ztunnel connects.
    pub socket: PathBuf,
}

impl AmbientSettings {
    /// Which pods are in ambient mode; none of those in excluded namespaces.
    #[must_use]
    pub fn enablement(&self, excluded: Vec<String>) -> Enablement {
        // They were read before.
        let read = |selectors: &Value| Enablement::read(selectors, excluded.clone()).ok();
        self.selectors.as_ref().and_then(read).unwrap_or_else(|| Enablement::usual(excluded.clone()))
    }
}

/// None: ambient mode is off.
pub(super) fn read(raw: &mut Raw<'_>) -> Option<AmbientSettings> {
    let is_on = raw.switch("AMBIENT_ENABLED");
    let selectors = selectors(raw);
    let defaults =
        AmbientDefaults { dns_capture: raw.switch("AMBIENT_DNS_CAPTURE"), ipv6: raw.switch("AMBIENT_IPV6") };
    let socket = PathBuf::from(raw.text("ZTUNNEL_UDS_ADDRESS"));
    if !socket.is_absolute() || socket.file_name().is_none() {
        raw.reject("ZTUNNEL_UDS_ADDRESS", "not the path of a socket, from the root of the file system");
    }
    is_on.then_some(AmbientSettings { selectors, defaults, socket })
}

fn selectors(raw: &mut Raw<'_>) -> Option<Value> {
    const NAME: &str = "AMBIENT_ENABLEMENT_SELECTOR";
    let text = raw.text(NAME);
    if text.trim().is_empty() {
        return None;
    }
    let read = serde_json::from_str::<Value>(&text).map_err(|error| format!("not JSON: {error}"));
    let checked =
        read.and_then(|value| Enablement::read(&value, []).map(|_| value).map_err(|error| error.to_string()));
    checked.map_err(|why| raw.reject(NAME, &why)).ok()
}
