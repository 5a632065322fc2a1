#!/usr/bin/env bash
# Runs every test of the workspace and says how many there were. Needs root: most of them make network namespaces.
#
# Tests with a node or an API server mostly wait. They run beside all others, and are printed when those are done.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ "$(id -u)" != 0 ]; then
    echo "test.sh: the tests make network namespaces and need root" >&2
    exit 1
fi

others=$(mktemp) patient=$(mktemp)
trap 'kill %1 2>/dev/null; rm -f "$others" "$patient"' EXIT
# The programs the end-to-end tests start; and every test, so that neither half waits for what the other compiles.
cargo build --locked --workspace --bins || exit 1
cargo test --locked --workspace --no-run || exit 1

of_patient=() of_others=()
for file in e2e/tests/*.rs; do
    if grep -qE 'e2e::(node|kube)' "$file"; then
        of_patient+=(--test "$(basename "$file" .rs)")
    else
        of_others+=(--test "$(basename "$file" .rs)")
    fi
done

echo "tests with a node or an API server run meanwhile, and are printed at the end"
cargo test --locked --no-fail-fast -p e2e "${of_patient[@]}" -- "$@" >"$patient" 2>&1 &
{
    cargo test --locked --no-fail-fast -p e2e --lib --bins "${of_others[@]}" -- "$@"
    e2e=$?
    cargo test --locked --no-fail-fast --workspace --exclude e2e -- "$@" && exit "$e2e"
} 2>&1 | tee "$others"
status=${PIPESTATUS[0]}
wait %1 || status=1
cat "$patient"

# "test result: ok. 12 passed; 0 failed; ..." once for every test program.
cat "$others" "$patient" | awk '/^test result:/ { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed }'
exit "$status"
