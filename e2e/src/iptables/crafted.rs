//! What tests that make segments by hand have in common.

use std::net::IpAddr;

use anyhow::Result;
use test_support::netns::Namespace;

/// What programs the rules.
pub const FORMS: [&str; 5] = [
    "",
    "--backend restore",
    "--force-iptables-binary legacy",
    "--native-nftables",
    "--native-nftables --nft-sets",
];

/// An address that no kernel answers for; the pod's way to it leads over the wire.
pub fn stranger(v6: bool) -> IpAddr {
    if v6 { [0x2001, 0xdb8, 7, 0, 0, 0, 0, 7].into() } else { [203, 0, 113, 7].into() }
}

/// While it lives, no reset leaves the pod, nor comes to connection tracking.
pub struct Lossy<'a>(&'a Namespace);

impl<'a> Lossy<'a> {
    /// Drops the resets of this pod from now on.
    pub fn new(pod: &'a Namespace) -> Result<Self> {
        pod.sh("nft 'table inet lossy { chain output { type filter hook output priority -400; tcp flags rst drop; }; }'")?.ok()?;
        Ok(Self(pod))
    }
}

impl Drop for Lossy<'_> {
    fn drop(&mut self) {
        self.0.sh("nft delete table inet lossy").expect("the table goes");
    }
}
