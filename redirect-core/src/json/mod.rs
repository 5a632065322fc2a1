//! Settings, decisions and plans as JSON (feature `serde`).
//!
//! The documents are the library's own types, which implement [`serde::Serialize`]. `schema/redirect-core-1.schema.json` in this crate
//! describes the result, and what `netfilter-state` and `packet-trace` add to it; tests hold every document to it. Names are in camel case, except for words that logs and metrics use as well.
//!
//! Every document says which [`VERSION`] of the schema it follows. A version only grows: fields are added, and words to
//! closed sets of them, so readers should pass over what they do not know. Anything else makes a new version.
//!
//! | document | type |
//! |---|---|
//! | settings | [`RawSettings`](crate::settings::RawSettings) |
//! | decision | [`pod::Decision`](crate::pod::Decision) |
//! | plan | [`RulePlan`](crate::RulePlan) |
//!
//! Settings alone are read back: they also implement [`serde::Deserialize`].
//!
//! ```
//! use redirect_core::{pod::PodFacts, settings::NamespaceFacts};
//!
//! let addresses = ["10.1.0.2".parse().unwrap()];
//! let decision = PodFacts::default().decide(&NamespaceFacts::new(&addresses)).unwrap();
//! assert_eq!(
//!     serde_json::to_value(&decision)?,
//!     serde_json::json!({
//!         "version": 1,
//!         "decision": "skip",
//!         "reason": "no_proxy",
//!         "explanation": "the pod has no container istio-proxy",
//!     }),
//! );
//! # Ok::<(), serde_json::Error>(())
//! ```

mod plan;
mod settings;
mod values;

/// The version of the schema that this release writes.
pub const VERSION: u32 = 1;
