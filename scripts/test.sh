#!/usr/bin/env bash
# Installs from Debian what the tests run, runs them, prints what each of them took, and their number. Needs root: most of them make network namespaces.
#
#   test.sh [WORD...]            all that needs no Kubernetes and no Go
#   test.sh cluster [WORD...]    what needs an API server, a kubelet, containerd or Helm
#
# With words, only tests whose names contain one of them. PROGRAMS names a folder of programs that are tested in place of those built here.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ]; then
    echo "test.sh: the tests make network namespaces and need root" >&2
    exit 1
fi
suite=
packages=all
part=(--early agent)
if [ "${1:-}" = cluster ]; then
    suite=cluster
    packages=cluster
    # As many nodes as e2e/src/node.rs lets run at once.
    part=(--only cluster --at-most 2 cluster::node::)
    # Nearly all that runs here is written in Go and has memory to spare: a tenth of the processors' time.
    export GOGC=${GOGC:-400}
    shift
fi

# Not relative: tests run in the folders of their crates.
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
# A full disk fails tests, and compilers, each in its own words.
if ! [ -d "$target/debug/deps" ]; then
    # Of the folder it will be in: it is cargo's to make.
    disk=$target
    while ! [ -d "$disk" ]; do disk=$(dirname "$disk"); done
    free=$(df --output=avail --block-size=G "$disk" | tr -dc 0-9)
    if [ "$free" -lt 8 ]; then
        echo "test.sh: what the tests compile takes up to 5 GB, what checks compile 3, and $free are free in $disk; CARGO_TARGET_DIR=FOLDER puts it elsewhere" >&2
        exit 1
    fi
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Rust links with a compiler for C. All else is installed while the tests are compiled.
command -v cc >/dev/null || scripts/setup-apt.sh release
scripts/setup-apt.sh "$packages" >"$work/installed" 2>&1 &
installing=$!
# What is compiled once is compiled fastest so.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
# The suite that is not run is not compiled: it is the largest program. All else is compiled at once: by themselves, programs would be built with fewer
# features of libraries, which would all be compiled twice.
tests=(--test '[!c]*')
[ "$suite" != cluster ] || tests=(--test '*')
cargo build --locked --workspace --bins --examples "${tests[@]}"
wait "$installing" || {
    cat "$work/installed" >&2
    exit 1
}
cat "$work/installed"
cargo test --quiet --locked --workspace --no-run --message-format=json --lib --bins "${tests[@]}" >"$work/built"
export BUILT_PROGRAMS=$target/debug
# Tests run programs also as other users, who may not enter every folder: root's own, for instance.
if [ -n "${PROGRAMS:-}" ] || ! setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$target/debug/run-tests"; then
    BUILT_PROGRAMS=$work/programs
    mkdir "$BUILT_PROGRAMS"
    chmod 755 "$work"
    mapfile -d '' built < <(find "$target/debug" -maxdepth 1 -type f -executable -print0)
    # Links take no space, but lead to no other file system.
    cp --link --target-directory="$BUILT_PROGRAMS" "${built[@]}" 2>"$work/linked" ||
        cp --remove-destination --target-directory="$BUILT_PROGRAMS" "${built[@]}"
fi
if [ -n "${PROGRAMS:-}" ]; then
    find "$PROGRAMS" -maxdepth 1 -type f -executable -exec cp --remove-destination --target-directory="$BUILT_PROGRAMS" {} +
fi

documentation=
if [ "$suite" = cluster ]; then
    # The API server that tests share (e2e/src/kube.rs) runs until its standard input ends: with this script, however that ends.
    mkdir "$work/api"
    exec {server}> >("$target/debug/e2e-helper" api-server "$work/api" >&2)
    for _ in $(seq 600); do
        if [ -e "$work/api/addresses" ]; then break; fi
        sleep 0.1
    done
    export SHARED_API_SERVER=$work/api
elif [ $# = 0 ]; then
    # Examples of the documentation are compiled by one processor most of the time: beside the tests.
    cargo test --quiet --locked --workspace --exclude redirect-core-fuzz --doc >"$work/documentation" 2>&1 &
    documentation=$!
fi

status=0
"$target/debug/run-tests" "$work/built" "${part[@]}" --record "$target/tests.tsv" "$@" || status=1
if [ -n "$documentation" ]; then
    if ! wait "$documentation"; then
        status=1
        cat "$work/documentation"
    fi
    awk '/^test result:/ { passed += $4; failed += $6 } END { printf "documentation: %d passed, %d failed\n", passed, failed }' "$work/documentation"
fi
exit "$status"
