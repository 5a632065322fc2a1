//! Settings of ambient mode.

use std::path::PathBuf;
use std::time::Duration;

use cni_core::enablement::Enablement;
use cni_core::yaml;
use redirect_core::Family;
use redirect_core::ambient::ProbeSources;
use serde_json::Value;
use zds::Newcomer;

use super::raw::Raw;
use super::table::Key;

/// What holds for all pods, unless their annotations decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmbientDefaults {
    /// Whether DNS queries go to ztunnel (`AMBIENT_DNS_CAPTURE`).
    pub dns_capture: bool,
    /// Whether IPv6 is redirected, too (`AMBIENT_IPV6`).
    pub ipv6: bool,
    /// Whether pods may limit what is captured of their traffic (`AMBIENT_CAPTURE_SCOPE`).
    pub capture_scope: bool,
    /// How long pods may keep connections past ztunnel that were open when they were enrolled (`AMBIENT_KEEP_CONNECTIONS`).
    pub keep_connections: Duration,
    /// The sources that the node gives to the kubelet's probes (`HOST_PROBE_SNAT_IP`, `HOST_PROBE_SNAT_IPV6`).
    pub probes: ProbeSources,
}

/// Settings of ambient mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmbientSettings {
    /// Which pods are in it: selectors for the plugin's entry, which the agent reads as the plugin does; none for the usual ones.
    pub selectors: Option<Value>,
    /// Whether labels of no other name than the usual one decide.
    pub has_usual_selectors: bool,
    /// What holds for all pods, unless their annotations decide.
    pub defaults: AmbientDefaults,
    /// Whether probes of pods with branch interfaces get routes of their own.
    pub routes_branch_probes: bool,
    /// Where ztunnel connects.
    pub socket: PathBuf,
    /// What a ztunnel receives that connects beside another one (`AMBIENT_ZTUNNEL_CANARY`).
    pub newcomer: Newcomer,
}

/// None: ambient mode is off.
pub(super) fn read(raw: &mut Raw<'_>) -> Option<AmbientSettings> {
    let is_on = raw.switch(Key::AMBIENT_ENABLED);
    let (selectors, enablement) = selectors(raw).unzip();
    let has_usual_selectors = enablement.is_none_or(|given| given.is_usual());
    let defaults = AmbientDefaults {
        dns_capture: raw.switch(Key::AMBIENT_DNS_CAPTURE),
        ipv6: raw.switch(Key::AMBIENT_IPV6),
        capture_scope: raw.switch(Key::AMBIENT_CAPTURE_SCOPE),
        keep_connections: raw.duration(Key::AMBIENT_KEEP_CONNECTIONS),
        probes: probes(raw),
    };
    let routes_branch_probes = raw.switch(Key::AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE);
    let socket = PathBuf::from(raw.text(Key::ZTUNNEL_UDS_ADDRESS));
    if !socket.is_absolute() || socket.file_name().is_none() {
        raw.reject(Key::ZTUNNEL_UDS_ADDRESS, "not the path of a socket, from the root of the file system");
    }
    let newcomer =
        if raw.switch(Key::AMBIENT_ZTUNNEL_CANARY) { Newcomer::NewPods } else { Newcomer::AllPods };
    is_on.then_some(AmbientSettings {
        selectors,
        has_usual_selectors,
        defaults,
        routes_branch_probes,
        socket,
        newcomer,
    })
}

fn probes(raw: &mut Raw<'_>) -> ProbeSources {
    let keys = [(Key::HOST_PROBE_SNAT_IP, Family::V4), (Key::HOST_PROBE_SNAT_IPV6, Family::V6)];
    keys.into_iter().fold(ProbeSources::USUAL, |sources, (key, family)| {
        raw.read(key, sources, |text| sources.with(family, text))
    })
}

fn selectors(raw: &mut Raw<'_>) -> Option<(Value, Enablement)> {
    const KEY: Key = Key::AMBIENT_ENABLEMENT_SELECTOR;
    let text = raw.text(KEY);
    if text.trim().is_empty() {
        return None;
    }
    // Istio's chart writes YAML.
    let read = yaml::documents(&text).and_then(|documents| match <[Value; 1]>::try_from(documents) {
        Ok([selectors]) => Ok(selectors),
        Err(all) => Err(format!("has {} documents, not one", all.len())),
    });
    let checked = read.and_then(|value| {
        let read = Enablement::read(&value, []).map_err(|error| error.to_string())?;
        Ok((value, read))
    });
    checked.map_err(|why| raw.reject(KEY, &why)).ok()
}
