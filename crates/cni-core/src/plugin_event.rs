//! What the plugin asks of the node agent at a unix socket: a pod, before it asks the API server itself (`POST /v1/pod`); and to enrol a pod of
//! ambient mode, in the reference's form (`POST /cmdadd`).

use std::net::IpAddr;

use base64::{Engine, engine::general_purpose::STANDARD};
use redirect_core::ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// The socket's name in the run directory.
pub const SOCKET_NAME: &str = "pluginevent.sock";
/// Where events of ADD are posted.
pub const ADD_PATH: &str = "/cmdadd";

/// Where the plugin asks for a pod. The path has the version of what is asked and answered; an agent that does not know it answers 404.
pub const POD_PATH: &str = "/v1/pod";

/// A pod that is asked for. The answer is 200 with a [`GivenPod`]; any other answer has the reason as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRequest {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID: another pod of this name is not an answer.
    pub uid: String,
}

/// A pod, and what else decides about it: what the agent does not know is missing, and is asked of the API server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GivenPod {
    /// The object, of which fields may be missing that the plugin does not read.
    pub pod: Value,
    /// The labels of its namespace; none of them, if it lacks the one by which the agent watches namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_labels: Option<Map<String, Value>>,
    /// The handler of its runtime class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_handler: Option<String>,
}

/// A pod that is being created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct AddEvent {
    /// The file of its network namespace.
    pub netns: String,
    /// Its name.
    pub pod_name: String,
    /// Its namespace.
    pub pod_namespace: String,
    /// Its UID, if the runtime passes it; the reference's form lacks it.
    #[serde(rename = "PodUID", default, skip_serializing_if = "String::is_empty")]
    pub pod_uid: String,
    /// Its addresses, as the plugins before gave them.
    #[serde(rename = "IPs", deserialize_with = "null_is_empty")]
    pub ips: Vec<PodIp>,
}

/// An address of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PodIp {
    /// Which of the result's interfaces has it.
    #[serde(default)]
    pub interface: Option<i64>,
    /// The address, and its network.
    #[serde(with = "masked")]
    pub address: IpNet,
    /// The gateway; a missing one is written as an empty text.
    #[serde(default, with = "empty_is_none")]
    pub gateway: Option<IpAddr>,
}

/// From `ADDRESS/PREFIX`.
pub(crate) fn network(text: &str) -> Option<IpNet> {
    let (ip, prefix) = text.split_once('/')?;
    IpNet::new(ip.parse().ok()?, prefix.parse().ok()?).ok()
}

/// An address with the length of its network's prefix, which is written as a mask.
mod masked {
    use super::{Deserialize, Deserializer, Engine, IpAddr, IpNet, STANDARD, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Written {
        #[serde(rename = "IP")]
        ip: IpAddr,
        mask: String,
    }

    fn mask(network: IpNet) -> Vec<u8> {
        match network.netmask() {
            IpAddr::V4(mask) => mask.octets().to_vec(),
            IpAddr::V6(mask) => mask.octets().to_vec(),
        }
    }

    fn with_mask(ip: IpAddr, wanted: &[u8]) -> Option<IpNet> {
        let ones: u32 = wanted.iter().map(|byte| byte.count_ones()).sum();
        let found = IpNet::new(ip, u8::try_from(ones).ok()?).ok()?;
        (mask(found) == wanted).then_some(found)
    }

    pub(super) fn serialize<S: Serializer>(network: &IpNet, serializer: S) -> Result<S::Ok, S::Error> {
        Written { ip: network.addr(), mask: STANDARD.encode(mask(*network)) }.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpNet, D::Error> {
        let Written { ip, mask } = Written::deserialize(deserializer)?;
        let found = STANDARD.decode(&mask).ok().and_then(|mask| with_mask(ip, &mask));
        found.ok_or_else(|| {
            serde::de::Error::custom(format!("Mask {mask:?} is not a network mask of {ip} in base64"))
        })
    }
}

fn null_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PodIp>, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

mod empty_is_none {
    use super::{Deserialize, Deserializer, IpAddr, Serializer};

    #[expect(clippy::ref_option, reason = "serde passes references")]
    pub(super) fn serialize<S: Serializer>(ip: &Option<IpAddr>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&ip.map(|ip| ip.to_string()).unwrap_or_default())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<IpAddr>, D::Error> {
        let text: Option<String> = Option::deserialize(deserializer)?;
        let text = text.filter(|text| !text.is_empty());
        text.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn an_event_has_the_references_form() {
        let event = AddEvent {
            netns: "/run/netns/x".into(),
            pod_name: "web".into(),
            pod_namespace: "shop".into(),
            pod_uid: String::new(),
            ips: vec![
                PodIp {
                    interface: Some(2),
                    address: network("10.1.0.2/24").expect("a network"),
                    gateway: Some("10.1.0.1".parse().expect("an address")),
                },
                PodIp { interface: None, address: network("fd00::2/64").expect("a network"), gateway: None },
            ],
        };
        let written = json!({"Netns": "/run/netns/x", "PodName": "web", "PodNamespace": "shop", "IPs": [
            {"Interface": 2, "Address": {"IP": "10.1.0.2", "Mask": "////AA=="}, "Gateway": "10.1.0.1"},
            {"Interface": null, "Address": {"IP": "fd00::2", "Mask": "//////////8AAAAAAAAAAA=="}, "Gateway": ""},
        ]});
        assert_eq!(serde_json::to_value(&event).expect("JSON"), written);
        assert_eq!(serde_json::from_value::<AddEvent>(written).expect("an event"), event);
    }

    #[test]
    fn what_is_missing_may_be_null_and_what_is_wrong_is_refused() {
        let read = |ips: serde_json::Value| {
            let event = json!({"Netns": "/n", "PodName": "p", "PodNamespace": "s", "IPs": ips});
            serde_json::from_value::<AddEvent>(event)
                .map(|event| event.ips.len())
                .map_err(|error| error.to_string())
        };
        assert_eq!(read(json!(null)), Ok(0));
        assert_eq!(read(json!([{"Address": {"IP": "10.1.0.2", "Mask": "/////w=="}}])), Ok(1));
        for (ip, mask) in [
            ("10.1.0.2", "AP8AAA=="),
            ("10.1.0.2", "no"),
            ("fd00::2", "////AA=="),
            ("10.1.0.2", "/////////w=="),
        ] {
            let error = read(json!([{"Address": {"IP": ip, "Mask": mask}}])).expect_err("no mask");
            assert!(error.contains(mask), "{error}");
        }
        assert!(network("10.1.0.2/33").is_none() && network("10.1.0.2").is_none());
    }

    proptest! {
        #[test]
        fn networks_are_read_as_they_were_written(ip: IpAddr, prefix in 0_u8..=128) {
            let Ok(address) = IpNet::new(ip, prefix) else {
                prop_assert!(ip.is_ipv4() && prefix > 32);
                return Ok(());
            };
            let ip = PodIp { interface: None, address, gateway: None };
            let written = serde_json::to_string(&ip).expect("JSON");
            prop_assert_eq!(serde_json::from_str::<PodIp>(&written).expect("a network"), ip);
        }
    }
}
