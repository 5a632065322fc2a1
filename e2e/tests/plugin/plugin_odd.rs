//! The plugin where files are not files and servers are no API servers: it answers in time, and says whose fault it is.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};
use e2e::plugin::{self, Invocation, RunDir, plain_kubeconfig, sidecar};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::parallel::in_threads;
use test_support::process::{self, EARLY, LATE, SHORT};

/// A deadline that is to be met, because trying goes on; the first answer comes long before it.
const SOON: &str = "5s";

/// Starts a server that gives every request the same answer, byte for byte; its port.
fn serve(answer: impl Into<Vec<u8>>) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let answer: Arc<[u8]> = answer.into().into();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = answer.clone();
            thread::spawn(move || answer_once(&stream, &answer));
        }
    });
    Ok(port)
}

fn answer_once(mut stream: &TcpStream, answer: &[u8]) -> std::io::Result<()> {
    for line in BufReader::new(stream).lines() {
        if line?.is_empty() {
            break;
        }
    }
    stream.write_all(answer)?;
    // An answer that promises more than it has is one without end.
    if answer.ends_with(b"...") {
        while stream.write_all(&[b' '; 64 << 10]).is_ok() {}
    }
    Ok(())
}

fn http(status: &str, kind: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

fn pod() -> Value {
    let mut pod = sidecar("web", &[]);
    pod["metadata"]["uid"] = json!("uid-1");
    pod
}

/// ADD of pod `web` with this UID from the API server at a port; code and text of its error, if any.
fn add(port: u16, timeout: &str, uid: &str) -> Result<Option<(u64, String)>> {
    let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(Families::V4)?);
    run_dir.write_kubeconfig(&plain_kubeconfig(port))?;
    let mut conf = run_dir.conf();
    conf["add_timeout"] = json!(timeout);
    let args = format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID={uid}");
    let start = Instant::now();
    let answer = Invocation::new("ADD", &conf).netns(&namespace).env("CNI_ARGS", &args).run()?;
    ensure!(start.elapsed() < EARLY, "it took {:?}", start.elapsed());
    let is_pristine = namespace.state_with_nft()?.is_pristine();
    ensure!(is_pristine != answer.0.status.success(), "{answer:?}");
    if answer.0.status.success() { Ok(None) } else { answer.error().map(Some) }
}

#[test]
fn answers_that_no_api_server_gives_are_blamed_on_the_server() -> Result<()> {
    let html = "<html>sign in</html>";
    let cut = pod().to_string();
    let with = |pointer: &str, value: &str| {
        let mut pod = pod();
        if let Some(place) = pod.pointer_mut(pointer) {
            *place = json!(value);
        }
        http("200 OK", "application/json", &pod.to_string())
    };
    let check = |(answer, expected): (String, &str)| -> Result<()> {
        let (code, text) = add(serve(answer)?, SOON, "")?.expect(expected);
        ensure!(
            code == 11 && text.contains(expected) && text.contains("is this the API server?"),
            "{expected}: {code} {text}"
        );
        Ok(())
    };
    at_once(
        [
            (http("200 OK", "text/html", html), "not JSON (text/html)"),
            (http("204 No Content", "application/json", ""), "is empty"),
            (http("302 Found\r\nLocation: https://login", "text/html", ""), "302 Found"),
            (http("200 OK", "application/json", &cut[..cut.len() - 9]), "is cut off"),
            (with("/metadata/name", "till"), "received \"Pod\" \"till\""),
            (with("/metadata/namespace", "bank"), "in namespace \"bank\""),
            (with("/kind", "Job"), "received \"Job\""),
            (http("200 OK", "application/json", "[]"), "received \"\""),
            (
                http("200 OK", "application/json", "{\"kind\":\"Pod\",\"metadata\":3}"),
                "received \"Pod\" \"\"",
            ),
        ],
        check,
    )
}

#[test]
fn a_status_without_an_api_servers_words_is_known_by_its_number() -> Result<()> {
    let check = |(status, code): (&str, u64)| -> Result<()> {
        for body in ["{\"error\":\"no\"}", "<p>no</p>"] {
            let (found, text) = add(serve(http(status, "text/html", body))?, SOON, "")?.expect("an error");
            ensure!(found == code, "{status} {body}: {found} {text}");
            ensure!(text.contains(&format!("({})", &status[..3])), "{status}: {text}");
            ensure!(!text.contains("(0)"), "{status}: {text}");
        }
        Ok(())
    };
    at_once([("401 X", 11), ("403 X", 101), ("404 X", 11), ("429 X", 11), ("503 X", 11)], check)
}

/// Checks each of them on a thread of its own: nearly all of their time is the plugin's pauses.
fn at_once<T: Send, const N: usize>(cases: [T; N], check: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let check = &check;
    in_threads(N, cases.into_iter().map(|case| move || check(case)).collect()).into_iter().collect()
}

/// With a limit on memory, because without it a machine only becomes slow.
#[test]
fn a_body_without_end_does_not_fill_the_memory() -> Result<()> {
    let port = serve("HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\n...")?;
    let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(Families::V4)?);
    run_dir.write_kubeconfig(&plain_kubeconfig(port))?;
    let mut conf = run_dir.conf();
    // An unoptimized plugin needs seconds for one body, more on a busy machine.
    conf["add_timeout"] = json!("20s");
    let limited = ["/bin/sh", "-c", "ulimit -v 1000000; exec \"$@\"", "sh"].map(str::to_owned);
    let add = Invocation::new("ADD", &conf).netns(&namespace).pod("default", "web").under(limited.into());
    let (code, text) = add.run()?.error()?;
    assert!(code == 11 && text.contains("has more than"), "{code} {text}");
    Ok(())
}

#[test]
fn the_uid_that_the_runtime_names_is_the_pods() -> Result<()> {
    let port = serve(http("200 OK", "application/json", &pod().to_string()))?;
    assert_eq!(add(port, LATE, "uid-1")?, None);
    assert_eq!(add(port, LATE, "")?, None);
    let (code, text) = add(port, LATE, "uid-2")?.expect("another pod");
    assert!(code == 11 && text.contains("its UID is uid-1, not uid-2"), "{code} {text}");
    // A static pod has another UID than what stands for it in the API server.
    let mut mirror = pod();
    mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("uid-2");
    assert_eq!(add(serve(http("200 OK", "application/json", &mirror.to_string()))?, LATE, "uid-2")?, None);
    Ok(())
}

fn pipe(path: &Path) -> Result<PathBuf> {
    process::run(&mut process::command("mkfifo", [path]), SHORT)?.ok()?;
    Ok(path.to_owned())
}

#[test]
fn a_pipe_or_a_device_in_the_place_of_a_file_holds_up_nobody() -> Result<()> {
    let zero = PathBuf::from("/dev/zero");
    let kubeconfig = |cluster: Value, user: Value| {
        let mut kubeconfig = plain_kubeconfig(1);
        kubeconfig["clusters"][0]["cluster"] = cluster;
        kubeconfig["users"][0]["user"] = user;
        kubeconfig
    };
    let http = || json!({"server": "http://127.0.0.1:1"});
    for is_pipe in [true, false] {
        for what in ["kubeconfig", "tokenFile", "certificate-authority", "client-certificate"] {
            let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(Families::V4)?);
            let odd = if is_pipe { pipe(&run_dir.path().join("pipe"))? } else { zero.clone() };
            match what {
                "kubeconfig" => {
                    std::os::unix::fs::symlink(&odd, run_dir.path().join("istio-cni-kubeconfig"))?;
                }
                "certificate-authority" => run_dir.write_kubeconfig(&kubeconfig(
                    json!({"server": "https://127.0.0.1:1", what: odd}),
                    json!({}),
                ))?,
                _ => run_dir.write_kubeconfig(&kubeconfig(http(), json!({what: odd, "client-key": odd})))?,
            }
            for command in ["ADD", "STATUS"] {
                let start = Instant::now();
                let mut conf = run_dir.conf();
                conf["add_timeout"] = json!(LATE);
                conf["agent_host_network"] = json!(true);
                let invocation = Invocation::new(command, &conf).netns(&namespace).pod("default", "web");
                let (code, text) = within(&invocation, what)?.error()?;
                ensure!(start.elapsed() < EARLY, "{command} {what}: {:?}", start.elapsed());
                let expected = if command == "ADD" { 103 } else { 50 };
                ensure!(
                    code == expected && text.contains("not a regular file"),
                    "{command} {what}: {code} {text}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_pipe_in_the_place_of_the_log_file_or_the_namespace_holds_up_nobody() -> Result<()> {
    let (run_dir, namespace) = (RunDir::new()?, Namespace::pod(Families::V4)?);
    run_dir.write_manifest("web.yaml", &pod())?;
    pipe(&run_dir.path().join("istio-cni.log"))?;
    let add = Invocation::new("ADD", &run_dir.manifest_conf()).pod("default", "web");
    within(&add.clone().netns(&namespace), "istio-cni.log")?.result()?;
    fs::remove_file(run_dir.path().join("istio-cni.log"))?;
    for odd in [pipe(&run_dir.path().join("pipe"))?, PathBuf::from("/dev/zero")] {
        let (code, text) =
            within(&add.clone().env("CNI_NETNS", &odd.display().to_string()), "CNI_NETNS")?.error()?;
        ensure!(code == 4 && text.contains("CNI_NETNS"), "{code} {text}");
    }
    Ok(())
}

/// Runs it with a limit on memory, and on time beside its own: a program that hangs is ended and named.
fn within(invocation: &Invocation, what: &str) -> Result<plugin::Answer> {
    let seconds = EARLY.as_secs().to_string();
    let script = "ulimit -v 1000000; exec timeout --kill-after=1 \"$@\"";
    let words = ["/bin/sh", "-c", script, "sh", &seconds].map(str::to_owned);
    let answer = invocation.clone().under(words.into()).run()?;
    ensure!(answer.0.code() != Some(124), "{what}: hangs");
    Ok(answer)
}
