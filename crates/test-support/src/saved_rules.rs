//! What iptables-save printed on real nodes and in real pods.
//!
//! The folder `nodes` has a namespace's rules in a file a family: nodes with the firewalls and container engines of Debian 12 (ufw, firewalld,
//! shorewall, firehol, ferm, fail2ban, Docker with two published ports, Podman, libvirt, LXC), with the CNI plugins bridge, portmap and firewall,
//! with kube-proxy 1.34 and four services, with sshuttle; pods of Istio's program in the form of its CNI plugin (`istio`), of its init container,
//! with DNS capture and TPROXY, of Linkerd's and of Consul's; and Istio's beside others' on one machine.

use crate::{netns::Namespace, process};
use anyhow::{Context, Result};
use std::{collections::BTreeMap, fs, path::Path};

/// The rules of one family, as iptables-save or ip6tables-save printed them.
#[derive(Debug)]
pub struct SavedRules {
    /// Of which family.
    pub is_v6: bool,
    /// Which variant printed them: iptables-nft or iptables-legacy.
    pub is_nft: bool,
    /// What it printed.
    pub text: String,
}

impl SavedRules {
    /// Of each node and pod by its name.
    pub fn of_nodes() -> Result<BTreeMap<String, Vec<Self>>> {
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("nodes"))? {
            let path = file?.path();
            let name = path.file_stem().context("a file without a name")?.to_string_lossy().into_owned();
            let text = fs::read_to_string(&path)?;
            let is_nft = text.lines().next().is_some_and(|line| line.contains("(nf_tables)"));
            let is_v6 = path.extension().is_some_and(|family| family == "v6");
            all.entry(name).or_default().push(Self { is_v6, is_nft, text });
        }
        Ok(all)
    }

    /// Has the program that printed them put them into a namespace.
    pub fn restore(&self, namespace: &Namespace) -> Result<()> {
        let program = match (self.is_v6, self.is_nft) {
            (false, true) => "iptables-nft-restore",
            (true, true) => "ip6tables-nft-restore",
            (false, false) => "iptables-legacy-restore",
            (true, false) => "ip6tables-legacy-restore",
        };
        // kube-proxy makes the counter that this match needs, over netlink. The match always holds.
        let text = self.text.replace("-m nfacct --nfacct-name  ct_state_invalid_dropped_pkts ", "");
        let mut command = namespace.command(&process::command(program, [""; 0]));
        process::run_with_input(&mut command, &text, process::SHORT)?.ok()?;
        Ok(())
    }
}
