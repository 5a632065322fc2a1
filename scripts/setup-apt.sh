#!/bin/sh
# Installs from Debian what the tests run. Does nothing, quickly, where all of it is installed. Needs root.
#
#   setup-apt.sh          what `make test` needs
#   setup-apt.sh cluster  what `make test-cluster` needs
#   setup-apt.sh demo     what the demo needs: a part of it
#   setup-apt.sh release  what building the programs as shipped needs
#   setup-apt.sh cross    the same for the other architecture that is shipped
#   setup-apt.sh kernels  what starting other kernels needs
#   setup-apt.sh crio     what CRI-O starts, and what brings it images
#   setup-apt.sh guides   what the guides use, and a registry to push to
#   setup-apt.sh page     the browser that the web page is tested in
set -eu

packages="iptables nftables iproute2 containernetworking-plugins ca-certificates util-linux"
tools="busybox-static openssl curl ipset jq libfaketime procps strace systemd gcc musl-tools binutils"
case ${1:-all} in
demo) ;;
release) packages="gcc musl-tools" ;;
cross)
    case $(uname -m) in
    aarch64) packages="gcc musl-tools gcc-x86-64-linux-gnu libc6-dev-amd64-cross" ;;
    *) packages="gcc musl-tools gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
    esac
    ;;
kernels) packages="$packages qemu-system-x86 qemu-system-arm busybox-static kmod xz-utils zstd jq debian-archive-keyring bsdextrautils" ;;
guides) packages="skopeo docker-registry" ;;
crio) packages="skopeo conmon runc" ;;
page) packages="chromium chromium-driver fonts-inter fonts-jetbrains-mono iproute2 util-linux" ;;
all) packages="$packages $tools" ;;
cluster) packages="$packages $tools containerd runc etcd-server prometheus" ;;
*)
    echo "setup-apt.sh: $1 is not one of the words in this script's first lines" >&2
    exit 2
    ;;
esac

is_installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

missing=
for package in $packages; do
    is_installed "$package" || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ]; then
    echo "setup-apt.sh: not root, cannot install:$missing" >&2
    exit 1
fi
echo "installing:$missing"
apt-get update -qq
# shellcheck disable=SC2086 # a list of packages
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing >/dev/null
