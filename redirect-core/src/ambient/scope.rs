//! What of a pod's traffic ambient mode captures, where an operator lets the pod's owner decide.

use crate::{
    redirect::{InboundPorts, OutboundRanges, Read, SettingsReader},
    settings::{InputErrors, Key, NamespaceFacts, RawSettings, Setting},
    values::{Cidrs, InterfaceName, PortRange},
};
use alloc::vec::Vec;

/// How annotations begin that count only where an operator lets owners of pods decide.
const OF_OWNERS: &str = "traffic.istio.io/";

/// Which traffic is captured: what a sidecar's settings say of it, without what is excluded for the sidecar itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureScope {
    pub(crate) inbound: InboundPorts,
    pub(crate) outbound: OutboundRanges,
    pub(crate) outbound_exclude: Cidrs,
    /// Captured whatever the destination.
    pub(crate) outbound_ports: Vec<PortRange>,
    pub(crate) outbound_ports_exclude: Vec<PortRange>,
    pub(crate) exclude_interfaces: Vec<InterfaceName>,
}

impl CaptureScope {
    /// Everything.
    pub(crate) const fn everything() -> Self {
        Self {
            inbound: InboundPorts::AllExcept(Vec::new()),
            outbound: OutboundRanges::All,
            outbound_exclude: Cidrs::new(),
            outbound_ports: Vec::new(),
            outbound_ports_exclude: Vec::new(),
            exclude_interfaces: Vec::new(),
        }
    }

    /// Whether that is everything.
    pub(crate) fn is_everything(&self) -> bool {
        // Ports that are captured whatever the destination add nothing to all destinations.
        let adding = Self { outbound_ports: self.outbound_ports.clone(), ..Self::everything() };
        *self == adding
    }

    /// Reads it from settings; where something cannot be read, that is noted.
    pub(crate) fn read(raw: &RawSettings, errors: &mut InputErrors) -> Self {
        let facts = NamespaceFacts::new(&[]);
        let mut reader = SettingsReader::new(raw, &facts, core::mem::take(errors));
        let scope = Self::read_all(&mut reader);
        *errors = reader.into_errors();
        scope
    }

    fn read_all(reader: &mut SettingsReader<'_>) -> Self {
        let outbound = reader.outbound(Key::AmbientOutboundRanges).unwrap_or(OutboundRanges::All);
        let excluded = Vec::read(reader, Key::AmbientInboundExcludePorts);
        let inbound = reader.inbound(Key::AmbientInboundPorts, excluded).unwrap_or(InboundPorts::None);
        Self {
            inbound,
            outbound,
            outbound_exclude: Cidrs::read(reader, Key::AmbientOutboundExcludeRanges).unwrap_or_default(),
            outbound_ports: Vec::read(reader, Key::AmbientOutboundPorts).unwrap_or_default(),
            outbound_ports_exclude: Vec::read(reader, Key::AmbientOutboundExcludePorts).unwrap_or_default(),
            exclude_interfaces: Vec::read(reader, Key::AmbientExcludeInterfaces).unwrap_or_default(),
        }
    }
}

/// Whether a setting's annotations count only where owners of pods decide about the scope.
pub fn is_of_owners(setting: &Setting) -> bool {
    setting.annotations.iter().any(|name| name.starts_with(OF_OWNERS))
}
