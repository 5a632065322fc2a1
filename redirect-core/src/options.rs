//! By which means rules are put in force.

/// A variant of the iptables programs. Closed: only two exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// The older kernel interface, `iptables-legacy`.
    Legacy,
    /// On top of nf_tables, `iptables-nft`.
    Nft,
}

impl Variant {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Legacy, Self::Nft];

    /// Its name in program names and settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Nft => "nft",
        }
    }
}

/// What programs the rules, as far as the user says. Closed on purpose: another means is for every program to decide about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendChoice {
    /// Whatever suits the namespace.
    Auto,
    /// One transaction over netlink, into the tables of iptables-nft.
    Netlink,
    /// `iptables-restore` of this variant, or of the one that suits the namespace.
    Restore(Option<Variant>),
    /// Native nftables.
    NativeNft,
}

/// How native rules are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NativeForm {
    /// One rule for each planned one, as the reference writes them.
    Plain,
    /// Lists of ports and ranges with the same consequence become sets: what a packet costs does not grow with them.
    Sets,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_named_as_in_the_names_of_programs() {
        assert_eq!([Variant::Legacy, Variant::Nft].map(Variant::name), ["legacy", "nft"]);
    }
}
