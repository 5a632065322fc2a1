#!/usr/bin/env bash
# Compares the sizes of the release programs with those recorded in docs/sizes.txt: none may grow by more than 5 %
# unless recorded (`scripts/sizes.sh --record`), and none over its limit at all.
set -euo pipefail
cd "$(dirname "$0")/.."

# The plugin is loaded from disk for every pod start, the web page's program over a network. In KiB.
declare -A limits=([istio-cni]=8192 [istio-iptables]=4096 [istio-validation]=3072 [install-cni]=11264 [redirectctl]=9216 [kubectl-redirect]=9216 [page]=1500)
recorded=docs/sizes.txt
programs="istio-cni istio-iptables istio-validation install-cni redirectctl kubectl-redirect"

sizes() {
    # shellcheck disable=SC2086 # a list of programs
    folder=$(scripts/release.sh $programs)
    for program in $programs; do
        printf '%s %s\n' "$program" "$(stat -c %s "$folder/$program")"
    done
    printf 'page %s\n' "$(stat -c %s "$(scripts/page.sh)/program/web_bg.wasm")"
}

if [ "${1:-}" = --record ]; then
    sizes | tee "$recorded"
    exit
fi
failed=0
while read -r program size; do
    before=$(awk -v program="$program" '$1 == program { print $2 }' "$recorded")
    limit=$((limits[$program] * 1024))
    verdict=ok
    if [ "$size" -gt "$limit" ]; then verdict="over its limit of ${limits[$program]} KiB"; failed=1
    elif [ $((size * 100)) -gt $((before * 105)) ]; then verdict="grown by more than 5 %"; failed=1; fi
    printf '%-18s %9d bytes, recorded %9d: %s\n' "$program" "$size" "$before" "$verdict"
done < <(sizes)
exit "$failed"
