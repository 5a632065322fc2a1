#!/bin/sh
# Builds programs as they are shipped: optimised, stripped, static with musl, and position-independent. They run on nodes with any C
# library, read nothing of the node's name service, and need nothing in an image. Prints the folder they are in.
#
# usage: scripts/release.sh [PROGRAM...]      all of them by default
#        scripts/release.sh --check           builds nothing, prints everything that is missing, each with what to do
#        scripts/release.sh --prepare         builds nothing, adds Rust's standard library for the target: builds at the same time may not
#
# Programs do not reveal the paths of their sources and of cargo's crates.
#
# TARGET=TRIPLE builds for another target than this machine's with musl. FIXED=1 gives the programs a fixed address, to measure what
# being position-independent costs. PROFILE=local builds all at once, in half the time; they are larger than what is shipped.
set -eu
cd "$(dirname "$0")/.."

problems=0
problem() {
    printf 'release.sh: %s\n' "$1" >&2
    problems=$((problems + 1))
}

command -v rustc >/dev/null || {
    problem "no Rust: install it with rustup (https://rustup.rs)"
    exit 1
}
host=$(rustc -vV | sed -n 's/^host: //p')
triple=${TARGET:-${host%%-*}-unknown-linux-musl}
only=
case ${1:-} in --check | --prepare) only=$1; shift ;; esac
[ $# -gt 0 ] || set -- istio-cni istio-iptables istio-validation install-cni redirectctl kubectl-redirect

# Rust's standard library for the target.
needs_library=
if ! [ -d "$(rustc --print target-libdir --target "$triple")" ]; then
    needs_library=1
    command -v rustup >/dev/null || problem "this Rust ($(command -v rustc)) has no standard library for $triple, and no rustup to add it: \
install Rust with rustup (https://rustup.rs), or the library from where this Rust is from. \
TARGET=$host builds programs with this machine's C library; they are not what is shipped"
fi

# The plugin's and the agent's TLS library has C in it.
variable=CC_$(printf %s "$triple" | tr - _)
eval "compiler=\${$variable:-\${TARGET_CC:-\${CC:-}}}"
case $triple in
"${host%%-*}"-*-musl)
    [ -n "$compiler" ] || command -v "${triple%%-*}-linux-musl-gcc" >/dev/null || command -v musl-gcc >/dev/null ||
        problem "no C compiler for $triple: scripts/setup-apt.sh release installs Debian's musl-tools, or name one in $variable"
    ;;
*-musl)
    # What that C asks of a C library is the same in musl and glibc, and Rust brings musl itself; so Debian's cross compiler does, which also links.
    cross=${triple%%-*}-linux-gnu-gcc
    if [ -z "$compiler" ]; then
        command -v "$cross" >/dev/null ||
            problem "no C compiler for $triple: scripts/setup-apt.sh cross installs Debian's $cross, or name one in $variable"
        export "$variable=$cross"
    fi
    linker=CARGO_TARGET_$(printf %s "$triple" | tr a-z- A-Z_)_LINKER
    eval "[ -n \"\${$linker:-}\" ]" || export "$linker=${compiler:-$cross}"
    ;;
esac

[ "$problems" = 0 ] || exit 1
[ "$only" != --check ] || exit 0
if [ -n "$needs_library" ]; then
    rustup target add "$triple" >&2 || {
        problem "rustup cannot add $triple: it needs https://static.rust-lang.org, or a mirror in RUSTUP_DIST_SERVER"
        exit 1
    }
fi
[ "$only" != --prepare ] || exit 0

# Flags one by one, because folders may have spaces in their names: cargo takes a separator of its own.
separator=$(printf '\037')
flags=$(printf %s "${RUSTFLAGS:-}" | tr -s ' ' '\037')
add_flag() { flags=$flags${flags:+$separator}$1; }

# Static is what musl's programs are anyway.
case $triple in
*-gnu*) add_flag -Ctarget-feature=+crt-static ;;
esac
position=
[ -z "${FIXED:-}" ] || position="-C relocation-model=static"

# Relocations take 8 bytes for 63 pointers instead of 24 for one. Linkers that cannot pack them warn.
add_flag -Clink-arg=-Wl,-z,pack-relative-relocs

# Panics name source files. They must not reveal this machine's paths.
cargo fetch --locked --quiet --target "$triple"
add_flag "--remap-path-prefix=$PWD=/project"
# Folders that begin with a dash are registries without a host, which cargo makes for each check of packages: other flags would rebuild everything.
for crates in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/[!-]*; do
    add_flag "--remap-path-prefix=$crates=/crates"
done
export CARGO_ENCODED_RUSTFLAGS="$flags"
# The build script of the TLS library's C asks for it, so everything would be built again for each commit; no program has a date in it.
unset SOURCE_DATE_EPOCH

# A person sees how far it is.
quiet=--quiet
[ ! -t 2 ] || quiet=
profile=${PROFILE:-release}
if [ "$profile" = release ]; then
    for program in "$@"; do
        # One by one: built together, each would get the library features of the others.
        # shellcheck disable=SC2086 # a list of arguments
        cargo rustc --release --locked $quiet --target "$triple" -p "$program" --bin "$program" -- $position >&2
    done
else
    # shellcheck disable=SC2046,SC2086 # lists of arguments
    cargo build --profile "$profile" --locked $quiet --target "$triple" $(printf -- '-p %s ' "$@") --bins >&2
fi
cd "${CARGO_TARGET_DIR:-target}/$triple/$profile"
pwd
