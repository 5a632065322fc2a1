//! Collects the objects of a manifest.

use serde_json::Value;

/// What becomes of the objects of a manifest, which come one by one.
pub(crate) trait Gather {
    /// Takes in one of them.
    fn take(&mut self, object: Value);
}
