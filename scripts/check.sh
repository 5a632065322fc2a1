#!/usr/bin/env bash
# What a change can break beside the tests, in six minutes at most on two processors where the tests are compiled. Prints what each step took.
# scripts/release-check.sh has what only a release needs. Installs cargo-deny where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
# Everything is compiled once here.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
. scripts/steps.sh

target=${CARGO_TARGET_DIR:-target}
# The libraries that do no I/O.
pure=(redirect-core crates/netfilter-state crates/packet-trace)
has_target() { rustup target list --installed 2>/dev/null | grep -qx "$1"; }

install_cargo_deny() {
    command -v cargo-deny >/dev/null && return
    # Not optimized: compiling that takes minutes, and saves a second. Not in the target folder, which cargo lets one build use at a time.
    CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR="$work/cargo-deny" cargo install --quiet --locked --profile dev cargo-deny
}

dependencies() {
    step "installing cargo-deny" install_cargo_deny
    step "dependency rules" cargo deny --log-level error check bans licenses sources
}

standard_libraries() {
    local target
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
}

# With what only scripts build: so chosen, nearly all of its libraries are the same as those of all else.
features_of_scripts=benches/criterion,tools/page,tools/public-api,redirect-core-fuzz/targets

lints() {
    cargo clippy --locked --workspace --all-targets --features "$features_of_scripts" -- -D warnings
}

documentation() {
    # Checked as it is when it is written, which takes as long again.
    RUSTDOC=$PWD/scripts/rustdoc.sh RUSTDOCFLAGS="-Z unstable-options --check -D warnings" \
        cargo doc --locked --quiet --workspace --features "$features_of_scripts" --no-deps --document-private-items
}

circles() {
    # The example chooses the features with which the tests were compiled.
    cargo build --locked --quiet --workspace --bin modules --example settings_table
    "$target/debug/modules" --allow crates/tools/module-circles.txt
}

validator() {
    local output
    # What the feature alone uses is a warning here, and in no build of the whole workspace.
    output=$(cargo check --locked -p istio-validation 2>&1) && ! grep -q '^warning' <<<"$output" || {
        printf '%s\n' "$output" >&2
        return 1
    }
    if cargo tree --locked -p istio-validation -e normal,features | grep -q 'netns-apply feature "write"'; then
        echo "istio-validation is built with netns-apply's feature write" >&2
        return 1
    fi
}

features() {
    local folder feature
    for folder in "${pure[@]}"; do
        for feature in $(sed -n '/^\[features\]/,/^\[dep/s/^\([a-z-]*\) = .*/\1/p' "$folder/Cargo.toml"); do
            cargo check --locked --quiet -p "$(basename "$folder")" --lib --features "$feature"
        done
    done
}

without_system() {
    local features
    has_target x86_64-unknown-none || return 0
    for features in "" --all-features; do
        # shellcheck disable=SC2086 # an option or none
        cargo check --locked --quiet --target x86_64-unknown-none -p redirect-core --lib $features
    done
}

in_browsers() {
    ! has_target wasm32-unknown-unknown || cargo clippy --locked --quiet --target wasm32-unknown-unknown -p web -- -D warnings
}

step "formatting" cargo fmt --all --check
step "plain words" scripts/prose.pl
step "type names" scripts/type-names.pl
step "the recipes of CONTRIBUTING.md, as text" scripts/recipe.sh --text
step "standard libraries of other targets" standard_libraries
beside dependencies
step "lints" lints
step "documentation" documentation
step "circles of modules" circles
step "public interfaces" scripts/public-api.sh
step "the validator without netns-apply's write" validator
step "each feature of the pure libraries alone" features
step "redirect-core without a system" without_system
step "lints of the web page's program" in_browsers
together
summary "all checks passed"
