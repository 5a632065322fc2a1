#!/usr/bin/env bash
# Runs every test of the workspace and says how many there were. Needs root: most of them make network namespaces.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ "$(id -u)" != 0 ]; then
    echo "test.sh: the tests make network namespaces and need root" >&2
    exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The programs the end-to-end tests start.
cargo build --locked --workspace --bins || exit 1
cargo test --locked --workspace --no-fail-fast -- "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

# "test result: ok. 12 passed; 0 failed; ..." once for every test program.
awk '/^test result:/ { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed }' "$log"
exit "$status"
