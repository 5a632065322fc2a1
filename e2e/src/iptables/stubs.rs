//! Programs that stand in for those of the system.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::Result;
use tempfile::TempDir;
use test_support::netns::Namespace;
use test_support::process::{Output, prefixed};

use crate::program::PATH;

use super::{istio_iptables, istio_iptables_command, with_environment};

/// A folder of programs that stand in for those of the system.
pub struct Stubs(TempDir);

impl Stubs {
    /// An empty one.
    pub fn new() -> Result<Self> {
        Ok(Self(tempfile::Builder::new().prefix("redirect-stubs-").tempdir()?))
    }

    /// A shell script by this name; `REAL` in it is the program it stands in for, `FOLDER` this folder. It starts with an empty environment.
    pub fn add(&self, name: &str, script: &str) -> Result<()> {
        let path = self.0.path().join(name);
        let folder = self.0.path().display().to_string();
        let script = script.replace("REAL", &format!("/usr/sbin/{name}")).replace("FOLDER", &folder);
        fs::write(&path, format!("#!/bin/sh\n{script}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    /// `istio-iptables` that finds these before those of the system.
    pub fn command(&self, args: &str) -> Command {
        let args: Vec<&str> = args.split_whitespace().collect();
        let path = format!("{}:{PATH}", self.0.path().display());
        with_environment(istio_iptables(), &args, &[("PATH".to_owned(), path)])
    }

    /// What a script of these has put into a file here; empty where the file is missing.
    pub fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.path().join(file)).unwrap_or_default()
    }
}

/// Runs `istio-iptables` where the folder that iptables and nft are in is empty: in a mount namespace of its own.
pub fn without_programs(namespace: &Namespace, args: &str) -> Result<Output> {
    let words = ["unshare", "--mount", "sh", "-euc", "mount -t tmpfs none /usr/sbin; exec \"$@\"", "sh"];
    let args: Vec<&str> = args.split(' ').collect();
    namespace.run(&prefixed(&words, &istio_iptables_command(&args)))
}
