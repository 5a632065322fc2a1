#!/usr/bin/env bash
# The public interface of the published crates, as text under docs/public-api: a change of it is seen in review.
#
#   public-api.sh            compares, and fails where the text is not up to date
#   public-api.sh --update   rewrites it
#
# rustdoc's JSON has no stable form, so each release of the compiler may write another one. RUSTC_BOOTSTRAP lets the stable
# compiler write it; no other part of the project is built so, but for fuzzing.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-compare} in
compare) update= ;;
--update) update=yes ;;
*)
    echo "public-api.sh: $1 is not --update" >&2
    exit 2
    ;;
esac

target=${CARGO_TARGET_DIR:-target}
# Beside the documentation for people, which the same command would otherwise replace.
json=$target/public-api
failed=0
for crate in redirect-core netfilter-state packet-trace xtables-read netns-apply; do
    text=docs/public-api/$crate.txt
    RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$json cargo rustdoc --locked --quiet --lib --all-features -p "$crate" -- \
        -Z unstable-options --output-format json
    new=$(mktemp)
    if ! RUST_BACKTRACE=0 cargo run --locked --quiet -p tools --bin public-api "$json/doc/${crate//-/_}.json" >"$new"; then
        echo "public-api.sh: if $(rustc --version) writes another format of JSON than the library public-api reads, set the" >&2
        echo "public-api.sh: version of public-api in crates/tools/Cargo.toml to the one for this compiler, or use Rust 1.95" >&2
        rm "$new"
        exit 1
    fi
    if [ -n "$update" ]; then
        mkdir -p docs/public-api
        cat "$new" >"$text"
    elif ! diff -u "$text" "$new"; then
        failed=1
    fi
    rm "$new"
done
if [ $failed = 1 ]; then
    echo "the public interface is not the one in docs/public-api: if the change is meant, run scripts/public-api.sh --update," >&2
    echo "review the difference, and say in CHANGELOG.md what users have to change; if it breaks them, raise the version" >&2
    echo "(written with Rust 1.95; this is $(rustc --version), and another compiler may write some lines otherwise)" >&2
    exit 1
fi
