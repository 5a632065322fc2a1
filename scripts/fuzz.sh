#!/usr/bin/env bash
# Runs the fuzz targets, one per processor at a time (FUZZ_JOBS), and prints a table of what came of it.
#
#   scripts/fuzz.sh [--smoke] [TARGET...]
#
# FUZZ_MINUTES says how long each one runs (20 unless said); FUZZ_SECONDS wins over it. --smoke is a few seconds each, for every release.
# With a nightly compiler the address sanitizer looks on; FUZZ_SANITIZER=none leaves it out, and it is left out of the smoke run.
# What is found lies under fuzz/artifacts, and the corpora under fuzz/corpus; neither is committed. A corpus is cut down to what covers
# something of its own before it is counted.
set -euo pipefail
# Profiles for fuzzing are those of .cargo there.
cd "$(dirname "$0")/../fuzz"

seconds=${FUZZ_SECONDS:-$((${FUZZ_MINUTES:-20} * 60))}
jobs_at_once=${FUZZ_JOBS:-$(nproc)}
sanitizer=${FUZZ_SANITIZER:-}
is_smoke=
if [ "${1:-}" = --smoke ]; then
    is_smoke=yes seconds=${FUZZ_SECONDS:-5} sanitizer=none
    shift
fi
toolchain=()
if [ -z "$sanitizer" ]; then
    # Sanitizers come with nightly compilers only.
    if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
        sanitizer=address toolchain=(+nightly)
    else
        sanitizer=none
    fi
fi
mapfile -t known < <(sed -n '/^\[\[bin\]\]/,/^path/s/^name = "\(.*\)"$/\1/p' Cargo.toml)
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=("${known[@]}")
for target in "${targets[@]}"; do
    if ! printf '%s\n' "${known[@]}" | grep -qx -- "$target"; then
        echo "fuzz.sh: $target is not a target; targets: ${known[*]}" >&2
        exit 1
    fi
done

logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT

# cargo-fuzz asks for compiler options that are not stable; no other part of the project does.
export RUSTC_BOOTSTRAP=1
common=(--fuzz-dir . --features linked --sanitizer "$sanitizer")
# A few seconds are not worth the minutes of an optimized build.
[ -z "$is_smoke" ] || common+=(--dev)
cargo "${toolchain[@]}" fuzz build "${common[@]}"

# What the text targets may write into an input; the others find their way without.
words() {
    case $1 in
        agent_http | add_event | log_socket) echo words/http.dict ;;
        netlink_answers | ztunnel) ;;
        *) echo words/settings.dict ;;
    esac
}

run() {
    local target=$1 corpus=corpus/$1 dictionary code=0
    local options=(-max_total_time="$seconds" -timeout=30 -rss_limit_mb=4096 -print_final_stats=1)
    dictionary=$(words "$target")
    [ -z "$dictionary" ] || options+=(-dict="$dictionary")
    mkdir -p "$corpus"
    find "$corpus" -type f | wc -l >"$logs/$target.before"
    cargo "${toolchain[@]}" fuzz run "${common[@]}" "$target" "$corpus" "seeds/$target" -- "${options[@]}" >"$logs/$target" 2>&1 || code=$?
    echo "$code" >"$logs/$target.code"
    if [ -z "$is_smoke" ]; then
        cargo "${toolchain[@]}" fuzz cmin "${common[@]}" "$target" >"$logs/$target.cmin" 2>&1 || true
    fi
    return 0
}

for target in "${targets[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs_at_once" ]; do wait -n || true; done
    run "$target" &
done
wait

# The last state line of libFuzzer: "#123 DONE cov: 456 ft: 789 corp: 12/3456b ...".
failed=0
printf '%-22s %12s %8s %8s %8s %6s\n' target executions edges corpus new result
for target in "${targets[@]}"; do
    log=$logs/$target
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -1)
    edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
    corpus=$(find "corpus/$target" -type f | wc -l)
    before=$(cat "$log.before")
    result=ok
    if [ "$(cat "$log.code" 2>/dev/null)" != 0 ]; then
        result=FOUND failed=1
    fi
    printf '%-22s %12s %8s %8s %8s %6s\n' "$target" "${executions:--}" "${edges:--}" "$corpus" "$((corpus > before ? corpus - before : 0))" "$result"
done
for target in "${targets[@]}"; do
    if [ "$(cat "$logs/$target.code" 2>/dev/null)" != 0 ]; then
        printf '\n== %s\n' "$target"
        tail -40 "$logs/$target"
    fi
done
printf '%s seconds each, %s at a time, sanitizer: %s, %s, %s processors\n' "$seconds" "$jobs_at_once" "$sanitizer" "$(uname -m)" "$(nproc)"
exit "$failed"
