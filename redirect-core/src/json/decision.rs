//! Whether and how a pod is redirected.

use super::VERSION;
use crate::{
    pod,
    redirect::{self, DnsCapture, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups},
    values::{Cidrs, Family, InterfaceName, Port, PortRange},
};
use alloc::{borrow::ToOwned, boxed::Box, string::String, vec::Vec};
use ipnet::IpNet;
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
            pub outbound_exclude: Cidrs,
            /// Whose traffic is captured.
            pub owner_groups: OwnerGroups,
            /// Which DNS queries are captured.
            pub dns: DnsCapture,
            /// The IPv4 loopback range the application may use with itself.
            pub loopback: IpNet,
            $($(#[doc = $value_doc])+ pub $value: $value_type,)+
            $($(#[doc = $list_doc])+ pub $list: Vec<$item>,)+
        }

        impl From<&redirect::Redirect> for Redirect {
            fn from(redirect: &redirect::Redirect) -> Self {
                Self {
                    mode: redirect.mode(),
                    families: redirect.families().list().to_vec(),
                    proxy_uids: redirect.proxy_uids().to_vec(),
                    proxy_gids: redirect.proxy_gids().to_vec(),
                    inbound: redirect.inbound().clone(),
                    outbound: redirect.outbound().clone(),
                    outbound_exclude: redirect.outbound_exclude().clone(),
                    owner_groups: redirect.owner_groups().clone(),
                    dns: redirect.dns().clone(),
                    loopback: redirect.loopback(Family::V4),
                    $($value: redirect.$value(),)+
                    $($list: redirect.$list().to_vec(),)+
                }
            }
        }
    };
}

redirect::rows!(document);
