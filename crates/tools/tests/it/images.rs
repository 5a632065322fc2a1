//! The images: the same programs give the same bytes, and what is written is what the specifications and their readers want.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use flate2::read::GzDecoder;
use oci_spec::image::{Arch, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType, Os};
use serde_json::Value;
use tempfile::{TempDir, tempdir};
use test_support::project;

const REFERENCE: &str = "localhost/mesh/install-cni:9.8.7";
const NAMES: [&str; 3] = ["install-cni", "proxy-init", "validator"];
const PACKAGES: [&str; 5] = ["install-cni", "istio-cni", "istio-iptables", "istio-validation", "redirectctl"];
const AMD64: u16 = 62;
const ARM64: u16 = 183;

/// The shortest program that an image takes: a header for a machine, with as many bytes as asked behind it.
fn program(machine: u16, interpreter: bool, more: usize) -> Vec<u8> {
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    for half in [2, machine] {
        elf.extend(u16::to_le_bytes(half));
    }
    elf.extend(u32::to_le_bytes(1));
    // Where it starts, where its list of segments is, where its list of sections is.
    for place in [0_u64, 64, 0] {
        elf.extend(place.to_le_bytes());
    }
    elf.extend(u32::to_le_bytes(0));
    for half in [64_u16, 56, 1, 64, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    let kind: u32 = if interpreter { 3 } else { 1 };
    elf.extend(kind.to_le_bytes());
    elf.resize(64 + 56 + more, 0);
    elf
}

/// A folder of all programs, as a build on another day by another user leaves them.
fn programs(machine: u16, day: u64, mode: u32) -> TempDir {
    let folder = tempdir().expect("a folder");
    for (index, package) in PACKAGES.iter().enumerate() {
        let path = folder.path().join(package);
        fs::write(&path, program(machine, false, 1000 * (index + 1))).expect("it is written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("it has a mode");
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(day * 86_400);
        File::options().append(true).open(&path).and_then(|file| file.set_modified(time)).expect("a time");
    }
    folder
}

fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_image"));
    command.args(args).env_remove("SOURCE_DATE_EPOCH").env_remove("SOURCE_REVISION");
    command.envs(variables.iter().copied()).output().expect("it runs")
}

fn packed(image: &str, options: &[&str], platforms: &[(&str, &Path)], variables: &[(&str, &str)]) -> Vec<u8> {
    let folder = tempdir().expect("a folder");
    let archive = folder.path().join("image.tar");
    let platforms: Vec<String> =
        platforms.iter().map(|(name, folder)| format!("{name}={}", folder.display())).collect();
    let file = archive.display().to_string();
    let mut args = vec!["pack"];
    args.extend(options);
    args.extend([image, &file, REFERENCE]);
    args.extend(platforms.iter().map(String::as_str));
    let output = run(&args, variables);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = fs::read(&archive).expect("an archive");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "something is left beside it");
    bytes
}

/// Stands in for programs that `deploy/build-images.sh` starts.
struct Stubs(TempDir);

impl Stubs {
    /// Cargo runs the program that is tested here, and puts an empty program where it would build one. Each build is noted.
    fn new() -> Self {
        let stubs = Self(tempdir().expect("a folder"));
        for (machine, triple) in [(AMD64, "x86_64-unknown-linux-musl"), (ARM64, "aarch64-unknown-linux-musl")]
        {
            fs::write(stubs.path(triple), program(machine, false, 0)).expect("it is written");
        }
        let here = stubs.0.path().display();
        let cargo = format!(
            "case $1 in\n\
             run) while [ \"$1\" != -- ]; do shift; done; shift; exec '{}' \"$@\" ;;\n\
             fetch) ;;\n\
             build) while [ \"$1\" != --target ]; do shift; done\n\
                 triple=$2; shift 2; mkdir -p \"$CARGO_TARGET_DIR/$triple/local\"\n\
                 while [ \"$1\" = -p ]; do\n\
                     [ ! -e '{here}/broken-'$2 ] || exit 101\n\
                     cp '{here}'/$triple \"$CARGO_TARGET_DIR/$triple/local/$2\"\n\
                     echo $2 $triple >>'{here}/built'; shift 2\n\
                 done ;;\n\
             *) exec '{}' \"$@\" ;;\nesac",
            env!("CARGO_BIN_EXE_image"),
            env!("CARGO"),
        );
        stubs.write("cargo", &cargo);
        stubs
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, script: &str) {
        fs::write(self.path(name), format!("#!/bin/sh\n{script}\n")).expect("it is written");
        fs::set_permissions(self.path(name), Permissions::from_mode(0o755)).expect("it has a mode");
    }

    /// What was built: each program with its target.
    fn built(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("built")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn build_images(&self, args: &[&str], path: &str, variables: &[(&str, &Path)]) -> Output {
        let mut command = Command::new("/bin/bash");
        command.arg(project::file("deploy/build-images.sh")).args(args);
        let path = format!("{}:{path}", self.0.path().display());
        command.env("PATH", path).env("CARGO_TARGET_DIR", self.path("target"));
        command.envs(variables.iter().copied()).output().expect("it runs")
    }
}

fn usual_path() -> String {
    std::env::var("PATH").expect("a path")
}

/// Where a program is.
fn found(name: &str) -> PathBuf {
    let path = usual_path();
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(name));
    places.find(|path| path.exists()).unwrap_or_else(|| panic!("{name} is missing"))
}

#[test]
fn folders_may_have_spaces_in_their_names() {
    let (folder, stubs) = (tempdir().expect("a folder"), Stubs::new());
    let built = folder.path().join("built here");
    fs::rename(programs(AMD64, 1, 0o755).keep(), &built).expect("it moves");
    let images = folder.path().join("the images");
    let args = ["--for", "amd64", images.to_str().expect("UTF-8")];
    let output = stubs.build_images(&args, &usual_path(), &[("PROGRAMS_AMD64", &built)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(stubs.built(), [""; 0], "these are built already");
    for name in NAMES {
        assert!(images.join(format!("{name}.tar")).is_file(), "{name}");
        assert!(images.join(format!("{name}.amd64.cdx.json")).is_file(), "{name}");
    }
}

/// Compilers and libraries for both architectures, on a machine of amd64.
fn complete() -> Stubs {
    let stubs = Stubs::new();
    let rustc = found("rustc");
    stubs.write(
        "rustc",
        &format!("case $1 in --print) echo / ;; *) exec '{}' \"$@\" ;; esac", rustc.display()),
    );
    stubs.write("uname", "echo x86_64");
    for compiler in ["musl-gcc", "x86_64-linux-gnu-gcc", "aarch64-linux-gnu-gcc", "cc"] {
        stubs.write(compiler, "exit 0");
    }
    stubs
}

/// Minutes and seconds: `0:07`. A machine that does other things may take any number of minutes.
fn is_a_time(text: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.split_once(':').is_some_and(|(minutes, seconds)| {
        is_number(minutes) && is_number(seconds) && seconds.len() == 2 && seconds < "60"
    })
}

#[test]
fn what_the_wanted_images_need_is_built_for_this_machine_or_for_all_and_said() {
    let stubs = complete();
    let images = stubs.path("images");
    let folder = images.to_str().expect("UTF-8");
    let programs_for = |triple: &'static str| PACKAGES.iter().map(move |name| format!("{name} {triple}"));
    let mut amd64: Vec<String> = programs_for("x86_64-unknown-linux-musl").collect();
    amd64.push("kubectl-redirect x86_64-unknown-linux-musl".to_owned());
    amd64.sort();
    let all: Vec<String> = amd64.iter().cloned().chain(programs_for("aarch64-unknown-linux-musl")).collect();
    let validator = ["istio-validation x86_64-unknown-linux-musl".to_owned()];
    for (args, expected, steps) in [
        (vec![folder], &amd64[..], "4 of 4"),
        (vec!["--for", "amd64,arm64", folder], &all, "5 of 5"),
        (vec![folder, "registry.example.com/mesh", "validator"], &validator, "2 of 2"),
    ] {
        let _ = fs::remove_file(stubs.path("built"));
        let output = stubs.build_images(&args, &usual_path(), &[]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{told}");
        let mut built = stubs.built();
        built.sort_by_key(|line| (line.contains("aarch64"), line.clone()));
        assert_eq!(built, expected, "{args:?}");
        let after = told.split_once(&format!("{steps}, after ")).and_then(|(_, rest)| rest.split_once(": "));
        assert!(told.contains("1 of ") && after.is_some_and(|(time, _)| is_a_time(time)), "{told}");
        let plugin = images.join("kubectl-redirect");
        let way =
            format!("kubectl redirect is {0}; kubectl finds it after: sudo install {0} ", plugin.display());
        let last = told.lines().last().expect("lines");
        assert_eq!(last.contains(&way), expected.len() > 1, "{told}");
        assert_eq!(fs::remove_file(&plugin).is_ok(), expected.len() > 1, "{args:?}");
        let archive = Layout(files(&fs::read(images.join("validator.tar")).expect("an archive")));
        for number in 1..steps.split(' ').next().expect("a number").parse().expect("a number") {
            assert_eq!(told.matches(&format!(": {number} of ")).count(), 1, "{told}");
        }
        let single = archive.0.contains_key(Path::new("manifest.json"));
        assert_eq!(single, expected.len() != all.len(), "an archive for one architecture, or for both");
    }
    for broken in ["istio-cni", "istio-validation"] {
        fs::remove_dir_all(&images).expect("it is removed");
        fs::write(stubs.path(&format!("broken-{broken}")), "").expect("it is written");
        let output = stubs.build_images(&[folder], &usual_path(), &[]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let told = String::from_utf8_lossy(&output.stderr);
        let last = "build-images.sh: cannot build the programs for amd64: the reason is above";
        assert_eq!(told.lines().last(), Some(last), "{told}");
        assert_eq!(fs::read_dir(&images).expect("a folder").count(), 0, "{broken}");
        fs::remove_file(stubs.path(&format!("broken-{broken}"))).expect("it is removed");
    }
}

/// rustup refuses a second one of its kind, and cargo needs what it adds.
#[test]
fn a_library_that_is_missing_is_added_once_before_anything_is_built() {
    let stubs = complete();
    let here = stubs.0.path().display().to_string();
    let library = stubs.path("library");
    stubs.write(
        "rustc",
        &format!(
            "case $1 in --print) echo '{}' ;; *) exec '{}' \"$@\" ;; esac",
            library.display(),
            found("rustc").display()
        ),
    );
    stubs.write(
        "rustup",
        &format!(
            "[ ! -e '{here}/built' ] && mkdir '{here}/adds' || {{ echo conflict >&2; exit 1; }}\n\
             echo \"$@\" >>'{here}/added'; mkdir '{here}/library'; rmdir '{here}/adds'"
        ),
    );
    let images = stubs.path("images");
    let output = stubs.build_images(&[images.to_str().expect("UTF-8")], &usual_path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let added = fs::read_to_string(stubs.path("added")).expect("a library");
    assert_eq!(added, "target add x86_64-unknown-linux-musl\n");
}

#[test]
fn everything_that_is_missing_is_said_at_once_before_anything_is_built() {
    let stubs = Stubs::new();
    stubs.write("cargo", &format!("echo started >>'{}'; exit 1", stubs.path("built").display()));
    stubs.write("rustc", "case $* in -vV) echo host: x86_64-unknown-linux-gnu ;; *) echo /nowhere ;; esac");
    stubs.write("uname", "echo x86_64");
    stubs.write("df", "echo Avail; echo 7M");
    let tools = tempdir().expect("a folder");
    for tool in
        ["sed", "head", "tail", "tr", "mkdir", "dirname", "find", "sh", "cat", "wc", "git", "env", "bash"]
    {
        std::os::unix::fs::symlink(found(tool), tools.path().join(tool)).expect("a link");
    }
    let (images, programs) = (stubs.path("images"), tempdir().expect("a folder"));
    let path = tools.path().to_str().expect("UTF-8");
    let folder = images.to_str().expect("UTF-8");
    let output = stubs.build_images(&["--for", "amd64,arm64,riscv64", folder], path, &[]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    for missing in [
        "no standard library for x86_64-unknown-linux-musl, and no rustup to add it: install Rust with rustup",
        "no C compiler for x86_64-unknown-linux-musl: scripts/setup-apt.sh release installs",
        "no standard library for aarch64-unknown-linux-musl",
        "no C compiler for aarch64-unknown-linux-musl: scripts/setup-apt.sh cross installs",
        "riscv64 is neither amd64 nor arm64",
        "no C compiler for this machine",
        "7 MiB are free",
    ] {
        assert_eq!(told.matches(missing).count(), 1, "{missing}\n{told}");
    }
    let output =
        stubs.build_images(&["--for", "amd64", folder], path, &[("PROGRAMS_AMD64", programs.path())]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        told.matches(&format!("{} has no ", programs.path().display())).count(),
        PACKAGES.len(),
        "{told}"
    );
    assert_eq!(stubs.built(), [""; 0]);
}

/// What is in a tar archive: by path; a link is the bytes of its target.
fn files(archive: &[u8]) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(archive).entries().expect("an archive") {
        let mut entry = entry.expect("an entry");
        let header = entry.header().clone();
        let of = (header.mtime().ok(), header.uid().ok(), header.gid().ok());
        assert_eq!(of, (Some(0), Some(0), Some(0)), "{:?}", entry.path());
        let path = entry.path().expect("a path").into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).expect("a file");
        if let Some(target) = header.link_name_bytes() {
            content = target.into_owned();
        }
        files.insert(path, (header.mode().expect("a mode"), content));
    }
    files
}

fn sum(content: &[u8]) -> String {
    let sum = <sha2::Sha256 as sha2::Digest>::digest(content);
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An archive as a runtime reads it.
struct Layout(BTreeMap<PathBuf, (u32, Vec<u8>)>);

impl Layout {
    fn blob(&self, digest: &str) -> &[u8] {
        let (_, content) = &self.0[&Path::new("blobs").join(digest.replace(':', "/"))];
        assert_eq!(digest, format!("sha256:{}", sum(content)));
        content
    }

    fn index(&self) -> ImageIndex {
        ImageIndex::from_reader(&self.0[Path::new("index.json")].1[..]).expect("an index")
    }

    /// What a descriptor names.
    fn content(&self, descriptor: &Descriptor) -> &[u8] {
        let content = self.blob(descriptor.digest().as_ref());
        assert_eq!(descriptor.size(), content.len() as u64, "{descriptor:?}");
        content
    }

    /// The descriptors of the images for all architectures, each with its platform: what a registry is given, and a node chooses from.
    fn platforms(&self) -> Vec<Descriptor> {
        let top = self.index();
        let [named] = &top.manifests()[..] else { panic!("{top:?}") };
        assert_eq!((top.schema_version(), named.media_type()), (2, &MediaType::ImageIndex));
        let index = ImageIndex::from_reader(self.content(named)).expect("an index");
        assert_eq!((index.schema_version(), index.media_type()), (2, &Some(MediaType::ImageIndex)));
        index.manifests().clone()
    }

    /// Holds the index to the architectures, each image to its platform, and all there is to what these name.
    fn check_platforms(&self) {
        let mut named = vec![self.index().manifests()[0].clone()];
        let platforms = self.platforms();
        for (descriptor, (architecture, variant)) in
            platforms.iter().zip([(Arch::Amd64, None), (Arch::ARM64, Some("v8".to_owned()))])
        {
            let platform = descriptor.platform().as_ref().expect("a platform");
            let of = (platform.os(), platform.architecture(), platform.variant());
            assert_eq!(of, (&Os::Linux, &architecture, &variant));
            assert_eq!(*descriptor.media_type(), MediaType::ImageManifest);
            let manifest = ImageManifest::from_reader(self.content(descriptor)).expect("a manifest");
            assert_eq!(
                (manifest.schema_version(), manifest.media_type()),
                (2, &Some(MediaType::ImageManifest))
            );
            assert_eq!(*manifest.config().media_type(), MediaType::ImageConfig);
            let config = ImageConfiguration::from_reader(self.content(manifest.config())).expect("a config");
            assert_eq!((config.os(), config.architecture(), config.variant()), of);
            let [layer] = &manifest.layers()[..] else { panic!("{manifest:?}") };
            assert_eq!(*layer.media_type(), MediaType::ImageLayerGzip);
            self.content(layer);
            named.extend([descriptor.clone(), manifest.config().clone(), layer.clone()]);
        }
        assert_eq!(platforms.len(), 2);
        let blobs = self.0.keys().filter(|path| path.starts_with("blobs")).count();
        assert_eq!(blobs, named.len(), "something is in the archive that nothing names");
    }

    /// Configuration and files of the image that a manifest's descriptor names.
    fn image(&self, digest: &str) -> (ImageConfiguration, BTreeMap<PathBuf, (u32, Vec<u8>)>) {
        let manifest = ImageManifest::from_reader(self.blob(digest)).expect("a manifest");
        let config = self.blob(manifest.config().digest().as_ref());
        assert_eq!(manifest.config().size(), config.len() as u64);
        let config = ImageConfiguration::from_reader(config).expect("a configuration");
        let [layer] = &manifest.layers()[..] else { panic!("{manifest:?}") };
        let blob = self.blob(layer.digest().as_ref());
        let mut content = Vec::new();
        if *layer.media_type() == MediaType::ImageLayerGzip {
            GzDecoder::new(blob).read_to_end(&mut content).expect("a layer");
        } else {
            assert_eq!(*layer.media_type(), MediaType::ImageLayer);
            content.extend(blob);
        }
        assert_eq!(config.rootfs().diff_ids()[..], [format!("sha256:{}", sum(&content))]);
        (config, files(&content))
    }
}

#[test]
fn the_same_programs_give_the_same_bytes() {
    let facts = [("SOURCE_DATE_EPOCH", "1700000000"), ("SOURCE_REVISION", "abc")];
    let (one, other) = (programs(AMD64, 1, 0o755), programs(AMD64, 20_000, 0o700));
    let arm = programs(ARM64, 3, 0o755);
    for image in NAMES {
        let first = packed(image, &[], &[("amd64", one.path()), ("arm64", arm.path())], &facts);
        let second = packed(image, &[], &[("amd64", other.path()), ("arm64", arm.path())], &facts);
        assert!(first == second, "{image} depends on more than its programs");
        fs::write(other.path().join("istio-cni"), program(AMD64, false, 7)).expect("it is written");
    }
    let first = packed("install-cni", &[], &[("amd64", one.path())], &facts);
    let changed = packed("install-cni", &[], &[("amd64", other.path())], &facts);
    assert!(first != changed, "another plugin gives the same image");
}

#[test]
fn an_image_for_two_architectures_is_as_the_specification_has_it() {
    let (amd, arm) = (programs(AMD64, 1, 0o755), programs(ARM64, 1, 0o755));
    let facts = [("SOURCE_DATE_EPOCH", "1700000000"), ("SOURCE_REVISION", "abc")];
    let archive = packed("install-cni", &[], &[("amd64", amd.path()), ("arm64", arm.path())], &facts);
    let layout = Layout(files(&archive));
    assert!(
        !layout.0.contains_key(Path::new("manifest.json")),
        "docker's list has room for one architecture"
    );
    layout.check_platforms();
    let annotations = layout.index().manifests()[0].annotations().clone().expect("annotations");
    assert_eq!(annotations["io.containerd.image.name"], REFERENCE);
    assert_eq!(annotations["org.opencontainers.image.ref.name"], "9.8.7");
    for (descriptor, machine) in layout.platforms().iter().zip([AMD64, ARM64]) {
        let (config, files) = layout.image(descriptor.digest().as_ref());
        let plugin = &files[Path::new("opt/cni/bin/istio-cni")];
        assert_eq!(*plugin, (0o755, program(machine, false, 2000)));
        let labels = config.labels_of_config().expect("labels");
        assert_eq!(labels["org.opencontainers.image.created"], "2023-11-14T22:13:20Z");
        assert_eq!(labels["org.opencontainers.image.revision"], "abc");
        assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
    }
}

/// The programs of an image, by their paths.
fn programs_of(image: &str) -> &'static [&'static str] {
    match image {
        "install-cni" => &["opt/cni/bin/istio-cni", "usr/local/bin/install-cni", "usr/local/bin/redirectctl"],
        "proxy-init" => &["usr/local/bin/istio-iptables"],
        _ => &["usr/local/bin/istio-validation"],
    }
}

/// A list of parts. With the feature `cyclonedx` a library has to find it valid.
fn list_of_parts(text: &[u8]) -> Value {
    #[cfg(feature = "cyclonedx")]
    {
        use cyclonedx_bom::models::bom::{Bom, SpecVersion};
        use cyclonedx_bom::validation::Validate as _;

        let bom = Bom::parse_from_json_v1_5(text).expect("CycloneDX 1.5");
        let result = bom.validate_version(SpecVersion::V1_5);
        assert!(result.passed(), "{result:?}");
    }
    let list: Value = serde_json::from_slice(text).expect("JSON");
    assert_eq!((&list["bomFormat"], &list["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    list
}

/// The part of a list that has a name.
fn part<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    list["components"].as_array().expect("components").iter().find(|part| part["name"] == name)
}

/// The list of parts beside an archive is about the programs that are in it, and names the compiler's standard library.
fn check_list_of_parts(file: &Path, image: &str, files: &BTreeMap<PathBuf, (u32, Vec<u8>)>) {
    let list = list_of_parts(&fs::read(file).expect("a list of parts"));
    for path in programs_of(image) {
        let sum = sum(&files[Path::new(path)].1);
        let listed = part(&list, &format!("/{path}")).expect("a program");
        assert_eq!(listed["hashes"][0]["content"], sum, "{} is about another {path}", file.display());
    }
    let rustc = Command::new("rustc").arg("--version").output().expect("rustc");
    let rustc = String::from_utf8(rustc.stdout).expect("UTF-8");
    let library = part(&list, "rust-std").expect("rust-std");
    assert_eq!(library["version"].as_str(), rustc.split(' ').nth(1));
}

/// The size of an image for amd64 in MiB, as docs/reference/images.md has it.
fn recorded_size(image: &str) -> f64 {
    let page = include_str!("../../../../docs/reference/images.md");
    let row =
        page.lines().find_map(|line| line.strip_prefix(&format!("| `{image}` | "))?.strip_suffix(" MiB |"));
    row.expect("a size").parse().expect("a number")
}

#[test]
#[ignore = "needs the images: make images"]
fn shipped_archives_are_as_the_specification_has_it_and_as_large_as_recorded() {
    let folder = std::env::var_os("IMAGES").expect("IMAGES names the folder of the archives");
    // Relative to the workspace, where make runs, and not to this package, where cargo runs tests.
    let folder = project::file(folder);
    for image in NAMES {
        let layout = Layout(files(&fs::read(folder.join(format!("{image}.tar"))).expect("an archive")));
        layout.check_platforms();
        for (descriptor, name) in layout.platforms().iter().zip(["amd64", "arm64"]) {
            let (_, files) = layout.image(descriptor.digest().as_ref());
            check_list_of_parts(&folder.join(format!("{image}.{name}.cdx.json")), image, &files);
        }
        let amd64 = ImageManifest::from_reader(layout.content(&layout.platforms()[0])).expect("a manifest");
        let kib = u32::try_from(amd64.layers()[0].size() / 1024).expect("a size");
        let (is, recorded) = (f64::from(kib) / 1024.0, recorded_size(image));
        // As the sizes of the programs: 5 %, and what is lost in one decimal.
        assert!((is - recorded).abs() < recorded * 0.05 + 0.05, "{image}: {is:.2} MiB, recorded {recorded}");
    }
}

#[test]
fn each_image_holds_its_programs_and_runs_the_first() {
    let folder = programs(AMD64, 1, 0o755);
    let expected: [(&str, &str, &str, &[&str]); 3] = [
        (
            "install-cni",
            "0:0",
            "/usr/local/bin/install-cni",
            &["opt/cni/bin/istio-cni", "usr/local/bin/install-cni", "usr/local/bin/redirectctl"],
        ),
        (
            "proxy-init",
            "0:0",
            "/usr/local/bin/istio-iptables",
            &["usr/local/bin/istio-iptables", "usr/local/bin/pilot-agent"],
        ),
        (
            "validator",
            "1337:1337",
            "/usr/local/bin/istio-validation",
            &["usr/local/bin/istio-iptables", "usr/local/bin/istio-validation", "usr/local/bin/pilot-agent"],
        ),
    ];
    for (image, user, entrypoint, executables) in expected {
        let archive = packed(image, &["--plain"], &[("amd64", folder.path())], &[]);
        let layout = Layout(files(&archive));
        assert!(layout.0.contains_key(Path::new("manifest.json")), "docker's list");
        let (config, files) = layout.image(layout.index().manifests()[0].digest().as_ref());
        let runs = config.config().clone().expect("what it runs");
        assert_eq!(runs.user().as_deref(), Some(user));
        assert_eq!(runs.entrypoint().clone().unwrap_or_default(), [entrypoint]);
        let found: Vec<&str> = files
            .iter()
            .filter(|(path, (mode, _))| {
                mode & 0o111 != 0 && !files.keys().any(|other| other != *path && other.starts_with(path))
            })
            .filter(|(_, (_, content))| !content.is_empty())
            .map(|(path, _)| path.to_str().expect("a path"))
            .collect();
        assert_eq!(found, executables, "{image}");
        // Who is in the image: those whose names settings may have.
        let passwd = String::from_utf8_lossy(&files[Path::new("etc/passwd")].1).into_owned();
        assert!(passwd.lines().any(|line| line.starts_with("istio-proxy:x:1337:1337:")), "{passwd}");
        assert_eq!(config.created(), &None, "nobody said when");
    }
}

#[test]
fn a_program_that_would_not_run_in_the_image_is_refused() {
    for (content, reason) in [
        (program(AMD64, true, 0), "it needs a loader"),
        (program(ARM64, false, 0), "not for amd64"),
        (b"#!/bin/sh\n".to_vec(), "not a program"),
    ] {
        let folder = programs(AMD64, 1, 0o755);
        fs::write(folder.path().join("istio-validation"), content).expect("it is written");
        let archive = folder.path().join("image.tar");
        let platform = format!("amd64={}", folder.path().display());
        let output = run(&["pack", "validator", &archive.display().to_string(), REFERENCE, &platform], &[]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && told.contains(reason) && told.contains("istio-validation"),
            "{told}"
        );
        assert!(!archive.exists(), "it left a part of an archive");
    }
}

/// What tests pack: programs as cargo builds them, with the files that the loader reads. Shipped images are packed without.
#[test]
fn linked_programs_are_packed_with_their_libraries_where_that_is_asked_for() {
    let (folder, libraries) = (programs(AMD64, 1, 0o755), tempdir().expect("a folder"));
    let linked = program(AMD64, true, 0);
    fs::write(folder.path().join("istio-validation"), &linked).expect("it is written");
    fs::create_dir(libraries.path().join("lib64")).expect("a folder");
    fs::write(libraries.path().join("lib64/ld.so"), program(AMD64, false, 7)).expect("it is written");
    let with = libraries.path().display().to_string();
    let archive = packed("validator", &["--linked", &with], &[("amd64", folder.path())], &[]);
    let layout = Layout(files(&archive));
    let (_, files) = layout.image(layout.index().manifests()[0].digest().as_ref());
    assert_eq!(files[Path::new("usr/local/bin/istio-validation")].1, linked);
    assert_eq!(files[Path::new("lib64/ld.so")], (0o755, program(AMD64, false, 7)));

    fs::write(libraries.path().join("lib64/ld.so"), program(ARM64, false, 7)).expect("it is written");
    let (file, platform) = (folder.path().join("image.tar"), format!("amd64={}", folder.path().display()));
    let output = run(
        &["pack", "--linked", &with, "validator", &file.display().to_string(), REFERENCE, &platform],
        &[],
    );
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && told.contains("ld.so: not for amd64"), "{told}");
}

#[test]
fn what_cannot_be_understood_is_refused() {
    let folder = programs(AMD64, 1, 0o755);
    let platform = format!("amd64={}", folder.path().display());
    let file = folder.path().join("image.tar").display().to_string();
    for (args, reason) in [
        (vec![], "usage"),
        (
            vec!["pack", "pilot", &file, REFERENCE, &platform],
            "pilot is not an image of ours: install-cni, proxy-init, validator",
        ),
        (vec!["pack", "validator", &file, "localhost:5000/validator", &platform], "has no tag"),
        (vec!["pack", "validator", &file, REFERENCE], "no ARCHITECTURE=FOLDER"),
        (vec!["pack", "validator", &file, REFERENCE, "riscv64=/"], "riscv64 is not an architecture of ours"),
    ] {
        let output = run(&args, &[]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && told.contains(reason), "{args:?}: {told}");
    }
    let output = run(&["pack", "validator", &file, REFERENCE, &platform], &[("SOURCE_DATE_EPOCH", "today")]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("SOURCE_DATE_EPOCH: today"), "{output:?}");
}

#[test]
fn the_list_of_parts_names_every_crate_that_is_linked() {
    let folder = programs(AMD64, 1, 0o755);
    let file = folder.path().join("install-cni.cdx.json");
    let platform = format!("amd64={}", folder.path().display());
    let written = || {
        let output = run(&["sbom", "install-cni", &platform, &file.display().to_string()], &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::read(&file).expect("a list")
    };
    let text = written();
    assert!(text == written(), "two runs differ");
    let list = list_of_parts(&text);
    // The agent serves with hyper, both speak TLS with rustls over C of ring; macros and crates of tests are not linked.
    for name in [
        "hyper",
        "rustls",
        "ring",
        "kube-client",
        "redirect-core",
        "rust-std",
        "musl",
        "/opt/cni/bin/istio-cni",
    ] {
        assert!(part(&list, name).is_some(), "{name} is missing");
    }
    for name in ["proptest", "oci-spec", "syn", "serde_derive", "windows-sys"] {
        assert!(part(&list, name).is_none(), "{name} is not linked");
    }
    let ring = part(&list, "ring").expect("ring");
    for field in ["hashes", "licenses", "purl"] {
        assert!(!ring[field].is_null(), "{field} is missing: {ring}");
    }
    // Whatever is listed is there for a reason.
    let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let needed: Vec<Value> =
        array(&list["dependencies"]).iter().flat_map(|one| array(&one["dependsOn"])).collect();
    for part in array(&list["components"]) {
        assert!(needed.contains(&part["bom-ref"]), "nobody needs {part}");
    }
}
