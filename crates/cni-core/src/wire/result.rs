//! The result: what the plugin before us in the chain said, as it said it.

use super::{RawObject, Version};
use crate::fields::FieldReader;
use crate::plugin_event::{PodIp, network};
use serde_json::{Value, value::RawValue};
use std::net::IpAddr;

/// The result of the plugins before us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrevResult(Option<String>);

impl PrevResult {
    /// Takes `prevResult` from a configuration and notes what is wrong with the parts the specification knows.
    pub fn read(object: &RawObject<'_>, reader: &mut FieldReader) -> Self {
        let Some(value) = object.value("prevResult") else { return Self(None) };
        if reader.object("prevResult", Some(&value)).is_some() {
            check(&value, reader);
        }
        Self(object.get("prevResult").map(RawValue::get).map(str::to_owned))
    }

    /// The pod's addresses, in any version's form.
    #[must_use]
    pub fn ips(&self) -> Vec<PodIp> {
        let Some(Ok(result)) = self.0.as_deref().map(serde_json::from_str::<RawObject<'_>>) else {
            return Vec::new();
        };
        let listed = result.value("ips");
        let listed = listed.as_ref().and_then(Value::as_array).into_iter().flatten();
        let listed = listed.filter_map(|item| pod_ip(item, "address"));
        let older = ["ip4", "ip6"].into_iter().filter_map(|family| pod_ip(&result.value(family)?, "ip"));
        listed.chain(older).collect()
    }

    /// What is printed: the previous result to the last digit and blank, or an empty one. A previous result that does
    /// not say its version is given the configuration's, because a reader would otherwise take it for 0.1.0.
    #[must_use]
    pub fn json(&self, version: Version) -> String {
        let Some(text) = &self.0 else { return format!(r#"{{"cniVersion":"{version}"}}"#) };
        let Ok(object) = serde_json::from_str::<RawObject<'_>>(text) else { return text.clone() };
        match (object.value("cniVersion"), text.strip_prefix('{')) {
            (None, Some(rest)) if object.get("cniVersion").is_none() => {
                let comma = if object.keys().next().is_some() { "," } else { "" };
                format!(r#"{{"cniVersion":"{version}"{comma}{rest}"#)
            }
            (Some(_), _) | (None, _) => text.clone(),
        }
    }
}

/// What [`check`] accepted, where it has an address.
fn pod_ip(item: &Value, address: &str) -> Option<PodIp> {
    Some(PodIp {
        interface: item.get("interface").and_then(Value::as_i64),
        address: network(item.get(address)?.as_str()?)?,
        gateway: item.get("gateway").and_then(Value::as_str).and_then(|text| text.parse().ok()),
    })
}

/// Checks the types of all fields of all versions: a later plugin, or the runtime, would stumble over them after we
/// have programmed the pod.
fn check(result: &Value, reader: &mut FieldReader) {
    if let Some(version) = reader.string("prevResult.cniVersion", result.get("cniVersion"))
        && Version::parse(version).is_err()
    {
        reader.problem(format!("prevResult.cniVersion: {version:?} is not a version of the specification"));
    }
    for (index, item) in reader.list("prevResult.interfaces", result.get("interfaces")).iter().enumerate() {
        let path = format!("prevResult.interfaces[{index}]");
        if reader.object(&path, Some(item)).is_some() {
            for field in ["name", "mac", "sandbox"] {
                reader.string(&format!("{path}.{field}"), item.get(field));
            }
        }
    }
    for (index, item) in reader.list("prevResult.ips", result.get("ips")).iter().enumerate() {
        let path = format!("prevResult.ips[{index}]");
        if reader.object(&path, Some(item)).is_some() {
            prefix(&format!("{path}.address"), item.get("address"), reader);
            address(&format!("{path}.gateway"), item.get("gateway"), reader);
            reader.integer(&format!("{path}.interface"), item.get("interface"));
        }
    }
    for family in ["ip4", "ip6"] {
        let path = format!("prevResult.{family}");
        if let Some(item) = result.get(family)
            && reader.object(&path, Some(item)).is_some()
        {
            prefix(&format!("{path}.ip"), item.get("ip"), reader);
            address(&format!("{path}.gateway"), item.get("gateway"), reader);
            routes(&format!("{path}.routes"), item.get("routes"), reader);
        }
    }
    routes("prevResult.routes", result.get("routes"), reader);
    reader.object("prevResult.dns", result.get("dns"));
}

fn routes(path: &str, routes: Option<&Value>, reader: &mut FieldReader) {
    for (index, item) in reader.list(path, routes).iter().enumerate() {
        let path = format!("{path}[{index}]");
        if reader.object(&path, Some(item)).is_some() {
            prefix(&format!("{path}.dst"), item.get("dst"), reader);
            address(&format!("{path}.gw"), item.get("gw"), reader);
        }
    }
}

fn prefix(path: &str, value: Option<&Value>, reader: &mut FieldReader) {
    let Some(text) = reader.string(path, value) else { return };
    if network(text).is_none() {
        reader.problem(format!("{path}: {text:?} is not an address with prefix length"));
    }
}

fn address(path: &str, value: Option<&Value>, reader: &mut FieldReader) {
    let Some(text) = reader.string(path, value) else { return };
    if !text.is_empty() && text.parse::<IpAddr>().is_err() {
        reader.problem(format!("{path}: {text:?} is not an IP address"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(prev: &str) -> (PrevResult, Vec<String>) {
        let conf = format!(r#"{{"prevResult":{prev}}}"#);
        let mut reader = FieldReader::default();
        let result = PrevResult::read(&serde_json::from_str(&conf).unwrap(), &mut reader);
        (result, reader.into_problems())
    }

    #[test]
    fn it_comes_back_as_it_came() {
        let text = "{\"ips\" : [ {\"address\":\"10.0.0.1/24\",\"x\":1.50} ],\n \"cniVersion\":\"1.1.0\", \"n\":1e999}";
        let (result, problems) = read(text);
        assert_eq!(problems, [""; 0]);
        assert_eq!(result.json(Version::NEWEST), text);
    }

    #[test]
    fn a_missing_one_is_empty_and_a_missing_version_is_added() {
        assert_eq!(read("null").0.json(Version::WITH_CHECK), r#"{"cniVersion":"0.4.0"}"#);
        assert_eq!(read("{}").0.json(Version::OLDEST), r#"{"cniVersion":"0.1.0"}"#);
        assert_eq!(read(r#"{"x":1}"#).0.json(Version::OLDEST), r#"{"cniVersion":"0.1.0","x":1}"#);
    }

    #[test]
    fn addresses_are_found_in_every_form() {
        let found = |prev: &str| {
            let (result, problems) = read(prev);
            assert_eq!(problems, [""; 0]);
            let ips = result.ips().into_iter();
            let text = |ip: PodIp| {
                let PodIp { interface, address, gateway } = ip;
                format!("{interface:?} {}/{} {gateway:?}", address.addr(), address.prefix_len())
            };
            ips.map(text).collect::<Vec<_>>()
        };
        let ips = r#"{"ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1","interface":2},{"address":"fd00::2/64"}],"n":1e999}"#;
        assert_eq!(found(ips), ["Some(2) 10.0.0.2/24 Some(10.0.0.1)", "None fd00::2/64 None"]);
        let older = r#"{"ip4":{"ip":"10.0.0.2/24","gateway":"10.0.0.1"},"ip6":{"ip":"fd00::2/64"}}"#;
        assert_eq!(found(older), ["None 10.0.0.2/24 Some(10.0.0.1)", "None fd00::2/64 None"]);
        assert_eq!((found("null"), found("{}")), (Vec::new(), Vec::new()));
    }

    #[test]
    fn every_problem_names_its_field() {
        let prev = r#"{"cniVersion":"7","interfaces":[{"name":1},2],"ips":[{"address":"10.0.0.1","gateway":"x",
            "interface":1.5},{"address":"::1/129"}],"routes":{"dst":1},"dns":[],"ip4":{"ip":4,"routes":[{"dst":"x"}]}}"#;
        let problems = read(prev).1;
        let fields: Vec<&str> = problems.iter().filter_map(|problem| problem.split(':').next()).collect();
        assert_eq!(
            fields,
            [
                "prevResult.cniVersion",
                "prevResult.interfaces[0].name",
                "prevResult.interfaces[1]",
                "prevResult.ips[0].address",
                "prevResult.ips[0].gateway",
                "prevResult.ips[0].interface",
                "prevResult.ips[1].address",
                "prevResult.ip4.ip",
                "prevResult.ip4.routes[0].dst",
                "prevResult.routes",
                "prevResult.dns",
            ]
        );
    }
}
