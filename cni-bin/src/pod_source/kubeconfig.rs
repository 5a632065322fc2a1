//! From a kubeconfig file to a client of the API server that trusts what the file says and nothing else.
//!
//! Nothing is taken from the machine: no certificate store, no proxy variable, no credential helper.

use crate::wire::Code;
use kube::{
    Client, Config,
    client::{ClientBuilder, ConfigExt},
    config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError as LoadError},
};
use secrecy::ExposeSecret;
use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

/// How long a connection may take to come about.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// Why a kubeconfig cannot be used. The texts never show what the file holds: some of it is secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KubeconfigError {
    /// There is none.
    #[error("kubeconfig {path} is missing", path = .path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// It is there, but of no use.
    #[error("kubeconfig {path}: {problem}", path = .path.display())]
    Unusable {
        /// Where it is.
        path: PathBuf,
        /// Why it is of no use, by field.
        problem: String,
    },
}

impl KubeconfigError {
    /// The code of the error object, and what to do.
    #[must_use]
    pub const fn advice(&self) -> (Code, &'static str) {
        match self {
            Self::Missing { .. } => {
                (Code::TryAgain, "the node agent writes it when it starts: is its pod on this node running?")
            }
            Self::Unusable { .. } => (Code::Kubeconfig, "the node agent writes it; look at its log"),
        }
    }
}

/// Reads a kubeconfig file.
///
/// # Errors
/// It is missing, or of no use.
pub async fn load(path: &Path) -> Result<Config, KubeconfigError> {
    let unusable = |problem: String| KubeconfigError::Unusable { path: path.to_owned(), problem };
    let mut file = Kubeconfig::read_from(path).map_err(|error| load_error(path, error))?;
    for named in &mut file.clusters {
        let Some(cluster) = &mut named.cluster else { continue };
        if cluster.proxy_url.as_deref().is_some_and(|url| !url.is_empty()) {
            return Err(unusable("clusters[].cluster.proxy-url: proxies are not supported".to_owned()));
        }
        // Keeps the library from looking at HTTPS_PROXY of the container runtime, which is meant for images.
        cluster.proxy_url = Some("http://unused.invalid".to_owned());
    }
    for named in &mut file.auth_infos {
        let Some(user) = &mut named.auth_info else { continue };
        if user.exec.is_some() || user.auth_provider.is_some() {
            let problem =
                "users[].user: exec and auth-provider are not supported: no programs are run for credentials";
            return Err(unusable(problem.to_owned()));
        }
        token(user).map_err(&unusable)?;
    }
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(|error| load_error(path, error))?;
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT_PATIENCE);
    // Who asks decides how often and how long.
    config.default_retry = false;
    check_server(&config).map_err(&unusable)?;
    // An empty list, where there is no authority, keeps the library from trusting the machine's.
    config.root_cert.get_or_insert_default();
    Ok(config)
}

/// Puts the token where the library finds it. As in Kubernetes' own clients a token file wins over a token, because it is
/// the fresher one, and blanks around the token do not count.
fn token(user: &mut AuthInfo) -> Result<(), String> {
    let (mut field, mut text) = ("token", user.token.as_ref().map(|token| token.expose_secret().to_owned()));
    if let Some(path) = user.token_file.take().filter(|path| !path.is_empty()) {
        match fs::read_to_string(&path) {
            Ok(read) => (field, text) = ("tokenFile", Some(read)),
            Err(_) if text.is_some() => {}
            Err(error) => return Err(format!("users[].user.tokenFile: cannot read {path}: {error}")),
        }
    }
    let Some(text) = text.as_deref().map(str::trim) else { return Ok(()) };
    // The library panics on what does not fit into a header.
    if text.is_empty() || text.contains(|c: char| !c.is_ascii_graphic()) {
        return Err(format!("users[].user.{field}: is empty or has characters that no token has"));
    }
    user.token = Some(text.into());
    Ok(())
}

/// A client for a kubeconfig file, and the server's address for messages. Needs a tokio runtime.
///
/// # Errors
/// The file is missing, or of no use.
pub async fn client(path: &Path) -> Result<(Client, String), KubeconfigError> {
    let config = load(path).await?;
    let server = server(&config);
    let builder = ClientBuilder::try_from(config).map_err(|error| credentials(path, &error))?;
    Ok((builder.build(), server))
}

/// Whether a kubeconfig file could be used; nobody is contacted.
///
/// # Errors
/// The file is missing, or of no use.
pub fn check(path: &Path) -> Result<(), KubeconfigError> {
    let unusable = |problem: String| KubeconfigError::Unusable { path: path.to_owned(), problem };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let config = runtime.map_err(|error| unusable(error.to_string()))?.block_on(load(path))?;
    config.rustls_client_config().map_err(|error| credentials(path, &error))?;
    config.auth_layer().map_err(|error| credentials(path, &error))?;
    Ok(())
}

fn server(config: &Config) -> String {
    let url = &config.cluster_url;
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{}{port}", url.scheme_str().unwrap_or_default(), url.host().unwrap_or_default())
}

fn check_server(config: &Config) -> Result<(), String> {
    let url = &config.cluster_url;
    let https = match url.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        Some(_) | None => {
            return Err("clusters[].cluster.server: is no address such as https://10.96.0.1:443".to_owned());
        }
    };
    let trusts =
        config.accept_invalid_certs || config.root_cert.as_ref().is_some_and(|certs| !certs.is_empty());
    if https && !trusts {
        return Err("clusters[].cluster: certificate-authority, certificate-authority-data or \
                    insecure-skip-tls-verify is needed; the machine's own certificates are not trusted"
            .to_owned());
    }
    Ok(())
}

fn load_error(path: &Path, error: LoadError) -> KubeconfigError {
    if let LoadError::ReadConfig(cause, _) = &error
        && cause.kind() == ErrorKind::NotFound
    {
        return KubeconfigError::Missing { path: path.to_owned() };
    }
    let problem = if let LoadError::Parse(cause) = error {
        // The parser's own words quote the file.
        let place = cause.location();
        let place = place.map(|place| format!(" at line {}, column {}", place.line(), place.column()));
        format!("is no kubeconfig{}", place.unwrap_or_default())
    } else {
        error.to_string()
    };
    KubeconfigError::Unusable { path: path.to_owned(), problem }
}

/// Certificates, keys and tokens that are there but wrong. The library's words name files, never what they hold.
fn credentials(path: &Path, error: &kube::Error) -> KubeconfigError {
    KubeconfigError::Unusable { path: path.to_owned(), problem: format!("credentials: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "s3cr3t-t0k3n";

    fn problem(text: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k");
        fs::write(folder.path().join("token"), format!("{SECRET}\n")).unwrap();
        fs::write(&path, text.replace('~', &folder.path().display().to_string())).unwrap();
        check(&path).err().map_or_else(String::new, |error| {
            assert_eq!(error.advice().0, Code::Kubeconfig);
            error.to_string()
        })
    }

    fn with(cluster: &str, user: &str) -> String {
        format!(
            "{{apiVersion: v1, kind: Config, clusters: [{{name: c, cluster: {{{cluster}}}}}], current-context: x,\
             users: [{{name: u, user: {{{user}}}}}], contexts: [{{name: x, context: {{cluster: c, user: u}}}}]}}"
        )
    }

    #[test]
    fn what_the_agent_writes_can_be_used() {
        for (cluster, user) in [
            ("server: 'http://127.0.0.1:1'", ""),
            ("server: 'https://[fd00::1]:6443', insecure-skip-tls-verify: true", "token: abc"),
            ("server: 'http://127.0.0.1:1'", "tokenFile: ~/token"),
            ("server: 'http://127.0.0.1:1'", "tokenFile: /nonexistent, token: abc"),
        ] {
            assert_eq!(problem(&with(cluster, user)), "", "{cluster} {user}");
        }
    }

    #[test]
    fn problems_name_the_field_and_hide_the_rest() {
        let http = "server: 'http://127.0.0.1:1'";
        for (text, expected) in [
            (String::new(), "current context"),
            (format!("a: [{SECRET}"), "line 1"),
            (format!("users: {SECRET}"), "is no kubeconfig at line 1"),
            (with("server: ''", ""), "cluster url"),
            (with("server: 'ftp://x'", ""), "server: is no address"),
            (with("server: 'https://x'", ""), "certificate-authority"),
            (with("server: 'https://x', certificate-authority: /nonexistent", ""), "/nonexistent"),
            (with("server: 'https://x', certificate-authority-data: '!'", ""), "certificate authority"),
            (with("server: 'https://x', certificate-authority-data: 'YWJj'", ""), "certificate-authority"),
            (with(&format!("{http}, proxy-url: 'http://x'"), ""), "proxy-url"),
            (with(http, "exec: {command: x, apiVersion: y}"), "exec"),
            (with(http, &format!("token: \"{SECRET}\\nx\"")), "users[].user.token:"),
            (with(http, "token: ' '"), "users[].user.token:"),
            (with(http, "tokenFile: /nonexistent"), "/nonexistent"),
            (with(http, "client-certificate-data: YWJj, client-key-data: YWJj"), "credentials"),
        ] {
            let problem = problem(&text);
            assert!(problem.contains(expected), "{expected} is missing in {problem:?}");
            assert!(!problem.contains(SECRET) && !problem.contains('\n'), "{problem}");
        }
    }

    /// Without a list of authorities, be it an empty one, the library would ask the machine for its own.
    #[test]
    fn the_machines_authorities_are_never_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k");
        for cluster in ["server: 'http://x'", "server: 'https://x', insecure-skip-tls-verify: true"] {
            fs::write(&path, with(cluster, "")).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let config = runtime.block_on(load(&path)).unwrap();
            assert_eq!((config.root_cert, config.proxy_url), (Some(Vec::new()), None), "{cluster}");
        }
    }

    #[test]
    fn a_missing_file_is_worth_another_try() {
        let error = check(Path::new("/nonexistent/k")).unwrap_err();
        assert_eq!(error, KubeconfigError::Missing { path: "/nonexistent/k".into() });
        assert_eq!(error.advice().0, Code::TryAgain);
    }
}
