#!/usr/bin/env bash
# Makes what a release consists of, from a tagged commit: programs, images, lists of their parts, the chart, and what says where they are from
# (docs/internals/releasing.md). Publishes nothing.
#
#   release-candidate.sh check           whether this commit can be released: says everything that speaks against it
#   release-candidate.sh make FOLDER     checks, also what scripts/release-check.sh does, makes it in a folder that is not there yet, verifies it
#   release-candidate.sh verify FOLDER   whether a folder is whole, unchanged, and of one version and commit. Needs no source and no compiler, but jq.
#
# ARCHITECTURES="amd64 arm64" are those in it. PROGRAMS_AMD64 and PROGRAMS_ARM64 name folders of programs that are built already, by scripts/release.sh
# of this commit; otherwise they are built here. BUILDER is the URI of who builds, for the provenance. PROGRAMS_DARWIN_AMD64 and PROGRAMS_DARWIN_ARM64
# name folders with kubectl-redirect as a Mac has built it (cargo build --release -p kubectl-redirect). DOWNLOADS is the URL under which the folder will
# be, for krew's manifest. DOCUMENTATION_URL is the one under which this commit's `docs` is read, for the links in messages and alerts; by default this
# version's tree of the repository.
set -euo pipefail

programs="istio-cni istio-iptables istio-validation install-cni redirectctl"
# For laptops, in archives of its own.
plugin=kubectl-redirect
images="install-cni proxy-init validator"
usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
}

# What speaks against it, all of it, before anything is published.
problems=()
problem() { problems+=("$*"); }
judge() {
    [ ${#problems[@]} -eq 0 ] || {
        printf 'release-candidate.sh: %s\n' "${problems[@]}" >&2
        exit 1
    }
}

# The version that the workspace says it has.
version() { sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml; }

# same WHERE IS WANTED
same() { [ "$2" = "$3" ] || problem "$1 says ${2:-nothing}, and Cargo.toml $3"; }

check() {
    local version file name said tag
    version=$(version)
    [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || problem "Cargo.toml: the workspace's version is ${version:-missing}"
    tag=v$version
    [ -z "$(git status --porcelain --untracked-files=normal)" ] ||
        problem "the tree has changes that are not committed; no one else can build from it"
    if ! git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null; then
        problem "tag $tag not found"
    elif [ "$(git rev-parse "$tag^{commit}")" != "$(git rev-parse HEAD)" ]; then
        problem "the tag $tag is another commit than this"
    fi
    for name in redirect-core netfilter-state packet-trace xtables-read netns-apply; do
        said=$(sed -n "s/^$name = { path = .*version = \"\(.*\)\" }\$/\1/p" Cargo.toml)
        same "Cargo.toml's dependency on $name" "$said" "$version"
    done
    for name in $programs $plugin redirect-core netfilter-state packet-trace xtables-read netns-apply; do
        said=$(grep -A 1 -Fx "name = \"$name\"" Cargo.lock | sed -n 's/^version = "\(.*\)"$/\1/p')
        same "Cargo.lock's $name" "$said" "$version"
    done
    for name in version appVersion; do
        same "the chart's $name" "$(sed -n "s/^$name: *//p" deploy/charts/istio-cni/Chart.yaml)" "$version"
    done
    while IFS=: read -r file name said; do
        same "$file's image $name" "$said" "$version"
    done < <(git grep -hoEn "(${images// /|}):[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.-]*" -- deploy README.md docs | sort -u | while IFS=: read -r _ name said; do
        git grep -lF "$name:$said" -- deploy README.md docs | while read -r file; do printf '%s:%s:%s\n' "$file" "$name" "${said%.}"; done
    done | sort -u)
    grep -q "^## \[\?$version\]\?\( \|\$\)" CHANGELOG.md || problem "CHANGELOG.md has no heading $version"
    said=$(sed -n '/^## Unreleased/,/^## [^U]/p' CHANGELOG.md | grep -c '^- ' || true)
    [ "$said" = 0 ] || problem "CHANGELOG.md has $said entries under Unreleased, which belong to $version or to no release"
    grep -q "^| ${version%.*} |" SECURITY.md || problem "SECURITY.md does not say whether ${version%.*} is supported"
    judge
}

# A compressed archive of what is in a folder, whose bytes depend on that and on the date alone.
pack() {
    local folder=$1 archive=$2 date=$3
    # By their names: Helm reads no archive whose names begin with a dot.
    # shellcheck disable=SC2046 # a list of names without spaces
    tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=go=u,go-w --mtime="@$date" --directory "$folder" $(ls "$folder") | gzip --no-name --best >"$archive"
}

# An archive of kubectl-redirect from a folder, as krew unpacks it.
pack_plugin() {
    local built=$1 archive=$2 date=$3
    rm -rf "$work/$plugin"
    mkdir "$work/$plugin"
    cp "$built/$plugin" LICENSE "$work/$plugin/"
    pack "$work/$plugin" "$archive" "$date"
}

# The repository's address, if it has a public one: a URL may hold credentials, and a path is local.
source_url() {
    local source
    source=$(git config --get remote.origin.url || true)
    [[ ! $source =~ ^https://[^@]*$ ]] || echo "${source%.git}"
}

# krew's manifest, with the archives of kubectl-redirect that are in a folder.
krew() {
    local folder=$1 version=$2 source file platform
    source=$(source_url)
    source=${source:-https://example.com/sidecar-cni}
    sed -e '/^#/d' -e "s|HOMEPAGE|$source|" -e "/^spec:/a\\  version: v$version" deploy/krew/redirect.yaml
    echo "  platforms:"
    for file in "$folder/$plugin-$version"-*.tar.gz; do
        platform=$(basename "$file" .tar.gz)
        platform=${platform#"$plugin-$version-"}
        cat <<PLATFORM
    - selector: {matchLabels: {os: ${platform%-*}, arch: ${platform#*-}}}
      uri: ${DOWNLOADS:-$source/releases/download/v$version}/$(basename "$file")
      sha256: $(sha256sum "$file" | cut -d ' ' -f 1)
      bin: $plugin
PLATFORM
    done
}

make_all() {
    local folder=$1 version commit date architecture triple built source
    version=$(version) commit=$(git rev-parse HEAD) date=$(git log -1 --format=%ct)
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/out"
    source=$(source_url)
    export DOCUMENTATION_URL=${DOCUMENTATION_URL:-${source:+$source/tree/v$version}}
    for architecture in ${ARCHITECTURES:-amd64 arm64}; do
        case $architecture in
        amd64) triple=x86_64-unknown-linux-musl built=${PROGRAMS_AMD64:-} ;;
        arm64) triple=aarch64-unknown-linux-musl built=${PROGRAMS_ARM64:-} ;;
        *) problem "$architecture is neither amd64 nor arm64"; judge ;;
        esac
        # shellcheck disable=SC2086 # a list of programs
        [ -n "$built" ] || built=$(TARGET=$triple scripts/release.sh $programs $plugin | tail -n 1)
        mkdir -p "$work/$architecture"
        for program in $programs; do cp "$built/$program" "$work/$architecture/"; done
        cp LICENSE "$work/$architecture/"
        pack "$work/$architecture" "$work/out/sidecar-cni-$version-linux-$architecture.tar.gz" "$date"
        pack_plugin "$built" "$work/out/$plugin-$version-linux-$architecture.tar.gz" "$date"
    done
    for architecture in amd64 arm64; do
        built=PROGRAMS_DARWIN_${architecture^^}
        [ -z "${!built:-}" ] || pack_plugin "${!built}" "$work/out/$plugin-$version-darwin-$architecture.tar.gz" "$date"
    done
    krew "$work/out" "$version" >"$work/out/redirect.yaml"
    PROGRAMS_AMD64=$work/amd64 PROGRAMS_ARM64=$work/arm64 SOURCE_REVISION=$commit SOURCE_DATE_EPOCH=$date \
        deploy/build-images.sh --for "$(tr ' ' , <<<"${ARCHITECTURES:-amd64 arm64}")" "$work/out" >&2
    mkdir -p "$work/chart"
    # The chart as Helm packs it, without its tests' values; Helm's own archive would have the time of day in it.
    git archive HEAD deploy/charts/istio-cni | tar --extract --directory "$work/chart" --strip-components=2 --exclude=deploy/charts/istio-cni/ci
    # Where its alerts link to.
    [ -z "$DOCUMENTATION_URL" ] || echo "home: $DOCUMENTATION_URL" >>"$work/chart/istio-cni/Chart.yaml"
    pack "$work/chart" "$work/out/istio-cni-$version.tgz" "$date"
    provenance "$work/out" "$version" "$commit" >"$work/provenance.json"
    mv "$work/provenance.json" "$work/out/"
    (cd "$work/out" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
    verify "$work/out"
    # All of it or nothing: a folder of this name is whole.
    mkdir -p "$(dirname "$folder")"
    cp -r "$work/out" "$folder.part" && mv "$folder.part" "$folder"
    echo "$folder"
}

# What was built, of what, by what: an in-toto statement with SLSA's provenance as its predicate. Not signed: the publisher signs it.
provenance() {
    local folder=$1 version=$2 commit=$3 source
    source=$(source_url)
    (cd "$folder" && sha256sum -- *) | jq --raw-input --null-input \
        --arg version "$version" --arg commit "$commit" --arg source "${source:-unknown}" --arg builder "${BUILDER:-urn:sidecar-cni:by-hand}" \
        --arg rustc "$(rustc -V)" --arg cargo "$(cargo -V)" --arg architectures "${ARCHITECTURES:-amd64 arm64}" '
        {
          _type: "https://in-toto.io/Statement/v1",
          subject: [inputs | capture("^(?<sum>[0-9a-f]{64}) [ *](?<name>.*)$") | {name, digest: {sha256: .sum}}],
          predicateType: "https://slsa.dev/provenance/v1",
          predicate: {
            buildDefinition: {
              buildType: "urn:sidecar-cni:release-candidate:v1",
              externalParameters: {ref: "refs/tags/v\($version)", architectures: ($architectures | split(" "))},
              internalParameters: {rustc: $rustc, cargo: $cargo},
              resolvedDependencies: [{uri: "git+\($source)@refs/tags/v\($version)", digest: {gitCommit: $commit}}]
            },
            runDetails: {builder: {id: $builder}}
          }
        }'
}

verify() {
    local folder=$1 version commit name file said list
    cd "$folder"
    for name in SHA256SUMS provenance.json; do [ -f "$name" ] || problem "$name is missing"; done
    judge
    sha256sum --check --strict --quiet SHA256SUMS 2>&1 || problem "the files differ from SHA256SUMS"
    # Nothing beside what is listed, in either list.
    said=$(sed 's/^[0-9a-f]* [ *]//' SHA256SUMS | sort)
    [ "$said" = "$(find . -type f ! -name SHA256SUMS -printf '%P\n' | sort)" ] || problem "SHA256SUMS does not list exactly these files"
    [ "$(jq -r '.subject[] | "\(.digest.sha256)  \(.name)"' provenance.json | sort)" = "$(grep -v ' [ *]provenance\.json$' SHA256SUMS | sort)" ] ||
        problem "provenance.json is about other files than SHA256SUMS"
    [ "$(jq -r '._type + " " + .predicateType' provenance.json)" = "https://in-toto.io/Statement/v1 https://slsa.dev/provenance/v1" ] ||
        problem "provenance.json is not a provenance"
    version=$(jq -r '.predicate.buildDefinition.externalParameters.ref | ltrimstr("refs/tags/v")' provenance.json)
    commit=$(jq -r '.predicate.buildDefinition.resolvedDependencies[0].digest.gitCommit' provenance.json)
    for name in $(jq -r '.predicate.buildDefinition.externalParameters.architectures[]' provenance.json); do
        file=sidecar-cni-$version-linux-$name.tar.gz
        [ -f "$file" ] || { problem "$file is missing"; continue; }
        list=$(tar --list --gzip --file "$file")
        for said in $programs LICENSE; do
            grep -qx "$said" <<<"$list" || problem "$file has no $said"
        done
        [ -f "$plugin-$version-linux-$name.tar.gz" ] || problem "$plugin-$version-linux-$name.tar.gz is missing"
    done
    for file in "$plugin-$version"-*.tar.gz; do
        [ -f "$file" ] || continue
        [ "$(tar --list --gzip --file "$file" | sort)" = "$(printf '%s\n' "$plugin" LICENSE | sort)" ] || problem "$file is not $plugin and its licence"
        grep -A 1 "/$file\$" redirect.yaml 2>/dev/null | grep -q "sha256: $(sha256sum "$file" | cut -d ' ' -f 1)\$" || problem "redirect.yaml does not name $file with its sum"
    done
    file=istio-cni-$version.tgz
    if [ -f "$file" ]; then
        said=$(tar --extract --gzip --to-stdout --file "$file" istio-cni/Chart.yaml | sed -n 's/^version: *//p')
        [ "$said" = "$version" ] || problem "$file holds version $said of the chart"
    else
        problem "$file is missing"
    fi
    for name in $images; do
        [ -f "$name.tar" ] || { problem "$name.tar is missing"; continue; }
        said=$(tar --extract --to-stdout --file "$name.tar" index.json | jq -r '[.manifests[].annotations // {} | .["org.opencontainers.image.ref.name"] // .["io.containerd.image.name"] // empty] | first')
        [ "${said##*:}" = "$version" ] || problem "$name.tar is version ${said##*:}, and the provenance's is $version"
        for file in "$name".*.cdx.json; do
            [ -f "$file" ] || problem "$name has no list of its parts"
        done
    done
    # No early end: who writes into the pipe would fail.
    [ ! -f install-cni.tar ] || said=$(tar --extract --to-stdout --file install-cni.tar | grep -ac "\"org.opencontainers.image.revision\":\"$commit\"" || true)
    [ "$said" != 0 ] || problem "install-cni.tar is not of commit $commit"
    judge
    echo "release-candidate.sh: version $version of commit $commit is whole" >&2
}

case ${1:-} in
check)
    [ $# -eq 1 ] || usage
    cd "$(dirname "$0")/.." && check
    echo "v$(version) can be released"
    ;;
make)
    [ $# -eq 2 ] || usage
    folder=$(realpath --canonicalize-missing "$2")
    [ ! -e "$folder" ] && [ ! -e "$folder.part" ] || { problem "$folder or $folder.part is there already"; judge; }
    cd "$(dirname "$0")/.." && check && scripts/release-check.sh >&2 && make_all "$folder"
    ;;
verify)
    [ $# -eq 2 ] || usage
    verify "$2"
    ;;
*) usage ;;
esac
