//! Container runtimes with a network stack or a kernel of their own. gVisor takes packets off the pod's interface before the rules of its
//! network namespace meet them, and Kata's virtual machine sends them past these rules: such a pod looks redirected and is not.

use serde::{Deserialize, Serialize};

/// Where the API server has runtime classes.
pub const RUNTIME_CLASSES: &str = "/apis/node.k8s.io/v1/runtimeclasses";

/// The names of runtime classes, and of their handlers, that count as sandboxed unless others are named: as gVisor, Kata, GKE, AKS and OpenShift
/// have them. A star at the end stands for anything.
pub const USUAL: &str = "gvisor,gvisor-*,runsc,runsc-*,kata,kata-*,firecracker";

/// What the plugin does with a pod of the mesh in a sandboxed runtime.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxedPods {
    /// It fails the pod's creation.
    #[default]
    Refuse,
    /// It leaves the pod alone.
    Skip,
}

impl SandboxedPods {
    /// From its word in settings.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        serde_json::from_value(word.into()).ok()
    }
}

/// Which runtimes are sandboxed, and what is done with their pods; as keys of the plugin's configuration, of which the usual ones are left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxedRuntimes {
    /// Names of runtime classes and handlers, some with a star at the end.
    #[serde(rename = "sandboxed_runtimes", skip_serializing_if = "are_usual")]
    pub names: Vec<String>,
    /// What is done.
    #[serde(rename = "sandboxed_pods", skip_serializing_if = "is_usual")]
    pub pods: SandboxedPods,
}

fn are_usual(names: &[String]) -> bool {
    names.iter().eq(USUAL.split(','))
}

fn is_usual(pods: &SandboxedPods) -> bool {
    *pods == SandboxedPods::default()
}

impl Default for SandboxedRuntimes {
    fn default() -> Self {
        Self { names: USUAL.split(',').map(str::to_owned).collect(), pods: SandboxedPods::default() }
    }
}

impl SandboxedRuntimes {
    /// Whether this is the name of a sandboxed runtime's class or handler.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| match known.strip_suffix('*') {
            Some(begin) => name.starts_with(begin),
            None => name == known,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_runtimes_are_known_and_names_that_resemble_them_are_not() {
        let usual = SandboxedRuntimes::default();
        let sandboxed = [
            "gvisor",
            "runsc",
            "runsc-gpu",
            "kata",
            "kata-qemu",
            "kata-clh",
            "kata-fc",
            "kata-qemu-snp",
            "kata-mshv-vm-isolation",
            "kata-remote",
            "firecracker",
        ];
        assert!(sandboxed.iter().all(|name| usual.has(name)));
        for other in
            ["", "runc", "crun", "nvidia", "sysbox-runc", "youki", "katana", "my-kata", "gvisors", "windows"]
        {
            assert!(!usual.has(other), "{other}");
        }
        let own = SandboxedRuntimes { names: vec!["vm".into(), "box*".into()], ..usual };
        assert!(own.has("vm") && own.has("box") && own.has("boxed") && !own.has("vms") && !own.has("kata"));
        for (word, pods) in
            [("refuse", Some(SandboxedPods::Refuse)), ("skip", Some(SandboxedPods::Skip)), ("x", None)]
        {
            assert_eq!(SandboxedPods::parse(word), pods, "{word}");
        }
    }
}
