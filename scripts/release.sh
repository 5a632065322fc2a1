#!/bin/sh
# Builds programs as they are shipped: optimised, stripped, and static, so that they run on nodes with any C library and in an
# empty image. Prints the folder they are in.
#
# usage: scripts/release.sh [PROGRAM...]      all of them by default
#
# PIE=1 makes all of them position-independent; see SECURITY.md.
set -eu
cd "$(dirname "$0")/.."

triple=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')}
[ $# -gt 0 ] || set -- istio-cni istio-iptables istio-validation install-cni
for program in "$@"; do
    case $program in
    # It listens, and lives long.
    install-cni) position= ;;
    # They run once for every pod start, and moving 14,000 pointers at each takes longer than all they do themselves.
    *) position="-C relocation-model=static" ;;
    esac
    [ -z "${PIE:-}" ] || position=
    # One by one: built together, each would get the library features of the others.
    # shellcheck disable=SC2086 # a list of arguments
    RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static" \
        cargo rustc --release --locked --quiet --target "$triple" -p "$program" --bin "$program" -- $position >&2
done
cd "${CARGO_TARGET_DIR:-target}/$triple/release"
pwd
