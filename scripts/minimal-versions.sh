#!/usr/bin/env bash
# Builds the published crates as their manifests promise: with the oldest versions of their dependencies that they claim to work with, and with
# the oldest compiler (rust-version); then with that compiler and the versions of Cargo.lock. Installs that compiler where rustup is.
#
# To go on without it: CHECK_WITHOUT_MSRV=yes takes the usual compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
toolchain=(+"$oldest")
if ! cargo "${toolchain[@]}" --version >/dev/null 2>&1 && ! rustup toolchain install "$oldest" --profile minimal; then
    if [ -z "${CHECK_WITHOUT_MSRV:-}" ]; then
        echo "no Rust $oldest: install it, or set CHECK_WITHOUT_MSRV=yes to use another compiler" >&2
        exit 1
    fi
    echo "NOT CHECKED: Rust $oldest (CHECK_WITHOUT_MSRV)" >&2
    toolchain=()
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
crates=(redirect-core crates/netfilter-state crates/packet-trace crates/xtables-read netns-apply)
cp --parents -r Cargo.toml Cargo.lock "${crates[@]}" "$copy"
# Those alone, and without what only their tests need: whose versions do not matter to users.
sed -i '/^members = \[/,/^\]/c members = ["redirect-core", "crates/netfilter-state", "crates/packet-trace", "crates/xtables-read", "netns-apply"]' "$copy/Cargo.toml"
for crate in "${crates[@]}"; do
    sed -i '/^\[dev-dependencies\]$/,/^\[/{/^\[dev-dependencies\]$/d;/^\[/!d}' "$copy/$crate/Cargo.toml"
    sed -i '/^\[\[example\]\]$/,$d' "$copy/$crate/Cargo.toml"
done

build() {
    echo "$1"
    (cd "$copy" && CARGO_TARGET_DIR="$copy/target" cargo "${toolchain[@]}" check --quiet --workspace --lib --all-features)
}
(cd "$copy" && cargo update --quiet --offline --workspace)
build "Rust $oldest and the versions of Cargo.lock"
# Cargo's own option for it is not stable.
(cd "$copy" && RUSTC_BOOTSTRAP=1 cargo update --quiet -Z direct-minimal-versions)
build "Rust $oldest and the oldest versions that the manifests allow"
