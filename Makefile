# Everything a newcomer needs: `make demo` and `make test`. Each sets up what it needs from Debian first; both need
# cargo and root.

.PHONY: demo test check setup bench release image clean-cache

# The main job on real network namespaces: redirected packets, shown.
demo:
	scripts/setup-apt.sh demo
	scripts/setup-kube.sh cnitool
	cargo build --release --locked -p istio-iptables -p istio-cni -p e2e --bin istio-iptables --bin istio-cni --bin demo --bin e2e-helper
	"$${CARGO_TARGET_DIR:-target}/release/demo"

# Every test. The first run builds a Kubernetes API server and kubelet from their Go modules (about five minutes).
test: setup
	scripts/test.sh

setup:
	scripts/setup-apt.sh
	scripts/setup-kube.sh

# The checks that are no tests: formatting, lints, dependency rules, documentation, fuzzing for a few seconds.
check:
	scripts/check.sh

# Side-by-side measurements; the results are ratios, because machines differ.
bench: release
	scripts/setup-apt.sh
	cargo run --release --locked -p benches --bin side-by-side

release:
	cargo build --release --locked
