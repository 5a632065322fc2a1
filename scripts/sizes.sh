#!/usr/bin/env bash
# Compares the sizes of the release programs with those recorded in docs/sizes.txt: none may grow by more than 5 %
# without somebody recording it (`scripts/sizes.sh --record`), and none over its limit at all.
set -euo pipefail
cd "$(dirname "$0")/.."

# The plugin is loaded from disk for every pod start. In MiB.
declare -A limits=([istio-cni]=8 [istio-iptables]=4 [istio-validation]=3 [install-cni]=10 [redirectctl]=9)
recorded=docs/sizes.txt
programs="istio-cni istio-iptables istio-validation install-cni redirectctl"

sizes() {
    # shellcheck disable=SC2086 # a list of programs
    folder=$(scripts/release.sh $programs)
    for program in $programs; do
        printf '%s %s\n' "$program" "$(stat -c %s "$folder/$program")"
    done
}

if [ "${1:-}" = --record ]; then
    sizes | tee "$recorded"
    exit
fi
failed=0
while read -r program size; do
    before=$(awk -v program="$program" '$1 == program { print $2 }' "$recorded")
    limit=$((limits[$program] * 1024 * 1024))
    verdict=ok
    if [ "$size" -gt "$limit" ]; then verdict="over its limit of ${limits[$program]} MiB"; failed=1
    elif [ $((size * 100)) -gt $((before * 105)) ]; then verdict="grown by more than 5 %"; failed=1; fi
    printf '%-18s %9d bytes, recorded %9d: %s\n' "$program" "$size" "$before" "$verdict"
done < <(sizes)
exit "$failed"
