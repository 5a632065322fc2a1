//! An API server that answers for pods over TLS and does nothing else, so that what a plugin spends on it is the plugin's
//! own: `openssl s_server`, handing out files that hold whole HTTP answers.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// A running server; it ends when dropped.
#[derive(Debug)]
pub struct PodServer {
    process: Child,
    port: u16,
    certificate: PathBuf,
}

impl PodServer {
    /// Starts one that knows these pods, by namespace and name. Its files go into a folder.
    ///
    /// # Errors
    /// `openssl` is missing, or does not start to listen.
    pub fn start(folder: &Path, pods: &[(&str, &str, Value)]) -> Result<Self> {
        let (certificate, key) = (folder.join("api.crt"), folder.join("api.key"));
        make_certificate(&certificate, &key)?;
        for (namespace, name, pod) in pods {
            let pods = folder.join(format!("api/v1/namespaces/{namespace}/pods"));
            fs::create_dir_all(&pods)?;
            // Clients may end the path with the mark of a query that is empty.
            for file in [(*name).to_owned(), format!("{name}?")] {
                fs::write(pods.join(file), response(&pod.to_string()))?;
            }
        }
        let said = folder.join("api.log");
        let process = Command::new("openssl")
            .args(["s_server", "-HTTP", "-accept", "127.0.0.1:0", "-cert"])
            .arg(&certificate)
            .arg("-key")
            .arg(&key)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(File::create(&said)?)
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run openssl")?;
        let mut this = Self { process, port: 0, certificate };
        this.port = wait_for_port(&said)?;
        Ok(this)
    }

    /// What a client needs to reach it.
    #[must_use]
    pub fn kubeconfig(&self) -> Value {
        let server = format!("https://127.0.0.1:{}", self.port);
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "bench",
            "clusters": [{"name": "bench", "cluster": {"server": server, "certificate-authority": self.certificate}}],
            "users": [{"name": "bench", "user": {"token": "nobody-asks"}}],
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        })
    }
}

impl Drop for PodServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn make_certificate(certificate: &Path, key: &Path) -> Result<()> {
    let mut command = Command::new("openssl");
    command
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-subj",
            "/CN=api",
        ])
        .args([
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-days",
            "2",
        ])
        .arg("-keyout")
        .arg(key)
        .arg("-out")
        .arg(certificate);
    let output = command.output().context("cannot run openssl")?;
    if !output.status.success() {
        bail!("openssl makes no certificate: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// A whole answer of HTTP with this body.
pub(crate) fn response(body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// The port in the line `ACCEPT 127.0.0.1:40123` that the server writes when it listens.
fn wait_for_port(said: &Path) -> Result<u16> {
    for _ in 0..500 {
        let text = fs::read_to_string(said)?;
        let mut lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        if let Some(address) = lines.find_map(|line| line.strip_prefix("ACCEPT ")) {
            let port = address.rsplit(':').next().unwrap_or_default();
            return port.parse().with_context(|| format!("openssl listens at {address:?}"));
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!("openssl s_server does not listen")
}
