# Everything a newcomer needs: `make demo` and `make test`. Each sets up what it needs from Debian first; both need
# cargo and root.

.PHONY: demo test check setup bench release

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

# Side-by-side measurements of the programs as shipped; the results are ratios, because machines differ.
bench:
	scripts/setup-apt.sh
	export BENCH_BIN="$$(scripts/release.sh istio-cni istio-iptables istio-validation)"; \
	for bench in side-by-side throughput packets validation; do \
		cargo run --release --locked --quiet -p benches --bin $$bench || exit 1; \
	done

# The programs as shipped: static ones. The last line says where they are.
release:
	scripts/release.sh
