//! Work inside network namespaces. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use netns_apply::netns::{DisposableThread, Netns, NetnsError, NetnsId};
use std::{path::Path, thread};
use test_support::netns::{Families, Namespace};

#[test]
fn a_disposable_thread_goes_from_one_namespace_to_the_next_alone() {
    let [one, other] = [(); 2].map(|()| Namespace::empty(Families::V4).unwrap());
    let opened = [&one, &other].map(|there| Netns::open(there.path()).unwrap());
    let no_netns = Netns::open("/proc/self/ns/uts").unwrap();
    let here = Netns::current().unwrap().id();
    let visited = DisposableThread::run(|thread| {
        opened.each_ref().map(|namespace| {
            thread.enter(namespace).unwrap();
            // It stays where it is.
            thread.enter(&no_netns).unwrap_err();
            Netns::current().unwrap().id()
        })
    });
    assert_eq!(visited, Ok([opened[0].id(), opened[1].id()]));
    assert_eq!(Netns::current().unwrap().id(), here);
    assert_eq!(DisposableThread::run(|_| -> () { panic!("on purpose") }), Err("on purpose".to_owned()));
}

#[test]
fn what_is_at_a_path_is_the_namespace_only_while_it_is_mounted_there() {
    let there = Namespace::empty(Families::V4).unwrap();
    let id = Netns::open(there.path()).unwrap().id();
    assert_eq!(NetnsId::at(&there.path()).unwrap(), id);
    for other in ["/proc/self/ns/net", "/proc/self/ns/uts", "/etc/hostname"] {
        assert_ne!(NetnsId::at(Path::new(other)).unwrap(), id, "{other}");
    }
    assert!(NetnsId::at(Path::new("/nonexistent")).is_err());
}

#[test]
fn a_panic_inside_is_an_error_outside() {
    let there = Namespace::empty(Families::V4).unwrap();
    let result = Netns::open(there.path()).unwrap().run(|| -> () { panic!("on purpose") });
    let Err(NetnsError::Thread { cause, .. }) = result else { panic!("{result:?}") };
    assert_eq!(cause, "on purpose");
}

#[test]
fn work_is_done_in_the_namespace_that_is_named() {
    let there = Namespace::empty(Families::V4).unwrap();
    let path = there.path().display().to_string();
    let id = || Netns::current().unwrap().id();
    assert_eq!(Netns::run_in(&path, id).unwrap(), Netns::open(&path).unwrap().id());
    assert_eq!(Netns::run_in("", id).unwrap(), id());
    // The own one is not entered, by whatever path it is named.
    let thread = || thread::current().id();
    for own in ["", "/proc/thread-self/ns/net"] {
        assert_eq!(Netns::run_in(own, thread).unwrap(), thread());
    }
    assert_ne!(Netns::run_in(&path, thread).unwrap(), thread());
}
