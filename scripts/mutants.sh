#!/usr/bin/env bash
# Changes the code in one small way after the other (cargo-mutants) and says which changes no test has noticed.
#
#   scripts/mutants.sh core [K/N] [OPTION...]     redirect-core, or every Nth change of it from the Kth on
#   scripts/mutants.sh apply [K/N] [OPTION...]    netns-apply's apply; needs root, its tests make network namespaces
#   scripts/mutants.sh summary                    how all runs so far came out, and what survived
#
# Options are cargo-mutants' own. Outcomes lie in target/mutants (MUTANTS), a folder for each part of N; a part that is there is not run again.
# redirect-core's unit tests come first, because they build in seconds; what they let through meets every test of the crate.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${MUTANTS:-target/mutants}

# Properties try 256 cases elsewhere; and how simple the smallest failing case is interests nobody here.
export PROPTEST_CASES=32 PROPTEST_MAX_SHRINK_ITERS=0 PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
# A change can make a loop that never ends and takes all memory.
ulimit -v 8000000

# Runs cargo-mutants; that changes were missed or took too long is no failure of it.
mutate() {
    local code=0
    cargo mutants --baseline skip --no-shuffle --colors never "$@" || code=$?
    case $code in
        0 | 2 | 3) ;;
        *) exit "$code" ;;
    esac
}

# A name as a regular expression that matches it and nothing else.
exactly() { sed 's/[][\\.|$(){}?+*^]/\\&/g; s/.*/^&$/'; }

core() {
    local part=$1 name
    shift
    local folder=$out/core-${part/\//-of-}
    [ ! -e "$folder/done" ] || return 0
    local common=(--package redirect-core --timeout "${MUTANTS_TIMEOUT:-120}" "$@")
    rm -rf "$folder" && mkdir -p "$folder/unit" "$folder/all"
    mutate "${common[@]}" --shard "$part" --sharding round-robin --output "$folder/unit" --cargo-arg=--lib
    local survivors=()
    while read -r name; do survivors+=(--re "$name"); done < <(exactly <"$folder/unit/mutants.out/missed.txt")
    if [ ${#survivors[@]} -gt 0 ]; then
        mutate "${common[@]}" "${survivors[@]}" --output "$folder/all" --cargo-arg=--tests
    fi
    touch "$folder/done"
}

apply() {
    local part=$1
    shift
    local folder=$out/apply-${part/\//-of-}
    [ ! -e "$folder/done" ] || return 0
    rm -rf "$folder" && mkdir -p "$folder/all"
    mutate --package netns-apply --file netns-apply/src/apply.rs --file 'netns-apply/src/apply/*.rs' --timeout "${MUTANTS_TIMEOUT:-300}" "$@" \
        --shard "$part" --sharding round-robin --output "$folder/all" --cargo-arg=--test=apply
    touch "$folder/done"
}

# Lines of a file of all finished parts: what is said of a change last counts.
lines() {
    local file
    for file in "$out/$1"-*/done; do
        [ ! -e "$file" ] || cat "${file%done}"$2/mutants.out/"$3" 2>/dev/null || true
    done
}
count() { lines "$@" | wc -l; }

summary() {
    local what caught missed unviable timeouts
    printf '%-8s %8s %8s %9s %9s %9s\n' code changed caught 'too long' unviable surviving
    for what in core apply; do
        caught=$(($(count "$what" unit caught.txt) + $(count "$what" all caught.txt)))
        unviable=$(($(count "$what" unit unviable.txt) + $(count "$what" all unviable.txt)))
        timeouts=$(($(count "$what" unit timeout.txt) + $(count "$what" all timeout.txt)))
        missed=$(count "$what" all missed.txt)
        printf '%-8s %8d %8d %9d %9d %9d\n' "$what" $((caught + unviable + timeouts + missed)) "$caught" "$timeouts" "$unviable" "$missed"
    done
    lines core all missed.txt
    lines apply all missed.txt
}

what=${1:-}
part=0/1
shift || true
if [[ ${1:-} =~ ^[0-9]+/[0-9]+$ ]]; then
    part=$1
    shift
fi
case $what in
    core | apply) "$what" "$part" "$@" ;;
    summary) summary ;;
    *)
        sed -n '2,/^$/{s/^# \{0,1\}//;p}' "$0" | head -9 >&2
        exit 1
        ;;
esac
