#!/usr/bin/env bash
# Builds the images: archives that `ctr images import`, `podman load` and `skopeo copy oci-archive:` read, and beside each a list of what it is made of
# (CycloneDX). Needs no daemon and no base image. The same programs give the same archives, byte for byte.
#
# usage: deploy/build-images.sh FOLDER [REGISTRY] [IMAGE...]      all images by default, named localhost/IMAGE:VERSION
#
# ARCHITECTURES="amd64 arm64" are the architectures in each archive. PROGRAMS_AMD64 and PROGRAMS_ARM64 name folders of programs that are built already;
# otherwise they are built here.
set -euo pipefail

folder=${1:?usage: deploy/build-images.sh FOLDER [REGISTRY] [IMAGE...]}
registry=${2:-localhost}
shift $(($# < 2 ? $# : 2))
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)

platforms=()
for architecture in ${ARCHITECTURES:-amd64 arm64}; do
    case $architecture in
    amd64) triple=x86_64-unknown-linux-musl programs=${PROGRAMS_AMD64:-} ;;
    arm64) triple=aarch64-unknown-linux-musl programs=${PROGRAMS_ARM64:-} ;;
    *) echo "build-images.sh: $architecture is neither amd64 nor arm64" >&2; exit 1 ;;
    esac
    [ -n "$programs" ] || programs=$(TARGET=$triple scripts/release.sh install-cni istio-cni istio-iptables istio-validation)
    platforms+=("$architecture=$programs")
done

# Where the programs are from. A modified tree has a revision that no one else has.
if [ -z "${SOURCE_REVISION:-}" ] && [ -z "$(git status --porcelain 2>/dev/null || echo unknown)" ]; then
    SOURCE_REVISION=$(git rev-parse HEAD) SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
    export SOURCE_REVISION SOURCE_DATE_EPOCH
fi

image() { cargo run --quiet --locked --package tools --bin image -- "$@"; }

# shellcheck disable=SC2046 # names, none of which has a space
[ $# -gt 0 ] || set -- $(image list)
for name in "$@"; do
    image pack "$name" "$folder/$name.tar" "$registry/$name:$version" "${platforms[@]}"
    for platform in "${platforms[@]}"; do
        image sbom "$name" "$platform" "$folder/$name.${platform%%=*}.cdx.json"
    done
done
