//! What a monitor hears of a pod's network namespace. Needs root.

use std::future::ready;
use std::time::Duration;

use install_cni::pods::netns_changes::{ChangeSubscriptions, subscribe};
use netns_apply::netns::Netns;
use test_support::netns::{Families, Namespace};

#[tokio::test(flavor = "current_thread")]
async fn a_wait_that_is_given_up_loses_no_change() {
    let namespace = Namespace::empty(Families::Dual).expect("a namespace");
    let netns = Netns::open(namespace.path()).expect("opens");
    let mut changes = ChangeSubscriptions::new(subscribe(&netns).expect("subscribes")).expect("waits");
    namespace.sh("nft add table ip theirs").expect("adds");
    // Each is dropped while it waits for the end of the burst, if not before.
    for _ in 0..20 {
        tokio::select! {
            biased;
            _ = changes.receive() => panic!("a burst takes longer than one look"),
            () = ready(()) => {}
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let heard = tokio::time::timeout(Duration::from_secs(60), changes.receive()).await;
    let (_, heard) = heard.expect("hears").expect("reads");
    assert!(heard.messages > 0 && !heard.lost, "{heard:?}");
}
