//! The programs and charts of one release of Istio, in a folder that the caller names.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use e2e::image::Image;
use e2e::node::Node;
use e2e::tools;
use e2e::ztunnel::stock;
use test_support::process::{self, SHORT};
use test_support::project;

/// The hub that the injector is given.
pub const HUB: &str = "docker.io/istio";

/// A release of Istio: `bin`, `manifests/charts` and `envoy_bootstrap.json` in one folder.
#[derive(Debug)]
pub struct Release {
    folder: PathBuf,
    version: String,
}

impl Release {
    /// The release in the folder that ISTIO names.
    pub fn named() -> Result<Self> {
        Self::of_variable("ISTIO")
    }

    /// The release in the folder that ISTIO_NEXT names: what the other is upgraded to.
    pub fn next() -> Result<Self> {
        Self::of_variable("ISTIO_NEXT")
    }

    fn of_variable(variable: &str) -> Result<Self> {
        let folder = std::env::var_os(variable)
            .with_context(|| format!("{variable} names no folder: run make mesh"))?;
        // Relative to the workspace, where make runs, and not to this package, where cargo runs tests.
        let folder = project::file(folder);
        for part in [
            "bin/pilot-discovery",
            "bin/pilot-agent",
            "bin/install-cni",
            "bin/istio-cni",
            "manifests/charts/istio-control/istio-discovery/Chart.yaml",
            "manifests/charts/istio-cni/Chart.yaml",
            "manifests/charts/base/files/crd-all.gen.yaml",
            "envoy_bootstrap.json",
        ] {
            ensure!(folder.join(part).exists(), "{variable}={} has no {part}", folder.display());
        }
        let folder = folder.canonicalize()?;
        let mut version = process::command(folder.join("bin/pilot-discovery"), ["version", "--short"]);
        let version = process::run(&mut version, SHORT)?.ok()?.stdout;
        let version = version.split_whitespace().last().context("pilot-discovery tells no version")?;
        Ok(Self { version: version.to_owned(), folder })
    }

    /// Its version, such as `1.30.3`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Whether it is 1.31 or newer.
    pub fn is_1_31_or_newer(&self) -> bool {
        let minor = self.version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
        minor.is_some_and(|minor| minor >= 31)
    }

    /// One of its programs.
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// A file or folder below its charts.
    pub fn chart(&self, path: &str) -> PathBuf {
        self.folder.join("manifests/charts").join(path)
    }

    /// The image of sidecars, under the name that the injector writes: the release's `pilot-agent` and a stock Envoy, and iptables, which `pilot-agent` runs to
    /// check rules.
    pub fn import_proxy(&self, node: &Node<'_>) -> Result<()> {
        let folders = ["var/lib/istio/data", "etc/istio/proxy", "etc/istio/pod"];
        let image = Image::new(&self.proxy_image()).with_busybox()?;
        let image = folders.into_iter().fold(image, Image::folder);
        let bootstrap = std::fs::read(self.folder.join("envoy_bootstrap.json"))?;
        let image = image
            .program("usr/local/bin/pilot-agent", &self.program("pilot-agent"))?
            .linked_program("usr/local/bin/envoy", &tools::built("envoy")?)?
            .file("var/lib/istio/envoy/envoy_bootstrap_tmpl.json", bootstrap, 0o644)
            // What the pod's hooks call is looked up in PATH.
            .link("bin/pilot-agent", "/usr/local/bin/pilot-agent")
            .entrypoint(&["/usr/local/bin/pilot-agent"]);
        node.import(&with_iptables(image)?)
    }

    /// The name of that image.
    pub fn proxy_image(&self) -> String {
        self.image("proxyv2")
    }

    /// The whole name of an image that goes by its name alone.
    pub fn image(&self, name: &str) -> String {
        format!("{HUB}/{name}:{}", self.version)
    }

    /// The image of Istio's own agent.
    pub fn import_agent(&self, node: &Node<'_>) -> Result<()> {
        let image = Image::new(&self.agent_image())
            .with_busybox()?
            .folder("usr/local/bin")
            .program("bin/install-cni", &self.program("install-cni"))?
            .program("opt/cni/bin/istio-cni", &self.program("istio-cni"))?
            .entrypoint(&["/bin/install-cni"]);
        node.import(&with_iptables(image)?)
    }

    /// An image of the ztunnel that the caller names.
    pub fn import_ztunnel(&self, node: &Node<'_>) -> Result<()> {
        let program = Path::new(&stock::program()?).to_owned();
        let image = Image::new(&self.image("ztunnel")).linked_program("usr/local/bin/ztunnel", &program)?;
        node.import(&image.entrypoint(&["/usr/local/bin/ztunnel"]))
    }

    /// The name of the agent's image.
    pub fn agent_image(&self) -> String {
        self.image("install-cni")
    }
}

/// This machine's iptables, both kinds, with the modules that rules of a sidecar need.
fn with_iptables(mut image: Image) -> Result<Image> {
    let modules = modules_of_iptables()?;
    for program in ["xtables-nft-multi", "xtables-legacy-multi"] {
        image =
            image.linked_program(&format!("usr/sbin/{program}"), &Path::new("/usr/sbin").join(program))?;
    }
    let inside = modules.to_string_lossy().trim_start_matches('/').to_owned();
    for entry in std::fs::read_dir(&modules)? {
        let path = entry?.path();
        let name = path.file_name().context("a module has a name")?.to_string_lossy().into_owned();
        image = image.program(&format!("{inside}/{name}"), &path)?;
    }
    for family in ["iptables", "ip6tables"] {
        for (kind, program) in [("nft", "xtables-nft-multi"), ("legacy", "xtables-legacy-multi")] {
            for verb in ["", "-save", "-restore"] {
                image = image.link(&format!("bin/{family}-{kind}{verb}"), &format!("/usr/sbin/{program}"));
            }
        }
        for verb in ["", "-save", "-restore"] {
            image = image.link(&format!("bin/{family}{verb}"), "/usr/sbin/xtables-nft-multi");
        }
    }
    Ok(image)
}

fn modules_of_iptables() -> Result<PathBuf> {
    let places =
        ["/usr/lib/x86_64-linux-gnu/xtables", "/usr/lib/aarch64-linux-gnu/xtables"].map(PathBuf::from);
    places
        .into_iter()
        .find(|place| place.exists())
        .context("no modules of iptables: run scripts/setup-apt.sh")
}
