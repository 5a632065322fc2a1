#!/bin/sh
# rustdoc with its options that are not stable, as cargo's RUSTDOC. RUSTC_BOOTSTRAP allows them for rustdoc alone: set for cargo, it would
# have every crate compiled again.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
