#!/usr/bin/env bash
# Runs unit tests that do no I/O in Miri, which finds undefined behaviour, out-of-bounds access and leaks also in the crates that ours are made of.
# Takes a nightly compiler with the components miri and rust-src. docs/internals/testing.md says what is left out, and why.
set -euo pipefail
cd "$(dirname "$0")/.."

# Files are read (the recordings); nothing else of the machine is touched. Properties try two cases: Miri is a hundred times slower and more.
export MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=2 PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri

miri() {
    local package=$1
    shift
    echo "== $package"
    cargo +nightly miri test --locked --quiet --package "$package" --lib -- "$@"
}

# Those skipped fill a set to its limit, and read every text of every setting: too many steps for an interpreter.
miri redirect-core values:: rule:: settings:: redirect:: plan::native --skip settings::recorded
miri netfilter-state align:: differences:: parse:: netlink::foreign netlink::reading netlink::sets netlink::wire netlink::xt \
    --skip so_many_elements_are_kept_and_no_more
miri packet-trace set::
miri logging entry:: flags:: level::
