//! What a network namespace and its files say that a plan depends on.

use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use redirect_core::settings::{NameLookup, id_in_passwd, nameservers};
use std::{collections::BTreeMap, fs, io, net::IpAddr};

/// The addresses of the calling thread's network namespace: interface by interface in the kernel's order, each
/// interface's IPv4 addresses before its IPv6 addresses. That order decides which family is "first".
///
/// # Errors
/// The kernel does not say.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut by_interface: BTreeMap<usize, Vec<IpAddr>> = BTreeMap::new();
    let mut names: Vec<String> = Vec::new();
    for entry in getifaddrs()? {
        // Every interface appears first with its link-layer address, in the kernel's order.
        let index = names.iter().position(|name| *name == entry.interface_name).unwrap_or_else(|| {
            names.push(entry.interface_name.clone());
            names.len() - 1
        });
        let Some(address) = entry.address else { continue };
        let ip = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let ip = ip.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())));
        by_interface.entry(index).or_default().extend(ip);
    }
    Ok(by_interface.into_values().flatten().collect())
}

/// The interfaces by which the calling thread's network namespace talks to others: those that are up and have an address, but
/// neither loopback nor, where there is another, tunnels (point to point), whose packets meet the rules of those again.
///
/// # Errors
/// The kernel does not say.
pub fn interfaces() -> io::Result<Vec<String>> {
    let (mut direct, mut tunnels) = (Vec::new(), Vec::new());
    for entry in getifaddrs()? {
        let has_address = entry
            .address
            .is_some_and(|address| address.as_sockaddr_in().is_some() || address.as_sockaddr_in6().is_some());
        let is_loopback = entry.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        if !has_address || is_loopback || !entry.flags.contains(InterfaceFlags::IFF_UP) {
            continue;
        }
        let is_tunnel = entry.flags.contains(InterfaceFlags::IFF_POINTOPOINT);
        let names = if is_tunnel { &mut tunnels } else { &mut direct };
        if !names.contains(&entry.interface_name) {
            names.push(entry.interface_name);
        }
    }
    Ok(if direct.is_empty() { tunnels } else { direct })
}

/// The DNS servers of `/etc/resolv.conf`; none where there is no such file.
///
/// # Errors
/// The file cannot be read.
pub fn dns_servers() -> io::Result<Vec<IpAddr>> {
    match fs::read_to_string("/etc/resolv.conf") {
        Ok(text) => Ok(nameservers(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Looks names up in `/etc/passwd` and `/etc/group` and nowhere else: no name service, no network.
#[derive(Debug, Clone, Copy, Default)]
pub struct NameFiles;

impl NameLookup for NameFiles {
    fn user(&self, name: &str) -> Option<u32> {
        id_in_passwd(&fs::read_to_string("/etc/passwd").ok()?, name)
    }

    fn group(&self, name: &str) -> Option<u32> {
        id_in_passwd(&fs::read_to_string("/etc/group").ok()?, name)
    }
}
