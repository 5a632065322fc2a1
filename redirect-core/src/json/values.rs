//! Values that JSON has as in settings, and that are checked when they are read back.

use crate::values::{Cidrs, InterfaceName, PortRange, PortSyntax, Problem, RouteTable};
use alloc::{string::String, vec::Vec};
use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

fn parsed<'de, T, D: Deserializer<'de>>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Result<T, Problem>,
) -> Result<T, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parsed(deserializer, |text| Self::parse(text, PortSyntax::Saved))
    }
}

impl Serialize for InterfaceName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for InterfaceName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parsed(deserializer, str::parse)
    }
}

/// IPv4's ranges first, as a plan has them.
impl Serialize for Cidrs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Cidrs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vec::<IpNet>::deserialize(deserializer)?.into_iter().collect())
    }
}

impl<'de> Deserialize<'de> for RouteTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(u32::deserialize(deserializer)?).ok_or_else(|| D::Error::custom(Problem::ReservedTable))
    }
}
