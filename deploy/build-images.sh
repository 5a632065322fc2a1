#!/usr/bin/env bash
# Builds the images: archives that `ctr images import`, `podman load` and `skopeo copy oci-archive:` read, and beside each a list of what it is made of
# (CycloneDX). Needs no daemon and no base image. The same programs give the same archives, byte for byte; what is built already is not built again.
#
# usage: deploy/build-images.sh [--for ARCHITECTURES] FOLDER [REGISTRY] [IMAGE...]
#
# All images by default, named localhost/IMAGE:VERSION, for this machine's architecture. --for amd64,arm64 puts both into each archive.
# With all images comes the plugin of kubectl for this machine.
# PROGRAMS_AMD64 and PROGRAMS_ARM64 name folders of programs that are built already, as a release's are by scripts/release.sh;
# those that are built here take half the time, and are larger.
set -euo pipefail

fail() {
    printf 'build-images.sh: %s\n' "$@" >&2
    exit 1
}

usage="usage: deploy/build-images.sh [--for amd64,arm64] FOLDER [REGISTRY] [IMAGE...]"
architectures=$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
plugin=kubectl-redirect plugin_for=$architectures
case ${1:-} in
--for) [ $# -ge 2 ] || fail "$usage"; architectures=${2//,/ }; shift 2 ;;
-*) fail "$1 is not an option" "$usage" ;;
esac
[ $# -ge 1 ] || fail "$usage"
folder=$1 registry=${2:-localhost}
shift $(($# < 2 ? $# : 2))
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
all=(install-cni istio-cni redirectctl istio-iptables istio-validation)

triple_of() {
    case $1 in
    amd64) echo x86_64-unknown-linux-musl ;;
    arm64) echo aarch64-unknown-linux-musl ;;
    *) return 1 ;;
    esac
}

# The folder of an architecture's programs that are built already, if any.
given_for() {
    case $1 in amd64) echo "${PROGRAMS_AMD64:-}" ;; arm64) echo "${PROGRAMS_ARM64:-}" ;; esac
}

# What a first build writes for each architecture, in MiB.
readonly MIB_OF_BUILD=1000

# Everything that would stop this later, each with what to do.
problems() {
    local architecture given program free needed=0 target=${CARGO_TARGET_DIR:-target}
    for architecture in $architectures; do
        if ! triple_of "$architecture" >/dev/null; then
            echo "$architecture is neither amd64 nor arm64: name one of them, or both, with --for"
            continue
        fi
        given=$(given_for "$architecture")
        if [ -z "$given" ]; then
            TARGET=$(triple_of "$architecture") scripts/release.sh --check 2>&1 | sed 's/^release.sh: //' || true
            needed=$((needed + MIB_OF_BUILD))
            continue
        fi
        for program in "${all[@]}"; do
            [ -f "$given/$program" ] || echo "$given has no $program: build it with scripts/release.sh, or name no folder for $architecture"
        done
    done
    command -v cargo >/dev/null || echo "no cargo: install Rust with rustup (https://rustup.rs)"
    command -v cc >/dev/null || echo "no C compiler for this machine: scripts/setup-apt.sh release installs Debian's gcc"
    [ -w "$folder" ] || echo "cannot write into $folder: name another folder"
    while ! [ -d "$target" ]; do target=$(dirname "$target"); done
    # What was built before is there already.
    free=$(df --output=avail --block-size=M "$target" | tail -n 1 | tr -dc 0-9)
    [ -n "$(find "$target" -maxdepth 3 -path '*-musl/local/install-cni' 2>/dev/null)" ] || [ "$free" -ge "$needed" ] ||
        echo "$free MiB are free in $(cd "$target" && pwd), and a first build takes $needed: free some, or name another folder in CARGO_TARGET_DIR"
}

mapfile -t found < <(problems)
[ ${#found[@]} = 0 ] || fail "cannot build:" "${found[@]/#/- }"

# Where the programs are from. A modified tree has a revision that no one else has.
if [ -z "${SOURCE_REVISION:-}" ] && [ -z "$(git status --porcelain 2>/dev/null || echo unknown)" ]; then
    SOURCE_REVISION=$(git rev-parse HEAD) SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
    export SOURCE_REVISION SOURCE_DATE_EPOCH
fi

image() { cargo run --quiet --locked --package tools --bin image -- "$@"; }

# Before the long part: it knows the images.
printf 'build-images.sh: the program that packs images\n' >&2
# shellcheck disable=SC2046 # names, none of which has a space
if [ $# -gt 0 ]; then plugin_for=; else set -- $(image list); fi
programs=$(image programs "$@")
steps=$#
for architecture in $architectures; do
    [ -z "$(given_for "$architecture")" ] || continue
    steps=$((steps + 1))
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# step WHAT: reports what begins now, and how far this is.
number=0
step() {
    number=$((number + 1))
    printf 'build-images.sh: %d of %d, after %d:%02d: %s\n' $number $steps $((SECONDS / 60)) $((SECONDS % 60)) "$1" >&2
}

# build ARCHITECTURE PROGRAM...: all at once, so that each crate is compiled once; into the architecture's folder.
build() {
    local architecture=$1 built
    shift
    step "programs for $architecture"
    built=$(PROFILE=local TARGET=$(triple_of "$architecture") scripts/release.sh "$@") ||
        fail "cannot build the programs for $architecture: the reason is above"
    for program; do cp "$built/$program" "$work/$architecture/"; done
}

platforms=()
for architecture in $architectures; do
    built=$(given_for "$architecture")
    if [ -z "$built" ]; then
        built=$work/$architecture
        mkdir "$built"
        wanted=$programs
        [ "$architecture" != "$plugin_for" ] || wanted+=" $plugin"
        # shellcheck disable=SC2086 # names, none of which has a space
        build "$architecture" $wanted
    fi
    platforms+=("$architecture=$built")
done
for name in "$@"; do
    step "image $name"
    image pack "$name" "$folder/$name.tar" "$registry/$name:$version" "${platforms[@]}"
    for platform in "${platforms[@]}"; do
        image sbom "$name" "$platform" "$folder/$name.${platform%%=*}.cdx.json"
    done
done
if [ -f "$work/$plugin_for/$plugin" ]; then
    cp "$work/$plugin_for/$plugin" "$folder/"
    printf 'build-images.sh: %s\n' "kubectl redirect is $folder/$plugin; kubectl finds it after: sudo install $folder/$plugin /usr/local/bin" >&2
fi
