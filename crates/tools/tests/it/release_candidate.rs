//! What `scripts/release-candidate.sh` refuses, in a clone with the scripts of this tree: commits that are not release, and folders that are not what was made.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use test_support::project;

const SCRIPT: &str = "scripts/release-candidate.sh";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn run(folder: &Path, program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).current_dir(folder).env("GIT_CONFIG_GLOBAL", "/dev/null");
    for (name, value) in [("NAME", "Nobody"), ("EMAIL", "nobody@example.com")] {
        command.env(format!("GIT_AUTHOR_{name}"), value).env(format!("GIT_COMMITTER_{name}"), value);
    }
    command.output().expect("starts")
}

fn ok(folder: &Path, program: &str, args: &[&str]) -> String {
    let output = run(folder, program, args);
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// A clone whose commit can be released.
struct Release(TempDir);

impl Release {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let from = project::file("").canonicalize().expect("the project").display().to_string();
        ok(folder.path(), "git", &["clone", "--quiet", "--no-tags", "--shared", &from, "."]);
        let release = Self(folder);
        // As they are in this tree, which may not be committed.
        for file in [SCRIPT, "SECURITY.md"] {
            fs::copy(project::file(file), release.path(file)).expect("copies");
        }
        let changes = fs::read_to_string(release.path("CHANGELOG.md")).expect("reads");
        let heading = format!("## Unreleased\n\n## {VERSION} - 2026-11-22\n");
        fs::write(release.path("CHANGELOG.md"), changes.replacen("## Unreleased\n", &heading, 1))
            .expect("writes");
        release.git(&["add", "--all"]);
        release.git(&["commit", "--quiet", "--message", "a release"]);
        release.git(&["tag", &format!("v{VERSION}")]);
        release
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn git(&self, args: &[&str]) {
        ok(self.0.path(), "git", args);
    }

    /// Replaces the first of a text in a file.
    fn edit(&self, file: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(file)).expect("reads");
        assert!(text.contains(from), "{file} has no {from:?}");
        fs::write(self.path(file), text.replacen(from, to, 1)).expect("writes");
    }

    /// What speaks against it; nothing, where it can be released.
    fn refusals(&self) -> Vec<String> {
        let output = run(self.0.path(), SCRIPT, &["check"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(i32::from(!said.is_empty())), "{said}");
        said.lines().map(str::to_owned).collect()
    }
}

#[test]
fn a_tagged_clean_commit_of_one_version_can_be_released_and_no_other() {
    let release = Release::new();
    assert_eq!(release.refusals(), [""; 0]);

    fs::write(release.path("left-over"), "").expect("writes");
    let refusals = release.refusals();
    assert!(refusals.len() == 1 && refusals[0].contains("changes that are not committed"), "{refusals:?}");
    fs::remove_file(release.path("left-over")).expect("removes");

    release.git(&["commit", "--quiet", "--allow-empty", "--message", "one more"]);
    let refusals = release.refusals();
    assert!(refusals.len() == 1 && refusals[0].contains("is another commit than this"), "{refusals:?}");

    release.git(&["tag", "--delete", &format!("v{VERSION}")]);
    let refusals = release.refusals();
    assert!(
        refusals.len() == 1 && refusals[0].contains(&format!("tag v{VERSION} not found")),
        "{refusals:?}"
    );
}

#[test]
fn every_version_that_differs_is_named_at_once() {
    let release = Release::new();
    let chart = "deploy/charts/istio-cni/Chart.yaml";
    release.edit(chart, &format!("\nversion: {VERSION}"), "\nversion: 9.9.1");
    release.edit(chart, &format!("\nappVersion: {VERSION}"), "\nappVersion: 9.9.2");
    release.edit("README.md", &format!("install-cni:{VERSION}"), "install-cni:9.9.3");
    release.edit("deploy/istio-cni-node.yaml", &format!("install-cni:{VERSION}"), "install-cni:9.9.4");
    let lock = |name: &str, version: &str| format!("name = \"{name}\"\nversion = \"{version}\"");
    release.edit("Cargo.lock", &lock("install-cni", VERSION), &lock("install-cni", "9.9.5"));
    let core = |version: &str| format!("path = \"redirect-core\", version = \"{version}\"");
    release.edit("Cargo.toml", &core(VERSION), &core("9.9.6"));
    release.edit("CHANGELOG.md", &format!("## {VERSION} "), "## 9.9.7 ");
    release.edit("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n- Something.\n");
    let (minor, _) = VERSION.rsplit_once('.').expect("a version");
    release.edit("SECURITY.md", &format!("| {minor} |"), "| 9.9 |");
    let refusals = release.refusals();
    for words in [
        "changes that are not committed",
        "the chart's version says 9.9.1",
        "the chart's appVersion says 9.9.2",
        "README.md's image install-cni says 9.9.3",
        "deploy/istio-cni-node.yaml's image install-cni says 9.9.4",
        "Cargo.lock's install-cni says 9.9.5",
        "dependency on redirect-core says 9.9.6",
        &format!("CHANGELOG.md has no heading {VERSION}"),
        "1 entries under Unreleased",
        "SECURITY.md does not say",
    ] {
        assert!(refusals.iter().any(|refusal| refusal.contains(words)), "{words:?} is not in {refusals:#?}");
    }
    assert_eq!(refusals.len(), 10, "{refusals:#?}");
}

/// A folder of the shape that `make` gives it, with files of a few bytes.
const MADE: &str = r#"
version=$1 commit=$2
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
for architecture in amd64 arm64; do
    mkdir "$work/$architecture"
    for program in istio-cni istio-iptables istio-validation install-cni redirectctl LICENSE; do echo x >"$work/$architecture/$program"; done
    tar -C "$work/$architecture" -czf "sidecar-cni-$version-linux-$architecture.tar.gz" $(ls "$work/$architecture")
    file=kubectl-redirect-$version-linux-$architecture.tar.gz
    mkdir -p "$work/plugin" && echo x >"$work/plugin/kubectl-redirect" && echo x >"$work/plugin/LICENSE"
    tar -C "$work/plugin" -czf "$file" kubectl-redirect LICENSE
    printf '      uri: https://example.com/%s\n      sha256: %s\n' "$file" "$(sha256sum "$file" | cut -d ' ' -f 1)" >>redirect.yaml
done
mkdir -p "$work/chart/istio-cni" && echo "version: $version" >"$work/chart/istio-cni/Chart.yaml"
tar -C "$work/chart" -czf "istio-cni-$version.tgz" istio-cni
for name in install-cni proxy-init validator; do
    mkdir -p "$work/$name/blobs/sha256"
    echo "{\"annotations\":{\"org.opencontainers.image.revision\":\"$commit\"}}" >"$work/$name/blobs/sha256/1"
    echo "{\"manifests\":[{\"annotations\":{\"org.opencontainers.image.ref.name\":\"$version\"}}]}" >"$work/$name/index.json"
    (cd "$work/$name" && tar -cf - index.json blobs/sha256/1) >"$name.tar"
    for architecture in amd64 arm64; do echo '{}' >"$name.$architecture.cdx.json"; done
done
sha256sum -- * | jq -Rn --arg version "$version" --arg commit "$commit" '{
    _type: "https://in-toto.io/Statement/v1", predicateType: "https://slsa.dev/provenance/v1",
    subject: [inputs | {name: .[66:], digest: {sha256: .[:64]}}],
    predicate: {buildDefinition: {externalParameters: {ref: "refs/tags/v\($version)", architectures: ["amd64", "arm64"]},
        resolvedDependencies: [{digest: {gitCommit: $commit}}]}}}' >"$work/provenance.json"
mv "$work/provenance.json" .
sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .
"#;

fn made(version_of_images: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let script = MADE.replace("ref.name\\\":\\\"$version", &format!("ref.name\\\":\\\"{version_of_images}"));
    ok(folder.path(), "bash", &["-euc", &script, "made", VERSION, COMMIT]);
    folder
}

/// What is wrong with a copy of such a folder after something was done to it.
fn wrongs_after(made: &TempDir, done: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    ok(made.path(), "cp", &["--archive", ".", &folder.path().display().to_string()]);
    ok(folder.path(), "bash", &["-euc", done]);
    let program = project::file(SCRIPT).canonicalize().expect("the script");
    let made = folder.path().display().to_string();
    let output = run(Path::new("/"), &program.display().to_string(), &["verify", &made]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), said.contains("is whole"), "{said}");
    said
}

#[test]
fn a_folder_that_is_not_what_was_made_is_refused() {
    let made_well = made(VERSION);
    let whole = wrongs_after(&made_well, ":");
    assert!(whole.contains(&format!("version {VERSION} of commit {COMMIT} is whole")), "{whole}");
    let sums = "sha256sum -- $(ls | grep -v SHA256SUMS) >../SHA256SUMS.$$; mv ../SHA256SUMS.$$ SHA256SUMS";
    for (done, words) in [
        ("echo y >>proxy-init.tar", "the files differ from SHA256SUMS"),
        ("echo y >more", "does not list exactly these files"),
        ("rm SHA256SUMS", "SHA256SUMS is missing"),
        ("rm validator.tar", "validator.tar is missing"),
        ("rm kubectl-redirect-*-linux-arm64.tar.gz", "linux-arm64.tar.gz is missing"),
        (&format!("sed -i 's/sha256: ./sha256: x/' redirect.yaml; {sums}"), "redirect.yaml does not name"),
        // With sums that were made again, the provenance tells.
        (&format!("echo y >>proxy-init.tar; {sums}"), "about other files than SHA256SUMS"),
        (
            &format!("sed -i s/{COMMIT}/{}/ provenance.json; {sums}", COMMIT.replace('0', "f")),
            "install-cni.tar is not of commit",
        ),
        (
            &format!("sed -i s,slsa.dev/provenance,example.com/other, provenance.json; {sums}"),
            "is not a provenance",
        ),
    ] {
        let said = wrongs_after(&made_well, done);
        assert!(said.contains(words), "{done}: {words:?} is not in {said}");
    }
    let said = wrongs_after(&made("9.9.9"), ":");
    assert!(said.contains("install-cni.tar is version 9.9.9"), "{said}");
}
