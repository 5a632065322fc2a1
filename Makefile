# Everything a newcomer needs: `make demo` and `make test`. Each sets up what it needs from Debian first; both need
# cargo and root.

.PHONY: demo test faults swap rollouts race scale runtimes check setup bench release

# The main job on real network namespaces: redirected packets, shown.
demo:
	scripts/setup-apt.sh demo
	scripts/setup-kube.sh cnitool
	cargo build --release --locked -p istio-iptables -p istio-cni -p e2e --bin istio-iptables --bin istio-cni --bin demo --bin e2e-helper
	"$${CARGO_TARGET_DIR:-target}/release/demo"

# Every test. The first run builds a Kubernetes control plane and kubelet from their Go modules (about six minutes).
test: setup
	scripts/test.sh

# Every step of every kind of change, failed once and killed once; prints a table. `make test` takes a part of them.
faults:
	scripts/setup-apt.sh
	cargo build --locked -p istio-iptables -p e2e
	FAULTS=all cargo test --locked -p e2e --test redirect_faults -- --nocapture

# Every configuration in the place of every other, fifty times each, under connections; prints a table. `make test` takes fewer.
swap:
	scripts/setup-apt.sh
	cargo build --locked -p istio-iptables -p e2e
	SWAPS=50 cargo test --locked -p e2e --test redirect_swap -- --nocapture

# The agent's DaemonSet rolls ten times while pods start, each time with an image that is late. `make test` rolls it twice.
rollouts: setup
	cargo build --locked -p install-cni -p istio-cni -p e2e
	ROLLOUTS=10 cargo test --locked -p e2e --test agent_rollout a_daemon_set_that_rolls -- --nocapture

# Pods start while everything happens to the agent and the node, ten times over, reboots included; prints its figures. `make test` plays it once.
race: setup
	cargo build --locked -p install-cni -p istio-cni -p istio-validation -p e2e
	RACES=10 cargo test --locked -p e2e --test agent_race -- --nocapture
	cargo test --locked -p install-cni --test repair -- --ignored

# 5,000 broken pods on one node and on fifty; prints what that costs the API server and the agents. `make test` plays 200.
scale: setup
	cargo build --locked -p install-cni -p istio-cni -p e2e
	SCALE_PODS=5000 SCALE_NODES=50 cargo test --locked -p e2e --test agent_scale -- --nocapture

# The agent and the plugin under containerd 2 and Multus. Builds both the first time (minutes), so `make test` does without.
runtimes: setup
	scripts/setup-kube.sh runtimes
	cargo build --locked -p install-cni -p istio-cni -p e2e
	cargo test --locked -p e2e --test agent_runtimes -- --ignored

setup:
	scripts/setup-apt.sh
	scripts/setup-kube.sh

# The checks that are no tests: formatting, lints, dependency rules, documentation, fuzzing for a few seconds.
check:
	scripts/check.sh

# Side-by-side measurements of the programs as shipped; the results are ratios, because machines differ.
bench:
	scripts/setup-apt.sh
	export BENCH_BIN="$$(scripts/release.sh istio-cni istio-iptables istio-validation)"; \
	for bench in side-by-side throughput packets validation; do \
		cargo run --release --locked --quiet -p benches --bin $$bench || exit 1; \
	done

# The programs as shipped: static with musl. The last line says where they are.
release:
	scripts/setup-apt.sh release
	scripts/release.sh
