//! What a client is made of: a server, how it is trusted, and who asks.

use crate::{Client, client::CONNECT_PATIENCE};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Config,
    client::{Body, ClientBuilder, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig},
};
use tower::{BoxError, ServiceExt as _};

/// A server, how it is trusted, and who asks. Everything that was a file has been read.
#[derive(Debug, Clone)]
pub struct Access(pub(crate) Config);

/// Why a client cannot be made. The texts never show what is secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AccessError(pub(crate) String);

impl Access {
    /// From a kubeconfig whose files have all been read into it.
    pub(crate) fn of(mut file: Kubeconfig) -> Result<Self, kube::config::KubeconfigError> {
        for cluster in file.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
            // Keeps the library from looking at HTTPS_PROXY, which is meant for images.
            cluster.proxy_url = Some("http://unused.invalid".to_owned());
        }
        let options = KubeConfigOptions::default();
        let mut config = block_on(Config::from_custom_kubeconfig(file, &options))?;
        config.proxy_url = None;
        // Without an authority, an empty list keeps the library from trusting the machine's.
        config.root_cert.get_or_insert_default();
        Ok(Self(config))
    }

    /// Whether it suffices for a client; contacts no server.
    ///
    /// # Errors
    /// Why not, by field of a kubeconfig.
    pub fn check(&self) -> Result<(), AccessError> {
        self.check_server()?;
        self.0.rustls_client_config().map_err(|error| credentials(&error))?;
        self.0.auth_layer().map_err(|error| credentials(&error))?;
        Ok(())
    }

    /// A client. Needs a tokio runtime.
    ///
    /// # Errors
    /// As [`Access::check`].
    pub fn client(&self) -> Result<Client, AccessError> {
        self.check_server()?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_PATIENCE));
        let connector = self.0.rustls_https_connector_with_connector(connector);
        let connector = connector.map_err(|error| credentials(&error))?;
        // Not the library's own stack: that one logs every failure itself.
        let service: legacy::Client<_, Body> = legacy::Client::builder(TokioExecutor::new()).build(connector);
        let builder = ClientBuilder::new(service.map_err(BoxError::from), "default");
        let base = self.0.base_uri_layer();
        let client = match self.0.auth_layer().map_err(|error| credentials(&error))? {
            Some(auth) => builder.with_layer(&auth).with_layer(&base).build(),
            None => builder.with_layer(&base).build(),
        };
        Ok(Client::new(client, self.server()))
    }

    /// The server's address, for messages.
    #[must_use]
    pub fn server(&self) -> String {
        let url = &self.0.cluster_url;
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        format!("{}://{}{port}", url.scheme_str().unwrap_or_default(), url.host().unwrap_or_default())
    }

    fn check_server(&self) -> Result<(), AccessError> {
        let is_https = match self.0.cluster_url.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            Some(_) | None => {
                return Err(AccessError(
                    "clusters[].cluster.server: is not an address such as https://10.96.0.1:443".to_owned(),
                ));
            }
        };
        let has_authority = self.0.root_cert.as_ref().is_some_and(|certs| !certs.is_empty());
        if is_https && !self.0.accept_invalid_certs && !has_authority {
            return Err(AccessError(
                "clusters[].cluster: certificate-authority, certificate-authority-data or \
                 insecure-skip-tls-verify is needed; the machine's own certificates are not trusted"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

/// Certificates, keys and tokens that are there but wrong. The library's words name fields, never what they hold.
fn credentials(error: &kube::Error) -> AccessError {
    AccessError(format!("credentials: {}", words(&error.to_string())))
}

/// The library blames the key where it cannot read the certificate.
fn words(error: &str) -> &str {
    if error.contains("UnsupportedCertVersion") {
        return "the client certificate is of X.509 version 1; have one of version 3 issued";
    }
    error
}

/// The result of a future that waits for nothing: the library reads no file here and runs no program.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return done;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_of_version_1_is_named_as_such() {
        let other = "rustls tls error: no private key";
        assert_eq!(words(other), other);
        // As the library has it.
        let error =
            "invalid private key: invalid peer certificate: Other(OtherError(UnsupportedCertVersion))";
        assert!(words(error).contains("X.509 version 1"), "{}", words(error));
    }
}
