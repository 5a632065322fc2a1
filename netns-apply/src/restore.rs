//! The `iptables-save`, `iptables-restore` family of programs.

use crate::{
    ApplyError,
    capabilities::Capability,
    exec::{self, ExecError, Programs},
    lock::NetnsLock,
};
use netfilter_state::{change::IptablesChange, state::IptablesTables};
use redirect_core::{Family, options::Variant};
use std::path::{Path, PathBuf};

/// The Debian package that has the programs of either variant.
const PACKAGE: &str = "iptables";

/// The programs of a variant of iptables, for one family.
#[derive(Clone, Copy)]
pub(crate) struct IptablesPrograms<'a> {
    programs: &'a Programs,
    variant: Variant,
    family: Family,
}

impl Programs {
    /// Those of a variant of iptables, for one family.
    pub(crate) const fn iptables(&self, variant: Variant, family: Family) -> IptablesPrograms<'_> {
        IptablesPrograms { programs: self, variant, family }
    }
}

impl IptablesPrograms<'_> {
    /// The rules in the calling thread's network namespace; an error if they take more than `most` bytes.
    pub(crate) fn save(self, most: usize) -> Result<IptablesTables, ApplyError> {
        let (program, text) = self.saved(&[], most)?;
        rules_in(&program, &text)
    }

    /// As [`save`](Self::save), but only of these tables, which exist: each of them may take `most` bytes.
    pub(crate) fn save_tables<'t>(
        self,
        tables: impl Iterator<Item = &'t str>,
        most: usize,
    ) -> Result<IptablesTables, ApplyError> {
        let (mut program, mut all) = (PathBuf::new(), String::new());
        for table in tables {
            let text;
            (program, text) = self.saved(&["-t", table], most)?;
            all += &text;
        }
        rules_in(&program, &all)
    }

    /// What the program prints, at most so many bytes, and its path.
    fn saved(self, args: &[&str], most: usize) -> Result<(PathBuf, String), ExecError> {
        let program = self.find("save")?;
        let text = exec::read(&program, args, most).map_err(|error| explained(self.variant, error))?;
        Ok((program, text))
    }

    /// Whether the variant is installed and the kernel answers it. Only nft's own tables are listed: listing the legacy
    /// ones would load them.
    pub(crate) fn usable(self, most: usize) -> Result<(), ExecError> {
        match self.variant {
            Variant::Nft => self.saved(&[], most).map(drop),
            Variant::Legacy => self.find("restore").map(drop),
        }
    }

    /// Asks whether a change would be accepted. Nothing is changed.
    pub(crate) fn test(self, change: &IptablesChange, lock: &NetnsLock) -> Result<(), ApplyError> {
        self.restore(&["--test", "--noflush"], change, lock).map_err(|cause| {
            let hint = hint(&cause);
            ApplyError::Rejected { family: self.family, variant: self.variant, cause, hint }
        })
    }

    /// Puts a change in force, table by table.
    pub(crate) fn commit(self, change: &IptablesChange, lock: &NetnsLock) -> Result<(), ApplyError> {
        Ok(self.restore(&["--noflush"], change, lock)?)
    }

    fn restore(self, args: &[&str], change: &IptablesChange, lock: &NetnsLock) -> Result<(), ExecError> {
        if change.is_empty() {
            return Ok(());
        }
        let program = self.find("restore")?;
        let mut args = args.to_vec();
        if self.variant == Variant::Legacy {
            args.extend(["--wait", "30"]);
        }
        exec::write(&program, &args, &change.restore_text(), lock)
            .map_err(|error| explained(self.variant, error))
    }

    /// Finds `iptables-nft-save`, or `iptables-save` if that belongs to the variant in question.
    pub(crate) fn find(self, verb: &str) -> Result<PathBuf, ExecError> {
        let Self { programs, variant, family } = self;
        let base = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let name = format!("{base}-{}-{verb}", variant.name());
        if let Some(path) = programs.find(&name) {
            return Ok(path);
        }
        let plain =
            programs.find(&format!("{base}-{verb}")).ok_or_else(|| programs.missing(&name, PACKAGE))?;
        let version = exec::version(&plain)?;
        let found = if version.contains("nf_tables") { Variant::Nft } else { Variant::Legacy };
        if found == variant { Ok(plain) } else { Err(programs.missing(&name, PACKAGE)) }
    }
}

fn rules_in(program: &Path, text: &str) -> Result<IptablesTables, ApplyError> {
    let program = program.display().to_string();
    IptablesTables::saved(text).map_err(|cause| ApplyError::Unreadable { program, cause })
}

/// If a capability is missing, the legacy variant reports that it cannot initialize a table, just as if a module were missing.
fn explained(variant: Variant, mut error: ExecError) -> ExecError {
    if variant == Variant::Legacy
        && Capability::NET_RAW.is_held() == Some(false)
        && let ExecError::Failed { message, .. } = &mut error
    {
        message.push_str("; CAP_NET_RAW is missing: in the container's securityContext add NET_RAW to capabilities, or use another backend");
    }
    error
}

/// What an operator can do about a refusal.
fn hint(error: &ExecError) -> &'static str {
    let ExecError::Failed { message, .. } = error else { return "" };
    let says = |words: &str| message.contains(words);
    if says(Capability::NET_RAW.name) {
        ""
    } else if says("can't initialize")
        || says("unable to initialize")
        || says("missing kernel module")
        || says("Couldn't load")
    {
        "; the kernel lacks a table, match or target: load its module on the node (modprobe), or use the other variant (--force-iptables-binary)"
    } else if says("more arguments") {
        "; a rule has too many conditions for iptables-restore: list fewer owner groups"
    } else if says("incompatible") {
        "; another program has put native nftables rules into iptables' tables: remove those, or use --native-nftables"
    } else {
        ""
    }
}
