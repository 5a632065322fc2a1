//! Any body at the agent's socket for events of ADD: it is refused in one line, or has a pod's names and networks, and is written as it was read.

#![no_main]

use cni_core::plugin_event::{AddEvent, PodNetwork};
use install_cni::ambient::add_event::read_event;
use libfuzzer_sys::fuzz_target;
use redirect_core_fuzz::text;

fuzz_target!(|body: &[u8]| {
    let event = match read_event(body) {
        Ok(event) => event,
        Err(why) => return text::is_one_safe_line(&why),
    };
    for name in [&event.pod_name, &event.pod_namespace] {
        // They become parts of a path at the API server.
        assert!(
            !name.starts_with('.') && !name.contains(|c: char| c == '/' || !c.is_ascii_graphic()),
            "{name:?}"
        );
    }
    for ip in &event.ips {
        let again = PodNetwork::new(ip.address.ip, ip.address.prefix());
        assert_eq!(again, Some(ip.address), "its mask is one of its address");
    }
    let written = serde_json::to_vec(&event).expect("JSON");
    assert_eq!(serde_json::from_slice::<AddEvent>(&written).expect("an event"), event);
});
