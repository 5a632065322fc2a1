//! A stand-in for the kubelets of many nodes: it answers `exec` as the API server asks for it, with what a test says.
//!
//! The API server speaks SPDY/3.1 with a kubelet (`k8s.io/apimachinery/pkg/util/httpstream/spdy`): it upgrades the request, opens one stream
//! for each of error, standard output and standard error, in this order, and reads them to their ends. Of the first comes the status.

pub mod kubelet;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use e2e::http::HttpRequest;
use e2e::kube::{ApiServer, Identity};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

/// The chart's objects by which the agents of a namespace are known. Returns the owners that their pods name.
pub fn make_fleet(api: &ApiServer, namespace: &str) -> Result<Value> {
    let labels = json!({"k8s-app": "istio-cni-node"});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "istio-cni", "labels": {"app": "istio-cni"}},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "istio-cni"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}]});
    // On no node: a test makes the pods itself.
    let spec = json!({"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
        "nodeSelector": {"of": "none"}, "containers": [{"name": "install-cni", "image": "hub/install-cni:0.1.0"}]}}});
    let set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "spec": spec,
        "metadata": {"name": "istio-cni-node", "namespace": namespace}});
    api.create(&binding)?;
    let uid = api.create(&set)?["metadata"]["uid"].clone();
    Ok(
        json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "istio-cni-node", "uid": uid, "controller": true}]),
    )
}

/// A program that a test runs in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// `NAMESPACE/NAME/CONTAINER`.
    pub container: String,
    /// The program and its words.
    pub words: Vec<String>,
}

/// What becomes of a call.
#[derive(Clone, Debug)]
pub enum Reply {
    /// The program ends with these outputs and this exit code.
    Ended { stdout: Vec<u8>, stderr: String, code: u8 },
    /// It cannot be started.
    Refused(&'static str),
    /// It does not end.
    Silent,
}

impl Reply {
    pub fn ended(stdout: impl Into<Vec<u8>>, code: u8) -> Self {
        Self::Ended { stdout: stdout.into(), stderr: String::new(), code }
    }

    /// The status that the kubelet sends at the end.
    fn status(&self) -> Option<Value> {
        Some(match self {
            Self::Ended { code: 0, .. } => json!({"metadata": {}, "status": "Success"}),
            Self::Ended { code, .. } => {
                json!({"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                "message": format!("command terminated with non-zero exit code: exit code {code}"),
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]}})
            }
            Self::Refused(why) => {
                json!({"metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500, "message": why})
            }
            Self::Silent => return None,
        })
    }
}

/// The kubelet of as many nodes as name its port.
pub struct Kubelets {
    pub port: u16,
    calls: Arc<Mutex<Vec<Call>>>,
    open: Arc<Open>,
}

/// Calls that have no answer yet.
#[derive(Default)]
struct Open {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Kubelets {
    /// Serves until the test ends.
    pub fn start(
        identity: &Identity,
        answer: impl Fn(&Call) -> Reply + Send + Sync + 'static,
    ) -> Result<Self> {
        let certificate = CertificateDer::from_pem_file(&identity.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&identity.key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key)?);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let kubelets =
            Self { port: listener.local_addr()?.port(), calls: Arc::default(), open: Arc::default() };
        let (answer, calls, open) =
            (Arc::new(answer), Arc::clone(&kubelets.calls), Arc::clone(&kubelets.open));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, answer, calls) = (Arc::clone(&config), Arc::clone(&answer), Arc::clone(&calls));
                let open = Arc::clone(&open);
                thread::spawn(move || {
                    // A client that goes away is not the test's concern; one that gets no answer fails it.
                    let now = open.now.fetch_add(1, Ordering::SeqCst) + 1;
                    open.most.fetch_max(now, Ordering::SeqCst);
                    let _ = serve(stream, config, answer.as_ref(), &calls, &open);
                });
            }
        });
        Ok(kubelets)
    }

    /// How many calls had no answer at the same time, at most.
    pub fn most_at_once(&self) -> usize {
        self.open.most.load(Ordering::SeqCst)
    }

    /// What was run so far.
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn serve(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    answer: &(impl Fn(&Call) -> Reply + ?Sized),
    calls: &Mutex<Vec<Call>>,
    open: &Open,
) -> Result<()> {
    let mut stream = StreamOwned::new(ServerConnection::new(config)?, stream);
    let call = call(&HttpRequest::read(&mut stream)?.context("no request")?)?;
    calls.lock().unwrap_or_else(PoisonError::into_inner).push(call.clone());
    let upgrade = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                   X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";
    stream.write_all(upgrade.as_bytes())?;
    let reply = answer(&call);
    let (stdout, stderr) = match &reply {
        Reply::Ended { stdout, stderr, .. } => (stdout.as_slice(), stderr.as_bytes()),
        Reply::Refused(_) | Reply::Silent => (&[][..], &[][..]),
    };
    let Some(status) = reply.status() else { return hold(&mut stream) };
    // Before the end is sent: then the next call may come.
    open.now.fetch_sub(1, Ordering::SeqCst);
    let streams = [opened(&mut stream, true)?, opened(&mut stream, false)?, opened(&mut stream, false)?];
    for (id, bytes) in
        [(streams[1], stdout), (streams[2], stderr), (streams[0], status.to_string().as_bytes())]
    {
        send(&mut stream, id, bytes)?;
    }
    hold(&mut stream)
}

/// Reads until the other side has had enough.
fn hold(stream: &mut impl Read) -> Result<()> {
    while stream.read(&mut [0; 4096])? > 0 {}
    Ok(())
}

/// Of `POST /exec/NAMESPACE/POD/CONTAINER?command=redirectctl&command=scan&error=1&output=1 HTTP/1.1`.
fn call(request: &HttpRequest) -> Result<Call> {
    let container = request.path().strip_prefix("/exec/").with_context(|| request.head.clone())?;
    let words = request.query().split('&').filter_map(|pair| pair.strip_prefix("command=")).map(unescaped);
    Ok(Call { container: container.to_owned(), words: words.collect::<Result<_>>()? })
}

fn unescaped(text: &str) -> Result<String> {
    let mut bytes = Vec::new();
    let mut parts = text.split('%');
    bytes.extend(parts.next().unwrap_or_default().replace('+', " ").bytes());
    for part in parts {
        let (code, rest) = part.split_at_checked(2).context("an escape without its digits")?;
        bytes.push(u8::from_str_radix(code, 16)?);
        bytes.extend(rest.replace('+', " ").bytes());
    }
    Ok(String::from_utf8(bytes)?)
}

const SYN_STREAM: u8 = 1;
const SYN_REPLY: u8 = 2;
const FIN: u8 = 1;
/// The compressed form of no headers: a stored block, and an empty one that makes the reader pass it on. The first is behind the beginning
/// of a zlib stream with SPDY's dictionary.
const ZLIB_BEGINS: [u8; 6] = [0x78, 0xbb, 0xe3, 0xc6, 0xa7, 0xc2];
const NO_HEADERS: [u8; 14] = [0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// Waits for the next stream that is opened, and accepts it.
fn opened(stream: &mut (impl Read + Write), is_first: bool) -> Result<u32> {
    loop {
        let mut head = [0; 8];
        stream.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body)?;
        // A control frame of version 3.
        if head[0] != 0x80 || head[3] != SYN_STREAM {
            continue;
        }
        let Some(id) = body.first_chunk::<4>().copied() else { bail!("a stream without an identifier") };
        let mut reply = id.to_vec();
        reply.extend(ZLIB_BEGINS.iter().filter(|_| is_first));
        reply.extend(NO_HEADERS);
        stream.write_all(&[0x80, 3, 0, SYN_REPLY, 0, 0, 0, u8::try_from(reply.len())?])?;
        stream.write_all(&reply)?;
        return Ok(u32::from_be_bytes(id));
    }
}

/// Sends all bytes of a stream, and ends it.
fn send(stream: &mut impl Write, id: u32, bytes: &[u8]) -> Result<()> {
    for part in bytes.chunks(16 << 10) {
        frame(stream, id, 0, part)?;
    }
    frame(stream, id, FIN, &[])?;
    Ok(stream.flush()?)
}

fn frame(stream: &mut impl Write, id: u32, flags: u8, bytes: &[u8]) -> Result<()> {
    stream.write_all(&id.to_be_bytes())?;
    let mut length = u32::try_from(bytes.len())?.to_be_bytes();
    length[0] = flags;
    stream.write_all(&length)?;
    Ok(stream.write_all(bytes)?)
}
