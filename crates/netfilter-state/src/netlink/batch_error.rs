//! Why a transaction cannot be written.

/// Why a change cannot be written as a transaction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// A step names a chain that is not there.
    #[error("{0}: no such chain")]
    NoSuchChain(String),
    /// A step removes a rule that is not there.
    #[error("{place}: no rule {rule}")]
    NoSuchRule {
        /// Family, table and chain.
        place: String,
        /// The rule.
        rule: String,
    },
    /// A chain has the name of a built-in one, but was not made by iptables.
    #[error(
        "{0} is not the built-in chain that iptables knows (its type, hook or priority is another); another program owns the table"
    )]
    NotBuiltIn(String),
    /// A rule has no encoding.
    #[error("{place}: rule {rule} cannot be sent: {why}")]
    Unencodable {
        /// Family, table and chain.
        place: String,
        /// The rule.
        rule: String,
        /// Why.
        why: &'static str,
    },
    /// A rule or the whole is too long for netlink's length fields.
    #[error("a rule, or all together, is longer than netlink can carry")]
    TooLong,
}
