//! Reads the tables of legacy iptables from the kernel, without a helper program.
//!
//! In: an address family and the name of a table. Out: where its built-in chains begin and end, and its entries as the kernel
//! lays them out (`struct ipt_entry`, `struct ip6t_entry`). What entries mean is not known here.
//!
//! The interface is getsockopt(2) on any socket of the family, as `linux/netfilter_ipv4/ip_tables.h` and
//! `linux/netfilter_ipv6/ip6_tables.h` describe it. It takes `CAP_NET_ADMIN` in the user namespace that owns the network namespace.
//! Asking for a table creates it, and loads its module, so ask only for those that `/proc/net/ip_tables_names` lists.

use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

/// An address family that has tables of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XtablesFamily {
    /// `iptables`
    V4,
    /// `ip6tables`
    V6,
}

/// How many hooks a table may have a built-in chain at (`NF_INET_NUMHOOKS`): PREROUTING, INPUT, FORWARD, OUTPUT, POSTROUTING.
pub const HOOKS: usize = 5;

/// A table as the kernel holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XtablesTable {
    /// The hooks at which it has a built-in chain, a bit for each.
    pub valid_hooks: u32,
    /// The offset of the first entry of each hook's chain; means nothing for other hooks.
    pub begins: [u32; HOOKS],
    /// The offset of the entry that is each chain's policy.
    pub policies: [u32; HOOKS],
    /// The number of entries, including those that begin and end chains.
    pub count: u32,
    /// The entries, one behind the other.
    pub entries: Vec<u8>,
}

/// Length of a table's name in the kernel, the final zero included (`XT_TABLE_MAXNAMELEN`).
const NAME: usize = 32;
/// `struct ipt_getinfo`: the name and 13 numbers of 32 bits.
const INFO: usize = NAME + 13 * 4;
/// `struct ipt_get_entries` before its entries, which are aligned to 8 bytes: the name and their size.
const ENTRIES: usize = NAME + 8;
/// `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO`.
const GET_INFO: libc::c_int = 64;
/// `IPT_SO_GET_ENTRIES` and `IP6T_SO_GET_ENTRIES`.
const GET_ENTRIES: libc::c_int = 65;
/// How often a table is read that another program changes between the two questions.
const TRIES: usize = 8;

/// Reads a table of the calling thread's network namespace.
///
/// # Errors
/// The kernel refuses (`EPERM` without `CAP_NET_ADMIN`, `ENOENT` without the table), `E2BIG` if its entries take more than `most`
/// bytes, `EAGAIN` if other programs keep changing it, `EINVAL` if the name is too long.
pub fn table(family: XtablesFamily, name: &str, most: usize) -> io::Result<XtablesTable> {
    let socket = open(family)?;
    let mut tries = 1;
    loop {
        match read(&socket, family, name, most) {
            // It has changed since its size was read.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && tries < TRIES => tries += 1,
            read => return read,
        }
    }
}

fn open(family: XtablesFamily) -> io::Result<OwnedFd> {
    let domain = match family {
        XtablesFamily::V4 => AddressFamily::Inet,
        XtablesFamily::V6 => AddressFamily::Inet6,
    };
    Ok(socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?)
}

fn read(socket: &OwnedFd, family: XtablesFamily, name: &str, most: usize) -> io::Result<XtablesTable> {
    let mut info = question(name, INFO)?;
    get(socket, family, GET_INFO, &mut info)?;
    let number = |index: usize| {
        let at = NAME + index * 4;
        info.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
    };
    let numbers = |first: usize| std::array::from_fn(|hook| number(first + hook));
    let (count, size) = (number(11), number(12));
    let size_in_memory = usize::try_from(size).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    if size_in_memory > most {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    let mut entries = question(name, ENTRIES + size_in_memory)?;
    if let Some(field) = entries.get_mut(NAME..NAME + 4) {
        field.copy_from_slice(&size.to_ne_bytes());
    }
    get(socket, family, GET_ENTRIES, &mut entries)?;
    entries.drain(..ENTRIES);
    Ok(XtablesTable { valid_hooks: number(0), begins: numbers(1), policies: numbers(6), count, entries })
}

/// A buffer of this size that begins with a table's name, and is zero otherwise.
fn question(name: &str, size: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; size];
    match buffer.get_mut(..name.len()).filter(|_| name.len() < NAME) {
        Some(field) => field.copy_from_slice(name.as_bytes()),
        None => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
    Ok(buffer)
}

/// Asks what the buffer asks; the answer takes its place, and has its size.
fn get(socket: &OwnedFd, family: XtablesFamily, option: libc::c_int, buffer: &mut [u8]) -> io::Result<()> {
    let level = match family {
        XtablesFamily::V4 => libc::IPPROTO_IP,
        XtablesFamily::V6 => libc::IPPROTO_IPV6,
    };
    let mut length =
        libc::socklen_t::try_from(buffer.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    #[allow(unsafe_code, reason = "getsockopt(2) reads its question where it writes its answer")]
    // SAFETY: the socket is open while it is borrowed; `buffer` is valid for reads and writes of `length` bytes, and all of them are
    // initialized; the kernel writes no more than `length` bytes, and keeps neither pointer.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            buffer.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    if usize::try_from(length).ok() != Some(buffer.len()) {
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    Ok(())
}

/// The snippet of the README, as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
