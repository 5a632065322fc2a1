//! What sees packets in a network namespace and is not looked into: XDP programs and filters of traffic control.
//!
//! BPF programs that hang on interfaces without a queueing discipline (tcx, netkit) are not found: only bpf(2) lists them.

use super::{
    ListRequest, RouteError, RouteSocket,
    links::{Link, Links, number, text},
};
use crate::socket::attributes;
use netfilter_state::netlink::Message;
use std::collections::BTreeSet;

/// `RTM_GETQDISC` and `RTM_GETTFILTER`.
const GET_DISCIPLINE: u16 = 38;
const GET_FILTER: u16 = 46;
/// Size of `tcmsg`.
const HEADER: usize = 20;
/// What kind a discipline or filter is (`TCA_KIND`).
const KIND: u16 = 1;
/// Where filters hang that an `ingress` or `clsact` discipline makes room for (`TC_H_CLSACT`, `TC_H_MIN_INGRESS`, `TC_H_MIN_EGRESS`).
const PARENTS: [(u32, &str); 2] = [(0xffff_fff2, "ingress"), (0xffff_fff3, "egress")];
/// How many kinds of filters are named at most.
const MOST_KINDS: usize = 8;

impl RouteSocket {
    /// What sees packets and is not looked into, each in words.
    pub(crate) fn unexamined(&mut self, links: &Links) -> Result<Vec<String>, RouteError> {
        let mut all: Vec<String> = links.0.values().filter_map(xdp_program).collect();
        for index in self.with_room_for_filters()? {
            let name = links.name(index).map_or_else(|| format!("interface {index}"), str::to_owned);
            for (parent, direction) in PARENTS {
                let kinds = self.filters(index, parent)?;
                if !kinds.is_empty() {
                    let kinds: Vec<String> = kinds.into_iter().take(MOST_KINDS).collect();
                    all.push(format!("tc filters of {name}, {direction} ({})", kinds.join(", ")));
                }
            }
        }
        Ok(all)
    }

    /// The indices of interfaces that have a discipline for what they receive.
    fn with_room_for_filters(&mut self) -> Result<BTreeSet<u32>, RouteError> {
        let take = |indices: &mut BTreeSet<u32>, message: &Message<'_>| {
            let is_one = kind(message.payload()).is_some_and(|kind| kind == "clsact" || kind == "ingress");
            indices.extend(number(message.payload(), 4).filter(|_| is_one));
            Ok(())
        };
        Ok(self.gather(&request(GET_DISCIPLINE, 0, 0), "list queueing disciplines", take)?.0)
    }

    /// The kinds of the filters that hang somewhere.
    fn filters(&mut self, index: u32, parent: u32) -> Result<BTreeSet<String>, RouteError> {
        let take = |kinds: &mut BTreeSet<String>, message: &Message<'_>| {
            kinds.extend(kind(message.payload()));
            Ok(())
        };
        Ok(self.gather(&request(GET_FILTER, index, parent), "list filters of traffic control", take)?.0)
    }
}

/// A `tcmsg`.
fn request(kind: u16, index: u32, parent: u32) -> ListRequest {
    let payload = [0, index, 0, parent, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
    ListRequest { kind, payload }
}

fn xdp_program(link: &Link) -> Option<String> {
    Some(match link.xdp? {
        0 => format!("an XDP program of {}", link.name),
        number => format!("the XDP program {number} of {}", link.name),
    })
}

fn kind(payload: &[u8]) -> Option<String> {
    let kind = attributes(payload.get(HEADER..)?).find(|one| one.kind() == KIND)?;
    Some(text(kind.value()))
}
