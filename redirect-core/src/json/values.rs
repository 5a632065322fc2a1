//! Values that are written as in settings.

use crate::{
    redirect::Families,
    rule::Chain,
    settings::Key,
    values::{Cidrs, InterfaceName, PortRange},
};
use serde::{Serialize, Serializer};

macro_rules! as_displayed {
    ($($type:ty),+) => { $(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )+ };
}

as_displayed!(Chain, InterfaceName, PortRange);

/// By its name: [`Key::json_name`].
impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.json_name())
    }
}

/// As a list.
impl Serialize for Families {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.list().serialize(serializer)
    }
}

/// IPv4's ranges first, as a plan has them.
impl Serialize for Cidrs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}
