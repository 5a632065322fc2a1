//! The API server, asked for what commands check. Each request has one try: a person waits for the answer.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api_lists::Listing;
use cluster_client::params::{GetParams, ListParams};
use cluster_client::{Account, ApiError, Built, Client, Request, Trust, kubeconfig, server_url};
use cni_core::conf::Conf;
use cni_core::enablement::DATAPLANE_LABEL;
use cni_core::pod_source::PodName;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::cluster::ClusterObjects;
use crate::error::PodInputError;

/// How long the API server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most that is read of a list, such as all pods of a node.
const MOST: api_lists::ListLimits = api_lists::ListLimits { objects: 20_000, bytes: 64 << 20 };
/// The most events of a kind that are read for a scan.
const MOST_EVENTS: u32 = 500;
/// Kubeconfigs of a node: the plugin's, which may get pods and nothing else, and the kubelet's, which may list those of its node, where
/// kubeadm, k3s, RKE2, MicroK8s and k0s have it; at last an administrator's.
const OF_NODES: [&str; 8] = [
    "/var/run/istio-cni/istio-cni-kubeconfig",
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/kubelet/kubeconfig",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "/var/snap/microk8s/current/credentials/kubelet.config",
    "/var/lib/k0s/kubelet.conf",
    "/etc/rancher/k3s/k3s.yaml",
];
/// What to do where a machine has another name than its node.
pub const NAME_IT: &str = "give the name that kubectl get nodes shows with --node";
/// What asks for events about the pods of a scan.
const EVENTS: [&str; 4] =
    ["reason=FailedCreatePodSandBox", "source=cni-repair", "source=cni-heal", "source=cni-ambient"];

/// A pod's own service account, where it has one.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// With what an API server may be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// A kubeconfig's.
    Kubeconfig(PathBuf),
    /// Those of the pod that this runs in, in this folder, for this server.
    Account {
        /// Where token and authority are.
        folder: PathBuf,
        /// The server's address.
        server: String,
    },
}

impl Credentials {
    /// Where they are.
    fn path(&self) -> &Path {
        match self {
            Self::Kubeconfig(path) | Self::Account { folder: path, .. } => path,
        }
    }

    /// A client. Needs a tokio runtime.
    fn client(&self) -> Result<Client, String> {
        match self {
            Self::Kubeconfig(path) => kubeconfig::client(path).map_err(|error| error.to_string()),
            Self::Account { folder, server } => {
                let trust = Trust::Authority(folder.join("ca.crt"));
                let account = Account::new(server.clone(), trust, folder.join("token"));
                account.client().map_err(|error| error.to_string())
            }
        }
    }
}

/// Which credentials may be used: the kubeconfig that is named, else that of the environment, else the account of the pod that this runs
/// in, kubeconfigs of a node, the user's.
///
/// # Errors
/// None was found.
pub fn credentials(
    named: Option<&str>,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Vec<Credentials>, PodInputError> {
    let from_env = || env("KUBECONFIG").filter(|path| !path.is_empty());
    if let Some(path) = named.map(str::to_owned).or_else(from_env) {
        return Ok(vec![Credentials::Kubeconfig(path.into())]);
    }
    let home = env("HOME").map(|home| Path::new(&home).join(".kube/config"));
    let account = account(&env).filter(|account| fs::metadata(account.path()).is_ok());
    let kubeconfigs = existing(Path::new("/"), home).into_iter().map(Credentials::Kubeconfig);
    let found: Vec<Credentials> = account.into_iter().chain(kubeconfigs).collect();
    if found.is_empty() {
        return Err(PodInputError::of(
            "no kubeconfig found; set --kubeconfig or KUBECONFIG, or give pods with --file",
        ));
    }
    Ok(found)
}

/// The kubeconfigs that exist on a node whose root is this, and the user's.
fn existing(root: &Path, users: Option<PathBuf>) -> Vec<PathBuf> {
    let of_node = OF_NODES.into_iter().map(|path| root.join(path.trim_start_matches('/')));
    of_node.chain(users).filter(|path| fs::metadata(path).is_ok()).collect()
}

/// The account of a pod, which the kubelet gives the server's address in variables.
fn account(env: impl Fn(&str) -> Option<String>) -> Option<Credentials> {
    let said = |name: &str| env(name).filter(|text| !text.is_empty());
    let server = server_url("https", &said("KUBERNETES_SERVICE_HOST")?, &said("KUBERNETES_SERVICE_PORT")?);
    let folder = said("SERVICE_ACCOUNT_DIR").unwrap_or_else(|| SERVICE_ACCOUNT.to_owned());
    Some(Credentials::Account { folder: folder.into(), server })
}

/// An API server, and the credentials with which it may be asked.
#[derive(Debug)]
pub struct ApiServer {
    // None only while it is dropped.
    runtime: Option<Runtime>,
    clients: Vec<(PathBuf, Client)>,
    /// Whether it left a question unanswered: then nothing more is asked that could be done without.
    is_silent: Cell<bool>,
}

impl ApiServer {
    /// Contacts no server yet.
    ///
    /// # Errors
    /// No credentials are of any use: why, for each.
    pub fn new(credentials: &[Credentials]) -> Result<Self, PodInputError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(PodInputError::of)?;
        let (mut clients, mut wrong) = (Vec::new(), Vec::new());
        {
            let _inside = runtime.enter();
            for one in credentials {
                match one.client() {
                    Ok(client) => clients.push((one.path().to_owned(), client)),
                    Err(error) => wrong.push(format!(
                        "{error}; name another kubeconfig with --kubeconfig, or give pods with --file"
                    )),
                }
            }
        }
        if clients.is_empty() {
            return Err(PodInputError(wrong));
        }
        Ok(Self { runtime: Some(runtime), clients, is_silent: Cell::new(false) })
    }

    /// A pod.
    ///
    /// # Errors
    /// It cannot be read: why, and what to do.
    pub fn pod(&self, name: &PodName) -> Result<Value, PodInputError> {
        let request = || {
            Request::new(format!("/api/v1/namespaces/{}/pods", name.namespace))
                .get(&name.name, &GetParams::default())
        };
        let found = self.ask(request).map_err(|(path, failure)| {
            if matches!(&failure, ApiError::NotFound(words) if words.by_api) {
                return PodInputError::of(format!(
                    "the API server has no pod {name} (404); kubectl get pods -n {} lists its pods",
                    name.namespace
                ));
            }
            report(&path, &failure, "get")
        })?;
        let text = |pointer: &str| found.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let is_it = text("/metadata/namespace") == name.namespace && text("/metadata/name") == name.name;
        if is_it && text("/kind") == "Pod" {
            return Ok(found);
        }
        // An answer that no API server gives.
        let server = self.clients.first().map(|(_, client)| client.server().to_owned()).unwrap_or_default();
        let what = format!("asked for pod {name}, it answers with something else");
        Err(report(Path::new(""), &ApiError::Garbled { server, what }, ""))
    }

    /// The pods of a node.
    ///
    /// # Errors
    /// They cannot be read: why, and what to do.
    pub fn pods(&self, node: &str) -> Result<Vec<Value>, PodInputError> {
        let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
        self.list("/api/v1/pods", &params, "PodList").map_err(|(path, failure)| {
            let PodInputError(mut messages) = report(&path, &failure, "list");
            if let (ApiError::Forbidden(_), Some(last)) = (&failure, messages.last_mut()) {
                // The server lets a kubelet list the pods of its own node alone.
                last.push_str(&format!("; if {node} is not the name of this node, {NAME_IT}"));
            }
            PodInputError(messages)
        })
    }

    /// Everything known about one pod besides its object.
    #[must_use]
    pub fn around_pod(&self, name: &PodName, pod: &Value) -> ClusterObjects {
        let mut cluster = ClusterObjects::default();
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
        if let Some(node) = text("/spec/nodeName") {
            // Without it the pod is judged by itself.
            let _ = self.node(node, &mut cluster);
        }
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={}", name.name);
        let events = format!("/api/v1/namespaces/{}/events", name.namespace);
        self.more("the pod's events", &events, &fields, &mut cluster);
        if text("/spec/runtimeClassName").is_some() {
            self.runtime_classes(&mut cluster);
        }
        cluster
    }

    /// Everything known about a node and its pods besides their objects.
    ///
    /// # Errors
    /// The API server has no such node: the machine has another name.
    pub fn around_node(&self, node: &str, pods: &[Value]) -> Result<ClusterObjects, PodInputError> {
        let mut cluster = ClusterObjects::default();
        if let Err(Some(ApiError::NotFound(words))) = self.node(node, &mut cluster)
            && words.by_api
        {
            return Err(PodInputError::of(format!("the API server has no node {node}; {NAME_IT}")));
        }
        for fields in EVENTS {
            if !self.more("events of pods", "/api/v1/events", fields, &mut cluster) {
                break;
            }
        }
        if pods.iter().any(|pod| pod.pointer("/spec/runtimeClassName").is_some()) {
            self.runtime_classes(&mut cluster);
        }
        Ok(cluster)
    }

    /// The labels of one namespace, if they may decide which pods are in ambient mode.
    pub fn namespace(&self, name: &str, conf: Option<&Conf>, cluster: &mut ClusterObjects) {
        if conf.is_some_and(|conf| conf.ambient_enabled) {
            // A failure is noted.
            let _ = self.one("the pod's namespace", "/api/v1/namespaces", name, cluster);
        }
    }

    /// The same of all namespaces.
    pub fn namespaces(&self, conf: Option<&Conf>, cluster: &mut ClusterObjects) {
        let Some(conf) = conf.filter(|conf| conf.ambient_enabled) else { return };
        let mut params = ListParams::default();
        if conf.enablement.is_usual() {
            // Others decide nothing, and a cluster has many.
            params = params.labels(DATAPLANE_LABEL);
        }
        let list = || self.list("/api/v1/namespaces", &params, "NamespaceList");
        // A failure is noted.
        cluster.has_all_namespaces = self.unless_silent("namespaces", list, cluster).is_ok();
    }

    fn node(&self, name: &str, cluster: &mut ClusterObjects) -> Result<(), Option<ApiError>> {
        self.one("the node", "/api/v1/nodes", name, cluster)
    }

    fn runtime_classes(&self, cluster: &mut ClusterObjects) {
        let path = "/apis/node.k8s.io/v1/runtimeclasses";
        let list = || self.list(path, &ListParams::default(), "RuntimeClassList");
        // A failure is noted.
        let _ = self.unless_silent("runtime classes", list, cluster);
    }

    fn one(
        &self,
        what: &str,
        path: &str,
        name: &str,
        cluster: &mut ClusterObjects,
    ) -> Result<(), Option<ApiError>> {
        let request = || Request::new(path).get(name, &GetParams::default());
        self.unless_silent(what, || self.ask(request).map(|object| vec![object]), cluster)
    }

    /// Whether an answer came.
    fn more(&self, what: &str, path: &str, fields: &str, cluster: &mut ClusterObjects) -> bool {
        let params = ListParams::default().fields(fields).limit(MOST_EVENTS);
        self.unless_silent(what, || self.list(path, &params, "EventList"), cluster).is_ok()
    }

    /// Notes a failure. The error is that of the server, unless it was not asked.
    fn unless_silent(
        &self,
        what: &str,
        ask: impl FnOnce() -> Result<Vec<Value>, (PathBuf, ApiError)>,
        cluster: &mut ClusterObjects,
    ) -> Result<(), Option<ApiError>> {
        if self.is_silent.get() {
            cluster.untold.push(format!("{what}: the API server did not answer"));
            return Err(None);
        }
        match ask() {
            Ok(objects) => {
                for object in objects {
                    cluster.take(&object);
                }
                Ok(())
            }
            Err((_, failure)) => {
                cluster.untold.push(format!("{what}: {failure}"));
                Err(Some(failure))
            }
        }
    }

    /// An object.
    fn ask(&self, request: impl Fn() -> Built) -> Result<Value, (PathBuf, ApiError)> {
        self.with_an_account(&async |client: &Client| client.json(request(), PATIENCE).await)
    }

    /// The objects of a list: all, or as many as one page has if that has a limit.
    fn list(
        &self,
        path: &str,
        params: &ListParams,
        kind: &'static str,
    ) -> Result<Vec<Value>, (PathBuf, ApiError)> {
        let item = kind.strip_suffix("List").unwrap_or(kind);
        // What is in a list does not say its kind.
        let keep = |object: &Value| {
            let mut object = object.clone();
            object.as_object_mut()?.entry("kind").or_insert_with(|| item.into());
            Some(object)
        };
        self.with_an_account(&async |client: &Client| {
            let deadline = Instant::now() + PATIENCE;
            let (mut listing, mut params) = (Listing::new(kind, MOST), params.clone());
            let mut objects = Vec::new();
            loop {
                let mut answer = client.open(Request::new(path).list(&params), PATIENCE).await?;
                let most = usize::try_from(listing.left()).unwrap_or(usize::MAX);
                let text = answer.whole(most, deadline).await?;
                let page = listing.page(&*text, &keep).map_err(|error| ApiError::Garbled {
                    server: client.server().to_owned(),
                    what: error.to_string(),
                })?;
                objects.extend(page.kept);
                params.continue_token = page.rest.filter(|_| params.limit.is_none());
                if params.continue_token.is_none() {
                    return Ok(objects);
                }
            }
        })
    }

    /// Asks with one account after the other, until one is not refused.
    fn with_an_account<T>(
        &self,
        ask: &impl AsyncFn(&Client) -> Result<T, ApiError>,
    ) -> Result<T, (PathBuf, ApiError)> {
        let mut refused = None;
        for (path, client) in &self.clients {
            let Some(runtime) = &self.runtime else { break };
            match runtime.block_on(ask(client)) {
                Ok(answer) => return Ok(answer),
                // The first is the one that is meant for this.
                Err(failure) if failure.is_refusal() => {
                    refused.get_or_insert((path.clone(), failure));
                }
                Err(failure) => {
                    self.is_silent
                        .set(matches!(failure, ApiError::Silent { .. } | ApiError::Unreachable { .. }));
                    return Err((path.clone(), failure));
                }
            }
        }
        Err(refused.unwrap_or_else(|| (PathBuf::new(), ApiError::Impossible("no server to ask".to_owned()))))
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        // A look-up of the server's name may still be under way on a thread; it is not waited for.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A failure, and what to do about it.
fn report(kubeconfig: &Path, failure: &ApiError, verb: &str) -> PodInputError {
    let kubeconfig = kubeconfig.display();
    let advice = match failure {
        ApiError::Unauthorized(_) => format!(
            "the credentials in {kubeconfig} have expired or were withdrawn: name another kubeconfig with --kubeconfig"
        ),
        ApiError::Forbidden(_) => format!(
            "the account of {kubeconfig} needs the verb {verb} on pods: name another kubeconfig with --kubeconfig, or give pods with --file"
        ),
        ApiError::NotFound(_) | ApiError::Garbled { .. } => {
            "a proxy or load balancer may answer in the API server's place, at the address in the kubeconfig"
                .to_owned()
        }
        ApiError::Busy { .. } => "try again, or give pods with --file, which needs no API server".to_owned(),
        ApiError::Untrusted { .. } => format!(
            "the certificate authority in {kubeconfig} is not this server's: name another kubeconfig with --kubeconfig"
        ),
        ApiError::Unreachable { .. } | ApiError::Silent { .. } => format!(
            "see whether the address in {kubeconfig} is right and the server runs, or give pods with --file, which needs no API server"
        ),
        ApiError::Impossible(_) => "give pods with --file".to_owned(),
    };
    PodInputError::of(format!("{failure}; {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_names_a_kubeconfig_gets_that_one_and_no_other() {
        let env = |name: &str| (name == "KUBECONFIG").then(|| "/of/env".to_owned());
        let only = |path: &str| Ok(vec![Credentials::Kubeconfig(path.into())]);
        assert_eq!(credentials(Some("/named"), env), only("/named"));
        assert_eq!(credentials(None, env), only("/of/env"));
    }

    #[test]
    fn a_pod_uses_its_own_account_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        for (host, server) in [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")] {
            let env = |name: &str| match name {
                "KUBERNETES_SERVICE_HOST" => Some(host.to_owned()),
                "KUBERNETES_SERVICE_PORT" => Some("443".to_owned()),
                "SERVICE_ACCOUNT_DIR" => Some(path.display().to_string()),
                _ => None,
            };
            let found = credentials(None, env).expect("credentials");
            assert_eq!(found[0], Credentials::Account { folder: path.clone(), server: server.to_owned() });
            let named = credentials(Some("/named"), env);
            assert_eq!(named, Ok(vec![Credentials::Kubeconfig("/named".into())]));
        }
        assert_eq!(account(|name| (name == "KUBERNETES_SERVICE_HOST").then(|| "10.96.0.1".to_owned())), None);
    }

    #[test]
    fn kubelets_of_every_distribution_come_before_administrators() {
        let root = tempfile::tempdir().expect("a folder");
        let users = root.path().join("home");
        let files = [&OF_NODES[3..], &["/home"]].concat();
        for file in &files {
            let path = root.path().join(file.trim_start_matches('/'));
            fs::create_dir_all(path.parent().expect("a folder")).expect("is made");
            fs::write(path, "").expect("writes");
        }
        let found = existing(root.path(), Some(users));
        let wanted: Vec<PathBuf> =
            files.iter().map(|file| root.path().join(file.trim_start_matches('/'))).collect();
        assert_eq!(found, wanted);
        assert!(
            found.iter().position(|path| path.ends_with("k0s/kubelet.conf"))
                < found.iter().position(|path| path.ends_with("k3s.yaml"))
        );
    }
}
