//! A client and servers that misbehave: none of them is waited for without end, none is read without end, and each failure says whose
//! fault it is.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use cluster_client::{Account, ApiError, Client, Request, Trust, params::GetParams};
use serde_json::Value;

/// A limit that is to be met.
const SHORT: Duration = Duration::from_millis(300);
/// A limit that is not.
const LONG: Duration = Duration::from_secs(120);

/// A server that does the same with every connection, once a request has come.
struct Server {
    port: u16,
    served: Arc<AtomicUsize>,
    folder: tempfile::TempDir,
}

impl Server {
    fn start(serve: impl Fn(&mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let (serve, served) = (Arc::new(serve), Arc::new(AtomicUsize::new(0)));
        let count = served.clone();
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let (serve, count) = (serve.clone(), count.clone());
                thread::spawn(move || {
                    let mut head = Vec::new();
                    let mut byte = [0];
                    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
                        head.push(byte[0]);
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                    serve(&mut stream);
                });
            }
        });
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("token"), "abc\n").expect("writes");
        Self { port, served, folder }
    }

    fn answering(answer: &str) -> Self {
        let answer = answer.to_owned();
        Self::start(move |stream| drop(stream.write_all(answer.as_bytes())))
    }

    fn token(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    fn client(&self) -> Client {
        let server = format!("http://127.0.0.1:{}", self.port);
        Account::new(server, Trust::Unverified, self.token()).client().expect("a client")
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let done = runtime.block_on(future);
    runtime.shutdown_background();
    done
}

fn ask(server: &Server, patience: Duration) -> Result<Value, ApiError> {
    let request = Request::new("/api/v1/namespaces/shop/pods").get("cart", &GetParams::default());
    run(async { server.client().json(request, patience).await })
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn silent(failure: &ApiError) -> bool {
    matches!(failure, ApiError::Silent { .. })
}

#[test]
fn a_server_that_says_nothing_is_given_up_in_time() {
    let server = Server::start(|stream| drop(stream.read(&mut [0])));
    assert!(silent(&ask(&server, SHORT).unwrap_err()));
}

/// Each byte is in time, all of them are not.
#[test]
fn a_server_that_trickles_is_given_up_in_time() {
    let server = Server::start(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
        while stream.write_all(b" ").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let failure = ask(&server, SHORT).unwrap_err();
    assert_eq!(
        failure,
        ApiError::Silent { server: format!("http://127.0.0.1:{}", server.port), patience: SHORT }
    );
}

#[test]
fn a_watch_on_which_nothing_happens_ends_in_time() {
    let server = Server::start(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        let _ = stream.write_all(b"8\r\n{\"a\":1}\n\r\n5\r\n{\"b\":\r\n");
        let _ = stream.read(&mut [0]);
    });
    run(async {
        let request = Request::new("/x").get("y", &GetParams::default());
        let mut watch = server.client().open(request, LONG).await.unwrap();
        assert_eq!(watch.line::<Value>(LONG).await.unwrap(), Some(serde_json::json!({"a": 1})));
        assert!(silent(&watch.line::<Value>(SHORT).await.unwrap_err()));
    });
}

#[test]
fn a_line_that_never_ends_is_not_kept() {
    let server = Server::start(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
        while stream.write_all(&[b' '; 64 << 10]).is_ok() {}
    });
    run(async {
        let request = Request::new("/x").get("y", &GetParams::default());
        let mut watch = server.client().open(request, LONG).await.unwrap();
        let failure = watch.line::<Value>(LONG).await.unwrap_err();
        assert!(failure.to_string().contains("a line of more than"), "{failure}");
    });
}

#[test]
fn an_answer_without_end_is_not_read_to_its_end() {
    let server = Server::start(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
        while stream.write_all(&[b' '; 64 << 10]).is_ok() {}
    });
    let failure = ask(&server, LONG).unwrap_err();
    assert!(failure.to_string().contains("more than 8388608 bytes"), "{failure}");
}

#[test]
fn what_no_api_server_says_is_blamed_on_who_says_it() {
    for (status, headers, body, expected) in [
        ("200 OK", "Content-Type: text/html\r\n", "<html>welcome</html>", "not JSON (text/html)"),
        ("200 OK", "", "", "is empty"),
        ("204 No Content", "", "", "is empty"),
        ("200 OK", "", "{\"kind\": \"Pod\", \"meta", "cut off after 21 bytes"),
        ("302 Found", "Location: https://login\r\n", "", "302 Found, to \"https://login\""),
    ] {
        let failure = ask(&Server::answering(&answer(status, headers, body)), LONG).unwrap_err();
        let is_blamed = matches!(failure, ApiError::Garbled { .. });
        assert!(is_blamed && failure.to_string().contains(expected), "{status} {body:?}: {failure}");
    }
}

#[test]
fn an_answer_that_breaks_off_is_a_broken_connection() {
    let server = Server::answering("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"kind\":");
    let failure = ask(&server, LONG).unwrap_err();
    assert!(matches!(failure, ApiError::Unreachable { .. }), "{failure}");
}

#[test]
fn a_status_counts_also_where_the_words_are_not_an_api_servers() {
    let by_code = |code: u16, body: &str| {
        let text = answer(&format!("{code} X"), "Content-Type: text/plain\r\nRetry-After: 7\r\n", body);
        ask(&Server::answering(&text), LONG).unwrap_err()
    };
    for (body, by_api) in
        [("{\"kind\":\"Status\",\"message\":\"no\",\"code\":0}", true), ("{}", false), ("<p>no", false)]
    {
        let words = |failure: ApiError| {
            let (ApiError::Unauthorized(words) | ApiError::Forbidden(words) | ApiError::NotFound(words)) =
                failure
            else {
                return None;
            };
            Some(words.by_api)
        };
        assert_eq!([401, 403, 404].map(|code| words(by_code(code, body))), [Some(by_api); 3], "{body}");
        assert_eq!(by_code(401, body).is_refusal(), by_api);
        let busy = by_code(429, body);
        assert_eq!(busy.retry_after(), Some(Duration::from_secs(7)));
        assert!(busy.to_string().contains("no"), "{busy}");
    }
}

#[test]
fn words_about_a_failure_without_end_are_left_out() {
    let server = Server::start(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 1000000000\r\n\r\n");
        while stream.write_all(&[b'x'; 64 << 10]).is_ok() {}
    });
    let failure = ask(&server, LONG).unwrap_err();
    assert!(matches!(failure, ApiError::Forbidden(_)), "{failure}");
}

#[test]
fn a_client_goes_on_until_the_files_change() {
    let server = Server::answering(&answer("200 OK", "", "{}"));
    let account =
        Account::new(format!("http://127.0.0.1:{}", server.port), Trust::Unverified, server.token());
    run(async {
        account.client().unwrap();
        fs::write(server.token(), "not a token").unwrap();
        assert!(account.client().is_err(), "it is read again");
        fs::remove_file(server.token()).unwrap();
        account.client().expect("what was read before goes on");
    });
    assert_eq!(server.served.load(Ordering::SeqCst), 0, "nothing is sent to make a client");
}
