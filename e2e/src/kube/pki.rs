//! Certificates and service-account tokens, made with the `openssl` program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use test_support::process::{self, SHORT};

/// Who signs service-account tokens, and who they are for.
pub(super) const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// A certificate authority and the key that signs service-account tokens, as files in a folder.
#[derive(Debug)]
pub(super) struct Authority {
    folder: PathBuf,
}

/// A certificate and its key (PEM files).
#[derive(Clone, Debug)]
pub struct Identity {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// The one whose files are in a folder.
    pub(super) fn of(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    pub(super) fn new(folder: &Path) -> Result<Self> {
        let authority = Self::of(folder);
        authority.request("ca", "/CN=e2e", &["-addext", "keyUsage=critical,keyCertSign"])?;
        openssl(Command::new("openssl").args(["genrsa", "-out"]).arg(authority.token_key()).arg("2048"))?;
        Ok(authority)
    }

    /// The authority's own certificate.
    pub(super) fn certificate(&self) -> PathBuf {
        self.folder.join("ca.crt")
    }

    /// The private key of service-account tokens; the API server takes the public half from the same file.
    pub(super) fn token_key(&self) -> PathBuf {
        self.folder.join("sa.key")
    }

    /// Issues a certificate for client and server use, as `NAME.crt` and `NAME.key`.
    pub(super) fn issue(&self, name: &str, subject: &str, alternative_names: &str) -> Result<Identity> {
        let [certificate, key] =
            ["ca.crt", "ca.key"].map(|name| self.folder.join(name).display().to_string());
        let names = format!("subjectAltName={alternative_names}");
        let mut more = vec!["-CA", &certificate, "-CAkey", &key];
        for extension in
            [&*names, "extendedKeyUsage=serverAuth,clientAuth", "basicConstraints=critical,CA:false"]
        {
            more.extend(["-addext", extension]);
        }
        self.request(name, subject, &more)
    }

    fn request(&self, name: &str, subject: &str, more: &[&str]) -> Result<Identity> {
        let certificate = self.folder.join(format!("{name}.crt"));
        let key = self.folder.join(format!("{name}.key"));
        let mut command = Command::new("openssl");
        command.args("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split(' '));
        command.args(["-subj", subject]).arg("-out").arg(&certificate).arg("-keyout").arg(&key).args(more);
        openssl(&mut command)?;
        Ok(Identity { certificate, key })
    }

    /// Signs a JSON web token (RS256) with these claims.
    pub(super) fn sign_token(&self, claims: &Value) -> Result<String> {
        let script = r#"
            encode() { openssl base64 -A | tr '+/' '-_' | tr -d '='; }
            head=$(printf '{"alg":"RS256"}' | encode)
            body=$(printf %s "$1" | encode)
            tail=$(printf %s "$head.$body" | openssl dgst -sha256 -sign "$0" -binary | encode)
            printf %s "$head.$body.$tail"
        "#;
        let mut command = Command::new("sh");
        command.args(["-euc", script]).arg(self.token_key()).arg(claims.to_string());
        openssl(&mut command)
    }
}

/// A file's content in base64, on one line.
pub(super) fn base64(file: &Path) -> Result<String> {
    let content = fs::read(file).with_context(|| format!("no file {}", file.display()))?;
    Ok(STANDARD.encode(content))
}

/// Seconds since 1970, as tokens count.
pub(super) fn seconds(moment: SystemTime) -> Result<u64> {
    Ok(moment.duration_since(UNIX_EPOCH)?.as_secs())
}

fn openssl(command: &mut Command) -> Result<String> {
    Ok(process::run(command, SHORT)?.ok()?.stdout)
}
