#!/usr/bin/env bash
# Changes the code in one small way after the other (cargo-mutants) and says which changes no test has noticed.
#
#   scripts/mutants.sh core [K/N] [OPTION...]     redirect-core, or every Nth change of it from the Kth on
#   scripts/mutants.sh apply [K/N] [OPTION...]    netns-apply's apply; needs root, its tests make network namespaces
#   scripts/mutants.sh summary                    how all runs so far came out, and what survived
#
# Options are cargo-mutants' own. Outcomes lie in target/mutants (MUTANTS), a folder for each part of N; a part that is there is not run again.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${MUTANTS:-target/mutants}

# Properties try 256 cases elsewhere; and how simple the smallest failing case is interests nobody here.
export PROPTEST_CASES=32 PROPTEST_MAX_SHRINK_ITERS=0 PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
# A change can make a loop that never ends and takes all memory.
ulimit -v 8000000

# Unit tests first: they are compiled and run in half the time, and notice most changes. What they do not notice meets all other tests.
core() { # K/N [OPTION...]
    local part=$out/core-${1/\//-of-} tests=() unnoticed=() file name
    for file in redirect-core/tests/*.rs; do
        name=$(basename "$file" .rs)
        case $name in
            # These ask what the crate is made of, and that examples are as new as the sources, which says nothing about a change.
            dependencies | examples) ;;
            *) tests+=(--cargo-arg=--test="$name") ;;
        esac
    done
    change "$part/unit" --shard "$1" --sharding round-robin --package redirect-core --timeout "${MUTANTS_TIMEOUT:-60}" --cargo-arg=--lib "${@:2}"
    while read -r name; do unnoticed+=(--re "^$name\$"); done < <(literally <"$part/unit/mutants.out/missed.txt")
    [ ${#unnoticed[@]} = 0 ] ||
        change "$part/all" "${unnoticed[@]}" --package redirect-core --timeout "${MUTANTS_TIMEOUT:-120}" "${tests[@]}" "${@:2}"
    touch "$part/done"
}

apply() { # K/N [OPTION...]
    local part=$out/apply-${1/\//-of-}
    change "$part/all" --shard "$1" --sharding round-robin --package netns-apply --file netns-apply/src/apply.rs --file 'netns-apply/src/apply/*.rs' \
        --timeout "${MUTANTS_TIMEOUT:-300}" --cargo-arg=--test=apply "${@:2}"
    touch "$part/done"
}

# Runs cargo-mutants, unless that is done.
change() { # FOLDER OPTION...
    local folder=$1 code=0
    [ ! -e "$folder/done" ] || return 0
    rm -rf "$folder" && mkdir -p "$folder"
    cargo mutants --baseline skip --no-shuffle --colors never --output "$folder" "${@:2}" || code=$?
    case $code in
        # Changes were missed, or took too long: no failure of cargo-mutants.
        0 | 2 | 3) touch "$folder/done" ;;
        *) exit "$code" ;;
    esac
}

# Lines as regular expressions that fit nothing else.
literally() {
    sed 's/[][\.*^$+?(){}|]/\\&/g'
}

# The changes that came out so in all finished parts, one a line.
outcomes() { # core|apply OUTCOME
    local done run
    for done in "$out/$1"-*/done; do
        [ -e "$done" ] || continue
        for run in unit all; do
            # What unit tests have missed is in the other list, too, wherever it came out.
            [ "$run $2" = "unit missed" ] || cat "${done%/done}/$run/mutants.out/$2.txt" 2>/dev/null || true
        done
    done
}

summary() {
    local what outcome numbers
    printf '%-8s %8s %8s %8s %8s %8s\n' code changed caught timeout unviable missed
    for what in core apply; do
        numbers=()
        for outcome in caught timeout unviable missed; do numbers+=("$(outcomes "$what" "$outcome" | wc -l)"); done
        printf '%-8s %8d %8d %8d %8d %8d\n' "$what" "$((${numbers[*]/%/ +} 0))" "${numbers[@]}"
    done
    outcomes core missed
    outcomes apply missed
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
        sed -n '2,/^$/{s/^# \{0,1\}//;p}' "$0" | head -8 >&2
        exit 1
        ;;
esac
