//! The executable a container runtime runs for every pod; see the library of the same package.

use dlmalloc::GlobalDlmalloc;
use std::process::ExitCode;

/// musl's own asks the kernel for every few pages, and gives them back at once.
#[global_allocator]
static ALLOCATOR: GlobalDlmalloc = GlobalDlmalloc;

fn main() -> ExitCode {
    istio_cni::main()
}
