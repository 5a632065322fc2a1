#!/usr/bin/env bash
# Runs the tests that meet the kernel on other kernels than this machine's, each in a virtual machine, and prints a table.
#
#   kernels.sh [SUITE...]     suites of Debian whose newest kernel is taken; all of those below where none is named
#
#   KERNEL_ARCH=amd64|arm64   the processor's architecture, by Debian's name; this machine's where none is named
#   KERNEL_TESTS="..."        tests as PROGRAM/MODULE, in place of those below
#   KERNEL_ACCEL=kvm|tcg      the processor's own virtualization, or emulation, which is ten to twenty times slower
#   KERNEL_MINUTES=N          what one machine may take; 20, with emulation 120
#   RECORDINGS_EVERY=N        every Nth recording only; all of them, with emulation every 10th
#
# The machine has this one's files, read-only with a layer of memory above: it runs test programs built here, which start the same iptables and nft.
# For another architecture than this machine's, Debian's programs for it are a layer between, of this machine's release.
# Test programs are built with optimization, which emulation repays many times. Kernels are unpacked into the target folder; the package lists of this machine
# are not touched. Needs root and Debian's archive.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly all_suites="bullseye-security bookworm trixie sid"
readonly all_tests="packets/redirect_recordings packets/redirect_packets packets/redirect_routing it/netlink_native it/netlink_recordings
    plugin/plugin_recordings plugin/plugin_behaviour cluster/plugin_cnitool agent/heal packets/validation_recordings packets/validation_verdicts"
# What the tests start, and what that needs to start.
readonly foreign_packages="bash dash coreutils sed grep findutils util-linux mount kmod procps iproute2 iptables nftables containernetworking-plugins busybox-static strace"
target=$(realpath "${CARGO_TARGET_DIR:-target}")
host=$(dpkg --print-architecture)
arch=${KERNEL_ARCH:-$host}
release_name=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
readonly target host arch release_name work="$target/kernels/$arch"
readonly programs="$work/programs"

die() {
    echo "kernels.sh: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || die "needs root: a machine reads all of this one's files"
mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/packages" "$programs"
# The files of a machine: the first of these folders that has one.
if [ "$arch" = "$host" ]; then
    busybox=$(command -v busybox) layers=host
else
    busybox=$programs/bin/busybox layers=programs,host
fi

# A KVM whose processor has neither VT-x nor AMD-V runs an ordinary kernel far slower than emulation does.
accel=${KERNEL_ACCEL:-}
if [ -z "$accel" ]; then
    if [ "$arch" = "$host" ] && [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then accel=kvm; else accel=tcg; fi
fi
# Of emulated processors for arm64 the newest costs most: it signs pointers.
case $arch in
amd64) triple=x86_64-unknown-linux-musl compiler=x86_64-linux-gnu-gcc machine=(qemu-system-x86_64) console=ttyS0 emulated=max ;;
arm64) triple=aarch64-unknown-linux-musl compiler=aarch64-linux-gnu-gcc machine=(qemu-system-aarch64 -machine virt) console=ttyAMA0 emulated=neoverse-n1 ;;
*) die "KERNEL_ARCH is amd64 or arm64, not '$arch'" ;;
esac
case $accel in
kvm) processor=host minutes=${KERNEL_MINUTES:-20} every=${RECORDINGS_EVERY:-1} ;;
tcg) processor=$emulated minutes=${KERNEL_MINUTES:-120} every=${RECORDINGS_EVERY:-10} ;;
*) die "KERNEL_ACCEL is kvm or tcg, not '$accel'" ;;
esac

# apt with package lists of its own, of the suites asked for.
apt_options=(-qq -o "APT::Architecture=$arch" -o "APT::Architectures=$arch"
    -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/apt/lists"
    -o "Dir::Cache=$work/apt/cache" -o "Dir::State::status=$work/apt/status" -o APT::Sandbox::User=root -o Acquire::Languages=none)
read_lists() { # SUITE...
    local mirror suite
    mirror=$(sed -n 's/^URIs: *\(.*[^/]\)\/*$/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
    mirror=${mirror:-http://deb.debian.org/debian}
    : >"$work/apt/status"
    for suite in $(printf '%s\n' "$@" "$release_name" | sort -u); do
        case $suite in
        *-security) echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror%/debian}/debian-security $suite main" ;;
        *) echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" ;;
        esac
    done >"$work/apt/sources.list"
    apt-get "${apt_options[@]}" update
}

# Debian's programs for an architecture that is not this machine's, as it would have them: into $programs. Nothing of /etc: alternatives stay this machine's.
unpack_programs() {
    local file
    [ "$(cat "$programs/ready" 2>/dev/null)" != "$foreign_packages" ] || return 0
    echo "== unpacking programs for $arch"
    rm -rf "${programs:?}"/*
    mkdir -p "$programs"/usr/{bin,sbin,lib}
    for folder in bin sbin lib; do ln -s "usr/$folder" "$programs/$folder"; done
    # shellcheck disable=SC2086 # a list of words
    apt-get "${apt_options[@]}" install -y --download-only --no-install-recommends --target-release "$release_name" $foreign_packages >/dev/null
    for file in "$work"/apt/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$file" | tar -x --keep-directory-symlink --exclude=./etc --exclude=./usr/share/doc --exclude=./usr/share/man -C "$programs"
        rm "$file"
    done
    echo "$foreign_packages" >"$programs/ready"
}

# What a package depends on, a name a line. apt-cache is read to its end: a pipe that closes early would be its failure.
depends_of() { # PACKAGE
    apt-cache "${apt_options[@]}" show "$1" | awk '/^Depends:/ && !seen++ { sub("Depends: ", ""); gsub(/ \([^)]*\)/, ""); gsub(/, /, "\n"); print }'
}

# Unpacks the newest kernel of a suite into $work/RELEASE, and sets `release`.
unpack_kernel() { # SUITE
    local package file part
    package=$(depends_of "linux-image-$arch/$1" | grep -oE '^linux-image-[0-9].*') || die "Debian's $1 has no linux-image-$arch"
    release=${package#linux-image-}
    [ ! -e "$work/$release/ready" ] || return 0
    echo "== unpacking $package"
    rm -rf "${work:?}/$release"
    mkdir -p "$work/$release/tree"
    for part in "$package" $(depends_of "$package" | grep -xF -e "linux-modules-$release" -e "linux-binary-$release" -e "linux-base-$release" || true); do
        (cd "$work/packages" && apt-get "${apt_options[@]}" download "$part")
        file=$(ls -t "$work/packages/${part}"_*.deb | head -n 1)
        dpkg-deb --extract "$file" "$work/$release/tree"
        rm "$file"
    done
    [ -d "$work/$release/tree/lib" ] || ln -s usr/lib "$work/$release/tree/lib"
    # Newer packages have the kernel beside its modules.
    if [ ! -e "$work/$release/tree/boot/vmlinuz-$release" ]; then
        mkdir -p "$work/$release/tree/boot"
        ln -s "../usr/lib/modules/$release/vmlinuz" "$work/$release/tree/boot/vmlinuz-$release"
    fi
    depmod -b "$work/$release/tree" "$release"
    first_root "$release"
    touch "$work/$release/ready"
}

# What the kernel starts from: busybox, and the modules without which it cannot read this machine's files.
first_root() { # RELEASE
    local first="$work/$1/first" number=10 module
    mkdir -p "$first/bin" "$first/modules"
    cp "$busybox" "$first/bin/busybox"
    cp scripts/kernels/first-init "$first/init"
    for module in virtio_pci 9p 9pnet_virtio overlay; do
        modprobe --dirname "$work/$1/tree" --set-version "$1" --show-depends "$module"
    done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' | while read -r module; do
        case $module in
        *.xz) xz --decompress --stdout "$module" >"$first/modules/$number-$(basename "$module" .xz)" ;;
        *.zst) zstd --quiet --decompress --stdout "$module" >"$first/modules/$number-$(basename "$module" .zst)" ;;
        *) cp "$module" "$first/modules/$number-$(basename "$module")" ;;
        esac
        number=$((number + 1))
    done
    (cd "$first" && find . | busybox cpio -o -H newc 2>/dev/null) >"$work/$1/first.cpio"
}

# What the machine executes: each module of the list with its test program and the folder it runs in. `it` is netns-apply's.
write_list() { # PROGRAM/MODULE...
    local test line linker cross=() suites=() packages=(e2e istio-cni istio-iptables istio-validation install-cni redirectctl)
    if [ "$arch" != "$host" ]; then
        # With musl, as programs are shipped: scripts/release.sh says why Debian's compiler does for it.
        TARGET=$triple scripts/release.sh --prepare
        linker=CARGO_TARGET_${triple//-/_}_LINKER
        export "CC_${triple//-/_}=$compiler" "${linker^^}=$compiler"
        cross=(--target "$triple")
    fi
    # Only what the list names: a suite of e2e takes minutes to build.
    mapfile -t suites < <(printf '%s\n' "${@%%/*}" | grep -vx it | sort -u)
    build() { cargo build --locked --quiet --profile emulated "${cross[@]}" --message-format=json "$@" >>"$work/built.json"; }
    : >"$work/built.json"
    build "${packages[@]/#/--package=}" --bins "${suites[@]/#/--test=}"
    [[ " $*" != *" it/"* ]] || build --package=e2e --package=netns-apply --test=it
    for test in "$@"; do
        line=$(jq -r --arg program "${test%/*}" --arg name "${test#*/}" 'select(.reason == "compiler-artifact" and .executable != null and .profile.test
            and .target.name == $program and (.target.name != "it" or (.manifest_path | endswith("/netns-apply/Cargo.toml"))))
            | [$name, .executable, (.manifest_path | rtrimstr("/Cargo.toml"))] | @tsv' "$work/built.json")
        [ -n "$line" ] || die "no test program is called ${test%/*}"
        echo "$line"
    done >"$work/tests.tsv"
    rm "$work/built.json"
}

boot() { # RELEASE
    local out="$work/$1/out"
    rm -rf "$out"
    mkdir -p "$out"
    cp "$work/tests.tsv" scripts/kernels/run-tests "$out/"
    timeout --foreground "$((minutes * 60))" "${machine[@]}" -accel "$accel$([ "$accel" != tcg ] || echo ,thread=multi)" -cpu "$processor" -smp 2 -m 3072 \
        -nodefaults -no-user-config -display none -no-reboot -serial "file:$out/console.log" \
        -kernel "$work/$1/tree/boot/vmlinuz-$1" -initrd "$work/$1/first.cpio" \
        -append "console=$console panic=-1 quiet mitigations=off out=$out every=$every layers=$layers cache=$work/cache modules=$work/$1/tree/lib/modules/$1" \
        -virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap" \
        -virtfs "local,path=$programs,mount_tag=programs,security_model=none,readonly=on,multidevs=remap" \
        -virtfs "local,path=$out,mount_tag=out,security_model=none" </dev/null || true
    if [ ! -e "$out/finished" ]; then
        echo "the machine of $1 did not finish; $out/console.log ends:" >&2
        tail -n 20 "$out/console.log" >&2
        return 1
    fi
}

# shellcheck disable=SC2086 # lists of words
set -- ${*:-$all_suites}
# shellcheck disable=SC2086
write_list ${KERNEL_TESTS:-$all_tests}
! grep -q ^plugin_cnitool "$work/tests.tsv" || E2E_CACHE="$work/cache" GOARCH="$arch" scripts/setup-kube.sh cni
read_lists "$@"
[ "$arch" = "$host" ] || unpack_programs
failed=0
for suite in "$@"; do
    unpack_kernel "$suite"
    echo "== $release, $suite ($accel, of the recordings every $every.), $(date +%T)"
    boot "$release" || failed=1
    [ -s "$work/$release/out/results.tsv" ] || continue
    column -t -s "$(printf '\t')" "$work/$release/out/results.tsv"
    ! grep -q "$(printf '\t')failed$(printf '\t')" "$work/$release/out/results.tsv" || failed=1
done
exit "$failed"
