#!/usr/bin/env bash
# Runs every test of the workspace and prints their number. Needs root: most of them make network namespaces.
#
# Tests with a node, an API server or an agent mostly wait. They run beside all others, and are printed when those are done.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ "$(id -u)" != 0 ]; then
    echo "test.sh: the tests make network namespaces and need root" >&2
    exit 1
fi

lanes=$(mktemp -d)
# Not relative: tests run in the folders of their crates.
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
# Where tests note each time they try again, with the cause (e2e/src/retries.rs).
retries=$target/retries.txt

# A full disk fails tests, and compilers, each in its own words.
if ! [ -d "$target/debug/deps" ]; then
    # Of the folder it will be in: it is cargo's to make.
    disk=$target
    while ! [ -d "$disk" ]; do disk=$(dirname "$disk"); done
    free=$(df --output=avail --block-size=G "$disk" | tr -dc 0-9)
    if [ "$free" -lt 15 ]; then
        echo "test.sh: what tests and checks compile takes up to 15 GB, and $free are free in $disk; CARGO_TARGET_DIR=FOLDER puts it elsewhere" >&2
        exit 1
    fi
fi
rm -f "$retries"
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$lanes"' EXIT
# Programs and tests at once: by themselves, programs would be built with fewer features of libraries, which would all be compiled twice.
cargo build --locked --workspace --bins --tests --examples || exit 1
cargo test --locked --workspace --no-run || exit 1
export BUILT_PROGRAMS=$target/debug

# Always the whole workspace, and its parts by the names of tests: cargo recompiles libraries for each choice of packages, with other features.
of_nodes=() of_agents=() of_others=() of_crates=()
for file in */tests/*.rs crates/*/tests/*.rs; do
    name=$(basename "$file" .rs)
    others=$({ compgen -G "*/tests/$name.rs"; compgen -G "crates/*/tests/$name.rs"; } | grep -vcxF "$file")
    if [ "${file%%/*}" = e2e ] && [ "$others" != 0 ]; then
        echo "test.sh: $file has the name of another crate's tests, and would be run twice" >&2
        exit 1
    fi
    # So divided, all three take about as long.
    if grep -q 'e2e::node' "$file" || [[ $file = e2e/tests/agent_* ]]; then
        of_nodes+=(--test "$name")
    elif grep -q 'e2e::kube' "$file"; then
        of_agents+=(--test "$name")
    elif [ "${file%%/*}" = e2e ]; then
        of_others+=(--test "$name")
    elif [ "${file%%/*}" = node-agent ] && [ "$others" = 0 ]; then
        of_agents+=(--test "$name")
    else
        of_crates+=(--test "$name")
    fi
done
run() { cargo test --locked --no-fail-fast --workspace "$@"; }

echo "tests with a node, an API server or an agent run in the background, and are printed at the end"
run "${of_nodes[@]}" -- "$@" >"$lanes/nodes" 2>&1 &
nodes=$!
run "${of_agents[@]}" -- "$@" >"$lanes/agents" 2>&1 &
agents=$!
{
    failed=0
    run "${of_others[@]}" -- "$@" || failed=1
    run --lib --bins --examples "${of_crates[@]}" -- "$@" || failed=1
    run --doc -- "$@" || failed=1
    exit "$failed"
} 2>&1 | tee "$lanes/others"
status=${PIPESTATUS[0]}
wait "$agents" || status=1
cat "$lanes/agents"
wait "$nodes" || status=1
cat "$lanes/nodes"

# "test result: ok. 12 passed; 0 failed; ..." once for every test program.
cat "$lanes"/* | awk '/^test result:/ { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed }'
if [ -s "$retries" ]; then
    printf '%s times a test tried again:\n' "$(wc -l <"$retries")"
    sed 's/^/  /' "$retries"
else
    echo "no test tried again"
fi
exit "$status"
