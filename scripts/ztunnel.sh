#!/bin/sh
# Compiles a stock ztunnel from its source, with dependencies from crates.io alone; the last line says where the program is.
#
#   ztunnel.sh FOLDER   FOLDER is a checkout of github.com/istio/ztunnel, which stays as it is
#
# Works in ${E2E_CACHE:-$HOME/.cache/sidecar-cni-e2e}/ztunnel; what did not change is not compiled again. TLS is by ring, and the feature `testing` has a
# certificate authority built in, so that no control plane is needed.
set -eu

source=${1:-}
if [ ! -f "$source/src/inpod.rs" ]; then
    echo "ztunnel.sh: ${source:-no folder}: want a checkout of github.com/istio/ztunnel; compiling it takes four minutes of two cores" >&2
    exit 2
fi
command -v protoc >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends protobuf-compiler >/dev/null

cache=${E2E_CACHE:-$HOME/.cache/sidecar-cni-e2e}/ztunnel
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
rm -rf "$cache/source"
mkdir "$cache/source"
tar -C "$source" --exclude=./.git --exclude=./vendor --exclude=./out --exclude=./target -c . | tar -C "$cache/source" -x
cd "$cache/source"
# Optional, and partly from no registry. What the lock file has of the rest stays as it is.
sed -i '/^boring/d; /^tls-boring/d' Cargo.toml
cargo metadata --format-version 1 >/dev/null
CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 nice cargo build -j2 --locked --no-default-features --features tls-ring,testing --bin ztunnel \
    --target-dir "$cache/target" >&2
echo "$cache/target/debug/ztunnel"
