//! The plugin and a real API server, with TLS and RBAC: what it reads, and what it says when it cannot.

mod plugin_support;

use std::fs;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::netns::{Families, Namespace};
use e2e::process::until;
use plugin_support::{Invocation, RunDir, sidecar};
use serde_json::{Value, json};

const ACCOUNT: &str = "istio-cni";

/// An API server with the plugin's service account, a role that lets it read pods, and a sidecar pod `web`.
struct Cluster {
    api: ApiServer,
    run_dir: RunDir,
}

impl Cluster {
    fn new() -> Result<Self> {
        let cluster = Self { api: ApiServer::start()?, run_dir: RunDir::new()? };
        let api = &cluster.api;
        api.create_service_account("default", ACCOUNT)?;
        api.kubectl(&[
            "create",
            "clusterrole",
            ACCOUNT,
            "--verb=get,list,watch",
            "--resource=pods,nodes,namespaces",
        ])?;
        cluster.bind_role()?;
        api.create(&pod("web"))?;
        let file = api.token_kubeconfig("probe", &api.token("default", ACCOUNT)?)?;
        until("the role to count", Duration::from_secs(10), &[], || {
            Ok(api.kubectl_as(&file, &["get", "pod", "web"])?.status.success().then_some(()))
        })?;
        Ok(cluster)
    }

    fn bind_role(&self) -> Result<()> {
        let account = format!("--serviceaccount=default:{ACCOUNT}");
        let role = format!("--clusterrole={ACCOUNT}");
        self.api.kubectl(&["create", "clusterrolebinding", ACCOUNT, &role, &account]).map(drop)
    }

    fn good_token(&self) -> Result<String> {
        self.api.token("default", ACCOUNT)
    }

    fn use_token(&self, token: &str) -> Result<()> {
        self.run_dir.write_kubeconfig(&self.api.kubeconfig(&json!({"token": token}))?)
    }

    /// ADD of a pod with this deadline; how long it took, and the code and text of its error, if any.
    fn add(&self, name: &str, timeout: &str) -> Result<(Duration, Option<(u64, String)>)> {
        let namespace = Namespace::pod(Families::Dual)?;
        let mut conf = self.run_dir.conf();
        conf["add_timeout"] = json!(timeout);
        let start = Instant::now();
        let answer = Invocation::new("ADD", &conf).netns(&namespace).pod("default", name).run()?;
        let time = start.elapsed();
        let pristine = namespace.state_with_nft()?.is_pristine();
        if answer.0.status.success() {
            answer.result()?;
            ensure!(!pristine, "ADD succeeds and programs nothing");
            return Ok((time, None));
        }
        ensure!(pristine, "ADD fails and leaves something");
        Ok((time, Some(answer.error()?)))
    }

    /// The error of an ADD that has to fail, within `limit`.
    fn refused(&self, name: &str, timeout: &str, limit: Duration) -> Result<(u64, String)> {
        let (time, error) = self.add(name, timeout)?;
        let error = error.context("ADD succeeds")?;
        ensure!(time <= limit, "it took {time:?}: {error:?}");
        Ok(error)
    }
}

fn pod(name: &str) -> Value {
    let mut pod = sidecar(name, &[]);
    pod["spec"]["nodeName"] = json!("nowhere");
    pod
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_pod_is_read_with_every_kind_of_credentials() -> Result<()> {
    let cluster = Cluster::new()?;
    let (api, run_dir) = (&cluster.api, &cluster.run_dir);
    let token = cluster.good_token()?;

    cluster.use_token(&token)?;
    assert_eq!(cluster.add("web", "25s")?.1, None, "inline token");

    let file = run_dir.path().join("token");
    fs::write(&file, format!("{token}\n"))?;
    run_dir.write_kubeconfig(&api.kubeconfig(&json!({"tokenFile": "token", "token": "stale"}))?)?;
    assert_eq!(cluster.add("web", "25s")?.1, None, "token file, relative to the kubeconfig");

    let admin: Value = serde_json::from_str(&fs::read_to_string(api.admin_kubeconfig())?)?;
    run_dir.write_kubeconfig(&admin)?;
    assert_eq!(cluster.add("web", "25s")?.1, None, "client certificate");

    let mut insecure = api.kubeconfig(&json!({"token": token}))?;
    insecure["clusters"][0]["cluster"] = json!({"server": api.url(), "insecure-skip-tls-verify": true});
    run_dir.write_kubeconfig(&insecure)?;
    assert_eq!(cluster.add("web", "25s")?.1, None, "insecure");

    let mut by_file = api.kubeconfig(&json!({"token": token}))?;
    by_file["clusters"][0]["cluster"] = json!({"server": api.url(), "certificate-authority": api.ca_path()});
    run_dir.write_kubeconfig(&by_file)?;
    assert_eq!(cluster.add("web", "25s")?.1, None, "authority in a file");
    Ok(())
}

#[test]
fn an_expired_token_is_told_and_a_renewed_one_is_used_at_once() -> Result<()> {
    let cluster = Cluster::new()?;
    let expired = cluster.api.expired_token("default", ACCOUNT)?;
    cluster.use_token(&expired)?;
    let (code, text) = cluster.refused("web", "25s", 15 * SECOND)?;
    assert!(code == 11 && text.contains("(401)") && text.contains("istio-cni-kubeconfig"), "{code} {text}");
    assert!(!text.contains(&expired), "{text}");

    // The agent renews the token while the plugin tries.
    let renewed = cluster.good_token()?;
    let (time, error) = thread::scope(|scope| {
        let adding = scope.spawn(|| cluster.add("web", "25s"));
        thread::sleep(SECOND);
        cluster.use_token(&renewed)?;
        adding.join().expect("no panic")
    })?;
    assert_eq!(error, None);
    assert!(time >= SECOND && time < 4 * SECOND, "{time:?}");

    // And a token that is not valid yet, or no token at all.
    let tomorrow = SystemTime::now() + Duration::from_secs(86400);
    let early = cluster.api.signed_token("default", ACCOUNT, tomorrow, tomorrow + SECOND)?;
    cluster.use_token(&early)?;
    assert_eq!(cluster.refused("web", "1s", 3 * SECOND)?.0, 11);
    Ok(())
}

#[test]
fn a_missing_role_is_told() -> Result<()> {
    let cluster = Cluster::new()?;
    cluster.api.create_service_account("default", "nobody")?;
    cluster.use_token(&cluster.api.token("default", "nobody")?)?;
    let (code, text) = cluster.refused("web", "25s", 15 * SECOND)?;
    assert!(code == 101 && text.contains("(403)") && text.contains("ClusterRole istio-cni"), "{code} {text}");
    // No credentials at all: an anonymous user, who may not either.
    cluster.run_dir.write_kubeconfig(&cluster.api.kubeconfig(&json!({}))?)?;
    assert_eq!(cluster.refused("web", "25s", 15 * SECOND)?.0, 101);
    Ok(())
}

#[test]
fn a_wrong_authority_is_told() -> Result<()> {
    let cluster = Cluster::new()?;
    let mut kubeconfig = cluster.api.kubeconfig(&json!({"token": cluster.good_token()?}))?;
    let other = RunDir::new()?;
    let request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=other -days 2 -keyout key -out ca";
    let mut openssl = e2e::process::command("sh", ["-ec", request]);
    e2e::process::run(openssl.current_dir(other.path()), e2e::process::SHORT)?.ok()?;
    kubeconfig["clusters"][0]["cluster"] =
        json!({"server": cluster.api.url(), "certificate-authority": other.path().join("ca")});
    cluster.run_dir.write_kubeconfig(&kubeconfig)?;
    let (code, text) = cluster.refused("web", "25s", 15 * SECOND)?;
    assert!(
        code == 102 && text.contains("certificate") && text.contains(&cluster.api.url()),
        "{code} {text}"
    );

    // A server that speaks no TLS.
    let plain = plugin_support::PodApi::start()?;
    kubeconfig["clusters"][0]["cluster"]["server"] = json!(format!("https://127.0.0.1:{}", plain.port()));
    cluster.run_dir.write_kubeconfig(&kubeconfig)?;
    let (code, text) = cluster.refused("web", "2s", 4 * SECOND)?;
    assert!(code == 102 || code == 11, "{code} {text}");
    Ok(())
}

#[test]
fn a_stopped_server_is_told_at_the_deadline_and_one_that_comes_back_is_used() -> Result<()> {
    let cluster = Cluster::new()?;
    cluster.use_token(&cluster.good_token()?)?;
    cluster.api.stop();
    let start = Instant::now();
    let (code, text) = cluster.refused("web", "3s", 4 * SECOND)?;
    assert!(start.elapsed() >= 2 * SECOND, "it gave up after {:?}", start.elapsed());
    assert!(
        code == 11 && text.contains("is not reached") && text.contains(&cluster.api.url()),
        "{code} {text}"
    );

    let (_, error) = thread::scope(|scope| {
        let adding = scope.spawn(|| cluster.add("web", "60s"));
        cluster.api.start_again()?;
        adding.join().expect("no panic")
    })?;
    assert_eq!(error, None);
    Ok(())
}

#[test]
fn a_server_that_hangs_is_told_at_the_deadline() -> Result<()> {
    let run_dir = RunDir::new()?;
    // It accepts connections, by way of the kernel, and never says anything.
    let silent = std::net::TcpListener::bind("127.0.0.1:0")?;
    run_dir.write_kubeconfig(&plugin_support::plain_kubeconfig(silent.local_addr()?.port()))?;
    let mut conf = run_dir.conf();
    conf["add_timeout"] = json!(2);
    let namespace = Namespace::pod(Families::V4)?;
    let start = Instant::now();
    let answer = Invocation::new("ADD", &conf).netns(&namespace).pod("default", "web").run()?;
    let (code, text) = answer.error()?;
    assert!(start.elapsed() < 3 * SECOND, "{:?}", start.elapsed());
    assert!(code == 11 && text.contains("does not answer within"), "{code} {text}");
    Ok(())
}

#[test]
fn a_pod_that_appears_late_is_redirected_and_one_that_never_does_is_told() -> Result<()> {
    let cluster = Cluster::new()?;
    cluster.use_token(&cluster.good_token()?)?;
    let (time, error) = thread::scope(|scope| {
        let adding = scope.spawn(|| cluster.add("late", "25s"));
        thread::sleep(2 * SECOND);
        cluster.api.create(&pod("late"))?;
        adding.join().expect("no panic")
    })?;
    assert_eq!(error, None);
    assert!(time >= 2 * SECOND && time < 5 * SECOND, "{time:?}");

    let (code, text) = cluster.refused("never", "2s", 3 * SECOND)?;
    assert!(code == 11 && text.contains("no pod default/never (404)"), "{code} {text}");
    Ok(())
}
