#!/usr/bin/env bash
# What a release must be, and what a change seldom breaks: the programs as shipped, and the published crates with the compilers and libraries
# of their users. Builds all that is shipped, some of it twice, so it takes tens of minutes. scripts/check.sh has what every change is checked for.
# Installs cargo-deny and cargo-fuzz where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
. scripts/steps.sh

# What is shipped is compiled by one processor most of the time, and into folders of its own: so it is built beside all else.
shipped() {
    step "sizes of the programs" scripts/sizes.sh
    step "the programs as shipped" scripts/shipped.sh
    # The plugin alone, which has all that could differ: much Rust, and C and assembler. `make reproducible` compares all programs and all images.
    step "the same bytes from another folder" scripts/reproducible.sh istio-cni
}

tools() {
    command -v cargo-deny >/dev/null || CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --locked --profile dev cargo-deny
    command -v cargo-fuzz >/dev/null || cargo install --quiet --locked cargo-fuzz
}

advisories() {
    local fetched
    # Findings fail; a machine without the database prints a note, and one with it runs `cargo deny check advisories` (docs/internals/releasing.md).
    if fetched=$(timeout 300 cargo deny --log-level error fetch db 2>&1); then
        cargo deny --log-level error --offline check advisories
    else
        printf '%s\n' "$fetched" | tail -n 3 >&2
        echo "NOT CHECKED: advisories, because https://github.com/rustsec/advisory-db cannot be had from here" >&2
    fi
}

# scripts/check.sh checks what the web page uses of them.
in_browsers() {
    local folder
    rustup target list --installed 2>/dev/null | grep -qx wasm32-unknown-unknown || rustup target add wasm32-unknown-unknown
    for folder in redirect-core netfilter-state packet-trace; do
        cargo check --locked --quiet --target wasm32-unknown-unknown -p "$folder" --lib
        cargo check --locked --quiet --target wasm32-unknown-unknown -p "$folder" --lib --all-features
    done
}

packages() {
    # Cargo checks each crate against those it has just packed, by way of a registry in the target folder, and
    # unpacks these once for each path and version: from a folder that was used before it would take the text of that time.
    CARGO_TARGET_DIR="$work/packages" cargo package --locked --quiet --allow-dirty -p redirect-core -p netfilter-state -p packet-trace -p xtables-read -p netns-apply
    rm -rf "$work/packages" "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/{redirect-core,netfilter-state,packet-trace,xtables-read}-0.*
    find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -maxdepth 1 -name '-*' -type d -empty -delete
}

# The tests of every change read lists of parts as JSON only.
lists_of_parts() {
    cargo test --locked --quiet -p tools --features cyclonedx --test it images::the_list_of_parts
}

# Another C library than that of `make test`. The tests of the agent set its clock and name its system calls, which depend on the library.
tests_as_shipped() {
    PROGRAMS=$(scripts/release.sh) scripts/test.sh --only packets --only plugin
}

beside shipped
step "installing cargo-deny and cargo-fuzz" tools
step "advisories about dependencies" advisories
step "the recipes of CONTRIBUTING.md" scripts/recipe.sh
step "the pure libraries in browsers" in_browsers
step "the oldest compiler and libraries" scripts/minimal-versions.sh
step "the documentation of libraries" cargo doc --locked --quiet --workspace --no-deps --lib
step "what would be published" packages
step "lists of parts, as a library of CycloneDX reads them" lists_of_parts
step "fuzzing, a few seconds a target" scripts/fuzz.sh --smoke
together
step "packets and the plugin, with the programs as shipped" tests_as_shipped
summary "all checks of a release passed"
