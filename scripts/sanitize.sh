#!/usr/bin/env bash
# Runs tests that meet the kernel with everything compiled for the address sanitizer: the tests of netns-apply, and those of e2e that are named, against
# programs built the same way. Takes root and a nightly compiler; builds into a folder of its own, target/sanitize, which may be deleted afterwards.
#
#   scripts/sanitize.sh [TEST...]    of the suite `packets`; redirect_packets and redirect_undo unless said
set -euo pipefail
cd "$(dirname "$0")/.."

tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(redirect_packets:: redirect_undo::)
target=x86_64-unknown-linux-gnu
[ "$(uname -m)" = x86_64 ] || target=aarch64-unknown-linux-gnu
folder=$(realpath -m "${CARGO_TARGET_DIR:-target}/sanitize")

export SAMPLES=all
# With a target named, build scripts and macros, which run within the compiler, go without. A report names lines.
sanitized() { RUSTFLAGS=-Zsanitizer=address CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_TARGET_DIR=$folder cargo +nightly "$@" --locked --target "$target"; }

sanitized test --package netns-apply
sanitized build --package istio-iptables
export ISTIO_IPTABLES=$folder/$target/debug/istio-iptables
# What cannot find a fault on purpose finds none.
grep -q __asan_init <(nm "$ISTIO_IPTABLES") || { echo "sanitize.sh: istio-iptables is built without the sanitizer" >&2; exit 1; }
cargo test --locked --package e2e --test packets -- "${tests[@]}"
