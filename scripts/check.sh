#!/usr/bin/env bash
# The checks that are no tests. Installs cargo-deny and cargo-fuzz where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }

for tool in cargo-deny cargo-fuzz; do
    if ! command -v "$tool" >/dev/null; then
        step "installing $tool"
        cargo install --quiet --locked "$tool"
    fi
done

step "formatting"
cargo fmt --all --check
cargo fmt --manifest-path fuzz/Cargo.toml --check

step "lints"
cargo clippy --locked --workspace --all-targets -- -D warnings

step "dependency rules"
# Advisories are left to whoever has the network for them: `cargo deny check advisories`.
cargo deny --log-level error check bans licenses sources

step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items --quiet

step "the recipe for a new setting"
scripts/recipe.sh

step "the validator builds without the writing side of netns-apply"
cargo check --locked --quiet -p istio-validation
if cargo tree --locked -p istio-validation -e normal,features | grep -q 'netns-apply feature "write"'; then
    echo "istio-validation is built with netns-apply's feature write" >&2
    exit 1
fi

step "sizes of the programs"
scripts/sizes.sh

step "the programs as shipped"
scripts/shipped.sh

step "fuzzing, ten seconds a target"
# cargo-fuzz asks for compiler options that are not stable; no other part of the project does.
for target in $(sed -n 's/^name = "\(.*\)"$/\1/p' fuzz/Cargo.toml | tail -n +2); do
    mkdir -p "fuzz/corpus/$target" "fuzz/seeds/$target"
    RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir fuzz --sanitizer none "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" \
        -- -max_total_time=10 -verbosity=0
done

step "all checks passed"
