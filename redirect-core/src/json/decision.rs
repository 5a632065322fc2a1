//! Whether and how a pod is redirected.

use super::{Family, VERSION, ports};
use crate::{
    pod, redirect,
    values::{self, PortRange},
};
use alloc::{
    borrow::ToOwned,
    boxed::Box,
    string::{String, ToString},
    vec::Vec,
};
use core::net::IpAddr;
use serde::{Deserialize, Serialize};

/// Whether, and how, a pod is redirected: the counterpart of [`pod::Decision`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Decision {
    /// The version of the schema.
    pub version: u32,
    /// What was decided.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Verdict {
    /// The pod is redirected, like this.
    Redirect {
        /// How.
        redirect: Box<Redirect>,
    },
    /// The pod is left alone.
    Skip {
        /// The word for the reason: [`pod::SkipReason::word`].
        reason: String,
        /// The reason in a sentence; its wording may change.
        explanation: String,
    },
}

/// A redirection: the counterpart of [`redirect::Redirect`](crate::Redirect). Ports are written as in settings: `80`, or
/// `8000:8099`; address ranges with their prefix length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Redirect {
    /// How inbound connections reach the proxy.
    pub mode: InterceptionMode,
    /// The families that have rules.
    pub families: Vec<Family>,
    /// Where the proxy listens for outbound connections.
    pub proxy_port: u16,
    /// Where the proxy listens for inbound connections.
    pub inbound_port: u16,
    /// Where tunnelled inbound connections arrive.
    pub tunnel_port: u16,
    /// The proxy's users.
    pub proxy_uids: Vec<u32>,
    /// The proxy's groups.
    pub proxy_gids: Vec<u32>,
    /// Which inbound ports are captured.
    pub inbound: InboundPorts,
    /// Which destinations are captured.
    pub outbound: OutboundRanges,
    /// Which destinations are not, whatever `outbound` says.
    pub outbound_exclude: Vec<String>,
    /// Which ports are captured whatever the destination.
    pub outbound_ports: Vec<String>,
    /// Which ports are not captured, TCP and UDP.
    pub outbound_ports_exclude: Vec<String>,
    /// Whose traffic is captured.
    pub owner_groups: OwnerGroups,
    /// Which DNS queries are captured.
    pub dns: DnsCapture,
    /// Interfaces left alone.
    pub exclude_interfaces: Vec<String>,
    /// Interfaces whose inbound traffic counts as outbound.
    pub virtual_interfaces: Vec<String>,
    /// Whether inbound packets that connection tracking finds invalid are dropped.
    pub drop_invalid: bool,
    /// Whether what would pass on a connection that was not captured is dropped.
    pub strict_capture: bool,
    /// The IPv4 loopback range the application may use with itself.
    pub loopback: String,
}

/// How inbound connections reach the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "UPPERCASE")]
#[non_exhaustive]
pub enum InterceptionMode {
    /// By rewriting their destination.
    Redirect,
    /// As they are, with policy routing.
    Tproxy {
        /// The mark of inbound packets.
        mark: u32,
        /// The routing table that delivers marked packets locally.
        table: u32,
    },
}

/// Which inbound TCP ports are captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "capture", rename_all = "camelCase")]
#[non_exhaustive]
pub enum InboundPorts {
    /// None.
    None,
    /// All but these.
    AllExcept {
        /// The ports.
        ports: Vec<String>,
    },
    /// These.
    Only {
        /// The ports.
        ports: Vec<String>,
    },
}

/// Which outbound destinations are captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "capture", rename_all = "camelCase")]
#[non_exhaustive]
pub enum OutboundRanges {
    /// All.
    All,
    /// These; none where there is none.
    Only {
        /// The address ranges.
        ranges: Vec<String>,
    },
}

/// Whose outbound traffic is captured, by group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "capture", rename_all = "camelCase")]
#[non_exhaustive]
pub enum OwnerGroups {
    /// Every group but these.
    AllExcept {
        /// The groups.
        groups: Vec<u32>,
    },
    /// These; none where there is none.
    Only {
        /// The groups.
        groups: Vec<u32>,
    },
}

/// Which DNS queries are captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "capture", rename_all = "camelCase")]
#[non_exhaustive]
pub enum DnsCapture {
    /// None.
    Off,
    /// Those to these servers.
    Servers {
        /// The servers.
        servers: Vec<IpAddr>,
    },
    /// All to port 53.
    All,
}

impl From<&pod::Decision> for Decision {
    fn from(decision: &pod::Decision) -> Self {
        let verdict = match decision {
            pod::Decision::Redirect(redirect) => {
                Verdict::Redirect { redirect: Box::new(redirect.as_ref().into()) }
            }
            pod::Decision::Skip(reason) => Verdict::Skip {
                reason: reason.word().to_owned(),
                explanation: reason.explanation().to_owned(),
            },
        };
        Self { version: VERSION, verdict }
    }
}

impl From<&redirect::Redirect> for Redirect {
    fn from(redirect: &redirect::Redirect) -> Self {
        let all_ports = |ranges: &[PortRange]| ranges.iter().copied().map(ports).collect();
        let names = |names: &[values::InterfaceName]| names.iter().map(ToString::to_string).collect();
        Self {
            mode: redirect.mode().into(),
            families: redirect.families().iter().map(Family::from).collect(),
            proxy_port: redirect.proxy_port().number(),
            inbound_port: redirect.inbound_port().number(),
            tunnel_port: redirect.tunnel_port().number(),
            proxy_uids: redirect.proxy_uids().to_vec(),
            proxy_gids: redirect.proxy_gids().to_vec(),
            inbound: match redirect.inbound() {
                redirect::InboundPorts::None => InboundPorts::None,
                redirect::InboundPorts::AllExcept(ports) => {
                    InboundPorts::AllExcept { ports: all_ports(ports) }
                }
                redirect::InboundPorts::Only(ports) => InboundPorts::Only { ports: all_ports(ports) },
            },
            outbound: match redirect.outbound() {
                redirect::OutboundRanges::All => OutboundRanges::All,
                redirect::OutboundRanges::Only(only) => OutboundRanges::Only { ranges: ranges(only) },
            },
            outbound_exclude: ranges(redirect.outbound_exclude()),
            outbound_ports: all_ports(redirect.outbound_ports()),
            outbound_ports_exclude: all_ports(redirect.outbound_ports_exclude()),
            owner_groups: match redirect.owner_groups() {
                redirect::OwnerGroups::AllExcept(groups) => OwnerGroups::AllExcept { groups: groups.clone() },
                redirect::OwnerGroups::Only(groups) => OwnerGroups::Only { groups: groups.clone() },
            },
            dns: match redirect.dns() {
                redirect::DnsCapture::Off => DnsCapture::Off,
                redirect::DnsCapture::Servers(servers) => DnsCapture::Servers { servers: servers.clone() },
                redirect::DnsCapture::All => DnsCapture::All,
            },
            exclude_interfaces: names(redirect.exclude_interfaces()),
            virtual_interfaces: names(redirect.virtual_interfaces()),
            drop_invalid: redirect.drop_invalid(),
            strict_capture: redirect.strict_capture(),
            loopback: redirect.loopback(values::Family::V4).to_string(),
        }
    }
}

impl From<redirect::InterceptionMode> for InterceptionMode {
    fn from(mode: redirect::InterceptionMode) -> Self {
        match mode {
            redirect::InterceptionMode::Redirect => Self::Redirect,
            redirect::InterceptionMode::Tproxy(tproxy) => {
                Self::Tproxy { mark: tproxy.mark().value(), table: tproxy.table().number() }
            }
        }
    }
}

/// IPv4's first, as a plan has them.
fn ranges(ranges: &values::Cidrs) -> Vec<String> {
    values::Family::BOTH.into_iter().flat_map(|family| ranges.of(family)).map(|net| net.to_string()).collect()
}
