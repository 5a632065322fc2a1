//! The CNI plugin as a runtime calls it, its pods from a folder of manifests, an API server or the node agent.

use crate::api::{PodServer, response};
use anyhow::Result;
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};
use test_support::netns::Namespace;

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
    /// The pods' UID, where the runtime passes one.
    uid: Option<&'static str>,
    /// Where its pods come from, if that is not a folder.
    _server: Option<PodServer>,
}

impl Plugin {
    /// One that reads pods from manifests. They and the configuration are written into a folder.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn new(program: &Path, folder: &Path) -> Result<Self> {
        let manifests = folder.join("pods");
        fs::create_dir_all(&manifests)?;
        for pod in [Pod::Injected, Pod::Plain] {
            fs::write(manifests.join(format!("{}.json", pod.name())), manifest(pod).to_string())?;
        }
        let conf = json!({"pod_manifest_dir": manifests});
        Ok(Self { program: program.to_owned(), conf: configure(folder, conf)?, uid: None, _server: None })
    }

    /// One that the runtime passes the annotations of a pod outside the mesh, and that has nothing to read pods from.
    ///
    /// # Errors
    /// The configuration cannot be written.
    pub fn with_annotations(program: &Path, folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let annotations = json!({"kubernetes.io/config.seen": "", "kubernetes.io/config.source": "api"});
        let conf = json!({"runtimeConfig": {"io.kubernetes.cri.pod-annotations": annotations}});
        Ok(Self { program: program.to_owned(), conf: configure(folder, conf)?, uid: None, _server: None })
    }

    /// One that reads pods from an API server on this machine, over TLS. Everything is written into a folder, which must be
    /// another plugin's no more.
    ///
    /// # Errors
    /// The files cannot be written, or the server does not start.
    pub fn with_server(program: &Path, folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let pods = [Pod::Injected, Pod::Plain].map(|pod| ("default", pod.name(), manifest(pod)));
        let server = PodServer::start(folder, &pods)?;
        fs::write(folder.join("istio-cni-kubeconfig"), server.kubeconfig().to_string())?;
        let conf = configure(folder, json!({}))?;
        Ok(Self { program: program.to_owned(), conf, uid: None, _server: Some(server) })
    }

    /// One that gets the injected pod from a stand-in for the agent, at a socket in a folder of its own, for as long as this process lives.
    ///
    /// # Errors
    /// The configuration cannot be written, or the socket not be made.
    pub fn with_agent(program: &Path, folder: &Path) -> Result<Self> {
        const UID: &str = "u-1";
        fs::create_dir_all(folder)?;
        let mut pod = manifest(Pod::Injected);
        pod["metadata"]["uid"] = json!(UID);
        let listener = UnixListener::bind(folder.join("pluginevent.sock"))?;
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A plugin that is gone gets no answer.
                let _ = answer(&stream, &json!({"pod": pod}).to_string());
            }
        });
        let conf = configure(folder, json!({}))?;
        Ok(Self { program: program.to_owned(), conf, uid: Some(UID), _server: None })
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
            .env("CNI_ARGS", {
                let uid = self.uid.map(|uid| format!(";K8S_POD_UID={uid}")).unwrap_or_default();
                format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={}{uid}", pod.name())
            });
        Ok(command)
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new(&self.program);
        command.env_clear().stdin(File::open(&self.conf)?).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }
}

/// Answers one request, whatever it is.
fn answer(stream: &UnixStream, body: &str) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut line, mut length) = (String::new(), 0);
    while reader.read_line(&mut line)? > 2 {
        let lower = line.to_ascii_lowercase();
        if let Some(text) = lower.strip_prefix("content-length:") {
            length = text.trim().parse().unwrap_or_default();
        }
        line.clear();
    }
    reader.read_exact(&mut vec![0; length])?;
    (&mut &*stream).write_all(response(body).as_bytes())
}

/// Writes a configuration with these keys and the usual ones.
fn configure(folder: &Path, mut content: Value) -> Result<PathBuf> {
    content["cniVersion"] = json!("1.0.0");
    content["name"] = json!("bench");
    content["type"] = json!("istio-cni");
    content["cni_agent_run_dir"] = json!(folder);
    content["prevResult"] = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
        "ips": [{"address": "10.1.0.2/24", "interface": 0}, {"address": "fd00:10::2/64", "interface": 0}],
    });
    let path = folder.join("conf.json");
    fs::write(&path, content.to_string())?;
    Ok(path)
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
