//! The facts of a network namespace and its file system that a plan depends on; another program reads it, we only parse.

use alloc::{collections::BTreeSet, vec::Vec};
use core::{fmt, net::IpAddr};

/// Looks up user and group names. The planner itself never asks the system.
///
/// Open on purpose: who plans for a container image has other names than who plans for the machine he runs on. A method
/// that comes in a later version has a body.
///
/// ```
/// use redirect_core::settings::{NameLookup, id_in_passwd};
///
/// struct Image { passwd: String, group: String }
///
/// impl NameLookup for Image {
///     fn user(&self, name: &str) -> Option<u32> { id_in_passwd(&self.passwd, name) }
///     fn group(&self, name: &str) -> Option<u32> { id_in_passwd(&self.group, name) }
/// }
/// ```
pub trait NameLookup {
    /// The id of a user.
    fn user(&self, name: &str) -> Option<u32>;
    /// The id of a group.
    fn group(&self, name: &str) -> Option<u32>;
}

/// Knows no names: only numeric ids are understood.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoNames;

impl NameLookup for NoNames {
    fn user(&self, _: &str) -> Option<u32> {
        None
    }

    fn group(&self, _: &str) -> Option<u32> {
        None
    }
}

/// The facts of the network namespace a plan is made for.
#[derive(Clone, Copy)]
pub struct NamespaceFacts<'a> {
    pub(crate) addresses: &'a [IpAddr],
    pub(crate) nameservers: &'a [IpAddr],
    pub(crate) names: &'a dyn NameLookup,
    pub(crate) has_v6: bool,
}

impl<'a> NamespaceFacts<'a> {
    /// A namespace with these addresses on all its interfaces, in the kernel's order; loopback and link-local ones may be
    /// among them. It knows no DNS server and no names, and its kernel has IPv6.
    #[must_use]
    pub const fn new(addresses: &'a [IpAddr]) -> Self {
        Self { addresses, nameservers: &[], names: &NoNames, has_v6: true }
    }

    /// With the DNS servers of `/etc/resolv.conf`; checked only where DNS capture is limited to them
    /// ([`RawSettings::needs_nameservers`](super::RawSettings::needs_nameservers)).
    #[must_use]
    pub const fn with_nameservers(self, nameservers: &'a [IpAddr]) -> Self {
        Self { nameservers, ..self }
    }

    /// With names of users and groups.
    #[must_use]
    pub const fn with_names(self, names: &'a dyn NameLookup) -> Self {
        Self { names, ..self }
    }

    /// With IPv6 in its kernel and switched on (sysctl `net.ipv6.conf.lo.disable_ipv6`), or without: then strict capture has nothing
    /// to close there.
    #[must_use]
    pub const fn with_ipv6(self, has_v6: bool) -> Self {
        Self { has_v6, ..self }
    }
}

impl fmt::Debug for NamespaceFacts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamespaceFacts")
            .field("addresses", &self.addresses)
            .field("nameservers", &self.nameservers)
            .field("has_v6", &self.has_v6)
            .finish_non_exhaustive()
    }
}

/// The servers of a `resolv.conf(5)`, in order, each once; a zone such as `%eth0` is dropped, anything unreadable skipped.
#[must_use]
pub fn nameservers(resolv_conf: &str) -> Vec<IpAddr> {
    let server = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some("nameserver")).then_some(())?;
        words.next()?.split('%').next()?.parse().ok()
    };
    let mut seen = BTreeSet::new();
    resolv_conf.lines().filter_map(server).filter(|server| seen.insert(*server)).collect()
}

/// The id of a name in the text of a `passwd(5)` or `group(5)` file.
#[must_use]
pub fn id_in_passwd(file: &str, name: &str) -> Option<u32> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then_some(())?;
        fields.nth(1)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_read_as_resolvers_do() {
        let text = "# nameserver 9.9.9.9\nsearch a b\nnameserver 10.96.0.10\nnameserver\tfe80::1%eth0\nnameserver x\nnameserver 10.96.0.10\n";
        assert_eq!(nameservers(text), ["10.96.0.10".parse::<IpAddr>().unwrap(), "fe80::1".parse().unwrap()]);
    }

    #[test]
    fn facts_are_shown_without_who_looks_names_up() {
        let [address, nameserver] = ["10.1.0.2", "10.96.0.10"].map(|text| [text.parse().unwrap()]);
        let facts = NamespaceFacts::new(&address).with_nameservers(&nameserver);
        let shown = "NamespaceFacts { addresses: [10.1.0.2], nameservers: [10.96.0.10], has_v6: true, .. }";
        assert_eq!(alloc::format!("{facts:?}"), shown);
    }

    #[test]
    fn ids_are_found_by_whole_name() {
        let file = "root:x:0:0::/:/bin/sh\nistio-proxy:x:1337:1337::/:/bin/sh\n";
        assert_eq!(id_in_passwd(file, "istio-proxy"), Some(1337));
        assert_eq!(id_in_passwd(file, "istio"), None);
    }
}
