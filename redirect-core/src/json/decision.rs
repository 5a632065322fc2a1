//! Whether and how a pod is redirected.

use super::{Family, VERSION};
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
    pub verdict: DecisionJson,
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "camelCase")]
#[non_exhaustive]
pub enum DecisionJson {
    /// The pod is redirected, like this.
    Redirect {
        /// How.
        redirect: Box<Redirect>,
    },
    /// The pod is not redirected.
    Skip {
        /// The word for the reason: [`pod::SkipReason::word`].
        reason: String,
        /// The reason in a sentence; its wording may change.
        explanation: String,
    },
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
    /// These; empty if unset.
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
    /// These; empty if unset.
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
                DecisionJson::Redirect { redirect: Box::new(redirect.as_ref().into()) }
            }
            pod::Decision::Skip(reason) => DecisionJson::Skip {
                reason: reason.word().to_owned(),
                explanation: reason.explanation().to_owned(),
            },
        };
        Self { version: VERSION, verdict }
    }
}

/// How a type of a row is written, and a value of it.
macro_rules! written {
    (Port) => {
        u16
    };
    (bool) => {
        bool
    };
    (PortRange) => {
        String
    };
    (InterfaceName) => {
        String
    };
    (Port, $value:expr) => {
        $value.number()
    };
    (bool, $value:expr) => {
        $value
    };
    (PortRange, $value:expr) => {
        $value.to_string()
    };
    (InterfaceName, $value:expr) => {
        $value.to_string()
    };
}

/// Makes the document of a redirection: what has a row there, and by hand what several settings decide.
macro_rules! document {
    (
        values { $($(#[doc = $value_doc:literal])+ $value:ident: $value_type:ident = $value_key:ident, $value_default:expr;)+ }
        lists { $($(#[doc = $list_doc:literal])+ $list:ident: $item:ident = $list_key:ident, $list_default:expr;)+ }
    ) => {
        /// A redirection: the counterpart of [`redirect::Redirect`](crate::Redirect). Ports are written as in settings:
        /// `80`, or `8000:8099`; address ranges with their prefix length.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase")]
        #[non_exhaustive]
        pub struct Redirect {
            /// How inbound connections reach the proxy.
            pub mode: InterceptionMode,
            /// The families that have rules.
            pub families: Vec<Family>,
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
            /// Whose traffic is captured.
            pub owner_groups: OwnerGroups,
            /// Which DNS queries are captured.
            pub dns: DnsCapture,
            /// The IPv4 loopback range the application may use with itself.
            pub loopback: String,
            $($(#[doc = $value_doc])+ pub $value: written!($value_type),)+
            $($(#[doc = $list_doc])+ pub $list: Vec<written!($item)>,)+
        }

        impl From<&redirect::Redirect> for Redirect {
            fn from(redirect: &redirect::Redirect) -> Self {
                Self {
                    mode: redirect.mode().into(),
                    families: redirect.families().iter().map(Family::from).collect(),
                    proxy_uids: redirect.proxy_uids().to_vec(),
                    proxy_gids: redirect.proxy_gids().to_vec(),
                    inbound: redirect.inbound().into(),
                    outbound: redirect.outbound().into(),
                    outbound_exclude: ranges(redirect.outbound_exclude()),
                    owner_groups: redirect.owner_groups().into(),
                    dns: redirect.dns().into(),
                    loopback: redirect.loopback(values::Family::V4).to_string(),
                    $($value: written!($value_type, redirect.$value()),)+
                    $($list: redirect.$list().iter().map(|item| written!($item, item)).collect(),)+
                }
            }
        }
    };
}

redirect::rows!(document);

impl From<&redirect::InboundPorts> for InboundPorts {
    fn from(inbound: &redirect::InboundPorts) -> Self {
        let all = |ranges: &[PortRange]| ranges.iter().map(ToString::to_string).collect();
        match inbound {
            redirect::InboundPorts::None => Self::None,
            redirect::InboundPorts::AllExcept(ports) => Self::AllExcept { ports: all(ports) },
            redirect::InboundPorts::Only(ports) => Self::Only { ports: all(ports) },
        }
    }
}

impl From<&redirect::OutboundRanges> for OutboundRanges {
    fn from(outbound: &redirect::OutboundRanges) -> Self {
        match outbound {
            redirect::OutboundRanges::All => Self::All,
            redirect::OutboundRanges::Only(only) => Self::Only { ranges: ranges(only) },
        }
    }
}

impl From<&redirect::OwnerGroups> for OwnerGroups {
    fn from(groups: &redirect::OwnerGroups) -> Self {
        match groups {
            redirect::OwnerGroups::AllExcept(groups) => Self::AllExcept { groups: groups.clone() },
            redirect::OwnerGroups::Only(groups) => Self::Only { groups: groups.clone() },
        }
    }
}

impl From<&redirect::DnsCapture> for DnsCapture {
    fn from(dns: &redirect::DnsCapture) -> Self {
        match dns {
            redirect::DnsCapture::Off => Self::Off,
            redirect::DnsCapture::Servers(servers) => Self::Servers { servers: servers.clone() },
            redirect::DnsCapture::All => Self::All,
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
