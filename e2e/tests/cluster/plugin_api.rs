//! The plugin and a real API server, with TLS and RBAC: what it reads, and what it says when it cannot.

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use e2e::kube::{ApiServer, fresh};
use e2e::plugin::{self, Invocation, RunDir, sidecar};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{EARLY, LATE, SHORT, until};

const ACCOUNT: &str = "istio-cni";

/// An API server with a namespace of the plugin's service account, a role that lets it read pods, and a sidecar pod `web`.
struct Cluster {
    api: ApiServer,
    namespace: String,
    run_dir: RunDir,
}

impl Cluster {
    fn new() -> Result<Self> {
        Self::on(ApiServer::shared()?)
    }

    fn on(api: ApiServer) -> Result<Self> {
        let cluster = Self { namespace: api.fresh_namespace("shop")?, api, run_dir: RunDir::new()? };
        let (api, namespace) = (&cluster.api, &cluster.namespace);
        api.create_service_account(namespace, ACCOUNT)?;
        cluster.allow("get,list,watch", "pods,nodes,namespaces")?;
        cluster.create(pod("web"))?;
        let file = api.token_kubeconfig("probe", &api.token(namespace, ACCOUNT)?)?;
        until("the role to count", SHORT, &[], || {
            Ok(api.kubectl_as(&file, &["get", "pod", "web", "-n", namespace])?.status.success().then_some(()))
        })?;
        Ok(cluster)
    }

    /// Gives the plugin's account a role with these verbs.
    fn allow(&self, verbs: &str, resources: &str) -> Result<()> {
        let (name, verbs, resources) =
            (fresh(ACCOUNT), format!("--verb={verbs}"), format!("--resource={resources}"));
        self.api.kubectl(&["create", "clusterrole", &name, &verbs, &resources])?;
        let account = format!("--serviceaccount={}:{ACCOUNT}", self.namespace);
        let role = format!("--clusterrole={name}");
        self.api.kubectl(&["create", "clusterrolebinding", &name, &role, &account]).map(drop)
    }

    /// Creates a pod in the namespace.
    fn create(&self, mut pod: Value) -> Result<()> {
        pod["metadata"]["namespace"] = json!(self.namespace);
        self.api.create(&pod).map(drop)
    }

    fn good_token(&self) -> Result<String> {
        self.api.token(&self.namespace, ACCOUNT)
    }

    fn use_token(&self, token: &str) -> Result<()> {
        self.run_dir.write_kubeconfig(&self.api.kubeconfig(&json!({"token": token}))?)
    }

    /// What the plugin says, at level debug.
    fn log(&self) -> PathBuf {
        self.run_dir.path().join("debug.log")
    }

    /// ADD of a pod with this deadline; the code and text of its error, if any.
    fn add(&self, name: &str, timeout: &str) -> Result<Option<(u64, String)>> {
        let namespace = Namespace::pod(Families::Dual)?;
        let mut conf = self.run_dir.conf();
        conf["add_timeout"] = json!(timeout);
        conf["plugin_log_level"] = json!("debug");
        let add = Invocation::new("ADD", &conf).netns(&namespace).pod(&self.namespace, name);
        let answer = add.stderr(&self.log()).run()?;
        let pristine = namespace.state_with_nft()?.is_pristine();
        if answer.0.status.success() {
            answer.result()?;
            ensure!(!pristine, "ADD succeeds and programs nothing");
            return Ok(None);
        }
        ensure!(pristine, "ADD fails and leaves something");
        Ok(Some(answer.error()?))
    }

    /// The error of an ADD that has to fail at its deadline.
    fn late(&self, name: &str, timeout: &str) -> Result<(u64, String)> {
        let start = Instant::now();
        let error = self.add(name, timeout)?.context("ADD succeeds")?;
        ensure!(start.elapsed() < EARLY, "it took {:?}: {error:?}", start.elapsed());
        Ok(error)
    }

    /// The error of an ADD that has to fail long before its deadline.
    fn refused(&self, name: &str) -> Result<(u64, String)> {
        self.late(name, LATE)
    }

    /// ADD of a pod that is to succeed because of what happens after its first try has failed. Succeeds long before its deadline.
    fn add_while(&self, name: &str, happening: impl FnOnce() -> Result<()>) -> Result<()> {
        let log = self.log();
        let _ = fs::remove_file(&log);
        let start = Instant::now();
        thread::scope(|scope| {
            let adding = scope.spawn(|| self.add(name, LATE));
            until("the first try to fail", SHORT, &[], || {
                let tried = fs::read_to_string(&log).is_ok_and(|log| log.contains("trying again"));
                Ok((tried || adding.is_finished()).then_some(()))
            })?;
            happening()?;
            if let Some(error) = adding.join().expect("no panic")? {
                bail!("ADD fails: {error:?}");
            }
            ensure!(fs::read_to_string(&log)?.contains("trying again"), "the first try succeeds");
            ensure!(start.elapsed() < EARLY, "it took {:?}", start.elapsed());
            Ok(())
        })
    }
}

fn pod(name: &str) -> Value {
    let mut pod = sidecar(name, &[]);
    pod["spec"]["nodeName"] = json!("nowhere");
    pod
}

#[test]
fn a_pod_is_read_with_every_kind_of_credentials() -> Result<()> {
    let cluster = Cluster::new()?;
    let (api, run_dir) = (&cluster.api, &cluster.run_dir);
    let token = cluster.good_token()?;

    cluster.use_token(&token)?;
    assert_eq!(cluster.add("web", LATE)?, None, "inline token");

    let file = run_dir.path().join("token");
    fs::write(&file, format!("{token}\n"))?;
    run_dir.write_kubeconfig(&api.kubeconfig(&json!({"tokenFile": "token", "token": "stale"}))?)?;
    assert_eq!(cluster.add("web", LATE)?, None, "token file, relative to the kubeconfig");

    let admin: Value = serde_json::from_str(&fs::read_to_string(api.admin_kubeconfig())?)?;
    run_dir.write_kubeconfig(&admin)?;
    assert_eq!(cluster.add("web", LATE)?, None, "client certificate");

    let mut insecure = api.kubeconfig(&json!({"token": token}))?;
    insecure["clusters"][0]["cluster"] = json!({"server": api.url(), "insecure-skip-tls-verify": true});
    run_dir.write_kubeconfig(&insecure)?;
    assert_eq!(cluster.add("web", LATE)?, None, "insecure");

    let mut by_file = api.kubeconfig(&json!({"token": token}))?;
    by_file["clusters"][0]["cluster"] = json!({"server": api.url(), "certificate-authority": api.ca_path()});
    run_dir.write_kubeconfig(&by_file)?;
    assert_eq!(cluster.add("web", LATE)?, None, "authority in a file");
    Ok(())
}

#[test]
fn an_expired_token_is_told_and_a_renewed_one_is_used_at_once() -> Result<()> {
    let cluster = Cluster::new()?;
    let expired = cluster.api.expired_token(&cluster.namespace, ACCOUNT)?;
    cluster.use_token(&expired)?;
    let (code, text) = cluster.refused("web")?;
    assert!(code == 11 && text.contains("(401)") && text.contains("istio-cni-kubeconfig"), "{code} {text}");
    assert!(!text.contains(&expired), "{text}");

    // The agent renews the token while the plugin tries. A plugin that read its kubeconfig once would never come to see the new token.
    let renewed = cluster.good_token()?;
    cluster.add_while("web", || cluster.use_token(&renewed))?;

    // And a token that is not valid yet, or no token at all.
    let tomorrow = SystemTime::now() + Duration::from_secs(86400);
    let early =
        cluster.api.signed_token(&cluster.namespace, ACCOUNT, tomorrow, tomorrow + Duration::from_secs(1))?;
    cluster.use_token(&early)?;
    let (code, text) = cluster.refused("web")?;
    assert!(code == 11 && text.contains("(401)"), "{code} {text}");
    Ok(())
}

/// A class may have any name; its handler says what it is.
#[test]
fn the_handler_of_a_runtime_class_is_read_where_its_name_says_nothing() -> Result<()> {
    let cluster = Cluster::new()?;
    cluster.use_token(&cluster.good_token()?)?;
    let [secure, gpu, kata] = ["secure", "gpu", "kata"].map(fresh);
    for (name, class, handler) in [("a", &secure, "runsc"), ("b", &gpu, "nvidia"), ("c", &kata, "kata")] {
        cluster.api.create(&json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": class}, "handler": handler}))?;
        let mut pod = pod(name);
        pod["spec"]["runtimeClassName"] = json!(class);
        cluster.create(pod)?;
    }
    // Without the right, a name must do, and the log says so.
    ensure!(cluster.add("a", LATE)?.is_none());
    let log = fs::read_to_string(cluster.log())?;
    ensure!(
        log.contains(&format!("RuntimeClass {secure}: its handler is unknown"))
            && log.contains("runtimeclasses"),
        "{log}"
    );
    ensure!(cluster.refused("c")?.0 == 104);
    cluster.allow("get", "runtimeclasses.node.k8s.io")?;
    until("the role to count", SHORT, &[], || Ok(cluster.add("a", LATE)?.map(drop)))?;
    let (code, text) = cluster.refused("a")?;
    ensure!(code == 104 && text.contains(&secure), "{code} {text}");
    ensure!(cluster.add("b", LATE)?.is_none());
    // A kubelet may know a class a moment before this server does.
    cluster.api.kubectl(&["delete", "runtimeclass", &gpu])?;
    let (code, text) = cluster.late("b", "3s")?;
    ensure!(code == 11 && text.contains(&format!("no RuntimeClass {gpu}")), "{code} {text}");
    Ok(())
}

#[test]
fn a_missing_role_is_told() -> Result<()> {
    let cluster = Cluster::new()?;
    cluster.api.create_service_account(&cluster.namespace, "nobody")?;
    cluster.use_token(&cluster.api.token(&cluster.namespace, "nobody")?)?;
    let (code, text) = cluster.refused("web")?;
    assert!(
        code == 101 && text.contains("(403)") && text.contains("ClusterRoleBinding istio-cni"),
        "{code} {text}"
    );
    // No credentials at all: an anonymous user, who may not either.
    cluster.run_dir.write_kubeconfig(&cluster.api.kubeconfig(&json!({}))?)?;
    assert_eq!(cluster.refused("web")?.0, 101);
    Ok(())
}

#[test]
fn a_wrong_authority_is_told() -> Result<()> {
    let cluster = Cluster::new()?;
    let mut kubeconfig = cluster.api.kubeconfig(&json!({"token": cluster.good_token()?}))?;
    let other = RunDir::new()?;
    let request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=other -days 2 -keyout key -out ca";
    let mut openssl = test_support::process::command("sh", ["-ec", request]);
    test_support::process::run(openssl.current_dir(other.path()), test_support::process::SHORT)?.ok()?;
    kubeconfig["clusters"][0]["cluster"] =
        json!({"server": cluster.api.url(), "certificate-authority": other.path().join("ca")});
    cluster.run_dir.write_kubeconfig(&kubeconfig)?;
    let (code, text) = cluster.refused("web")?;
    assert!(
        code == 102 && text.contains("certificate") && text.contains(&cluster.api.url()),
        "{code} {text}"
    );

    let plain = without_tls()?;
    kubeconfig["clusters"][0]["cluster"]["server"] = json!(format!("https://127.0.0.1:{plain}"));
    cluster.run_dir.write_kubeconfig(&kubeconfig)?;
    let (code, text) = cluster.refused("web")?;
    assert_eq!(code, 102, "{text}");
    Ok(())
}

/// A server that speaks no TLS, and says so to whoever does, as HTTP servers do. Returns its port.
fn without_tls() -> Result<u16> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        }
    });
    Ok(port)
}

#[test]
fn a_stopped_server_is_told_at_the_deadline_and_one_that_comes_back_is_used() -> Result<()> {
    let cluster = Cluster::on(ApiServer::start()?)?;
    cluster.use_token(&cluster.good_token()?)?;
    cluster.api.stop();
    let start = Instant::now();
    let (code, text) = cluster.late("web", "3s")?;
    assert!(start.elapsed() >= Duration::from_secs(2), "it gave up after {:?}", start.elapsed());
    assert!(
        code == 11 && text.contains("is unreachable") && text.contains(&cluster.api.url()),
        "{code} {text}"
    );
    cluster.add_while("web", || cluster.api.start_again())
}

#[test]
fn a_server_that_hangs_is_told_at_the_deadline() -> Result<()> {
    let run_dir = RunDir::new()?;
    // It accepts connections, by way of the kernel, and never says anything.
    let silent = std::net::TcpListener::bind("127.0.0.1:0")?;
    run_dir.write_kubeconfig(&plugin::plain_kubeconfig(silent.local_addr()?.port()))?;
    let mut conf = run_dir.conf();
    conf["add_timeout"] = json!(2);
    let namespace = Namespace::pod(Families::V4)?;
    let start = Instant::now();
    let answer = Invocation::new("ADD", &conf).netns(&namespace).pod("default", "web").run()?;
    let (code, text) = answer.error()?;
    assert!(start.elapsed() < EARLY, "{:?}", start.elapsed());
    assert!(code == 11 && text.contains("did not respond within"), "{code} {text}");
    Ok(())
}

#[test]
fn a_pod_that_appears_late_is_redirected_and_one_that_never_does_is_told() -> Result<()> {
    let cluster = Cluster::new()?;
    cluster.use_token(&cluster.good_token()?)?;
    cluster.add_while("late", || cluster.create(pod("late")))?;
    let missing = format!("no pod {}/never (404)", cluster.namespace);
    let (code, text) = cluster.late("never", "2s")?;
    assert!(code == 11 && text.contains(&missing), "{code} {text}");
    Ok(())
}
