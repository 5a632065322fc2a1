//! From a kubeconfig file to a client of the API server that trusts what the file says and nothing else.
//!
//! Nothing is taken from the machine: no certificate store, no proxy variable, no credential helper.

use crate::{Access, Client, files};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::config::{AuthInfo, Cluster, Kubeconfig, KubeconfigError as LoadError};
use secrecy::ExposeSecret;
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

/// Why a kubeconfig cannot be used. The texts never show what the file holds: some of it is secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KubeconfigError {
    /// The file is missing.
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

/// Reads a kubeconfig file and the files it names.
///
/// # Errors
/// It is missing, or of no use.
pub fn load(path: &Path) -> Result<Access, KubeconfigError> {
    match files::read_text(path, files::KUBECONFIG) {
        Ok(text) => of_text(&text, path),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(KubeconfigError::Missing { path: path.to_owned() })
        }
        Err(error) => Err(unusable(path, error.to_string())),
    }
}

/// Reads a kubeconfig's text, and the files it names: relative names are in the folder of the file that it is from.
///
/// # Errors
/// It is of no use.
pub fn of_text(text: &str, path: &Path) -> Result<Access, KubeconfigError> {
    let unusable = |problem: String| unusable(path, problem);
    let mut file = Kubeconfig::from_yaml(text).map_err(|error| unusable(load_problem(&error)))?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    for cluster in file.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        read_cluster(cluster, folder).map_err(unusable)?;
    }
    for user in file.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        read_user(user, folder).map_err(unusable)?;
    }
    Access::of(file).map_err(|error| unusable(load_problem(&error)))
}

fn unusable(path: &Path, problem: String) -> KubeconfigError {
    KubeconfigError::Unusable { path: path.to_owned(), problem }
}

/// Whether a kubeconfig file could be used; contacts no server.
///
/// # Errors
/// The file is missing, or of no use.
pub fn check(path: &Path) -> Result<(), KubeconfigError> {
    load(path)?.check().map_err(|error| unusable(path, error.to_string()))
}

/// A client for a kubeconfig file. Needs a tokio runtime.
///
/// # Errors
/// The file is missing, or of no use.
pub fn client(path: &Path) -> Result<Client, KubeconfigError> {
    load(path)?.client().map_err(|error| unusable(path, error.to_string()))
}

fn read_cluster(cluster: &mut Cluster, folder: &Path) -> Result<(), String> {
    if cluster.proxy_url.as_deref().is_some_and(|url| !url.is_empty()) {
        return Err("clusters[].cluster.proxy-url: proxies are not supported".to_owned());
    }
    let field = "clusters[].cluster.certificate-authority";
    read_data(field, cluster.certificate_authority.take(), folder, &mut cluster.certificate_authority_data)
}

fn read_user(user: &mut AuthInfo, folder: &Path) -> Result<(), String> {
    if user.exec.is_some() || user.auth_provider.is_some() {
        let problem =
            "users[].user: exec and auth-provider are not supported: no programs are run for credentials";
        return Err(problem.to_owned());
    }
    let (certificate, key) = (user.client_certificate.take(), user.client_key.take());
    read_data("users[].user.client-certificate", certificate, folder, &mut user.client_certificate_data)?;
    read_data("users[].user.client-key", key, folder, &mut user.client_key_data)?;
    read_token(user, folder)
}

/// Puts the token where the library finds it. As in Kubernetes' own clients a token file wins over a token, because it is
/// the fresher one, and blanks around the token do not count.
fn read_token(user: &mut AuthInfo, folder: &Path) -> Result<(), String> {
    let (mut field, mut text) = ("token", user.token.as_ref().map(|token| token.expose_secret().to_owned()));
    if let Some(file) = named(user.token_file.take()) {
        let path = folder.join(file);
        match files::read_text(&path, files::TOKEN) {
            Ok(read) => (field, text) = ("tokenFile", Some(read)),
            Err(_) if text.is_some() => {}
            Err(error) => {
                return Err(format!("users[].user.tokenFile: cannot read {}: {error}", path.display()));
            }
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

fn named(path: Option<String>) -> Option<String> {
    path.filter(|path| !path.is_empty())
}

/// Puts what a field's file has where the library finds it, unless something is there.
fn read_data<T: From<String>>(
    field: &str,
    file: Option<String>,
    folder: &Path,
    data: &mut Option<T>,
) -> Result<(), String> {
    let Some(file) = named(file).filter(|_| data.is_none()) else { return Ok(()) };
    let path = folder.join(file);
    let content = files::read(&path, files::CERTIFICATES)
        .map_err(|error| format!("{field}: cannot read {}: {error}", path.display()))?;
    *data = Some(STANDARD.encode(content).into());
    Ok(())
}

fn load_problem(error: &LoadError) -> String {
    let LoadError::Parse(cause) = error else { return error.to_string() };
    // The parser's own words quote the file.
    let place = cause.location();
    let place = place.map(|place| format!(" at line {}, column {}", place.line(), place.column()));
    format!("is not a kubeconfig{}", place.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const SECRET: &str = "s3cr3t-t0k3n";

    fn problem(text: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k");
        fs::write(folder.path().join("token"), format!("{SECRET}\n")).unwrap();
        fs::write(&path, text.replace('~', &folder.path().display().to_string())).unwrap();
        check(&path).err().map_or_else(String::new, |error| {
            assert!(matches!(error, KubeconfigError::Unusable { .. }), "{error}");
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
            (format!("users: {SECRET}"), "is not a kubeconfig at line 1"),
            (with("server: ''", ""), "cluster url"),
            (with("server: 'ftp://x'", ""), "server: is not an address"),
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
            let access = load(&path).unwrap();
            let config = &access.0;
            assert_eq!((&config.root_cert, &config.proxy_url), (&Some(Vec::new()), &None), "{cluster}");
        }
    }

    #[test]
    fn a_missing_file_is_worth_another_try() {
        let error = check(Path::new("/nonexistent/k")).unwrap_err();
        assert_eq!(error, KubeconfigError::Missing { path: "/nonexistent/k".into() });
    }
}
