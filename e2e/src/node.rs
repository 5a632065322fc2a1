//! A real node: containerd and kubelet, alone with static pods or joined to an API server.
//!
//! The node has a network, mount and process-id namespace of its own. It sees the machine's files, except that `/run`, `/var/lib` and `/var/log`
//! are its own and empty; its network has one interface of its own and no way out; killing its first process ends everything in it.
//! So the machine is left as it was, and pod networks cannot clash with the machine's.
//!
//! Paths below the node's work folder ([`Node::conf_dir`] and so on) are the same inside and outside.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http;
use crate::image::Image;
use crate::kube::ApiServer;
use crate::tools;
use crate::traffic::Relay;
use test_support::leftovers::temp_dir;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Background, Output, SHORT, until};

mod config;
mod crio;
mod host;
mod pod;

#[doc(hidden)]
pub use host::init_in_helper;
pub use pod::{APP_PORT, GREETING, Pod, plain_pod, sidecar_pod};

pub(crate) use host::Host;

/// How long a part of the node may take to start on a busy machine.
const START: Duration = Duration::from_secs(180);
/// The conflist of the node's primary network.
pub const PRIMARY_CONFLIST: &str = "10-podnet.conflist";
/// Where the kubelet serves the list of its pods, without authentication, on the node's loopback.
const KUBELET_READ_ONLY_PORT: u16 = 10255;
/// Where it serves everything else.
const KUBELET_PORT: u16 = 10250;

/// Which container runtime a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// Debian's, of version 1. It knows nothing of STATUS.
    Debian,
    /// One of version 2, with plugins that know CNI 1.1.0: `scripts/setup-kube.sh runtimes` builds it.
    Containerd2,
    /// CRI-O, from the folder that CRIO names.
    Crio,
}

impl Runtime {
    /// A program of it.
    fn program(self, name: &str) -> Result<PathBuf> {
        match self {
            Self::Debian => Ok(name.into()),
            Self::Containerd2 => tools::built(&format!("containerd2/{name}")),
            Self::Crio => crio::program(name),
        }
    }

    /// A reference plugin, in the version that goes with it.
    fn plugin(self, name: &str) -> Result<PathBuf> {
        match (self, name) {
            (Self::Containerd2 | Self::Crio, "bridge" | "host-local") => tools::built(name),
            (Self::Debian | Self::Containerd2 | Self::Crio, _) => {
                Ok(Path::new(crate::cnitool::DEBIAN_PLUGINS).join(name))
            }
        }
    }
}

/// A node. A machine runs one at a time: starting waits until the node of any other test is gone.
#[derive(Debug)]
pub struct Node<'a> {
    // Dropped in this order.
    kubelet: Mutex<Option<Background>>,
    containerd: RwLock<Background>,
    _relay: Option<Relay>,
    host: Host,
    folder: TempDir,
    _turn: File,
    name: String,
    runtime: Runtime,
    families: Families,
    api: Option<&'a ApiServer>,
}

impl Node<'static> {
    /// A node without an API server: it runs the static pods of its manifest folder.
    pub fn standalone() -> Result<Self> {
        Self::standalone_of(Families::Dual)
    }

    /// The same with addresses of these families alone, for itself and its pods.
    pub fn standalone_of(families: Families) -> Result<Self> {
        Self::start(Runtime::Debian, families, None)
    }
}

impl<'a> Node<'a> {
    /// A node of a cluster. Pods are created at the API server. The server is reached at its own address also from inside the node,
    /// and from pods at the gateway 10.88.0.1.
    pub fn joined(api: &'a ApiServer) -> Result<Self> {
        Self::joined_with(Runtime::Debian, api)
    }

    /// The same with another containerd.
    pub fn joined_with(runtime: Runtime, api: &'a ApiServer) -> Result<Self> {
        Self::start(runtime, Families::Dual, Some(api))
    }

    fn start(runtime: Runtime, families: Families, api: Option<&'a ApiServer>) -> Result<Self> {
        let turn = wait_for_turn()?;
        let folder = temp_dir()?;
        for part in ["net.d", "bin", "manifests", "state", "pod-logs", "plugins"] {
            fs::create_dir(folder.path().join(part))?;
        }
        let host = Host::start(folder.path(), families)?;
        let name = host.name().to_owned();
        let relay = api.map(|api| Relay::start(host.namespace(), api.port())).transpose()?;
        config::write_all(folder.path(), &name, api)?;
        let containerd = RwLock::new(start_runtime(runtime, &host, folder.path())?);
        let kubelet = Mutex::new(None);
        let node = Self {
            kubelet,
            containerd,
            _relay: relay,
            host,
            folder,
            _turn: turn,
            name,
            runtime,
            families,
            api,
        };
        for plugin in ["bridge", "host-local", "loopback", "portmap"] {
            node.install_plugin(&runtime.plugin(plugin)?)?;
        }
        node.write_conf(PRIMARY_CONFLIST, &node.primary_conflist())?;
        node.import(&Image::pause()?)?;
        node.import(&Image::busybox()?)?;
        node.start_kubelet()?;
        Ok(node)
    }

    /// Its name in the cluster, and the suffix of its static pods' names.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's network namespace; pods are reached from here.
    pub fn namespace(&self) -> &Namespace {
        self.host.namespace()
    }

    /// Where containerd looks for network configurations.
    pub fn conf_dir(&self) -> PathBuf {
        self.folder.path().join("net.d")
    }

    /// Where containerd looks for CNI plugins.
    pub fn bin_dir(&self) -> PathBuf {
        self.folder.path().join("bin")
    }

    /// Where the kubelet looks for static pods.
    pub fn manifest_dir(&self) -> PathBuf {
        self.folder.path().join("manifests")
    }

    /// A folder for files that the node and the test share.
    pub fn state_dir(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Gives the node a seccomp profile, for pods that name it as `localhostProfile`.
    pub fn write_seccomp_profile(&self, name: &str, profile: &str) -> Result<()> {
        let folder = self.folder.path().join("kubelet/seccomp");
        fs::create_dir_all(&folder)?;
        Ok(fs::write(folder.join(name), profile)?)
    }

    /// A file of the node as this process can open it, also below the node's own `/run`, `/var/lib` and `/var/log`.
    /// A symbolic link with an absolute target, such as `/var/run`, leads out of it.
    pub fn file(&self, path: &str) -> PathBuf {
        self.host.root().join(path.trim_start_matches('/'))
    }

    /// The conflist the node starts with: one bridge, 10.88.0.0/24 and fd88::/64, as far as the node has these families. A test appends its plugin to `plugins`.
    pub fn primary_conflist(&self) -> Value {
        config::primary_conflist(&self.folder.path().join("state"), self.families)
    }

    /// Puts a configuration into the configuration folder, at once and whole. containerd takes the first file by name and notices
    /// changes by itself, soon but not at once: see [`Node::configure`].
    pub fn write_conf(&self, file: &str, content: &Value) -> Result<()> {
        // In the folder itself: containerd 1.6 takes no notice of a file that is moved in from elsewhere.
        let temporary = self.conf_dir().join(format!("{file}.new"));
        fs::write(&temporary, serde_json::to_vec_pretty(content)?)?;
        fs::rename(temporary, self.conf_dir().join(file)).with_context(|| format!("cannot write {file}"))
    }

    /// Copies an executable into the plugin folder, at once and whole.
    pub fn install_plugin(&self, program: &Path) -> Result<()> {
        let name = program.file_name().with_context(|| format!("{} names no file", program.display()))?;
        let temporary = self.folder.path().join("plugin.new");
        fs::copy(program, &temporary).with_context(|| format!("cannot read {}", program.display()))?;
        fs::rename(temporary, self.bin_dir().join(name)).context("cannot install the plugin")
    }

    /// Writes a configuration with [`Node::write_conf`] and waits until containerd has loaded it.
    pub fn configure(&self, file: &str, content: &Value) -> Result<()> {
        let before = self.loads(file);
        self.write_conf(file, content)?;
        until("containerd to load the network configuration", START, &[&self.containerd()], || {
            Ok((self.loads(file) > before).then_some(()))
        })
    }

    /// Makes the node more like others, for as long as the value lives: the folders of network configurations and plugins are in `/etc/cni/net.d` and
    /// `/opt/cni/bin` as well, and the API server is at its address in the service network, which the kubelet passes to containers.
    pub fn as_usual(&self) -> Result<Relay> {
        self.host.make_writable(self.folder.path(), &[Path::new("/etc"), Path::new("/opt")])?;
        let script = r#"mkdir -p /etc/cni/net.d /opt/cni/bin && mount --bind "$0" /etc/cni/net.d && mount --bind "$1" /opt/cni/bin"#;
        let mut bind = process::command("sh", ["-ec", script]);
        bind.arg(self.conf_dir()).arg(self.bin_dir());
        self.run(&bind)?.ok()?;
        self.namespace().add_address("lo", "10.96.0.1/32")?;
        let api = self.api.context("the node is alone")?;
        Relay::between(self.namespace(), 443, api.port())
    }

    /// Lets the node reach a server on a port of this machine's loopback, at the same address, for as long as the value lives.
    pub fn reach(&self, port: u16) -> Result<Relay> {
        self.reach_at(port, port)
    }

    /// The same at another port of the node.
    pub fn reach_at(&self, inside: u16, port: u16) -> Result<Relay> {
        Relay::between(self.namespace(), inside, port)
    }

    /// A command that runs on the node: in its network, mount and process-id namespaces.
    pub fn command(&self, command: &Command) -> Command {
        self.host.command(command)
    }

    /// Runs a command on the node to its end; an exit code other than 0 is not an error.
    pub fn run(&self, command: &Command) -> Result<Output> {
        process::run(&mut self.command(command), SHORT)
    }

    /// Runs containerd's client; an exit code other than 0 is an error.
    pub fn ctr(&self, args: &[&str]) -> Result<Output> {
        self.try_ctr(args)?.ok()
    }

    fn try_ctr(&self, args: &[&str]) -> Result<Output> {
        let socket = config::socket(self.folder.path());
        let mut command =
            process::command(self.runtime.program("ctr")?, ["-a", &socket.to_string_lossy(), "-n", "k8s.io"]);
        self.run(command.args(args))
    }

    /// Gives the node an image. Pods must use it with `imagePullPolicy: Never`.
    pub fn import(&self, image: &Image) -> Result<()> {
        let archive = self.folder.path().join("image.tar");
        image.write(File::create(&archive)?)?;
        match self.runtime {
            Runtime::Debian | Runtime::Containerd2 => {
                self.ctr(&["images", "import", &archive.to_string_lossy()])?
            }
            Runtime::Crio => {
                self.run(&crio::import_command(self.folder.path(), &archive, image.reference())?)?.ok()?
            }
        };
        fs::remove_file(archive).context("cannot remove the image archive")
    }

    /// Starts a pod given as its object: at the API server, on this node, or as a static pod. Returns at once.
    pub fn start_pod(&self, pod: &Value) -> Result<Pod<'_>> {
        let metadata = &pod["metadata"];
        let name = metadata["name"].as_str().context("the pod has no name")?;
        let namespace = metadata["namespace"].as_str().unwrap_or("default");
        if let Some(api) = self.api {
            let mut pod = pod.clone();
            pod["spec"]["nodeName"] = json!(self.name);
            api.create(&pod)?;
            return Ok(Pod::new(self, namespace, name, None));
        }
        let (temporary, manifest) = (
            self.folder.path().join("manifest.new"),
            self.manifest_dir().join(format!("{namespace}_{name}.json")),
        );
        fs::write(&temporary, pod.to_string())?;
        fs::rename(temporary, &manifest)?;
        Ok(Pod::new(self, namespace, &format!("{name}-{}", self.name), Some(manifest)))
    }

    /// A pod that exists already, by the name it has on the node.
    pub fn pod(&self, namespace: &str, name: &str) -> Pod<'_> {
        Pod::new(self, namespace, name, None)
    }

    /// All pods of the node as the kubelet sees them, with their status.
    pub fn pods(&self) -> Result<Vec<Value>> {
        let kubelet = (Ipv4Addr::LOCALHOST, KUBELET_READ_ONLY_PORT);
        let (status, text) = self.namespace().enter(|| http::get(kubelet, "/pods", SHORT))??;
        ensure!(status == 200, "the kubelet answers {status}: {text}");
        let mut list: Value = serde_json::from_str(&text).context("the kubelet answers no JSON")?;
        Ok(serde_json::from_value(list["items"].take()).unwrap_or_default())
    }

    /// Ends the kubelet and starts it again. Its pods run on.
    pub fn restart_kubelet(&self) -> Result<()> {
        self.kubelet.lock().unwrap_or_else(PoisonError::into_inner).take();
        // What was killed is the program that entered the node; the kubelet dies with it, perhaps a moment later.
        let ports = format!("sport = :{KUBELET_PORT} or sport = :{KUBELET_READ_ONLY_PORT}");
        let listeners = process::command("ss", ["-Hltn", &ports]);
        until("the kubelet's ports to be free", START, &[], || {
            Ok(self.namespace().run(&listeners)?.ok()?.stdout.is_empty().then_some(()))
        })?;
        self.start_kubelet()
    }

    /// Kills containerd and starts it again. Containers run on; whatever it was at, such as a plugin, dies with it.
    pub fn restart_containerd(&self) -> Result<()> {
        self.restart_containerd_as(self.runtime)
    }

    /// Likewise, with another one in its place. It takes over the containers of those before it as far as it knows their form.
    pub fn restart_containerd_as(&self, runtime: Runtime) -> Result<()> {
        let mut containerd = self.containerd.write().unwrap_or_else(PoisonError::into_inner);
        containerd.signal(Signal::SIGKILL)?;
        containerd.wait(START)?;
        *containerd = start_runtime(runtime, &self.host, self.folder.path())?;
        Ok(())
    }

    /// What a reboot does: every process dies, without a word, and what is in memory is forgotten: `/run`, the containers, the interfaces.
    /// `boot` happens before containerd and the kubelet start again. Files on disk stay, as do pods of the API server.
    pub fn reboot(&self, boot: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut kubelet = self.kubelet.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut containerd = self.containerd.write().unwrap_or_else(PoisonError::into_inner);
        // All of this process-id namespace but its first process.
        self.host.kill_all()?;
        for process in kubelet.iter().chain([&*containerd]) {
            process.wait(START)?;
        }
        kubelet.take();
        self.run(&process::command("sh", ["-ec", &self.forget_script()]))?.ok()?;
        boot()?;
        *containerd = start_runtime(self.runtime, &self.host, self.folder.path())?;
        drop(containerd);
        self.start_kubelet()
    }

    /// Takes away what memory held: mounts, `/run`, containerd's state, the bridge and what hangs on it. Mounts of the machine that the node's
    /// own `/run` covers are listed as well, and are out of reach. A veth may be gone before it is deleted: with the namespace of its other end.
    fn forget_script(&self) -> String {
        let folder = self.folder.path().display();
        format!(
            r"cut -d' ' -f2 /proc/mounts | grep -E '^(/run/|{folder}/(containerd-state|kubelet)/)' | sort -r |
                 while read -r mounted; do umount -l $mounted 2>/dev/null || true; done
             rm -rf /run/* '{folder}/containerd-state'
             ip -o link | sed -n 's/^[0-9]*: \(cni0\|veth[^:@]*\).*/\1/p' |
                 while read -r link; do ip link delete $link || ! ip link show $link || exit 1; done"
        )
    }

    fn containerd(&self) -> RwLockReadGuard<'_, Background> {
        self.containerd.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_kubelet(&self) -> Result<()> {
        let folder = self.folder.path();
        let command =
            self.command(&config::kubelet_command(folder, &self.name, self.families, self.api.is_some())?);
        let kubelet = Background::start("kubelet", &command, &folder.join("kubelet.log"))?.killed_on_drop();
        until("the kubelet to answer", START, &[&kubelet, &self.containerd()], || Ok(self.pods().ok()))?;
        if let Some(api) = self.api {
            until("the node to be registered", START, &[&kubelet], || {
                Ok(api.get("node", "", &self.name).ok())
            })?;
        }
        *self.kubelet.lock().unwrap_or_else(PoisonError::into_inner) = Some(kubelet);
        Ok(())
    }

    /// How often containerd has dealt with a new configuration file of this name. It loads the folder when the temporary file is renamed,
    /// and handles (and ignores) the appearance of the new name after that.
    fn loads(&self, file: &str) -> usize {
        let named = format!("/{file}\\\"");
        let log = self.containerd().log();
        log.lines().filter(|line| line.contains("event from cni conf dir") && line.contains(&named)).count()
    }

    /// The end of the logs of everything that runs on the node.
    fn tails(&self) -> String {
        let kubelet = self.kubelet.lock().unwrap_or_else(PoisonError::into_inner);
        let kubelet = kubelet.as_ref().map(Background::tail).unwrap_or_default();
        format!("{}{kubelet}", self.containerd().tail())
    }
}

/// Configures and starts a runtime.
fn start_runtime(runtime: Runtime, host: &Host, folder: &Path) -> Result<Background> {
    match runtime {
        Runtime::Debian | Runtime::Containerd2 => {
            config::write_containerd(folder, runtime)?;
            start_containerd(runtime, host, folder)
        }
        Runtime::Crio => {
            crio::write(folder)?;
            crio::start(host, folder)
        }
    }
}

fn start_containerd(runtime: Runtime, host: &Host, folder: &Path) -> Result<Background> {
    let command = host.command(&config::containerd_command(&runtime.program("containerd")?, folder));
    let containerd =
        Background::start("containerd", &command, &folder.join("containerd.log"))?.killed_on_drop();
    let socket = config::socket(folder);
    let ctr = runtime.program("ctr")?;
    let mut version = host.command(&process::command(ctr, ["-a", &socket.to_string_lossy(), "version"]));
    until("containerd to answer", START, &[&containerd], || {
        Ok(process::run(&mut version, SHORT)?.status.success().then_some(()))
    })?;
    Ok(containerd)
}

/// The files whose locks are the turns of nodes: two at once, because nodes are heavy.
const TURNS: [&str; 2] = ["kubelet", "kube-scheduler"];

/// Tests take turns with nodes, also those of other processes. The locks are on the node's own programs: nothing is left behind.
fn wait_for_turn() -> Result<File> {
    let files = TURNS.map(|name| tools::built(name).and_then(|path| Ok(File::open(path)?)));
    let files: Vec<File> = files.into_iter().collect::<Result<_>>()?;
    let turn = until("the node of another test to end", Duration::from_secs(900), &[], || {
        for (turn, file) in files.iter().enumerate() {
            match file.try_lock() {
                Ok(()) => return Ok(Some(turn)),
                Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(error)) => bail!("cannot lock {}: {error}", TURNS[turn]),
            }
        }
        Ok(None)
    })?;
    files.into_iter().nth(turn).context("a turn")
}

/// The address of one family out of several.
fn address_of_family(addresses: &[IpAddr], v6: bool) -> Option<IpAddr> {
    addresses.iter().copied().find(|address| address.is_ipv6() == v6)
}
