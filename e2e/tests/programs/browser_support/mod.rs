//! A real browser without a screen, driven by WebDriver; and the web page, served to it as any server of static files would.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::port;
use test_support::port::free_port;
use test_support::process::{self, Background, until};

/// Longer than a browser may take to start on any machine.
const PATIENCE: Duration = Duration::from_secs(600);
/// What a server may be told to send with every page: stricter than it is there is no page with a program.
const POLICY: &str = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Where the page is on its server: anywhere but at the top.
const AT: &str = "/mesh/tools/";
/// The key that WebDriver calls by this character.
pub const TAB: char = '\u{e004}';
pub const ENTER: char = '\u{e007}';
pub const SHIFT: char = '\u{e008}';
pub const CONTROL: char = '\u{e009}';
pub const SPACE: char = ' ';
pub const RIGHT: char = '\u{e014}';

/// A server of static files.
pub struct Server {
    port: u16,
    asked: Arc<Mutex<BTreeSet<String>>>,
}

impl Server {
    /// Serves the page that `make page` has made.
    pub fn start() -> Result<Self> {
        let folder = env::var_os("PAGE").context("PAGE names no folder; make page sets it")?;
        let folder = fs::canonicalize(folder).context("PAGE is not a folder")?;
        let asked: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let heard = Arc::clone(&asked);
        Ok(Self { port: port::serve(move |stream| serve(&stream, &folder, &heard))?, asked })
    }

    /// The address of a page.
    pub fn url(&self, page: &str) -> String {
        format!("http://127.0.0.1:{}{AT}{page}", self.port)
    }

    /// Everything that was asked for so far, as the first lines of the requests.
    pub fn asked(&self) -> BTreeSet<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Answers one request. A browser that goes away meanwhile is not a problem.
fn serve(stream: &TcpStream, folder: &Path, asked: &Mutex<BTreeSet<String>>) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    // The rest of the head must be read before the answer.
    let _ = lines.take_while(|line| !line.is_empty()).count();
    asked.lock().unwrap_or_else(PoisonError::into_inner).insert(first.clone());
    let path = first.split(' ').nth(1).and_then(|path| path.strip_prefix(AT));
    let file = path
        .map(|path| folder.join(path))
        .filter(|file| !path.is_some_and(|path| path.contains("..")) && file.is_file());
    let (status, body) = match file.as_ref().and_then(|file| fs::read(file).ok()) {
        Some(body) => ("200 OK", body),
        None => ("404 Not Found", Vec::new()),
    };
    let kind = match file.as_ref().and_then(|file| file.extension()).and_then(|ending| ending.to_str()) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css",
        Some("js") => "text/javascript",
        Some("json") => "application/json",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        Some("wasm") => "application/wasm",
        _ => "text/plain",
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nContent-Security-Policy: {POLICY}\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let mut stream = stream;
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

/// A browser with one window.
pub struct Browser {
    port: u16,
    session: String,
    driver: Background,
    _folder: TempDir,
}

impl Browser {
    /// Starts one.
    pub fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let port = free_port()?;
        let mut command = process::command("chromedriver", [format!("--port={port}")]);
        // What it keeps goes with the folder.
        command.env("HOME", folder.path()).env("TMPDIR", folder.path());
        let driver = Background::start("chromedriver", &command, &folder.path().join("log"))?;
        until("chromedriver", PATIENCE, &[&driver], || Ok(request(port, "GET", "/status", None).ok()))?;
        let data = folder.path().join("data");
        let arguments = [
            "--headless=new",
            // Tests run as root, and open nothing but the project's own pages.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            // It would ignore those who ask much in a short time.
            "--disable-ipc-flooding-protection",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            &format!("--user-data-dir={}", data.display()),
        ];
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments, "binary": "/usr/bin/chromium"},
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": 600_000, "pageLoad": 300_000},
        }}});
        let made = request(port, "POST", "/session", Some(&wanted)).with_context(|| driver.tail())?;
        let session = made["sessionId"].as_str().context("a session")?.to_owned();
        Ok(Self { port, session, driver, _folder: folder })
    }

    /// Loads a page, and waits until its program has answered what its address asks.
    pub fn ask(&self, url: &str) -> Result<()> {
        // The same page with another fragment would not be loaded again.
        self.open("about:blank")?;
        self.open(url)?;
        until("the page's answer", PATIENCE, &[&self.driver], || {
            let state = self.script("return document.body.dataset.state ?? ''", &[])?;
            ensure!(state != "stopped", "the page's program has stopped");
            Ok((state == "answered").then_some(()))
        })
        .with_context(|| self.script("return document.body.innerText", &[]).unwrap_or_default().to_string())
    }

    /// Loads a page.
    pub fn open(&self, url: &str) -> Result<()> {
        self.command("POST", "/url", &json!({"url": url})).map(drop)
    }

    /// Runs a script in the page.
    pub fn script(&self, script: &str, arguments: &[Value]) -> Result<Value> {
        self.command("POST", "/execute/sync", &json!({"script": script, "args": arguments}))
    }

    /// Runs one that calls the last of its arguments when it is done.
    pub fn waiting_script(&self, script: &str, arguments: &[Value]) -> Result<Value> {
        self.command("POST", "/execute/async", &json!({"script": script, "args": arguments}))
    }

    /// Waits until a script returns true.
    pub fn until(&self, what: &str, script: &str) -> Result<()> {
        until(what, PATIENCE, &[&self.driver], || {
            Ok((self.script(script, &[])? == Value::Bool(true)).then_some(()))
        })
    }

    /// Sends a command of the browser's own protocol.
    pub fn devtools(&self, command: &str, parameters: &Value) -> Result<Value> {
        self.command("POST", "/goog/cdp/execute", &json!({"cmd": command, "params": parameters}))
    }

    /// Presses keys one after the other, holding down `held`.
    pub fn press(&self, held: Option<char>, keys: &str) -> Result<()> {
        let key = |kind: &str, key: char| json!({"type": kind, "value": key});
        let mut actions: Vec<Value> = held.into_iter().map(|held| key("keyDown", held)).collect();
        actions.extend(keys.chars().flat_map(|one| [key("keyDown", one), key("keyUp", one)]));
        actions.extend(held.into_iter().map(|held| key("keyUp", held)));
        let keyboard = json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]});
        self.command("POST", "/actions", &keyboard).map(drop)
    }

    /// Makes the window this wide and high, for light or dark surroundings.
    pub fn surroundings(&self, width: u32, height: u32, scheme: &str) -> Result<()> {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.devtools("Emulation.setDeviceMetricsOverride", &size)?;
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.devtools("Emulation.setEmulatedMedia", &json!({"features": features})).map(drop)
    }

    /// What went wrong in the pages so far, as the console shows it: refused scripts and styles, missing files, errors of scripts.
    pub fn complaints(&self) -> Result<Vec<String>> {
        let all = self.command("POST", "/se/log", &json!({"type": "browser"}))?;
        let all = all.as_array().context("a log")?.iter();
        Ok(all.filter(|entry| entry["level"] != "INFO").map(ToString::to_string).collect())
    }

    fn command(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        request(self.port, method, &format!("/session/{}{path}", self.session), Some(body))
            .with_context(|| format!("{method} {path}"))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser is not a child of ours: the driver ends it.
        let _ = request(self.port, "DELETE", &format!("/session/{}", self.session), None);
    }
}

/// One request of WebDriver, and the value of its answer.
fn request(port: u16, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let body = body.map(ToString::to_string).unwrap_or_default();
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    )?;
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        ensure!(reader.read_line(&mut line)? > 0, "no answer");
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(text) = line.strip_prefix("content-length:") {
            length = text.trim().parse()?;
        }
    }
    let mut answer = vec![0; length];
    reader.read_exact(&mut answer)?;
    let answer: Value = serde_json::from_slice(&answer)?;
    let value = answer.get("value").cloned().context("an answer of WebDriver")?;
    ensure!(value.get("error").is_none(), "{}: {}", value["error"], value["message"]);
    Ok(value)
}

/// Where pictures for the documentation go, if they are wanted.
pub fn pictures() -> Option<PathBuf> {
    env::var_os("PAGE_PICTURES").map(PathBuf::from)
}
