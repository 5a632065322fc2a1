//! Settings, decisions and plans as JSON (feature `serde`).
//!
//! The types here are the documents. Their values are the library's own where those say the same. `schema/redirect-core-1.schema.json` in this crate describes the result, and what `netfilter-state` and
//! `packet-trace` add to it; tests hold every document to it. Names are in camel case, except for words that logs and metrics use as well.
//!
//! Every document says which [`VERSION`] of the schema it follows. A version only grows: fields are added, and words to
//! closed sets of them, so readers should pass over what they do not know. Anything else makes a new version.
//!
//! | document | made from | read back |
//! |---|---|---|
//! | [`Settings`] | [`RawSettings`](crate::settings::RawSettings) | yes |
//! | [`Decision`] | [`pod::Decision`](crate::pod::Decision) | no |
//! | [`Plan`] | [`RulePlan`](crate::RulePlan) | no |
//!
//! "Read back" means into the library's own types. All of them implement `Deserialize`, for programs that read what others
//! have written.
//!
//! ```
//! use redirect_core::{json, pod::PodFacts, settings::NamespaceFacts};
//!
//! let addresses = ["10.1.0.2".parse().unwrap()];
//! let decision = PodFacts::default().decide(&NamespaceFacts::new(&addresses)).unwrap();
//! assert_eq!(
//!     serde_json::to_value(json::Decision::from(&decision))?,
//!     serde_json::json!({
//!         "version": 1,
//!         "decision": "skip",
//!         "reason": "no_proxy",
//!         "explanation": "the pod has no container istio-proxy",
//!     }),
//! );
//! # Ok::<(), serde_json::Error>(())
//! ```

mod decision;
mod plan;
mod rule;
mod settings;
mod values;

pub use decision::{Decision, DecisionJson, Redirect};
pub use plan::{Chain, FamilyPlan, Plan, PlannedRule, PolicyRouting, Table};
pub use rule::{Action, Condition, Test};
pub use settings::{Said, Settings, SettingsError, Source, setting_name};

/// The version of the schema that this release writes.
pub const VERSION: u32 = 1;
