//! Whether a network namespace is as it was at an earlier look, without reading any rule again.

use crate::{
    legacy,
    netlink::NftConnection,
    routes::{RouteSocket, Routing, Survey},
};
use std::hash::{BuildHasher, RandomState};

/// What [`verify`](crate::verify()) depends on in a network namespace, in a few bytes: the generation of the nf_tables ruleset, which every transaction
/// raises, and a hash of routing, addresses and interfaces. While it is the same, so is the answer, with one exception: without any transaction,
/// packets may add elements to the sets of other programs, and time may remove them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    generation: u32,
    rest: u64,
}

/// How many bytes of policy rules are read. A namespace with more of them, or with more routes than are read, has no
/// fingerprint.
const MOST_READ: usize = 1 << 20;

impl Fingerprint {
    /// The fingerprint of the calling thread's network namespace. Fingerprints taken with different keys cannot be compared; keys that no one
    /// outside knows keep a container from making two states that look alike.
    ///
    /// `None` if the kernel cannot show that rules are unchanged: tables of legacy iptables are in use, whose changes it does not count, or it
    /// lacks nf_tables. Also `None` if something cannot be read.
    #[must_use]
    pub fn now(keys: &RandomState) -> Option<Self> {
        let generation = NftConnection::open().ok()?.generation().ok()?;
        let mut routes = RouteSocket::open(MOST_READ).ok()?;
        let (links, assigned) = (routes.links().ok()?, routes.assigned().ok()?);
        Self::of(keys, generation, &routes.survey(&links, &assigned).ok()?)
    }

    /// The same from what was read.
    pub(crate) fn of(keys: &RandomState, generation: u32, survey: &Survey) -> Option<Self> {
        let Survey { routing: Routing { tables, marked, .. }, addresses } = survey;
        if !tables.complete || legacy::is_in_use(MOST_READ).ok()? {
            return None;
        }
        Some(Self { generation, rest: keys.hash_one((tables, marked, addresses)) })
    }
}
