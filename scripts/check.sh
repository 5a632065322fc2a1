#!/usr/bin/env bash
# The checks beside the tests. Installs cargo-deny and cargo-fuzz where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }
has_target() { rustup target list --installed 2>/dev/null | grep -qx "$1"; }

for tool in cargo-deny cargo-fuzz; do
    if ! command -v "$tool" >/dev/null; then
        step "installing $tool"
        cargo install --quiet --locked "$tool"
    fi
done

step "standard libraries of other targets"
# Where rustup is missing, or cannot reach its server, this fails: to go on without, set the variable below.
for target in x86_64-unknown-none wasm32-unknown-unknown; do
    if ! has_target "$target" && ! rustup target add "$target"; then
        if [ -z "${CHECK_WITHOUT_TARGETS:-}" ]; then
            echo "no standard library for $target: install it, or set CHECK_WITHOUT_TARGETS=yes to go on without this check" >&2
            exit 1
        fi
        echo "NOT CHECKED: what is for $target (CHECK_WITHOUT_TARGETS)" >&2
    fi
done

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
# What is shipped is compiled by one processor most of the time, and into folders of its own: it is built, and checked, while all else is checked.
shipped() {
    step "sizes of the programs"
    scripts/sizes.sh
    step "the programs as shipped"
    scripts/shipped.sh
    step "the same bytes from another folder"
    # The plugin alone, which has all that could differ: much Rust, and C and assembler. `make reproducible` compares all programs and all images.
    scripts/reproducible.sh istio-cni
}
(set -e; shipped) >"$work/shipped" 2>&1 &
shipped=$!

step "formatting"
cargo fmt --all --check
cargo fmt --manifest-path fuzz/Cargo.toml --check

step "plain words"
scripts/prose.pl

step "lints"
cargo clippy --locked --workspace --all-targets -- -D warnings

step "lints of what makes the web page"
cargo clippy --locked -p tools --features page --bin page -- -D warnings

step "circles of modules"
cargo run --locked --quiet -p tools --bin modules -- --allow crates/tools/module-circles.txt

step "dependency rules"
cargo deny --log-level error check bans licenses sources

step "advisories about dependencies"
# Findings fail; a machine without the database prints a note, and one with it runs `cargo deny check advisories` (docs/internals/releasing.md).
if fetched=$(timeout 300 cargo deny --log-level error fetch db 2>&1); then
    cargo deny --log-level error --offline check advisories
else
    printf '%s\n' "$fetched" | tail -n 3 >&2
    echo "NOT CHECKED: advisories, because https://github.com/rustsec/advisory-db cannot be had from here" >&2
fi

step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items --quiet

step "the recipes of CONTRIBUTING.md"
scripts/recipe.sh

step "the validator builds without the writing side of netns-apply"
cargo check --locked --quiet -p istio-validation
if cargo tree --locked -p istio-validation -e normal,features | grep -q 'netns-apply feature "write"'; then
    echo "istio-validation is built with netns-apply's feature write" >&2
    exit 1
fi

# Those that do no I/O.
pure=(redirect-core crates/netfilter-state crates/packet-trace)

step "each feature of the pure libraries alone"
for folder in "${pure[@]}"; do
    for feature in $(sed -n '/^\[features\]/,/^\[dep/s/^\([a-z-]*\) = .*/\1/p' "$folder/Cargo.toml"); do
        cargo check --locked --quiet -p "$(basename "$folder")" --lib --features "$feature"
    done
done

step "the pure libraries on machines without an operating system"
for target in x86_64-unknown-none wasm32-unknown-unknown; do
    if has_target "$target"; then
        for folder in "${pure[@]}"; do
            cargo check --locked --quiet --target "$target" -p "$(basename "$folder")" --lib
            cargo check --locked --quiet --target "$target" -p "$(basename "$folder")" --lib --all-features
        done
    fi
done

step "lints of the web page's program where it runs"
! has_target wasm32-unknown-unknown || cargo clippy --locked --target wasm32-unknown-unknown -p web -- -D warnings

step "the oldest compiler, and the oldest versions of what the published crates depend on"
scripts/minimal-versions.sh

step "what would be published"
# Cargo checks each crate against those it has just packed, by way of a registry in the target folder, and
# unpacks these once for each path and version: from a folder that was used before it would take the text of that time.
CARGO_TARGET_DIR="$work/packages" cargo package --locked --quiet --allow-dirty -p redirect-core -p netfilter-state -p packet-trace -p xtables-read -p netns-apply
rm -rf "$work/packages" "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/{redirect-core,netfilter-state,packet-trace,xtables-read}-0.*
find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -maxdepth 1 -name '-*' -type d -empty -delete

step "public interfaces"
scripts/public-api.sh

step "fuzzing, a few seconds a target"
scripts/fuzz.sh --smoke

wait "$shipped" || failed=yes
cat "$work/shipped"
[ -z "${failed:-}" ] || exit 1

step "all checks passed"
