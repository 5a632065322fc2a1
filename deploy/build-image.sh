#!/bin/sh
# Builds the node agent's image as an archive that `ctr images import`, `docker load` and `podman load` read. Needs no daemon and no base
# image: two static programs and a few empty folders. The same programs give the same archive, byte for byte.
#
# usage: deploy/build-image.sh ARCHIVE [REFERENCE]
#
# INSTALL_CNI and ISTIO_CNI name programs that are built already; otherwise they are built here, for TARGET.
set -eu

archive=${1:?usage: deploy/build-image.sh ARCHIVE [REFERENCE]}
project=$(cd "$(dirname "$0")/.." && pwd)
# As the chart names it where nobody says otherwise.
reference=${2:-localhost/install-cni:$(sed -n 's/^version = "\(.*\)"$/\1/p' "$project/Cargo.toml" | head -n 1)}

if [ -z "${INSTALL_CNI:-}" ] || [ -z "${ISTIO_CNI:-}" ]; then
    folder=$("$project/scripts/release.sh" install-cni istio-cni)
    INSTALL_CNI=${INSTALL_CNI:-$folder/install-cni}
    ISTIO_CNI=${ISTIO_CNI:-$folder/istio-cni}
fi

for program in "$INSTALL_CNI" "$ISTIO_CNI"; do
    # There is no loader in the image, and the node may have another C library than this machine.
    if ldd "$program" 2>/dev/null | grep -q '=>'; then
        echo "$program is not static" >&2
        exit 1
    fi
done

case $(uname -m) in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(uname -m) ;;
esac
architecture=${ARCHITECTURE:-$architecture}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/root/usr/local/bin" "$work/root/opt/cni/bin" "$work/root/host/opt/cni/bin" \
    "$work/root/host/etc/cni/net.d" "$work/root/var/run/istio-cni" "$work/root/var/run/secrets" "$work/root/tmp" "$work/image"
install -m 0755 "$INSTALL_CNI" "$work/root/usr/local/bin/install-cni"
install -m 0755 "$ISTIO_CNI" "$work/root/opt/cni/bin/istio-cni"

# Nothing of this machine's clock, users or folder order.
pack() {
    tar --create --format=ustar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w \
        --directory "$1" .
}
sum() { sha256sum "$1" | cut -d ' ' -f 1; }

pack "$work/root" >"$work/image/layer.tar"
cat >"$work/image/config.json" <<CONFIG
{"architecture":"$architecture","os":"linux","config":{"Entrypoint":["/usr/local/bin/install-cni"],"Env":["PATH=/usr/local/bin"],"WorkingDir":"/"},"rootfs":{"type":"layers","diff_ids":["sha256:$(sum "$work/image/layer.tar")"]},"history":[{"created_by":"deploy/build-image.sh"}]}
CONFIG
name=$(sum "$work/image/config.json").json
mv "$work/image/config.json" "$work/image/$name"
cat >"$work/image/manifest.json" <<MANIFEST
[{"Config":"$name","RepoTags":["$reference"],"Layers":["layer.tar"]}]
MANIFEST
pack "$work/image" >"$archive"
echo "$archive: $reference, $(wc -c <"$archive") bytes"
