#!/bin/sh
# Watches the release build of the agent do nothing on a node with 250 pods for ten minutes, or for as many seconds as the first argument
# says: at most 12 MiB resident, at most 0.1 % of a core, no growth. A second one, which looks for drift in 250 pods every five seconds, must
# stay within 12 MiB and not grow either, nor may a third one, which heals. Needs root, for the pods' network namespaces.
set -eu
project=$(cd "$(dirname "$0")/.." && pwd)
cd "$project"
folder=$(scripts/release.sh install-cni)
INSTALL_CNI=$folder/install-cni IDLE_SECONDS=${1:-600} \
    cargo test --locked -p e2e --test agent idle:: -- --nocapture --test-threads=1
