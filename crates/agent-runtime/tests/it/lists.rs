//! A copy stays as it is while the API server answers with something that is not the list, and no server fills the memory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent_runtime::cluster::{ApiHandle, ControllerIdentity};
use agent_runtime::resync::{
    self, Collection, Freshness, ListLimits, ListSource, ReadError, Replica, Selection,
};
use cluster_client::{Account, Trust};
use serde_json::{Value, json};
use test_support::port;

/// For what must come, however slow the machine.
const LONG: Duration = Duration::from_secs(600);

/// A server that answers each request, by its target, with a body.
struct Server {
    connection: ApiHandle,
    requests: Arc<AtomicUsize>,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start(answer: impl Fn(&str, usize) -> String + Send + Sync + 'static) -> Self {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        let port = port::serve(move |stream| serve(stream, &answer, &count)).expect("a port");
        let folder = tempfile::tempdir().expect("a folder");
        let token = folder.path().join("token");
        std::fs::write(&token, "abc\n").expect("writes");
        let text = str::to_owned;
        let identity = ControllerIdentity {
            namespace: text("mesh"),
            pod: text("p"),
            node: text("n"),
            daemon_set: text("d"),
        };
        let account = Account::new(format!("http://127.0.0.1:{port}"), Trust::Unverified, token);
        Self { connection: ApiHandle::new(account, identity), requests, _folder: folder }
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn serve(mut stream: TcpStream, answer: &dyn Fn(&str, usize) -> String, count: &AtomicUsize) {
    loop {
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            if !stream.read(&mut byte).is_ok_and(|read| read == 1) {
                return;
            }
            head.push(byte[0]);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let target = head.split(' ').nth(1).unwrap_or_default();
        let body = answer(target, count.fetch_add(1, Ordering::SeqCst));
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        if stream.write_all((head + &body).as_bytes()).is_err() {
            return;
        }
    }
}

fn pods() -> ListSource {
    ListSource { path: "/api/v1/pods".to_owned(), kind: "PodList", limits: ListLimits::OF_NODE }
}

fn everything() -> Selection {
    Selection { fields: String::new(), labels: String::new() }
}

fn name(pod: &Value) -> Option<String> {
    pod["metadata"]["name"].as_str().map(str::to_owned)
}

fn pod_list(names: &[String], rest: &str) -> String {
    let items: Vec<Value> = names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
    json!({"kind": "PodList", "metadata": {"resourceVersion": "7", "continue": rest}, "items": items})
        .to_string()
}

/// Notes each list that it is given.
#[derive(Default)]
struct Names(Mutex<Vec<Vec<String>>>);

impl Replica for Names {
    type Item = String;

    fn parser(&self) -> impl Fn(&Value) -> Option<String> + Clone + Send + Sync + 'static {
        name
    }

    fn replace(&self, items: Vec<String>) {
        self.0.lock().expect("not poisoned").push(items);
    }

    fn changed(&self, _object: &Value) {}

    fn removed(&self, _object: &Value) {}

    /// Each list is newer than the last.
    fn interrupted(&self) -> bool {
        true
    }
}

/// A list, a watch that breaks, then answers that are no list of pods, and a list again.
#[tokio::test]
async fn a_copy_stays_until_there_is_a_list_again() {
    let others = ["{}", r#"{"kind":"Status","status":"Success"}"#];
    let lists = AtomicUsize::new(0);
    let server = Server::start(move |target, _| {
        if target.contains("watch=") {
            return "not an event\n".to_owned();
        }
        match lists.fetch_add(1, Ordering::SeqCst) {
            0 => pod_list(&["before".to_owned()], ""),
            list => others
                .get(list - 1)
                .map_or_else(|| pod_list(&["after".to_owned()], ""), |text| (*text).to_owned()),
        }
    });
    let collection = Collection {
        what: "pods",
        source: pods(),
        selection: everything(),
        freshness: Freshness::Remembered,
        remedy: "",
        spread: Duration::ZERO,
    };
    let names = Names::default();
    let is_current = async {
        while !names.0.lock().expect("not poisoned").iter().any(|list| *list == ["after"]) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        never = resync::run(&server.connection, &collection, &names) => match never {},
        done = tokio::time::timeout(LONG, is_current) => done.expect("a list"),
    }
    let seen = names.0.lock().expect("not poisoned").clone();
    let first: Vec<_> = seen.iter().take(2).cloned().collect();
    assert_eq!(first, [["before"], ["after"]], "nothing counts as an empty list");
}

async fn endless(names: usize) -> (ReadError, usize) {
    let names: Vec<String> = (0..names).map(|name| format!("pod-{name}")).collect();
    let server = Server::start(move |_, request| pod_list(&names, &format!("page-{request}")));
    let cluster = server.connection.get().expect("a client");
    let listed = cluster.list(&pods(), &everything(), Freshness::Newest, name as fn(&Value) -> _).await;
    (listed.expect_err("no end"), server.requests())
}

#[tokio::test]
async fn pages_without_end_are_given_up_at_a_limit_that_is_named() {
    let (error, requests) = endless(50).await;
    assert!(
        error.to_string().contains("the PodList has more than 5000 objects, the limit of a list"),
        "{error}"
    );
    assert_eq!(requests, 101);
    let (error, requests) = endless(0).await;
    assert!(error.to_string().contains("more than 1000 pages"), "{error}");
    assert_eq!(requests, 1001);
}
