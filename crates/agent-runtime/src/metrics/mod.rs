//! Metrics: each is declared once, with its type, name and help; its kind and labels follow from the type.

pub mod exposition;
pub mod process;

use std::fmt;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use reasons::AgentReason;
pub use reasons::Explained;

use crate::node::RequestedTaint;

/// A metric as the documentation shows it.
#[derive(Debug, Clone, Copy)]
pub struct Described {
    /// Its name as it is scraped.
    pub name: &'static str,
    /// Counter, gauge or histogram.
    pub kind: &'static str,
    /// Its labels, separated by commas.
    pub labels: &'static str,
    /// Its meaning, with the words of its labels.
    pub help: fn() -> String,
}

impl Described {
    /// A metric of this type.
    #[must_use]
    pub const fn of<M: MetricKind>(name: &'static str, help: fn() -> String) -> Self {
        Self { name, kind: M::KIND, labels: M::LABELS, help }
    }

    /// The name for the library, which appends `_total` to the names of counters.
    #[must_use]
    pub fn registered(&self) -> &'static str {
        self.name.strip_suffix("_total").unwrap_or(self.name)
    }
}

/// The kind and the labels of a type of metric.
pub trait MetricKind {
    /// Counter, gauge or histogram.
    const KIND: &'static str;
    /// The names of the labels, separated by commas.
    const LABELS: &'static str = "";
}

impl MetricKind for Counter {
    const KIND: &'static str = "counter";
}

impl MetricKind for Gauge {
    const KIND: &'static str = "gauge";
}

impl MetricKind for Histogram {
    const KIND: &'static str = "histogram";
}

impl<L: LabelNames, M: MetricKind, C> MetricKind for Family<L, M, C> {
    const KIND: &'static str = M::KIND;
    const LABELS: &'static str = L::NAMES;
}

/// The names of a set of labels.
pub trait LabelNames {
    /// Separated by commas.
    const NAMES: &'static str;
}

/// Declares a struct of metrics: `field: Type [= value] => "name", "help";`, whose help names reasons in scope in braces. It gets `ROWS`, a `Default` that counts from 0, and `register`.
#[macro_export]
macro_rules! metrics {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $kind:ty $(= $value:expr)? => $metric:literal, $help:literal;)* }) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $name { $(#[doc = $help] pub $field: $kind,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $crate::metrics!(@value $($value)?),)* }
            }
        }

        impl $name {
            /// All of them.
            pub const ROWS: &'static [$crate::metrics::Described] =
                &[$($crate::metrics::Described::of::<$kind>($metric, || format!($help))),*];

            /// Adds them to what is scraped.
            pub fn register(&self, registry: &mut prometheus_client::registry::Registry) {
                let mut rows = Self::ROWS.iter();
                $(if let Some(row) = rows.next() {
                    registry.register(row.registered(), (row.help)(), self.$field.clone());
                })*
            }
        }
    };
    (@value) => { Default::default() };
    (@value $value:expr) => { $value };
}

/// Declares sets of labels: `Name = "label" { label: Type }`. One of a single `Word` is made from what is explained.
#[macro_export]
macro_rules! labels {
    ($($(#[$meta:meta])* $name:ident = $names:literal { $($fields:tt)* })*) => {$(
        $crate::labels!(@from $name { $($fields)* });
        $crate::labels!(@set $(#[$meta])* $name = $names { $($fields)* });
    )*};
    (@from $name:ident { $field:ident: Word }) => {
        impl<R: $crate::metrics::Explained> From<R> for $name {
            fn from(reason: R) -> Self {
                Self { $field: reason.into() }
            }
        }
    };
    (@from $name:ident { $($fields:tt)* }) => {};
    (@set $(#[$meta:meta])* $name:ident = $names:literal { $($field:ident: $kind:ty),* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, prometheus_client::encoding::EncodeLabelSet)]
        #[expect(missing_docs, reason = "the names are the documentation")]
        pub struct $name { $(pub $field: $kind),* }

        impl $crate::metrics::LabelNames for $name {
            const NAMES: &'static str = $names;
        }
    };
}

/// Makes the members of a family with these labels: a counter that exists from the start shows its first rise.
pub fn start_at_zero<L, M, C>(family: &Family<L, M, C>, labels: impl IntoIterator<Item: Into<L>>)
where
    L: Clone + Eq + std::hash::Hash + EncodeLabelSet,
    C: MetricConstructor<M>,
{
    labels.into_iter().for_each(|labels| drop(family.get_or_create(&labels.into())));
}

/// A word in a label: one that is explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Word(&'static str);

impl<R: Explained> From<R> for Word {
    fn from(reason: R) -> Self {
        Self(reason.doc().word)
    }
}

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        self.0.encode(encoder)
    }
}

labels! {
    /// How it ended.
    ResultLabel = "result" { result: Word }
    /// Which watch.
    WatchLabel = "watch" { watch: &'static str }
    /// A requested change, and how it ended.
    ChangeLabels = "change,result" { change: &'static str, result: Word }
}

impl ChangeLabels {
    /// Every result of a change.
    pub const RESULTS: [AgentReason; 6] = [
        AgentReason::Done,
        AgentReason::Gone,
        AgentReason::Changed,
        AgentReason::Refused,
        AgentReason::Rejected,
        AgentReason::Unanswered,
    ];

    /// Of the taint, or, if no taint is requested, of the condition.
    #[must_use]
    pub fn of(requested: Option<RequestedTaint>, result: AgentReason) -> Self {
        let change = match requested {
            Some(RequestedTaint::Tainted) => "add",
            Some(RequestedTaint::Free) => "remove",
            None => AgentReason::Condition.word(),
        };
        Self { change, result: result.into() }
    }
}

/// A count as a gauge shows it.
#[must_use]
pub fn gauged(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
