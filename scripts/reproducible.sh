#!/usr/bin/env bash
# Builds the same sources twice and compares, byte for byte. The two builds differ in what must not matter: the folder of the sources, HOME, cargo's
# folder, time zone, language, umask, and how many jobs run at once.
#
#   reproducible.sh              what is committed, in two fresh clones: all programs and images for both architectures. Prints their sums.
#   reproducible.sh PROGRAM...   these programs for this machine's architecture, as they are in this folder and in a copy elsewhere
#
# The same bytes take the same compilers. Which these were is printed as well.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
home=$HOME cargo_home=${CARGO_HOME:-$HOME/.cargo}
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
host=$(rustc -vV | sed -n 's/^host: //p')

# elsewhere SOURCES COMMAND...: as another user on another machine would. Crates come from where they are here, so nothing is downloaded twice.
elsewhere() {
    local sources=$1
    shift
    mkdir -p "$work/another home/.cargo/registry"
    cp -r "$cargo_home"/registry/{cache,index} "$work/another home/.cargo/registry/"
    (
        umask 077
        cd "$sources"
        unset CARGO_TARGET_DIR
        HOME="$work/another home" CARGO_HOME="$work/another home/.cargo" TZ=Asia/Kathmandu LC_ALL=C.UTF-8 CARGO_BUILD_JOBS=1 "$@"
    )
}

here() {
    HOME=$home TZ=UTC LC_ALL=C CARGO_BUILD_JOBS=4 "$@"
}

# Says which files of the second folder are not the same in the first.
compare() {
    local name failed=0
    for name in "${@:3}"; do
        if cmp --quiet "$1/$name" "$2/$name"; then
            printf '%s  %s\n' "$(sha256sum "$2/$name" | cut -d ' ' -f 1)" "$name"
        else
            printf 'reproducible.sh: two builds of %s differ\n' "$name" >&2
            failed=1
        fi
    done
    return "$failed"
}

rustc -V
if [ $# -gt 0 ]; then
    mkdir -p "$work/a copy elsewhere"
    git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for file; do [ ! -e "$file" ] || printf "%s\0" "$file"; done' sh |
        tar --create --null --files-from=- | tar --extract --directory "$work/a copy elsewhere"
    first=$(here scripts/release.sh "$@")
    second=$(elsewhere "$work/a copy elsewhere" scripts/release.sh "$@")
    compare "$first" "$second" "$@"
    exit
fi

# All programs and images of the clone that is the current folder, into a folder beside it: with untracked files in it, the clone would have no revision.
images() {
    local triple out="$PWD out"
    for architecture in amd64 arm64; do
        case $architecture in amd64) triple=x86_64-unknown-linux-musl ;; *) triple=aarch64-unknown-linux-musl ;; esac
        mkdir -p "$out/$architecture"
        cp "$(TARGET=$triple scripts/release.sh | tail -n 1)"/{istio-cni,istio-iptables,istio-validation,install-cni,redirectctl,kubectl-redirect} "$out/$architecture/"
    done
    PROGRAMS_AMD64=$out/amd64 PROGRAMS_ARM64=$out/arm64 deploy/build-images.sh --for amd64,arm64 "$out/images" >&2
}

git clone --quiet . "$work/first"
(umask 022; cd "$work/first"; unset CARGO_TARGET_DIR; here images)
(umask 077; git clone --quiet . "$work/the second one")
elsewhere "$work/the second one" images
mapfile -t files < <(cd "$work/first out" && find . -type f | sort)
compare "$work/first out" "$work/the second one out" "${files[@]}"
