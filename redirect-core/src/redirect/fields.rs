//! What a redirection holds: a row for each setting that stands for itself, by hand what several settings decide.

use super::parts::{DnsCapture, Families, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups};
use crate::{
    settings::{Key, Notice, Provenance, Source, Sources},
    values::{Cidrs, Family, InterfaceName, Port, PortRange},
};
use alloc::{vec, vec::Vec};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ipnet::{IpNet, Ipv4Net};

/// Makes, for each row, a field of [`Redirect`] with its accessor. The value in a row is a sidecar's default; a test holds
/// it to the settings table.
macro_rules! fields {
    (
        values { $($(#[doc = $value_doc:literal])+ $value:ident: $value_type:ident = $value_key:ident, $value_default:expr;)+ }
        lists { $($(#[doc = $list_doc:literal])+ $list:ident by $list_setter:ident: $item:ident = $list_key:ident, $list_default:expr;)+ }
    ) => {
        /// A redirection. Every value of this type is valid: its plan can be rendered, encoded and put in force, and is
        /// then what the kernel shows.
        ///
        /// Two redirections are equal when they ask for the same; who asked for it does not matter.
        ///
        /// ```
        /// use redirect_core::{Families, Redirect, values::PortRange};
        ///
        /// let redirect = Redirect::sidecar(Families::Both)
        ///     .exclude_outbound([PortRange::single(3306)])
        ///     .strict_capture(true)
        ///     .build()?;
        /// assert_eq!(redirect.proxy_port().number(), 15001);
        /// assert!(!redirect.plan().planned_rules().is_empty());
        /// # Ok::<(), redirect_core::settings::InputErrors>(())
        /// ```
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
        pub struct Redirect {
            pub(super) mode: InterceptionMode,
            pub(super) families: Families,
            pub(super) proxy_uids: Vec<u32>,
            pub(super) proxy_gids: Vec<u32>,
            pub(super) inbound: InboundPorts,
            pub(super) outbound: OutboundRanges,
            pub(super) outbound_exclude: Cidrs,
            pub(super) owner_groups: OwnerGroups,
            pub(super) dns: DnsCapture,
            pub(super) loopback: Ipv4Net,
            $(pub(super) $value: $value_type,)+
            $(pub(super) $list: Vec<$item>,)+
            #[cfg_attr(feature = "serde", serde(skip))]
            pub(super) sources: Provenance<Sources>,
            #[cfg_attr(feature = "serde", serde(skip))]
            pub(crate) notices: Provenance<Vec<Notice>>,
        }

        impl Redirect {
            /// A sidecar's default.
            pub(super) fn draft(families: Families) -> Self {
                Self {
                    proxy_uids: vec![Redirect::PROXY_ID],
                    proxy_gids: vec![Redirect::PROXY_ID],
                    inbound: InboundPorts::AllExcept(Redirect::ALWAYS_EXCLUDED_INBOUND.to_vec()),
                    $($list: $list_default,)+
                    ..Self::without_lists(families)
                }
            }

            /// The same with every list empty, for who fills them all: nothing is allocated.
            pub(super) fn without_lists(families: Families) -> Self {
                Self {
                    families,
                    mode: InterceptionMode::Redirect,
                    proxy_uids: Vec::new(),
                    proxy_gids: Vec::new(),
                    inbound: InboundPorts::None,
                    outbound: OutboundRanges::All,
                    outbound_exclude: Cidrs::new(),
                    owner_groups: OwnerGroups::AllExcept(Vec::new()),
                    dns: DnsCapture::Off,
                    loopback: Ipv4Net::from(Ipv4Addr::LOCALHOST),
                    $($value: $value_default,)+
                    $($list: Vec::new(),)+
                    sources: Provenance::default(),
                    notices: Provenance::default(),
                }
            }

            $(
                $(#[doc = $value_doc])+
                #[must_use]
                pub const fn $value(&self) -> $value_type {
                    self.$value
                }
            )+

            $(
                $(#[doc = $list_doc])+
                #[must_use]
                pub fn $list(&self) -> &[$item] {
                    &self.$list
                }
            )+
        }
    };
}

/// The rows, given to a macro: what a redirection holds here, its setters in `builder`, and the reading of its text in `read` come
/// from the same table.
macro_rules! rows {
    ($made_by:ident) => {
        $made_by! {
            values {
                /// Where the proxy listens for outbound connections.
                proxy_port: Port = ProxyPort, Port::known(15001);
                /// Where the proxy listens for inbound connections.
                inbound_port: Port = InboundCapturePort, Port::known(15006);
                /// Where tunnelled inbound connections (HBONE) arrive; never captured.
                tunnel_port: Port = InboundTunnelPort, Port::known(15008);
                /// Whether inbound packets that connection tracking finds invalid are dropped.
                drop_invalid: bool = DropInvalid, false;
                /// Whether what would pass on a connection that was not captured is dropped.
                strict_capture: bool = StrictCapture, false;
            }
            lists {
                /// Which outbound ports are captured whatever the destination.
                outbound_ports by outbound_ports: PortRange = OutboundPorts, Vec::new();
                /// Which outbound ports are not captured, TCP and UDP.
                outbound_ports_exclude by replace_outbound_exclusions: PortRange = OutboundExcludePorts, Redirect::ALWAYS_EXCLUDED_OUTBOUND.to_vec();
                /// Interfaces excluded in both directions.
                exclude_interfaces by exclude_interfaces: InterfaceName = ExcludeInterfaces, Vec::new();
                /// Interfaces whose inbound traffic counts as outbound.
                virtual_interfaces by virtual_interfaces: InterfaceName = VirtualInterfaces, Vec::new();
            }
        }
    };
}
pub(crate) use rows;

rows!(fields);

impl Redirect {
    /// The families it has rules for.
    #[must_use]
    pub const fn families(&self) -> Families {
        self.families
    }

    /// How inbound connections reach the proxy.
    #[must_use]
    pub const fn mode(&self) -> InterceptionMode {
        self.mode
    }

    /// The proxy's users; at least one.
    #[must_use]
    pub fn proxy_uids(&self) -> &[u32] {
        &self.proxy_uids
    }

    /// The proxy's groups; at least one.
    #[must_use]
    pub fn proxy_gids(&self) -> &[u32] {
        &self.proxy_gids
    }

    /// Which inbound ports are captured.
    #[must_use]
    pub const fn inbound(&self) -> &InboundPorts {
        &self.inbound
    }

    /// Which destinations are captured.
    #[must_use]
    pub const fn outbound(&self) -> &OutboundRanges {
        &self.outbound
    }

    /// Which destinations are not, whatever [`outbound`](Self::outbound) says.
    #[must_use]
    pub const fn outbound_exclude(&self) -> &Cidrs {
        &self.outbound_exclude
    }

    /// Whose outbound traffic is captured.
    #[must_use]
    pub const fn owner_groups(&self) -> &OwnerGroups {
        &self.owner_groups
    }

    /// Which DNS queries are captured.
    #[must_use]
    pub const fn dns(&self) -> &DnsCapture {
        &self.dns
    }

    /// The range of loopback addresses the application may use with itself: of IPv4 as set, of IPv6 `::1/128`.
    #[must_use]
    pub fn loopback(&self, family: Family) -> IpNet {
        match family {
            Family::V4 => IpNet::V4(self.loopback),
            Family::V6 => IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST)),
        }
    }

    /// Who asked for what it has of a setting; [`Source::Default`] if unset.
    #[must_use]
    pub fn source(&self, key: Key) -> Source {
        self.sources.0.of(key)
    }

    /// What its author should know although nothing is wrong: settings without effect, misspelt names, traffic that bypasses the proxy
    /// against expectation.
    #[must_use]
    pub fn notices(&self) -> &[Notice] {
        &self.notices.0
    }

    /// Who asked for each setting.
    pub(crate) const fn sources(&self) -> &Sources {
        &self.sources.0
    }

    /// Who asked for the excluded inbound port at this place: a pod's own are excluded without being listed.
    pub(crate) fn source_of_excluded_inbound(&self, place: usize) -> Source {
        self.sources.0.of_excluded_inbound(place)
    }
}
