#!/usr/bin/env bash
# Checks the programs as shipped: static, position-independent, and without anything of a name service. The C library's name service shows in the
# file; that the plugin asks none for an API server with a host name is seen in what it opens.
set -euo pipefail
cd "$(dirname "$0")/.."
programs="istio-cni istio-iptables istio-validation install-cni redirectctl kubectl-redirect"
# shellcheck disable=SC2086 # a list of programs
folder=${1:-$(scripts/release.sh $programs)}
failed=0

complain() {
    echo "$*" >&2
    failed=1
}

for program in $programs; do
    file=$folder/$program
    # A program that can be at any address is a shared object to the linker, which sets a flag of its own to distinguish them.
    readelf --wide --file-header "$file" | grep -q 'Type: *DYN' || complain "$program has a fixed address in memory"
    readelf --wide --dynamic "$file" | grep -q 'FLAGS_1.*PIE' || complain "$program is not marked as position-independent"
    ! readelf --wide --program-headers "$file" | grep -q INTERP || complain "$program needs a loader"
    ! readelf --wide --dynamic "$file" | grep -q NEEDED || complain "$program needs libraries"
    # Names that only glibc's resolver has; symbols are stripped, strings are not.
    ! grep -qaE 'nsswitch\.conf|libnss_|__nss_' "$file" || complain "$program contains a name service switch"
done

# A pod whose API server has a host name, in a network namespace where nothing answers.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/istio-cni-kubeconfig" <<'CONFIG'
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: here, cluster: {server: "https://api-server.invalid:6443", insecure-skip-tls-verify: true}}]
contexts: [{name: here, context: {cluster: here, user: plugin}}]
users: [{name: plugin, user: {token: none}}]
CONFIG
conf='{"cniVersion":"1.0.0","name":"n","type":"istio-cni","cni_agent_run_dir":"'$work'","add_timeout":"1s",
    "prevResult":{"cniVersion":"1.0.0","interfaces":[],"ips":[]}}'
answer=$(echo "$conf" | CNI_COMMAND=ADD CNI_CONTAINERID=shipped CNI_NETNS=/proc/self/ns/net CNI_IFNAME=eth0 CNI_PATH=/ \
    CNI_ARGS='K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0' \
    unshare --net strace --follow-forks --quiet=all --trace=open,openat,connect --output="$work/trace" "$folder/istio-cni" 2>/dev/null) || true
# It did send a request, so the files it did not open prove something.
[[ $answer == *api-server.invalid* ]] || complain "the plugin did not look for its API server: $answer"
grep -q '"/etc/resolv.conf"' "$work/trace" || complain "the plugin read no /etc/resolv.conf"
if grep -E 'nsswitch|libnss|nscd|\.so' "$work/trace" >&2; then
    complain "the plugin asked the node's name service"
fi
[ "$failed" != 0 ] || echo "static, position-independent, no name service: $programs"
exit "$failed"
