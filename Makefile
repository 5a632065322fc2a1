# Everything a newcomer needs: `make demo` and `make test`. Each sets up what it needs from Debian first; both need
# cargo and root.

.PHONY: demo test test-cluster test-all outage enrol fleet kernels picture fuzz mutants miri sanitize inject msrv faults hunt soak scale race scan heal trace swap rollouts runtimes quarrel envoy images reproducible release-candidate seccomp chart mesh ztunnel networks guides manifests page check release-check setup bench release

# The main job on real network namespaces: redirected packets, shown.
demo:
	scripts/setup-apt.sh demo
	scripts/setup-kube.sh cnitool
	cargo build --release --locked -p istio-iptables -p istio-cni -p e2e --bin istio-iptables --bin istio-cni --bin demo --bin e2e-helper
	"$${CARGO_TARGET_DIR:-target}/release/demo"

# What needs no Kubernetes and no Go: ten minutes from a fresh clone, four once everything is compiled.
test:
	scripts/test.sh

# What needs an API server, a kubelet, containerd or Helm: a quarter of an hour. The first run builds them from their Go modules (six minutes).
test-cluster: setup
	scripts/setup-kube.sh helm
	scripts/test.sh cluster

# Both, with every recording, fault and repetition where those take a part. Takes an hour.
test-all: setup
	scripts/setup-kube.sh helm
	SAMPLES=all scripts/test.sh
	SAMPLES=all scripts/test.sh cluster

# Every kind of fault into every operation, one at a time (docs/internals/faults.md); then every step of every kind of change, failed once and killed once. Prints a
# table of each. `make test` takes a part of both.
faults:
	scripts/setup-apt.sh
	cargo build --locked --workspace --bins
	FAULTS=all cargo test --locked -p e2e --test programs faults:: -- --nocapture
	FAULTS=all cargo test --locked -p e2e --test packets redirect_faults:: -- --nocapture

# A million segments that follow no protocol, from outside, on connections that live, die and are used again: none may get past the proxy. Then a process
# of the pod without privileges tries 100,000 times to call a host outside: only by the paths that docs/concepts/capture.md names, and by none with strict
# capture. As many go to ambient pods that keep open connections: none may get past ztunnel. Prints its figures. `make test` sends 20,000 and 48,000, and tries 12,000 times.
hunt:
	scripts/setup-apt.sh
	cargo build --locked --workspace --bins
	HUNT=1000000 cargo test --locked -p e2e --test packets capture_hunt:: -- --nocapture
	HUNT_INSIDE=100000 cargo test --locked -p e2e --test packets capture_hunt_inside:: -- --nocapture
	SEGMENTS=1000000 cargo test --locked -p e2e --test packets ambient_kept::nothing_but_what_was_open -- --nocapture

# 2,000 network namespaces of pods on four nodes, three times programmed, checked, programmed otherwise, damaged, healed and cleaned by the programs as
# shipped, which are killed at random moments: none lost, nothing left over, and the agents do not grow. Prints its figures. `make test` takes 12.
soak:
	scripts/setup-apt.sh
	folder="$$(scripts/release.sh install-cni istio-cni istio-iptables)" && \
	BUILT_PROGRAMS="$$folder" INSTALL_CNI="$$folder/install-cni" SOAK=$${SOAK:-2000} \
		cargo test --locked -p e2e --test agent soak:: -- --nocapture --test-threads=1

# Every fuzz target for 20 minutes (FUZZ_MINUTES), one per processor at a time; prints a table. `make release-check` takes a few seconds of
# each, and `make check` compiles them.
fuzz:
	command -v cargo-fuzz >/dev/null || cargo install --quiet --locked cargo-fuzz
	scripts/fuzz.sh

# The code changed in one small way after the other, which tests must notice; prints what survived. Takes many hours: PART=3/80 takes every 80th change, from
# the fourth on, and goes on where it was. docs/internals/testing.md has the figures.
mutants:
	command -v cargo-mutants >/dev/null || cargo install --quiet --locked cargo-mutants
	scripts/mutants.sh core $${PART:-0/1}
	scripts/mutants.sh apply $${PART:-0/1}
	scripts/mutants.sh summary

# Unit tests without I/O in Miri, which finds undefined behaviour also in what ours is made of. Takes a nightly compiler.
miri:
	rustup component add --toolchain nightly miri rust-src
	scripts/miri.sh

# Tests that meet the kernel, compiled for the address sanitizer, into a folder of their own. Takes a nightly compiler.
sanitize:
	scripts/setup-apt.sh
	scripts/sanitize.sh

# 2,000 cases of hostile text in settings and annotations, and what the kernel then holds; prints how they came out. `make test` takes fewer.
inject:
	scripts/setup-apt.sh
	cargo build --locked --workspace --bins
	INJECTIONS=$${INJECTIONS:-1000} cargo test --locked -p e2e --test packets rule_injection:: -- --nocapture

# The published crates with the oldest compiler and the oldest versions of their dependencies that they promise to work with. `make release-check` does it, too.
msrv:
	scripts/minimal-versions.sh

# Every configuration in the place of every other, fifty times each, under connections; prints a table. `make test` takes fewer.
swap:
	scripts/setup-apt.sh
	cargo build --locked -p istio-iptables -p e2e
	SWAPS=50 cargo test --locked -p e2e --test packets redirect_swap:: -- --nocapture

# 5,000 packets over 200 plans, each really sent and compared with its trace; 10,000 among 1,000 random rulesets of other programs, compared
# with their traces and with what CHECK names; 300 surroundings of policy rules and routing tables; 2,000, each really sent in two pods, and 100,000 more compared with
# what two plans treat differently. Prints figures; `make test` takes fewer.
trace:
	scripts/setup-apt.sh
	TRACE_PLANS=200 cargo test --locked -p e2e --test packets trace_packets:: -- --nocapture
	TRACE_FOREIGN=10000 cargo test --locked -p e2e --test packets trace_foreign:: -- --nocapture
	DIFF_PAIRS=100 cargo test --locked -p e2e --test packets diff_packets:: -- --nocapture
	SURROUNDINGS=300 cargo test --locked -p e2e --test packets routing_surroundings:: -- --nocapture
	DIFF_PACKETS=100000 cargo test --release --locked -p packet-trace --test it traffic_difference:: -- --nocapture

# A thousand random deletions of pods' rules, all healed by the release build, and what it costs that nothing is deleted; prints figures. `make test`
# deletes fewer and has no bound on time.
heal:
	scripts/setup-apt.sh
	folder="$$(scripts/release.sh install-cni)" && export INSTALL_CNI="$$folder/install-cni" && \
	HEALS=1000 cargo test --locked -p e2e --test agent heal_random:: -- --nocapture --test-threads=1 && \
	IDLE_SECONDS=600 cargo test --locked -p e2e --test agent idle::an_agent_that_heals -- --nocapture

# The agent's DaemonSet rolls ten times while pods start, each time with an image that is late. `make test-cluster` rolls it twice.
rollouts: setup
	cargo build --locked -p install-cni -p istio-cni -p e2e
	ROLLOUTS=10 cargo test --locked -p e2e --test cluster node::agent_rollout::a_daemon_set_that_rolls -- --nocapture

# Pods start while everything happens to the agent and the node, ten times over, reboots included; prints its figures. `make test-cluster` plays it once.
race: setup
	cargo build --locked -p install-cni -p istio-cni -p istio-validation -p e2e
	RACES=10 cargo test --locked -p e2e --test cluster node::agent_race:: -- --nocapture
	cargo test --locked -p e2e --test agent repair:: -- --ignored

# The API server is away for ten minutes, in which fifty pods of the mesh and fifty others lose their sandboxes in rounds; prints how many rounds. `make test-cluster` has
# six pods once.
outage: setup
	cargo build --locked -p install-cni -p istio-cni -p e2e
	OUTAGE_PODS=$${OUTAGE_PODS:-50} OUTAGE_MINUTES=$${OUTAGE_MINUTES:-10} cargo test --locked -p e2e --test cluster -- --nocapture pods_that_the_agent_holds

# 5,000 broken pods on one node and on fifty, and 1,000 nodes that join, get agents and lose some; prints what that costs the API server, the agents and
# the cluster's taint controller. `make test-cluster` plays 200 and 60.
scale: setup
	cargo build --locked -p install-cni -p istio-cni -p e2e
	SCALE_PODS=5000 SCALE_NODES=50 SCALE_TAINT_NODES=1000 cargo test --locked -p e2e --test cluster agent_scale:: -- --nocapture

# 500 running pods become ambient, and 250 are created, with the release build; prints how long that takes, and the agent's memory. `make test-cluster` enrols fewer.
enrol: setup
	folder="$$(scripts/release.sh install-cni istio-cni)" && export INSTALL_CNI="$$folder/install-cni" && \
	ulimit -n "$$(ulimit -Hn)" && PODS=$${PODS:-500} ADDS=$${ADDS:-250} \
		cargo test --locked -p e2e --test cluster -- --nocapture --test-threads=1 enrolled_at_once created_in_a_crowd

# Agents of 10, 100, 1,000 and 5,000 nodes on one real API server: what they ask, and how they come back after it was gone; prints figures. Takes half an
# hour and 6 GiB. `make test-cluster` plays 40.
fleet: setup
	ulimit -n "$$(ulimit -Hn)" && FLEET="$${FLEET:-10 100 1000 5000}" FLEET_IDLE=$${FLEET_IDLE:-240} \
		cargo test --locked -p e2e --test cluster fleet:: -- --nocapture

# The tests that meet the kernel, on the kernels of four releases of Debian, 5.10 and newer, for amd64 and arm64, each in a virtual machine; prints tables. Takes
# hours where the processor is emulated; `KERNEL_ARCH=arm64 KERNEL_TESTS="packets/redirect_packets it/netlink_native" make kernels` runs a part.
kernels:
	scripts/setup-apt.sh
	scripts/setup-apt.sh kernels
	scripts/setup-apt.sh cross
	for arch in $${KERNEL_ARCH:-amd64 arm64}; do KERNEL_ARCH=$$arch scripts/kernels.sh || exit 1; done

# The agent and the plugin under containerd 2 and Multus. Builds both the first time (minutes), so `make test-cluster` does without. No registry has CRI-O: with
# CRIO=FOLDER, which holds `crio` and `pinns`, under that, too.
runtimes: setup
	scripts/setup-kube.sh runtimes
	cargo build --locked -p install-cni -p istio-cni -p e2e
	cargo test --locked -p e2e --test cluster node::agent_runtimes:: -- --ignored --skip quarrel --skip crio
	@[ -n "$(CRIO)" ] || echo 'make runtimes: no CRIO: nothing ran under CRI-O'
	[ -z "$(CRIO)" ] || { scripts/setup-apt.sh crio && \
		CRIO="$(realpath $(CRIO))" cargo test --locked -p e2e --test cluster node::agent_runtimes::crio:: -- --ignored; }

# A program rewrites its network's list once a second for ten minutes while 200 pods start under containerd 2.1, with the entry beside the list and then in it;
# prints figures. QUARREL_SECONDS and QUARREL_PODS make it shorter.
quarrel: setup
	scripts/setup-kube.sh runtimes
	cargo build --locked -p install-cni -p istio-cni -p e2e
	cargo test --locked -p e2e --test cluster node::agent_runtimes::quarrel -- --ignored --nocapture --test-threads=1

# What rules bring a real Envoy in network namespaces, in both modes and families, over every backend. Fetches Envoy the first time (20 MB), so `make test`
# has a stand-in.
envoy:
	scripts/setup-apt.sh
	scripts/setup-kube.sh envoy
	cargo build --locked --workspace --bins
	cargo test --locked -p e2e --test packets envoy_packets:: -- --ignored --test-threads=2

# Builds the images as they are shipped, for both architectures, into target/images; then runs those for this machine on nodes of containerd 1 and 2, with
# a real Envoy as the sidecar. Builds every program twice (minutes), so `make test` does without and packs small programs only.
images: setup
	scripts/setup-apt.sh cross
	scripts/setup-kube.sh runtimes
	scripts/setup-kube.sh helm
	scripts/setup-kube.sh envoy
	PROGRAMS_AMD64=$$(TARGET=x86_64-unknown-linux-musl scripts/release.sh | tail -n 1) \
	PROGRAMS_ARM64=$$(TARGET=aarch64-unknown-linux-musl scripts/release.sh | tail -n 1) \
	deploy/build-images.sh --for amd64,arm64 "$${CARGO_TARGET_DIR:-target}/images"
	export IMAGES="$${CARGO_TARGET_DIR:-target}/images"; \
	cargo test --locked -p tools --features cyclonedx --test it images:: -- --ignored && cargo test --locked -p e2e --test cluster node::images_node:: -- --ignored

# Builds all programs and images for both architectures in two clones in different folders, and compares every byte; prints their sums. Four release
# builds, so `make release-check` compares the plugin only.
reproducible:
	scripts/setup-apt.sh cross
	scripts/reproducible.sh

# What the agent asks of the kernel in its life, as it is shipped and as the tests have it, compared with the list that its seccomp profile is made of.
seccomp: setup
	cargo build --locked --workspace --bins
	rm -rf target/seccomp && mkdir -p target/seccomp/shipped target/seccomp/built
	SECCOMP_TRACES="$(CURDIR)/target/seccomp/built" cargo test --locked -p e2e --test agent seccomp::it_
	folder="$$(scripts/release.sh install-cni istio-cni)" && \
	INSTALL_CNI="$$folder/install-cni" ISTIO_CNI="$$folder/istio-cni" SECCOMP_TRACES="$(CURDIR)/target/seccomp/shipped" \
		cargo test --locked -p e2e --test agent seccomp::it_
	"$${CARGO_TARGET_DIR:-target}/debug/seccomp" compare deploy/seccomp/install-cni.calls install-cni,istio-cni target/seccomp/*/*

# What Helm makes of the chart, and what an API server and a node make of that: a part of `make test-cluster`.
chart: setup
	scripts/setup-kube.sh helm
	cargo build --locked -p install-cni -p istio-cni -p e2e
	cargo test --locked -p e2e --test cluster chart

# A real mesh: istiod, its injector, pilot-agent and Envoy, with pods redirected by our plugin, Istio's, and each one's init container; prints a table for each release
# of Istio, and what heals, restarts and is exchanged under load. Sidecars are upgraded from each release to the next one. No registry has packages of the programs of
# Istio: ISTIO names folders that hold them. With ZTUNNEL=PROGRAM, as for `make ztunnel`, also two nodes of ambient pods, and one with two DaemonSets of ztunnel.
mesh:
	@[ -n "$(ISTIO)" ] || { echo 'make mesh needs ISTIO="FOLDER...", in each folder a release of Istio: bin/{pilot-discovery,pilot-agent,install-cni,istio-cni}, manifests/charts and envoy_bootstrap.json; takes about ten minutes for each' >&2; exit 2; }
	scripts/setup-apt.sh cluster
	scripts/setup-kube.sh
	scripts/setup-kube.sh helm
	scripts/setup-kube.sh envoy
	cargo build --locked --workspace --bins
	for release in $(ISTIO); do \
		ISTIO="$$release" cargo test --locked -p e2e --test cluster node::mesh:: -- --ignored --nocapture --test-threads=1 --skip sidecars_are_upgraded || exit 1; done
	[ -z "$(ZTUNNEL)" ] || for release in $(ISTIO); do \
		ISTIO="$$release" ZTUNNEL="$(realpath $(ZTUNNEL))" cargo test --locked -p e2e --test cluster -- --ignored --nocapture --test-threads=1 enrolment::stock_ztunnel::under_istiod:: node::ambient_mesh:: || exit 1; done
	set -- $(ISTIO); [ $$# -gt 1 ] || echo 'mesh: one release: no sidecar is upgraded to the next'; while [ $$# -gt 1 ]; do \
		ISTIO="$$1" ISTIO_NEXT="$$2" cargo test --locked -p e2e --test cluster node::mesh::sidecars_are_upgraded -- --ignored --nocapture --test-threads=1 || exit 1; shift; done

# The agent and the plugin on the networks of other projects, with a real Envoy beside stand-ins for it, in both modes; prints the columns of
# docs/reference/compatibility.md, and UPDATE_DOCS=1 writes them. No registry has the programs. FLANNEL names a folder with `flanneld` and the CNI plugin
# `flannel`: VXLAN, both families. CILIUM names a folder with `cilium-agent`, `cilium-operator-generic`, the CNI plugin `cilium-cni`, `bpf/` of its source, its
# Helm chart as `chart/`, and the `clang` that the agent runs: five columns. ZTUNNEL=PROGRAM, as for `make ztunnel`, connects ambient pods by HBONE, too;
# ISTIO=FOLDER, as for `make mesh`, runs the same under Istio's own agent and plugin.
networks:
	@{ [ -x "$(FLANNEL)/flanneld" ] && [ -x "$(FLANNEL)/flannel" ]; } || [ -x "$(CILIUM)/cilium-agent" ] || { echo 'make networks needs FLANNEL=FOLDER with flanneld and the CNI plugin flannel, or CILIUM=FOLDER with cilium-agent; takes three minutes a column to run' >&2; exit 2; }
	scripts/setup-apt.sh cluster
	scripts/setup-kube.sh networks
	scripts/setup-kube.sh helm
	scripts/setup-kube.sh envoy
	$(if $(CILIUM),scripts/setup-kube.sh runtimes)
	cargo build --locked --workspace --bins
	@[ -n "$(ZTUNNEL)" ] || echo 'make networks: no ZTUNNEL: ambient pods had no ztunnel'
	@[ -n "$(ISTIO)" ] || echo 'make networks: no ISTIO: Istio'"'"'s plugin was not run'
	export FLANNEL="$(abspath $(FLANNEL))" CILIUM="$(abspath $(CILIUM))" $(if $(ZTUNNEL),ZTUNNEL="$(realpath $(ZTUNNEL))") $(if $(ISTIO),ISTIO="$(abspath $(ISTIO))") && \
	test="cargo test --locked -p e2e --test cluster -- --ignored --nocapture --test-threads=1" && \
	for network in $(if $(FLANNEL),flannel) $(if $(CILIUM),cilium); do \
	$$test node::networks::$$network $(if $(ISTIO),,--skip istios_plugin) || exit 1; done

# The agent in ambient mode with a stock ztunnel: encrypted connections between pods, probes, DNS, ztunnel killed and replaced, the agent killed, pods that come
# and go (20, or GUESTS), open streams (1000, or STREAMS) at enrolment and exchange, under both kinds of rules; prints figures. No registry has ztunnel: ZTUNNEL names the program. With ISTIO="FOLDER..." as for `make mesh`
# each release's own agent is replaced by ours and back, under load.
ztunnel:
	@[ -x "$(ZTUNNEL)" ] || { echo 'make ztunnel needs ZTUNNEL=PROGRAM, a ztunnel with its test certificate authority (feature testing); takes six minutes to run' >&2; exit 2; }
	scripts/setup-apt.sh cluster
	scripts/setup-kube.sh
	cargo build --locked --workspace --bins
	export ZTUNNEL="$(realpath $(ZTUNNEL))" && \
	test="cargo test --locked -p e2e --test cluster enrolment:: -- --ignored --nocapture --test-threads=1" && \
	$$test stock_ztunnel --skip istios_agent --skip under_istiod && \
	for release in $(ISTIO); do ISTIO="$$release" $$test istios_agent || exit 1; done
	@[ -n "$(ISTIO)" ] || echo 'make ztunnel: no ISTIO: Istio'"'"'s own agent was not replaced'

# Every command of the guides, typed on a cluster with a real node: from Istio's chart to verified pods, back, upgraded, removed and installed again.
# Builds the programs as shipped, and pushes the images to a registry of its own. Prints how long each step takes. Then the runbook of each alert, typed where what the
# alert is about has happened, and the commands for a node of a mesh, which `make test-cluster` types as well.
guides: setup
	scripts/setup-apt.sh guides
	scripts/setup-apt.sh release
	scripts/setup-kube.sh helm
	folder="$$(scripts/release.sh)" && export PROGRAMS_AMD64="$$folder" && \
	cargo test --locked -p e2e --test cluster node::guides_node:: -- --ignored --test-threads=1 --nocapture
	cargo test --locked -p e2e --test cluster -- runbooks:: guides_mesh:: --test-threads=1

# The web page, in target/site: the documentation, and redirectctl's plan, diff and trace in the browser. Tried in a real one; writes the pictures
# of it in docs/page.
page:
	scripts/setup-apt.sh page
	folder="$$(scripts/page.sh)" && export PAGE="$$folder" && mkdir -p docs/page && \
	PAGE_PICTURES="$(CURDIR)/docs/page" cargo test --locked -p e2e --test programs page_browser:: -- --ignored --test-threads=2

# The dashboard's picture in docs/tasks/alerts.md: what a real Prometheus has to say of two minutes of a real agent, built as it is shipped. Takes
# Python with venv, and matplotlib from PyPI.
picture: setup
	scripts/setup-apt.sh release
	python3 -m venv target/picture && target/picture/bin/pip install --quiet matplotlib==3.11.2
	folder="$$(scripts/release.sh install-cni)" && \
	INSTALL_CNI="$$folder/install-cni" PYTHON="$(CURDIR)/target/picture/bin/python" DASHBOARD_PICTURE="$(CURDIR)/docs/monitoring/dashboard.svg" \
		cargo test --locked -p e2e --test cluster monitoring_live::

# Writes what is generated: of the chart deploy/istio-cni-node.yaml, deploy/taint-controller.yaml and the chart's values.yaml; of their list the seccomp
# profile and its object.
manifests:
	scripts/setup-kube.sh helm
	UPDATE_MANIFESTS=yes cargo test --locked -p e2e --test cluster chart:: -- generated
	cargo run --quiet --locked -p tools --bin seccomp -- profile deploy/seccomp/install-cni.calls >target/profile && mv target/profile deploy/seccomp/install-cni.json
	cargo run --quiet --locked -p tools --bin seccomp -- object deploy/seccomp/install-cni.calls >target/profile && mv target/profile deploy/seccomp/security-profiles-operator.json

# redirectctl checks 200 pods of one node, 40 of them broken; fails where the fastest of five passes takes a second. `make test` takes fewer, and counts questions.
scan:
	scripts/setup-apt.sh
	cargo build --locked --release -p redirectctl
	cargo build --locked -p istio-cni -p e2e
	SCANNED=200 REDIRECTCTL="$${CARGO_TARGET_DIR:-target}/release/redirectctl" cargo test --locked -p e2e --test programs redirectctl_scan:: -- --nocapture

setup:
	scripts/setup-apt.sh cluster
	scripts/setup-kube.sh

# What a change can break beside the tests: formatting, lints, dependency rules, documentation, public interfaces. Takes four minutes after
# `make test` on two processors, and prints what each step took.
check:
	scripts/check.sh

# What only a release needs: the programs as shipped, their sizes and bytes; the published crates with the oldest compiler and libraries, and packed;
# advisories; the recipes of CONTRIBUTING.md, compiled; fuzzing for a few seconds. Builds all that is shipped, so it takes tens of minutes.
release-check:
	scripts/setup-apt.sh
	scripts/release-check.sh

# Side-by-side measurements of the programs as shipped; the results are ratios, because machines differ.
bench:
	scripts/setup-apt.sh
	folder="$$(scripts/release.sh istio-cni istio-iptables istio-validation)" && export BENCH_BIN="$$folder" && \
	for bench in side-by-side throughput packets validation; do \
		cargo run --release --locked --quiet -p benches --bin $$bench || exit 1; \
	done

# The programs as shipped: static with musl. The last line says where they are.
release:
	scripts/setup-apt.sh release
	scripts/release.sh

# What a release consists of, in the folder OUT, of a commit that has its version's tag (docs/internals/releasing.md), after `make release-check`.
# Publishes nothing.
release-candidate:
	scripts/setup-apt.sh
	scripts/setup-apt.sh cross
	scripts/release-candidate.sh make "$(OUT)"
