//! The fields of conditions and targets, which have no names in the types.

use super::{Equality, TcpFlags};
use crate::values::MaskedMark;
use core::ops::Not;
use serde::{Serialize, Serializer};

/// A comparison, whose value has fields. `not` is written only where it is so.
#[derive(Serialize)]
struct Comparison<T> {
    #[serde(flatten)]
    value: T,
    #[serde(skip_serializing_if = "Not::not")]
    not: bool,
}

/// A mark whose mask is written only where not all bits count.
#[derive(Serialize)]
struct PacketMark {
    mark: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask: Option<u32>,
}

impl From<MaskedMark> for PacketMark {
    fn from(mark: MaskedMark) -> Self {
        Self { mark: mark.value(), mask: mark.whole().is_none().then_some(mark.mask()) }
    }
}

/// A value that is the only field.
struct Field<T>(&'static str, T);

impl<T: Serialize> Serialize for Field<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map([(self.0, &self.1)])
    }
}

/// Functions that write a value as the field of this name.
macro_rules! fields {
    ($($name:ident),+) => { $(
        pub(crate) fn $name<S: Serializer>(value: &impl Serialize, serializer: S) -> Result<S::Ok, S::Error> {
            Field(stringify!($name), value).serialize(serializer)
        }
    )+ };
}

/// Functions that write a comparison with a value as the field of this name.
macro_rules! comparisons {
    ($($function:ident: $name:literal),+) => { $(
        pub(crate) fn $function<S: Serializer>(
            is: &Equality<impl Serialize>,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            Comparison { value: Field($name, &is.value), not: is.not }.serialize(serializer)
        }
    )+ };
}

fields!(chain, mark, port, protocol, zone);
comparisons!(is_gid: "gid", is_interface: "interface", is_port: "port", is_ports: "ports", is_range: "range", is_uid: "uid");

pub(crate) fn is<S: Serializer>(is: &Equality<impl Serialize>, serializer: S) -> Result<S::Ok, S::Error> {
    Comparison { value: &is.value, not: is.not }.serialize(serializer)
}

pub(crate) fn is_mark<S: Serializer>(is: &Equality<MaskedMark>, serializer: S) -> Result<S::Ok, S::Error> {
    Comparison { value: PacketMark::from(is.value), not: is.not }.serialize(serializer)
}

pub(crate) fn masked_mark<S: Serializer>(mark: &MaskedMark, serializer: S) -> Result<S::Ok, S::Error> {
    PacketMark::from(*mark).serialize(serializer)
}

/// `serialize_with` gives a reference.
#[expect(clippy::trivially_copy_pass_by_ref)]
pub(crate) fn flag_names<S: Serializer>(flags: &u8, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(TcpFlags::names(*flags))
}
