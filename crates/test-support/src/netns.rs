//! Throw-away network namespaces, and what the kernel holds in them.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::fcntl::{Flock, FlockArg};
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::mount::{MsFlags, mount};
use nix::net::if_::InterfaceFlags;
use nix::sched::{CloneFlags, setns, unshare};

use crate::leftovers::{ETC_NETNS, NAMESPACES, fresh_name, remove_namespace};
use crate::parallel::on_a_thread;
use crate::process::{self, Output, SHORT};

mod directory;
mod snapshot;
mod state;

pub use directory::NetnsDirectory;
pub use snapshot::{Snapshot, SnapshotDiff};
pub use state::{Chains, State, Tables};

/// The IPv4 address of a pod's `eth0`.
pub const POD_V4: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
/// The IPv6 address of a pod's `eth0`.
pub const POD_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, 2);
/// The IPv4 address of the client's `eth0` in a [`Topology`], the pod's default gateway.
pub const CLIENT_V4: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
/// The IPv6 address of the client's `eth0` in a [`Topology`], the pod's default gateway.
pub const CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, 1);
/// An IPv4 address on the client's `lo` in a [`Topology`]: to the pod, some service far away.
pub const REMOTE_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// An IPv6 address on the client's `lo` in a [`Topology`]: to the pod, some service far away.
pub const REMOTE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// The hardware address of a pod's `eth0`, of which the kernel makes its link-local address, `fe80::ff:fe00:2`: messages name it.
pub const POD_MAC: &str = "02:00:00:00:00:02";
/// The hardware address of what a pod's `eth0` is connected to.
pub const CLIENT_MAC: &str = "02:00:00:00:00:01";

/// For `ip -batch`.
const LO_UP: &str = "link set lo up\n";

/// Which addresses a namespace's interfaces get. Without IPv6 the kernel's IPv6 is off in the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// IPv4 only.
    V4,
    /// IPv6 only.
    V6,
    /// Both.
    Dual,
}

impl Families {
    /// Each of them, by whether it is IPv6.
    pub fn each(self) -> impl Iterator<Item = bool> {
        let without = match self {
            Self::V4 => Some(true),
            Self::V6 => Some(false),
            Self::Dual => None,
        };
        [false, true].into_iter().filter(move |v6| Some(*v6) != without)
    }

    /// From the letters of the conformance recordings: `4`, `6` or `46`.
    pub fn from_digits(digits: &str) -> Result<Self> {
        match digits {
            "4" => Ok(Self::V4),
            "6" => Ok(Self::V6),
            "46" => Ok(Self::Dual),
            other => Err(anyhow!("families {other:?}: want 4, 6 or 46")),
        }
    }
}

/// A named network namespace with `lo` up. It is deleted when the value is dropped.
#[derive(Debug)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// A namespace that looks like a pod's: `eth0` up with [`POD_V4`]`/24` and [`POD_V6`]`/64`, its peer `pe0` in the
    /// same namespace, so that no packet leaves it. No default route.
    pub fn pod(families: Families) -> Result<Self> {
        let namespace = Self::new(families)?;
        let address = |v6| format!("{}/{}", pod_address(v6), if v6 { 64 } else { 24 });
        namespace.with_eth0(LO_UP, families.each().map(address))?;
        Ok(namespace)
    }

    /// A namespace with nothing but `lo`, up.
    pub fn empty(families: Families) -> Result<Self> {
        let namespace = Self::new(families)?;
        namespace.ip_batch(LO_UP)?;
        Ok(namespace)
    }

    /// A namespace whose `lo` is down. Made here, without starting `ip`: tests make very many.
    fn new(families: Families) -> Result<Self> {
        share_namespaces()?;
        let namespace = Self::named(fresh_name())?;
        // Where duplicates were looked for, an address would be tentative for a second or two.
        let (switches, value) = match families {
            Families::V4 => (&["all/disable_ipv6"][..], "1"),
            Families::V6 | Families::Dual => (&["all/accept_dad", "default/accept_dad"][..], "0"),
        };
        on_a_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("no new network namespace")?;
            namespace.bind(Path::new("/proc/thread-self/ns/net"))?;
            for switch in switches {
                fs::write(format!("/proc/sys/net/ipv6/conf/{switch}"), value)?;
            }
            Ok(namespace)
        })
    }

    /// A name without a namespace. Dropping the value takes it away.
    fn named(name: String) -> Result<Self> {
        let namespace = Self { name };
        File::create(namespace.path())?;
        Ok(namespace)
    }

    /// Makes the name that of an existing network namespace.
    fn bind(&self, existing: &Path) -> Result<()> {
        mount(Some(existing), &self.path(), None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .with_context(|| format!("cannot give {} a name", existing.display()))
    }

    /// Gives an existing network namespace, such as `/proc/PID/ns/net`, a name of its own. Dropping the value takes the name
    /// away; the namespace lives on for its other holders.
    pub fn attach(existing: &Path) -> Result<Self> {
        share_namespaces()?;
        let namespace = Self::named(fresh_name())?;
        namespace.bind(existing)?;
        Ok(namespace)
    }

    /// Gives commands run in the namespace (not closures) a `/etc/resolv.conf` with these name servers.
    pub fn set_nameservers<S: AsRef<str>>(&self, servers: &[S]) -> Result<()> {
        let mut text = String::new();
        for server in servers {
            writeln!(text, "nameserver {}", server.as_ref())?;
        }
        self.set_resolv_conf(&text)
    }

    /// Gives commands run in the namespace (not closures) this `/etc/resolv.conf`.
    pub fn set_resolv_conf(&self, text: &str) -> Result<()> {
        let folder = Path::new(ETC_NETNS).join(&self.name);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("resolv.conf"), text).context("cannot write resolv.conf")
    }

    /// Gives commands run in the namespace (not closures) a `/etc/passwd` and a `/etc/group` with root alone.
    pub fn set_no_users(&self) -> Result<()> {
        let folder = Path::new(ETC_NETNS).join(&self.name);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("passwd"), "root:x:0:0::/root:/bin/sh\n").context("cannot write passwd")?;
        fs::write(folder.join("group"), "root:x:0:\n").context("cannot write group")
    }

    /// Its name for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file, what a CNI runtime passes as CNI_NETNS.
    pub fn path(&self) -> PathBuf {
        Path::new(NAMESPACES).join(&self.name)
    }

    /// A command that runs `command` in the namespace; in a mount namespace of its own where it has files of its own, such as `/etc/resolv.conf`.
    /// Standard streams, user and process group are the caller's to set on the result.
    pub fn command(&self, command: &Command) -> Command {
        if self.has_own_files() {
            process::prefixed(&["ip", "netns", "exec", &self.name], command)
        } else {
            process::prefixed(&["nsenter", &format!("--net={}", self.path().display())], command)
        }
    }

    fn has_own_files(&self) -> bool {
        Path::new(ETC_NETNS).join(&self.name).exists()
    }

    /// Runs a command in the namespace to its end. An exit code other than 0 is not an error; see [`Output::ok`].
    pub fn run(&self, command: &Command) -> Result<Output> {
        if self.has_own_files() {
            return process::run(&mut self.command(command), SHORT);
        }
        self.enter(|| process::run(&mut process::prefixed(&[], command), SHORT))?
    }

    /// Runs a shell script in the namespace; an exit code other than 0 is an error.
    pub fn sh(&self, script: &str) -> Result<Output> {
        self.run(&process::command("sh", ["-euc", script]))?.ok()
    }

    /// Runs a closure on a thread of its own inside the namespace. Sockets it opens stay in the namespace wherever they go.
    /// Only the network namespace is switched: `/etc/resolv.conf` is the machine's. A panic of the closure is passed on.
    pub fn enter<T: Send>(&self, action: impl FnOnce() -> T + Send) -> Result<T> {
        enter(&self.path(), action)
    }

    /// Feeds lines to `ip -batch` in the namespace.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut ip = process::command("ip", ["-batch", "-"]);
        self.enter(|| process::run_with_input(&mut ip, lines, SHORT))??.ok()?;
        Ok(())
    }

    /// Makes an `eth0` that is up, with these addresses. Its peer `pe0` is in the namespace as well, so that no packet leaves it.
    pub fn add_eth0<S: AsRef<str>>(&self, addresses: impl IntoIterator<Item = S>) -> Result<()> {
        self.with_eth0("", addresses)
    }

    /// `before`: further lines for `ip -batch`.
    fn with_eth0<S: AsRef<str>>(&self, before: &str, addresses: impl IntoIterator<Item = S>) -> Result<()> {
        let begin = format!(
            "{before}link add eth0 address {POD_MAC} type veth peer name pe0 address {CLIENT_MAC}\nlink set pe0 up\nlink set eth0 up\n"
        );
        let lines = addresses.into_iter().map(|address| added(address.as_ref(), "eth0"));
        self.ip_batch(&lines.fold(begin, |lines, line| lines + &line))?;
        self.settled_with(&["eth0", "pe0"])
    }

    /// Waits until every IPv6 address has its route: the kernel takes a moment with a new one, and until then routes change by themselves.
    pub fn settled(&self) -> Result<()> {
        self.settled_with(&[])
    }

    /// The same, with the addresses that the kernel gives these links after they have come up.
    fn settled_with(&self, links: &[&str]) -> Result<()> {
        process::until("routes to all addresses", SHORT, &[], || {
            let [addresses, routes] = self.enter(|| {
                ["if_inet6", "ipv6_route"]
                    .map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")))
            })?;
            Ok(has_settled(links, &addresses?, &routes?).then_some(()))
        })
    }

    /// Adds an address (`198.51.100.7/32`, `2001:db8::7/128`) to an interface, usable at once.
    pub fn add_address(&self, interface: &str, address: &str) -> Result<()> {
        self.ip_batch(&added(address, interface))
    }

    /// What the kernel holds in the namespace, without the native nftables tables.
    pub fn state(&self) -> Result<State> {
        State::of(self, false)
    }

    /// Everything the kernel holds in the namespace, from any program.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Snapshot::of(self)
    }

    /// What the kernel holds in the namespace, native nftables tables included.
    pub fn state_with_nft(&self) -> Result<State> {
        State::of(self, true)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove_namespace(&self.name);
    }
}

/// Whether these links have addresses of the kernel's making (`fe80::/10`), and all addresses have routes; of a namespace without IPv6 always.
fn has_settled(links: &[&str], addresses: &str, routes: &str) -> bool {
    let addresses: Vec<Vec<&str>> = addresses.lines().map(|line| line.split_whitespace().collect()).collect();
    let has_own =
        |link: &&str| addresses.iter().any(|address| address[0].starts_with("fe8") && address[5] == *link);
    let has_route = |address: &Vec<&str>| routes.lines().any(|line| is_local_route(line, address[0]));
    addresses.is_empty() || links.iter().all(has_own) && addresses.iter().all(has_route)
}

/// Whether a line of `ipv6_route` is the route that delivers packets to this address.
fn is_local_route(line: &str, address: &str) -> bool {
    /// `RTF_LOCAL`.
    const LOCAL: u32 = 1 << 31;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let flags = fields.get(8).and_then(|flags| u32::from_str_radix(flags, 16).ok());
    fields.first() == Some(&address) && flags.is_some_and(|flags| flags & LOCAL != 0)
}

/// Runs a closure on a thread of its own inside the network namespace of a file, such as `/run/netns/NAME` or `/proc/PID/ns/net`.
pub fn enter<T: Send>(namespace: &Path, action: impl FnOnce() -> T + Send) -> Result<T> {
    let file = File::open(namespace).with_context(|| format!("no namespace {}", namespace.display()))?;
    on_a_thread(|| {
        setns(&file, CloneFlags::CLONE_NEWNET)
            .with_context(|| format!("cannot enter {}", namespace.display()))?;
        Ok(action())
    })
}

/// Makes the folder of named namespaces a mount that is shared, as `ip netns` does it: in other mount namespaces, names come and go with those here.
fn share_namespaces() -> Result<()> {
    let none = None::<&Path>;
    let share = || mount(none, NAMESPACES, none, MsFlags::MS_SHARED | MsFlags::MS_REC, none);
    fs::create_dir_all(NAMESPACES)?;
    if share().is_ok() {
        return Ok(());
    }
    // Not a mount yet. One of the processes that find that makes it one; `ip netns` takes the same lock.
    let _lock = Flock::lock(File::open(NAMESPACES)?, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    if share().is_err() {
        mount(Some(NAMESPACES), NAMESPACES, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
        share()?;
    }
    Ok(())
}

/// A client and a pod, each in a namespace of its own, their `eth0` the two ends of one veth pair.
///
/// The pod's default routes lead to the client, which holds [`REMOTE_V4`] and [`REMOTE_V6`] on its `lo`: what the pod sends anywhere, the client sees.
#[derive(Debug)]
pub struct Topology {
    /// Where connections to the pod come from, and the rest of the world to the pod.
    pub client: Namespace,
    /// The pod.
    pub pod: Namespace,
}

impl Topology {
    /// The two namespaces, connected.
    pub fn new(families: Families) -> Result<Self> {
        let topology = Self { client: Namespace::new(families)?, pod: Namespace::new(families)? };
        let (client, pod) = (&topology.client, &topology.pod);
        let mut of_client = format!(
            "{LO_UP}link add eth0 address {CLIENT_MAC} type veth peer name eth0 netns {} address {POD_MAC}\nlink set eth0 up\n",
            pod.name()
        );
        let mut of_pod = format!("{LO_UP}link set eth0 up\n");
        for v6 in families.each() {
            let (network, host, all) = if v6 { (64, 128, "::/0") } else { (24, 32, "default") };
            of_client += &added(&format!("{}/{network}", client_address(v6)), "eth0");
            of_client += &added(&format!("{}/{host}", remote_address(v6)), "lo");
            of_pod += &added(&format!("{}/{network}", pod_address(v6)), "eth0");
            of_pod += &format!("route add {all} via {}\n", client_address(v6));
        }
        client.ip_batch(&of_client)?;
        pod.ip_batch(&of_pod)?;
        topology.wait_for_carrier()?;
        Ok(topology)
    }

    /// Packets sent while the kernel still brings the link up are lost and sent again a second later.
    fn wait_for_carrier(&self) -> Result<()> {
        for namespace in [&self.client, &self.pod] {
            process::until("eth0 to be up", Duration::from_secs(60), &[], || {
                let is_eth0_up = |link: InterfaceAddress| {
                    link.interface_name == "eth0" && link.flags.contains(InterfaceFlags::IFF_RUNNING)
                };
                #[expect(clippy::disallowed_methods, reason = "glibc's, in tests")]
                let is_up = namespace.enter(|| getifaddrs().map(|mut links| links.any(is_eth0_up)))??;
                Ok(is_up.then_some(()))
            })?;
            namespace.settled_with(&["eth0"])?;
        }
        Ok(())
    }
}

/// The addresses of the pod and the client in a [`Topology`] by family, for tests that run over both.
pub fn pod_address(v6: bool) -> IpAddr {
    if v6 { POD_V6.into() } else { POD_V4.into() }
}

/// See [`pod_address`].
pub fn client_address(v6: bool) -> IpAddr {
    if v6 { CLIENT_V6.into() } else { CLIENT_V4.into() }
}

/// See [`pod_address`]: the service far away.
pub fn remote_address(v6: bool) -> IpAddr {
    if v6 { REMOTE_V6.into() } else { REMOTE_V4.into() }
}

fn added(address: &str, interface: &str) -> String {
    let nodad = if address.contains(':') { " nodad" } else { "" };
    format!("addr add {address} dev {interface}{nodad}\n")
}

#[cfg(test)]
mod tests {
    use super::has_settled;

    const GLOBAL: &str = "fd000000000000000000000000000002 03 40 00 82     eth0\n";
    const OWN: &str = "fe800000000000001830ebfffe6980a0 03 40 20 80     eth0\n";

    /// Such a line for each of these addresses.
    fn routes(addresses: &[&str]) -> String {
        let none = "0".repeat(32);
        let route = |address: &&str| {
            format!("{} 80 {none} 00 {none} 00000000 00000002 00000000 80200001 eth0\n", &address[..32])
        };
        addresses.iter().map(route).collect()
    }

    #[test]
    fn a_namespace_has_settled_when_each_link_has_its_own_address_and_each_address_its_route() {
        let both = [GLOBAL, OWN].concat();
        assert!(has_settled(&["eth0"], &both, &routes(&[GLOBAL, OWN])));
        assert!(!has_settled(&["eth0"], GLOBAL, &routes(&[GLOBAL])));
        assert!(!has_settled(&["eth0"], &both, &routes(&[GLOBAL])));
        assert!(has_settled(&[], GLOBAL, &routes(&[GLOBAL])), "no link is to have one");
        // Without IPv6.
        assert!(has_settled(&["eth0"], "", ""));
    }
}
