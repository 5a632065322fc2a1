//! Pods of the mesh: applications before the injector has seen them, their services, and requests from inside of them.

use anyhow::{Context, Result};
use e2e::image::BUSYBOX;
use e2e::kube::ApiServer;
use e2e::node::{Node, Pod};
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{self, Output};

use super::APPS;
use crate::agent_support::{POD, is_ready};

/// The port of HTTP applications. An answer holds what the request was.
pub const HTTP: u16 = 8080;

/// Answers each request with its own headers. `nc` starts one for each connection.
const MIRROR: &str = r#"body=; while read -r line; do line=${line%?}; [ -n "$line" ] || break; body="$body$line
"; done; printf 'HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s' "${#body}" "$body""#;

/// An application before it is injected.
#[derive(Clone, Debug)]
pub struct App {
    name: String,
    namespace: &'static str,
    /// Whose it is: label `app`, and its service account.
    service: String,
    annotations: Value,
    script: String,
    probe: Option<Value>,
    ports: Vec<u16>,
}

impl App {
    /// It mirrors requests on [`HTTP`], and is ready when it does, as the kubelet sees it. It has a service account of its name.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            namespace: APPS,
            service: name.to_owned(),
            annotations: json!({}),
            script: format!("exec nc -ll -p {HTTP} -e /bin/sh -c \"$MIRROR\""),
            probe: Some(
                json!({"httpGet": {"path": "/readyz", "port": HTTP}, "periodSeconds": 1, "timeoutSeconds": 5}),
            ),
            ports: vec![HTTP],
        }
    }

    /// A pod of another one's service, under a name of its own.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// In another namespace than [`APPS`].
    #[must_use]
    pub const fn within(mut self, namespace: &'static str) -> Self {
        self.namespace = namespace;
        self
    }

    /// With an annotation.
    #[must_use]
    pub fn annotated(mut self, name: &str, value: &str) -> Self {
        self.annotations[name] = json!(value);
        self
    }

    /// With a further container port.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.ports.push(port);
        self
    }

    /// It runs another script, and is ready at once.
    #[must_use]
    pub fn runs(mut self, script: &str) -> Self {
        self.script = script.to_owned();
        self.probe = None;
        self
    }

    /// The pod as its author writes it. `istiod` is the address of the control plane, as there is no name server.
    fn pod(&self, istiod: &str) -> Value {
        let ports: Vec<Value> = self.ports.iter().map(|port| json!({"containerPort": port})).collect();
        let mut app = json!({
            "name": "app", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["/bin/sh", "-c", self.script],
            "env": [{"name": "MIRROR", "value": MIRROR}], "ports": ports,
        });
        if let Some(probe) = &self.probe {
            app["readinessProbe"] = probe.clone();
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": self.name, "namespace": self.namespace, "annotations": self.annotations,
                "labels": {"app": self.service},
            },
            "spec": {
                "serviceAccountName": self.service, "automountServiceAccountToken": false, "enableServiceLinks": false,
                // The application does not heed SIGTERM, and answers until the others have heard that it goes.
                "terminationGracePeriodSeconds": 10,
                "hostAliases": [{"ip": istiod, "hostnames": ["istiod.istio-system.svc"]}],
                "containers": [app],
            },
        })
    }

    /// Creates it: the injector sees it, and the plugin. Returns at once.
    pub fn start<'n>(&self, api: &ApiServer, node: &'n Node<'n>, istiod: &str) -> Result<Pod<'n>> {
        self.create_service_account(api)?;
        node.start_pod(&self.pod(istiod))
    }

    /// The same, on the node that the scheduler picks: none, as long as the only one is tainted.
    pub fn schedule<'n>(&self, api: &ApiServer, node: &'n Node<'n>, istiod: &str) -> Result<Pod<'n>> {
        self.create_service_account(api)?;
        api.create(&self.pod(istiod))?;
        Ok(node.pod(self.namespace, &self.name))
    }

    fn create_service_account(&self, api: &ApiServer) -> Result<()> {
        // A pod of the same service can have made it.
        let there = api.list("serviceaccounts", self.namespace)?;
        if there.iter().any(|account| account["metadata"]["name"] == *self.service) {
            return Ok(());
        }
        api.create_service_account(self.namespace, &self.service)
    }
}

/// A service of the application of this name: HTTP on port 80 and, where it is wanted, TCP on that port.
pub fn create_service(api: &ApiServer, name: &str, tcp: Option<u16>, headless: bool) -> Result<()> {
    let service = if headless { format!("{name}-headless") } else { name.to_owned() };
    let mut ports =
        vec![json!({"name": "http", "port": if headless { HTTP } else { 80 }, "targetPort": HTTP})];
    ports.extend(tcp.map(|port| json!({"name": "tcp", "port": port})));
    let mut spec = json!({"selector": {"app": name}, "ports": ports});
    if headless {
        spec["clusterIP"] = json!("None");
    }
    let metadata = json!({"name": service, "namespace": APPS});
    api.apply(&json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}).to_string())
}

/// The address of a service.
pub fn service_address(api: &ApiServer, name: &str) -> Result<String> {
    let service = api.get("service", APPS, name)?;
    Ok(service["spec"]["clusterIP"].as_str().context("no address")?.to_owned())
}

/// Waits until the validation that the injector has put first holds the pod back.
pub fn wait_held_back(pod: &Pod<'_>) -> Result<()> {
    pod.wait("to be held back", POD, |pod| {
        let status = &pod["status"]["initContainerStatuses"][0];
        let ends = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
        ends.into_iter().any(|end| end["exitCode"] == 126).then_some(())
    })
}

/// Waits until every container of a pod is ready, as the kubelet's probes say.
pub fn wait_ready(pod: &Pod<'_>) -> Result<()> {
    pod.wait("to be ready", POD, is_ready).with_context(|| {
        let log = |container: &str| pod.log(container).unwrap_or_else(|error| format!("{error:#}"));
        let (validation, proxy) = (log("istio-validation"), log("istio-proxy"));
        format!("{}\n{validation}\n{}", pod.name(), last_lines(&proxy))
    })
}

fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// A request from inside of a namespace, by a process of root. The name is the one that the request is for.
pub fn request(from: &Namespace, address: &str, name: &str) -> Result<Output> {
    let mut curl = process::command("curl", ["--silent", "--show-error", "--max-time", "20", "--globoff"]);
    curl.args([
        "--write-out",
        "\nstatus=%{http_code}",
        "--header",
        &format!("Host: {name}"),
        &format!("http://{address}/"),
    ]);
    from.run(&curl)
}
