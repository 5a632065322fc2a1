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
# Where tests note each time they try again, with the cause (e2e/src/retries.rs).
retries="${CARGO_TARGET_DIR:-target}/retries.txt"
rm -f "$retries"
trap 'kill %1 2>/dev/null; rm -f "$others" "$patient"' EXIT
# The programs the end-to-end tests start; and every test, so that neither half waits for what the other compiles.
cargo build --locked --workspace --bins || exit 1
cargo test --locked --workspace --no-run || exit 1

# Always the whole workspace, and its parts by the names of tests: cargo compiles libraries anew for each choice of packages, with other features.
of_patient=() of_others=() of_crates=()
for file in */tests/*.rs; do
    name=$(basename "$file" .rs)
    if [ "${file%%/*}" != e2e ]; then
        of_crates+=(--test "$name")
    elif compgen -G "[!e]*/tests/$name.rs" >/dev/null; then
        echo "test.sh: $file has the name of another crate's tests, and would be run twice" >&2
        exit 1
    elif grep -qE 'e2e::(node|kube)' "$file"; then
        of_patient+=(--test "$name")
    else
        of_others+=(--test "$name")
    fi
done
run() { cargo test --locked --no-fail-fast --workspace "$@"; }

echo "tests with a node or an API server run meanwhile, and are printed at the end"
run "${of_patient[@]}" -- "$@" >"$patient" 2>&1 &
{
    failed=0
    run "${of_others[@]}" -- "$@" || failed=1
    run --lib --bins --examples "${of_crates[@]}" -- "$@" || failed=1
    run --doc -- "$@" || failed=1
    exit "$failed"
} 2>&1 | tee "$others"
status=${PIPESTATUS[0]}
wait %1 || status=1
cat "$patient"

# "test result: ok. 12 passed; 0 failed; ..." once for every test program.
cat "$others" "$patient" | awk '/^test result:/ { passed += $4; failed += $6 } END { printf "%d passed, %d failed\n", passed, failed }'
if [ -s "$retries" ]; then
    printf '%s times a test tried again:\n' "$(wc -l <"$retries")"
    sed 's/^/  /' "$retries"
else
    echo "no test tried again"
fi
exit "$status"
