#!/bin/sh
# Makes the web page in target/site: the documentation, and the page that answers questions. Prints the folder it is in.
set -eu
cd "$(dirname "$0")/.."

target=wasm32-unknown-unknown
if ! [ -d "$(rustc --print target-libdir --target "$target")" ]; then
    rustup target add "$target" >&2 || {
        echo "page.sh: rustup cannot add $target; it needs https://static.rust-lang.org, or a mirror in RUSTUP_DIST_SERVER" >&2
        exit 1
    }
fi
built=${CARGO_TARGET_DIR:-target}
cargo rustc --locked --quiet --profile page --target "$target" -p web --lib --crate-type cdylib >&2
cargo run --locked --quiet -p tools --features page --bin page -- . "$built/$target/page/web.wasm" "$built/site" >&2
cd "$built/site"
pwd
