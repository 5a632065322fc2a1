//! The network namespace that an agent redirects before it takes the taint away. Needs root.

use cni_core::conf::{Conf, Envelope};
use cni_core::wire::CniCommand;
use install_cni::pods::check::ExpectedRules;
use install_cni::taint::probe::{ProbeError, probe};
use netns_apply::facts::addresses;

fn conf(more: &str) -> Conf {
    let text = format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"istio-cni"{more}}}"#);
    let envelope = Envelope::read(text.as_bytes(), CniCommand::Add).expect("JSON");
    envelope.conf().expect("a configuration")
}

#[test]
fn a_probe_is_redirected_with_every_backend_and_leaves_nothing() {
    let own = addresses().expect("addresses");
    for more in [
        "",
        r#","native_nftables":true"#,
        r#","native_nftables":true,"nft_sets":true"#,
        r#","strict_capture":true"#,
    ] {
        assert_eq!(probe(&ExpectedRules::of(&conf(more), &[])), Ok(()), "{more}");
    }
    assert_eq!(addresses().expect("addresses"), own, "this thread stayed where it was");
}

#[test]
fn what_would_fail_pods_fails_the_probe() {
    let environment = [("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "nonsense".to_owned())];
    let probed = probe(&ExpectedRules::of(&conf(""), &environment));
    assert!(matches!(&probed, Err(ProbeError::Failed(why)) if why.contains("nonsense")), "{probed:?}");
}
