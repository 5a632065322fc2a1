#!/usr/bin/env bash
# The public interface of the published crates, as text under docs/public-api: a change of it is seen in review.
#
#   public-api.sh            compares, and fails where the text is not up to date
#   public-api.sh --update   rewrites it
#
# It also counts what a user may name, which is not to grow past what can be surveyed.
#
# rustdoc's JSON has no stable form, so each release of the compiler may write another one.
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
crates=(redirect-core netfilter-state packet-trace xtables-read netns-apply)
RUSTDOC=$PWD/scripts/rustdoc.sh RUSTDOCFLAGS="-Z unstable-options --output-format json" \
    cargo doc --locked --quiet --lib --no-deps --all-features "${crates[@]/#/--package=}"
# The example chooses the features with which the tests were compiled.
cargo build --locked --quiet --workspace --features tools/public-api --bin public-api --example settings_table

# Types, traits, functions and constants. Not modules, nor what belongs to a type; what the root exports again counts once.
most=250
public_items() {
    sed -nE 's/^(#\[[^]]*\] )*pub ((const|unsafe|async) )*(struct|enum|union|trait|type|macro|fn|const|static|use) ([A-Za-z0-9_:]+).*/\5/p' "$@" |
        grep -vE '::[A-Z][A-Za-z0-9]*::' | sort -u |
        awk -F:: '{ path[$0]; if (NF > 2) deeper[$1 "::" $NF] } END { for (one in path) if (!(one in deeper)) n++; print n }'
}

failed=0
for crate in "${crates[@]}"; do
    text=docs/public-api/$crate.txt
    new=$(mktemp)
    if ! RUST_BACKTRACE=0 "$target/debug/public-api" "$target/doc/${crate//-/_}.json" >"$new"; then
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
# xtables-read is not for people who redirect a namespace.
items=$(cd docs/public-api && public_items {redirect-core,netfilter-state,packet-trace,netns-apply}.txt)
if [ "$items" -gt $most ]; then
    echo "the four libraries have $items public items, more than $most: make a function a method of its natural receiver, a constant" >&2
    echo "one of its type, or private what no other crate names; what only the programs here need belongs in an unpublished crate" >&2
    exit 1
fi
if [ $failed = 1 ]; then
    echo "the public interface is not the one in docs/public-api: if the change is meant, run scripts/public-api.sh --update," >&2
    echo "review the difference, and say in CHANGELOG.md what users have to change; if it breaks them, raise the version" >&2
    echo "(written with Rust 1.95; this is $(rustc --version), and another compiler may write some lines otherwise)" >&2
    exit 1
fi
