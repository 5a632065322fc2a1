//! The pure planner of sidecar-mesh traffic redirection.
//!
//! What a user asked for (flags, environment variables or pod annotations) becomes [`RawSettings`](settings::RawSettings):
//! text, each value with where it came from. Raw settings and the facts of the network namespace become a
//! [`Redirect`]: typed and valid by construction. A `Redirect` becomes a [`RulePlan`]: the ordered
//! iptables/ip6tables rules, policy routes and addresses that bend the pod's traffic through its proxy. A plan is
//! rendered and explained ([`render`]).
//!
//! Three tasks, each in some twenty lines, are examples of the crates beside this one: redirect a network namespace (`podman_mesh` of
//! [netns-apply](https://docs.rs/netns-apply)), see what a manifest's change does to the traffic (`pr_check` of
//! [packet-trace](https://docs.rs/packet-trace)), and read where a connection ends from what iptables-save printed (`audit`, there).
//!
//! Nothing here does I/O: no clock, no environment, no file, no socket. The same input gives the same bytes. It knows nothing of what
//! a kernel holds, nor of how rules get there.
//!
//! ```
//! use redirect_core::{pod::{Decision, PodFacts}, settings::NamespaceFacts, Family};
//!
//! let pod = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPorts", "3306")]);
//! let addresses = ["10.1.0.2".parse().unwrap()];
//! let facts = NamespaceFacts::new(&addresses);
//! let Ok(Decision::Redirect(redirect)) = pod.decide(&facts) else { panic!("a sidecar pod is redirected") };
//! let text = redirect.plan().rules(Family::V4).restore_text();
//! assert!(text.contains("-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN"));
//! ```
#![no_std]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::panic
    )
)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod accepted;
pub mod ambient;
#[cfg(feature = "serde")]
pub mod json;
pub mod options;
pub mod plan;
pub mod pod;
#[cfg(feature = "pod-json")]
pub mod pod_json;
#[cfg(test)]
mod recorded;
mod redirect;
pub mod render;
pub mod rule;
pub mod settings;
pub mod values;

pub use ambient::AmbientRedirect;
pub use ipnet;
pub use plan::RulePlan;
pub use redirect::{
    DnsCapture, Families, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups, Redirect,
    RedirectBuilder, Tproxy,
};
pub use values::Family;

/// The snippets of the README, as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
