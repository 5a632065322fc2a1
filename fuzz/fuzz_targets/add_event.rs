//! Any body at the agent's socket for plugins, as an event of ADD and as a request for a pod: it is refused in one line, or has a pod's names and
//! networks, and is written as it was read.

#![no_main]

use cni_core::plugin_event::AddEvent;
use install_cni::{ambient::add_event::read_event, serve::plugin_requests::read_request};
use libfuzzer_sys::fuzz_target;
use redirect_core_fuzz::text;

fuzz_target!(|body: &[u8]| {
    match read_request(body) {
        Ok(wanted) => [&wanted.name, &wanted.namespace].into_iter().for_each(|name| is_part_of_a_path(name)),
        Err(why) => text::is_one_safe_line(&why),
    }
    let event = match read_event(body) {
        Ok(event) => event,
        Err(why) => return text::is_one_safe_line(&why),
    };
    [&event.pod_name, &event.pod_namespace].into_iter().for_each(|name| is_part_of_a_path(name));
    for ip in &event.ips {
        assert!(ip.address.prefix_len() <= ip.address.max_prefix_len(), "its mask is one of its address");
    }
    let written = serde_json::to_vec(&event).expect("JSON");
    assert_eq!(serde_json::from_slice::<AddEvent>(&written).expect("an event"), event);
});

/// Names become parts of a path at the API server.
fn is_part_of_a_path(name: &str) {
    assert!(
        !name.starts_with('.') && !name.contains(|c: char| c == '/' || !c.is_ascii_graphic()),
        "{name:?}"
    );
}
