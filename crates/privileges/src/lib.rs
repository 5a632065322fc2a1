//! What a program may do (capabilities(7)), given up before it begins.
//!
//! A program's caller sets the upper bound of its capabilities: a container runtime starts plugins with everything, a pod its containers with what their
//! security context lists. A program drops what it does not need before it reads untrusted input.

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

pub use rustix::thread::CapabilitySet;

/// How many capabilities a set has room for (capget(2)).
const ROOM: u32 = 64;

/// Something that a program does not need could not be given up. The program can do its work all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot give up privileges that are not needed: {step}: {cause}")]
pub struct NotGivenUp {
    step: &'static str,
    cause: Errno,
}

/// Gives up every capability but these, in the calling thread and in those that it makes later: call it before other threads start. Programs that it starts
/// get none that it does not have, whatever their files say (`no_new_privs`). Capabilities that the process does not hold are not kept.
///
/// # Errors
/// The first step that the kernel refuses. The others are taken all the same.
pub fn keep_only(kept: CapabilitySet) -> Result<(), NotGivenUp> {
    let at = |step| move |cause| NotGivenUp { step, cause };
    let confined = set_no_new_privs(true).map_err(at("no_new_privs"));
    let held = capabilities(None).map_err(at("capget"))?;
    // Who lacks SETPCAP may not narrow the bounding set, and with no_new_privs cannot gain anything from it.
    let bounded = if held.effective.contains(CapabilitySet::SETPCAP) {
        narrow_bounding_set(kept).map_err(at("bounding set"))
    } else {
        Ok(())
    };
    let left = CapabilitySets {
        effective: held.effective & kept,
        permitted: held.permitted & kept,
        inheritable: held.inheritable & kept,
    };
    // The ambient set follows: it never has what is not permitted and inheritable.
    let given_up = if left == held { Ok(()) } else { set_capabilities(None, left).map_err(at("capset")) };
    confined.and(bounded).and(given_up)
}

/// Up to the last capability that this kernel knows.
fn narrow_bounding_set(kept: CapabilitySet) -> Result<(), Errno> {
    let all = (0..ROOM).map(|bit| CapabilitySet::from_bits_retain(1 << bit));
    for capability in all.filter(|capability| !kept.contains(*capability)) {
        match remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
