//! The plugin's kubeconfig: which server, how trusted, with which token.

use std::io;
use std::path::Path;

use base64::{Engine as _, engine::general_purpose::STANDARD};

use crate::install::disk::{self, Disk, DiskError, context};
use crate::install::plugin_token::PluginToken;
use crate::settings::{KubeconfigSettings, Paths, Trust};

/// What the plugin needs to reach the API server. Its `Debug` shows no token.
#[derive(Clone, PartialEq, Eq)]
pub struct PluginCredentials {
    /// The file's text.
    pub kubeconfig: String,
    /// The text of the token's own file, if it has one.
    pub token: Option<String>,
}

impl std::fmt::Debug for PluginCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl PluginCredentials {
    /// With the plugin's own token if it has one, else with the agent's; reads the service account's files.
    ///
    /// # Errors
    /// When one of them is missing or empty.
    pub fn read(
        disk: &dyn Disk,
        paths: &Paths,
        settings: &KubeconfigSettings,
        own: &PluginToken,
    ) -> Result<Self, DiskError> {
        let token = match own.choose(written(disk, paths)) {
            Some(token) => token,
            None => text(disk, &paths.service_account.join("token"))?,
        };
        let authority = match &settings.trust {
            Trust::Authority(file) => Some(text(disk, file)?),
            Trust::Unverified => None,
        };
        let token_file = paths.token_file();
        let kubeconfig = render(
            &settings.server,
            authority.as_deref(),
            &token,
            settings.token_file.then_some(&*token_file),
        );
        Ok(Self { kubeconfig, token: settings.token_file.then_some(token) })
    }
}

/// The token that was written last: in the kubeconfig, or in the file it names.
fn written(disk: &dyn Disk, paths: &Paths) -> Option<String> {
    let kubeconfig = disk::read_text(disk, &paths.kubeconfig()).ok()?;
    let value = |key: &str| {
        let line = kubeconfig.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(": "));
        serde_json::from_str::<String>(line?).ok()
    };
    value("token").or_else(|| {
        value("tokenFile")?;
        Some(disk::read_text(disk, &paths.token_file()).ok()?.trim().to_owned())
    })
}

/// The text of a file that must not be empty: a volume that is being filled has empty files for a moment.
fn text(disk: &dyn Disk, path: &Path) -> Result<String, DiskError> {
    let text = disk::read_text(disk, path)?;
    match text.trim() {
        "" => context(Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")), "use", path),
        trimmed => Ok(trimmed.to_owned()),
    }
}

/// The file's text. JSON strings are YAML strings, so nothing in a value can end it.
fn render(server: &str, authority: Option<&str>, token: &str, token_file: Option<&Path>) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let trust = match authority {
        Some(pem) => format!("certificate-authority-data: {}", quoted(&STANDARD.encode(format!("{pem}\n")))),
        None => "insecure-skip-tls-verify: true".to_owned(),
    };
    let credential = match token_file {
        Some(path) => format!("tokenFile: {}", quoted(&path.display().to_string())),
        None => format!("token: {}", quoted(token)),
    };
    format!(
        "apiVersion: v1\n\
         clusters:\n\
         - cluster:\n    {trust}\n    server: {}\n  name: local\n\
         contexts:\n\
         - context:\n    cluster: local\n    user: istio-cni\n  name: istio-cni-context\n\
         current-context: istio-cni-context\n\
         kind: Config\n\
         users:\n\
         - name: istio-cni\n  user:\n    {credential}\n",
        quoted(server)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_holds_server_authority_and_token() {
        let text = render("https://[fd00::1]:443", Some("PEM"), "to\"ken", None);
        assert_eq!(
            text,
            r#"apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: "UEVNCg=="
    server: "https://[fd00::1]:443"
  name: local
contexts:
- context:
    cluster: local
    user: istio-cni
  name: istio-cni-context
current-context: istio-cni-context
kind: Config
users:
- name: istio-cni
  user:
    token: "to\"ken"
"#
        );
    }

    #[test]
    fn a_kubeconfig_may_name_a_token_file_and_trust_anybody() {
        let text = render("https://h:1", None, "secret", Some(Path::new("/run/istio-cni-token")));
        assert!(text.contains("    insecure-skip-tls-verify: true\n"), "{text}");
        assert!(text.contains("    tokenFile: \"/run/istio-cni-token\"\n"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }

    #[test]
    fn debug_output_has_no_token() {
        let credentials =
            PluginCredentials { kubeconfig: "token: s3cret".into(), token: Some("s3cret".into()) };
        assert!(!format!("{credentials:?}").contains("s3cret"));
    }
}
