#!/usr/bin/env bash
# Changes the code in one small way after the other (cargo-mutants) and says which changes no test has noticed.
#
#   scripts/mutants.sh core [K/N] [OPTION...]     the three pure libraries, or every Nth change of them from the Kth on
#   scripts/mutants.sh apply [K/N] [OPTION...]    netns-apply's apply; needs root, its tests make network namespaces
#   scripts/mutants.sh summary                    how all runs so far came out, and what survived
#
# Options are cargo-mutants' own. Outcomes lie in target/mutants (MUTANTS), a folder for each part of N; an existing part is not run again.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${MUTANTS:-target/mutants}

# Properties try 256 cases elsewhere; and the smallest failing case is of no interest here.
export PROPTEST_CASES=32 PROPTEST_MAX_SHRINK_ITERS=0 PROPTEST_DISABLE_FAILURE_PERSISTENCE=true
# A change can make a loop that never ends and takes all memory.
ulimit -v 8000000

core() { # K/N [OPTION...]
    # Unit tests are compiled and run in half the time, and notice most changes: what they do not notice meets the others.
    export CARGO=$PWD/scripts/mutants/cargo
    local pure=(redirect-core netfilter-state packet-trace)
    # Whatever of the three is changed, the tests of all three are asked.
    part core "$1" "${pure[@]/#/--package=}" "${pure[@]/#/--test-package=}" --timeout "${MUTANTS_TIMEOUT:-180}" "${@:2}"
}

apply() { # K/N [OPTION...]
    part apply "$1" --package netns-apply --file netns-apply/src/apply.rs --file netns-apply/src/options.rs --file 'netns-apply/src/apply/*.rs' --timeout "${MUTANTS_TIMEOUT:-300}" \
        --cargo-arg=--test=it --cargo-test-arg=apply:: "${@:2}"
}

# One part of the changes, unless it is done.
part() { # core|apply K/N OPTION...
    local folder=$out/$1-${2/\//-of-} code=0
    [ ! -e "$folder/done" ] || return 0
    rm -rf "$folder" && mkdir -p "$folder"
    # Not by way of cargo, which would name itself as the cargo to use.
    cargo-mutants mutants --baseline skip --no-shuffle --colors never --shard "$2" --sharding round-robin --output "$folder" "${@:3}" || code=$?
    case $code in
        # Changes were missed, or took too long: no failure of cargo-mutants.
        0 | 2 | 3) touch "$folder/done" ;;
        *) exit "$code" ;;
    esac
}

# The changes that came out so in all finished parts, one a line.
outcomes() { # core|apply OUTCOME
    local file
    for file in "$out/$1"-*/done; do
        [ ! -e "$file" ] || cat "${file%done}mutants.out/$2.txt"
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
