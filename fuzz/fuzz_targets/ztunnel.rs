//! Any datagrams of a ztunnel: none is answered before the hello, one request at most is unanswered, a connection that ends receives nothing, and
//! ztunnel's words steer no terminal.
//!
//! Each datagram follows its length, one byte.

#![no_main]

use libfuzzer_sys::fuzz_target;
use redirect_core_fuzz::text;
use std::time::Duration;
use zds::{ConnectionId, NetnsInode, Server, ServerAction, ServerInput, ZdsWorkload, wire};

const ZTUNNEL: ConnectionId = ConnectionId(1);

fuzz_target!(|data: &[u8]| {
    let pod =
        |uid: &str| ZdsWorkload::new(uid.into(), "web".into(), "shop".into(), "a".into()).expect("short");
    let (mut server, mut rest) = (Server::new(), data);
    let pods = vec![(pod("a"), Some(NetnsInode(1))), (pod("b"), None), (pod("c"), Some(NetnsInode(2)))];
    let mut outputs = server.handle(Duration::ZERO, ServerInput::Pods(pods));
    outputs.extend(server.handle(Duration::ZERO, ServerInput::Accepted(ZTUNNEL)));
    let mut is_open = true;
    for now in (0..).map(Duration::from_millis) {
        let requests = outputs.iter().filter(|output| matches!(output, ServerAction::Send { .. })).count();
        assert!(requests <= usize::from(is_open && server.ztunnels() == 1), "{outputs:?}");
        for output in &outputs {
            match output {
                ServerAction::Close { reason, .. } => {
                    assert!(is_open, "closed twice");
                    is_open = false;
                    text::is_one_safe_line(&reason.to_string());
                }
                ServerAction::Send { datagram, .. } => assert!(datagram.len() <= wire::LARGEST_REQUEST),
                ServerAction::Report { state, .. } => text::is_one_safe_line(&state.to_string()),
            }
        }
        let Some((length, behind)) = rest.split_first() else { break };
        let (datagram, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        if let Ok(wire::ZtunnelReply::Nack(error)) = wire::answer(datagram) {
            assert!(!error.is_empty());
        }
        outputs = server.handle(now, ServerInput::Received(ZTUNNEL, datagram));
    }
});
