//! A redirection: everything a plan needs, typed and valid.
//!
//! A [`Redirect`] is made in one of three ways, all of which end in [`RedirectBuilder::build`]: typed
//! ([`Redirect::sidecar`]), from settings as text ([`Redirect::parse`]), and from a pod
//! ([`PodFacts::decide`](crate::pod::PodFacts::decide)).

mod builder;
mod fields;
mod notice;
mod parts;
mod read;
#[cfg(doctest)]
mod unbuildable;

pub use builder::RedirectBuilder;
pub use fields::Redirect;
pub use parts::{DnsCapture, Families, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups, Tproxy};
pub(crate) use read::{Read, SettingsReader};
