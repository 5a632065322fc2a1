//! A Kubernetes API server with etcd on loopback; [`Controllers`] beside it where a test needs more of a control plane.
//!
//! What the missing controllers would do for tests is done here: namespaces get their `default` service account and the
//! `kube-root-ca.crt` config map. Pods need a `nodeName`; what a deleted object owned stays; the roles `view`, `edit` and `admin`,
//! which a controller fills, are empty (`system:aggregate-to-view` and its like are not).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use cluster_client::Client;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::tools;
use test_support::leftovers::{fresh_name, temp_dir};
use test_support::port::free_port;
use test_support::process::{self, Background, Output, SHORT, until};

mod controllers;
mod pki;
mod resources;
mod sending;

use pki::Authority;
use resources::Resources;

pub use controllers::Controllers;
pub use pki::Identity;
pub use sending::Sending;

/// How long a start may take on a busy machine.
const START: Duration = Duration::from_secs(180);
/// The service network; its first address is the API server's name inside a cluster.
const SERVICE_NETWORK: &str = "10.96.0.0/16";
/// Names and addresses the server's certificate is good for: loopback, the first service address, and the gateway of a node's pods.
const SERVER_NAMES: &str = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,\
                            IP:127.0.0.1,IP:::1,IP:10.96.0.1,IP:10.88.0.1,IP:fd88::1";

/// etcd and kube-apiserver on free loopback ports, TLS with an authority of its own, RBAC on. All of it goes when the value is dropped.
#[derive(Debug)]
pub struct ApiServer {
    // Dropped in this order: the server, its store, the files.
    server: Mutex<Option<Background>>,
    /// None of a server that others use, too.
    etcd: Option<Background>,
    log: PathBuf,
    port: u16,
    etcd_url: String,
    authority: Authority,
    /// The admin's.
    client: OnceLock<Client>,
    /// None before it is asked for any by kind.
    resources: Mutex<Option<Resources>>,
    folder: TempDir,
}

/// The variable that names the folder of a server that tests share.
const SHARED: &str = "SHARED_API_SERVER";
/// What its clients need of that folder: the authority, the key of tokens, and the admin.
const SHARED_FILES: [&str; 6] = ["ca.crt", "ca.key", "sa.key", "admin.crt", "admin.key", "admin.kubeconfig"];
/// Its port and its store's address, written last.
const ADDRESSES: &str = "addresses";

/// What the helper does for a suite: a server in a folder, until standard input ends.
pub fn serve_in_helper(shared: &Path) -> Result<()> {
    let api = ApiServer::start()?;
    for name in SHARED_FILES {
        fs::copy(api.folder.path().join(name), shared.join(name))?;
    }
    fs::hard_link(&api.log, shared.join("kube-apiserver.log"))?;
    let new = shared.join("addresses.new");
    fs::write(&new, format!("{} {}", api.port, api.etcd_url))?;
    fs::rename(new, shared.join(ADDRESSES))?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// A name that nothing else on a server that tests share has: this word and more. The ID of a process comes again while such a server runs;
/// with the time it does not.
pub fn fresh(word: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{word}-{}-{}", fresh_name(), now.as_secs() % 100_000)
}

/// What an API server counts.
pub struct ServerMetrics(String);

impl ServerMetrics {
    /// A metric: all its series with these labels, each as in `verb="GET"`, together.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let of_name = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' '))
        };
        let fitting =
            self.0.lines().filter(of_name).filter(|line| labels.iter().all(|label| line.contains(label)));
        fitting.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    /// Requests with this verb for a resource, and whatever part of it, that have these other labels.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter")]
    pub fn requests(&self, verb: &str, resource: &str, labels: &[&str]) -> u64 {
        let of = [&*format!("verb=\"{verb}\""), &format!("resource=\"{resource}\"")];
        self.sum("apiserver_request_total", &[&of, labels].concat()) as u64
    }
}

impl ApiServer {
    /// Starts both and waits until the server is ready and the namespace `default` has its service account.
    pub fn start() -> Result<Self> {
        let folder = temp_dir()?;
        let authority = Authority::new(folder.path())?;
        authority.issue("apiserver", "/CN=kube-apiserver", SERVER_NAMES)?;
        let (etcd, etcd_url) = start_etcd(folder.path())?;
        let log = folder.path().join("kube-apiserver.log");
        let api = Self {
            server: Mutex::new(None),
            etcd: Some(etcd),
            log,
            port: free_port()?,
            etcd_url,
            authority,
            client: OnceLock::new(),
            resources: Mutex::new(None),
            folder,
        };
        api.certificate_kubeconfig("admin", "/O=system:masters/CN=admin")?;
        api.start_again()?;
        api.provision_namespace("default")?;
        Ok(api)
    }

    /// The server that the tests of a suite share, for those that neither stop nor fill it, nor change what all its clients see; without
    /// one ([`serve_in_helper`]) a server of its own. Tests keep apart what they name: namespaces, nodes and all else that is in no
    /// namespace ([`ApiServer::fresh_namespace`], [`fresh`]).
    pub fn shared() -> Result<Self> {
        let Some(shared) = std::env::var_os(SHARED).map(PathBuf::from) else { return Self::start() };
        let folder = temp_dir()?;
        for name in SHARED_FILES {
            fs::copy(shared.join(name), folder.path().join(name))
                .with_context(|| format!("{SHARED}={} has no {name}", shared.display()))?;
        }
        let text = fs::read_to_string(shared.join(ADDRESSES))?;
        let (port, etcd_url) = text.trim().split_once(' ').context("no addresses")?;
        Ok(Self {
            server: Mutex::new(None),
            etcd: None,
            log: shared.join("kube-apiserver.log"),
            port: port.parse()?,
            etcd_url: etcd_url.to_owned(),
            authority: Authority::of(folder.path()),
            client: OnceLock::new(),
            resources: Mutex::new(None),
            folder,
        })
    }

    /// Starts the server after [`ApiServer::stop`], on the same port with the same data, and waits until it is ready.
    pub fn start_again(&self) -> Result<()> {
        ensure!(self.etcd.is_some(), "others use this API server");
        let mut running = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_some() {
            return Ok(());
        }
        *running = Some(self.start_server()?);
        Ok(())
    }

    fn start_server(&self) -> Result<Background> {
        let server =
            Background::start("kube-apiserver", &self.server_command()?, &self.log)?.killed_on_drop();
        // Ready means that etcd answers, too.
        let probe = Sending::get("/readyz");
        let processes: Vec<_> = [&server].into_iter().chain(&self.etcd).collect();
        until("the API server to be ready", START, &processes, || {
            Ok(self.text(&probe).is_ok_and(|answer| answer == "ok").then_some(()))
        })?;
        Ok(server)
    }

    /// Kills the server: connections break, new ones are refused. Data stay.
    ///
    /// # Panics
    /// It is [shared](ApiServer::shared).
    pub fn stop(&self) {
        assert!(self.etcd.is_some(), "others use this API server");
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Makes the store forget all versions but the newest, as a control plane does every few minutes: a watch from an older one gets 410.
    pub fn compact(&self) -> Result<()> {
        let ask = |path: &str, body: &Value| -> Result<Value> {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "30", "--data"])
                .arg(body.to_string());
            let answer = process::run(curl.arg(format!("{}{path}", self.etcd_url)), SHORT)?.ok()?;
            serde_json::from_str(&answer.stdout).context("etcd answers no JSON")
        };
        let status = ask("/v3/maintenance/status", &json!({}))?;
        let newest = &status["header"]["revision"];
        ask("/v3/kv/compaction", &json!({"revision": newest, "physical": true})).map(drop)
    }

    /// The server's port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `https://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The certificate of its authority (PEM).
    pub fn ca_path(&self) -> PathBuf {
        self.authority.certificate()
    }

    /// What the server counts, at one moment.
    pub fn metrics(&self) -> Result<ServerMetrics> {
        Ok(ServerMetrics(self.text(&Sending::get("/metrics"))?))
    }

    /// All the server has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The kubeconfig file of a user who may do everything.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.folder.path().join("admin.kubeconfig")
    }

    /// A kubeconfig, everything embedded, for a user given as its kubeconfig object, such as `{"token": "..."}`.
    pub fn kubeconfig(&self, user: &Value) -> Result<Value> {
        Ok(json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": {
                "server": self.url(), "certificate-authority-data": pki::base64(&self.ca_path())?}}],
            "users": [{"name": "e2e", "user": user}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        }))
    }

    /// Writes the kubeconfig file `NAME.kubeconfig` of a bearer token.
    pub fn token_kubeconfig(&self, name: &str, token: &str) -> Result<PathBuf> {
        let file = self.folder.path().join(format!("{name}.kubeconfig"));
        fs::write(&file, self.kubeconfig(&json!({"token": token}))?.to_string())?;
        Ok(file)
    }

    /// The kubeconfig file of the user, and the groups, that a certificate of this subject names.
    pub fn certificate_kubeconfig(&self, name: &str, subject: &str) -> Result<PathBuf> {
        let Identity { certificate, key } = self.authority.issue(name, subject, &format!("DNS:{name}"))?;
        let user = json!({"client-certificate-data": pki::base64(&certificate)?, "client-key-data": pki::base64(&key)?});
        let file = self.folder.path().join(format!("{name}.kubeconfig"));
        fs::write(&file, self.kubeconfig(&user)?.to_string())?;
        Ok(file)
    }

    /// Certificate and key of a node's kubelet, good as client and as server.
    pub fn node_identity(&self, node: &str) -> Result<Identity> {
        self.authority.issue(
            node,
            &format!("/O=system:nodes/CN=system:node:{node}"),
            &format!("DNS:{node},IP:127.0.0.1"),
        )
    }

    /// Runs kubectl as the admin; an exit code other than 0 is an error. It starts slowly: [`ApiServer::get`] and its like ask without it.
    pub fn kubectl(&self, args: &[&str]) -> Result<Output> {
        self.kubectl_as(&self.admin_kubeconfig(), args)?.ok()
    }

    /// Runs kubectl with a kubeconfig file, however it ends.
    pub fn kubectl_as(&self, kubeconfig: &Path, args: &[&str]) -> Result<Output> {
        let cache = self.folder.path().join("kubectl-cache");
        let mut kubectl = process::command(tools::built("kubectl")?, ["--kubeconfig"]);
        kubectl.arg(kubeconfig).arg("--cache-dir").arg(cache).args(args);
        // It ends before its garbage is worth collecting.
        process::run(kubectl.env("GOGC", "off"), SHORT)
    }

    /// Creates a namespace with its default service account, ready for pods.
    pub fn create_namespace(&self, name: &str) -> Result<()> {
        self.create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}))?;
        self.provision_namespace(name)
    }

    /// Creates a namespace of a name that no other test has, ready for pods, and returns the name: this word and more.
    pub fn fresh_namespace(&self, word: &str) -> Result<String> {
        let name = fresh(word);
        self.create_namespace(&name)?;
        Ok(name)
    }

    /// Creates a service account without any role.
    pub fn create_service_account(&self, namespace: &str, name: &str) -> Result<()> {
        let metadata = json!({"namespace": namespace, "name": name});
        self.create(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})).map(drop)
    }

    /// A token of a service account from the TokenRequest API, good for an hour.
    pub fn token(&self, namespace: &str, service_account: &str) -> Result<String> {
        self.requested_token(namespace, service_account, &json!({"expirationSeconds": 3600}))
    }

    /// A token of a pod's service account, bound to the pod and for this audience, as the kubelet projects one into it.
    pub fn pod_token(
        &self,
        namespace: &str,
        pod: &str,
        service_account: &str,
        audience: &str,
    ) -> Result<String> {
        let pod = &self.get("pod", namespace, pod)?["metadata"];
        let bound = json!({"kind": "Pod", "apiVersion": "v1", "name": pod["name"], "uid": pod["uid"]});
        let wanted = json!({"audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound});
        self.requested_token(namespace, service_account, &wanted)
    }

    fn requested_token(&self, namespace: &str, service_account: &str, wanted: &Value) -> Result<String> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token");
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": wanted});
        let answer = self.send(&Sending::post(&path, &request))?;
        Ok(answer["status"]["token"].as_str().context("no token")?.to_owned())
    }

    /// A token of a service account that is valid between two moments, signed with the server's own key. The TokenRequest API
    /// gives none that lasts less than ten minutes, and none that has expired.
    pub fn signed_token(
        &self,
        namespace: &str,
        service_account: &str,
        from: SystemTime,
        until: SystemTime,
    ) -> Result<String> {
        let account = self.get("serviceaccount", namespace, service_account)?;
        self.authority.sign_token(&json!({
            "iss": pki::ISSUER, "aud": [pki::ISSUER],
            "sub": format!("system:serviceaccount:{namespace}:{service_account}"),
            "iat": pki::seconds(from)?, "nbf": pki::seconds(from)?, "exp": pki::seconds(until)?,
            "kubernetes.io": {
                "namespace": namespace,
                "serviceaccount": {"name": service_account, "uid": account["metadata"]["uid"]},
            },
        }))
    }

    /// A token that expired a minute ago and was good for an hour.
    pub fn expired_token(&self, namespace: &str, service_account: &str) -> Result<String> {
        let expired = SystemTime::now() - Duration::from_secs(60);
        self.signed_token(namespace, service_account, expired - Duration::from_secs(3600), expired)
    }

    /// What the controllers of a real control plane put into every namespace.
    fn provision_namespace(&self, name: &str) -> Result<()> {
        let data = json!({"ca.crt": fs::read_to_string(self.ca_path())?});
        let metadata = json!({"namespace": name, "name": "kube-root-ca.crt"});
        self.create(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}))?;
        self.create_service_account(name, "default")
    }

    fn server_command(&self) -> Result<Command> {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        let flags = [
            format!("--etcd-servers={}", self.etcd_url),
            format!("--secure-port={}", self.port),
            "--bind-address=127.0.0.1".to_owned(),
            // The address is not published, but it must not be loopback. This one is for documentation.
            "--advertise-address=192.0.2.1".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--tls-cert-file={}", path("apiserver.crt")),
            format!("--tls-private-key-file={}", path("apiserver.key")),
            format!("--client-ca-file={}", self.ca_path().display()),
            // A kubelet lets this one run programs in containers.
            format!("--kubelet-client-certificate={}", path("admin.crt")),
            format!("--kubelet-client-key={}", path("admin.key")),
            format!("--service-account-key-file={}", self.authority.token_key().display()),
            format!("--service-account-signing-key-file={}", self.authority.token_key().display()),
            format!("--service-account-issuer={}", pki::ISSUER),
            format!("--service-cluster-ip-range={SERVICE_NETWORK}"),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--allow-privileged".to_owned(),
            // Its taint would stay for ever without the controller that takes it away.
            "--disable-admission-plugins=TaintNodesByCondition".to_owned(),
            "--enable-priority-and-fairness=false".to_owned(),
            "--request-timeout=10m".to_owned(),
        ];
        Ok(process::command(tools::built("kube-apiserver")?, flags))
    }
}

fn start_etcd(folder: &Path) -> Result<(Background, String)> {
    let (client, peer) =
        (format!("http://127.0.0.1:{}", free_port()?), format!("http://127.0.0.1:{}", free_port()?));
    let etcd = tools::built("etcd").unwrap_or_else(|_| PathBuf::from("etcd"));
    let mut command = Command::new(etcd);
    command.arg("--data-dir").arg(folder.join("etcd"));
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}")]);
    // Data that need not survive the test need not be safe on disk either.
    command.arg("--unsafe-no-fsync");
    Ok((Background::start("etcd", &command, &folder.join("etcd.log"))?.killed_on_drop(), client))
}
