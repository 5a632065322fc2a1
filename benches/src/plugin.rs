//! The CNI plugin as a runtime calls it, its pods from a folder of manifests.

use anyhow::Result;
use e2e::netns::Namespace;
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Names of pods that the folder has manifests of.
#[derive(Debug, Clone, Copy)]
pub enum Pod {
    /// One with a sidecar.
    Injected,
    /// One without: the plugin leaves it alone.
    Plain,
}

impl Pod {
    const fn name(self) -> &'static str {
        match self {
            Self::Injected => "injected",
            Self::Plain => "plain",
        }
    }
}

/// A plugin with its configuration.
#[derive(Debug)]
pub struct Plugin {
    program: PathBuf,
    conf: PathBuf,
}

impl Plugin {
    /// Writes manifests and configuration into a folder.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn new(program: &Path, folder: &Path) -> Result<Self> {
        let manifests = folder.join("pods");
        fs::create_dir_all(&manifests)?;
        for pod in [Pod::Injected, Pod::Plain] {
            fs::write(manifests.join(format!("{}.json", pod.name())), manifest(pod).to_string())?;
        }
        let conf = folder.join("conf.json");
        let content = json!({
            "cniVersion": "1.0.0", "name": "bench", "type": "istio-cni",
            "pod_manifest_dir": manifests, "cni_agent_run_dir": folder,
            "prevResult": {
                "cniVersion": "1.0.0",
                "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
                "ips": [{"address": "10.1.0.2/24", "interface": 0}, {"address": "fd00:10::2/64", "interface": 0}],
            },
        });
        fs::write(&conf, content.to_string())?;
        Ok(Self { program: program.to_owned(), conf })
    }

    /// The command that asks for its version.
    ///
    /// # Errors
    /// The configuration is gone.
    pub fn version(&self) -> Result<Command> {
        let mut command = self.command()?;
        command.env("CNI_COMMAND", "VERSION");
        Ok(command)
    }

    /// The command that adds a pod.
    ///
    /// # Errors
    /// The configuration is gone.
    pub fn add(&self, pod: Pod, namespace: &Namespace) -> Result<Command> {
        let mut command = self.command()?;
        command
            .env("CNI_COMMAND", "ADD")
            .env("CNI_CONTAINERID", "bench")
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_NETNS", namespace.path())
            .env("CNI_ARGS", format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={}", pod.name()));
        Ok(command)
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new(&self.program);
        command.env_clear().stdin(File::open(&self.conf)?).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }
}

fn manifest(pod: Pod) -> Value {
    let proxy = json!({"name": "istio-proxy", "image": "istio-proxy", "args": ["proxy", "sidecar"]});
    let (containers, annotations) = match pod {
        Pod::Injected => {
            (json!([{"name": "app", "image": "app"}, proxy]), json!({"sidecar.istio.io/status": "{}"}))
        }
        Pod::Plain => (json!([{"name": "app", "image": "app"}]), json!({})),
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": pod.name(), "namespace": "default", "annotations": annotations},
        "spec": {"containers": containers},
    })
}
