//! `istio-iptables`: plans redirection from flags and environment, and programs a network namespace.
//!
//! Exit codes: 0 done; 1 bad input, or failed; 126 the validation found the pod not redirected.

mod report;
mod rights;
mod run;

use dlmalloc::GlobalDlmalloc;
use settings_cli::{Pages, Program};
use std::{env, process::ExitCode};

/// musl's own asks the kernel for every few pages, and gives them back at once.
#[global_allocator]
static ALLOCATOR: GlobalDlmalloc = GlobalDlmalloc;

const PROGRAM: Program = Program {
    name: "istio-iptables",
    about: "Redirects a pod's traffic to its sidecar proxy: programs iptables or nftables rules in a network namespace.",
    version: env!("CARGO_PKG_VERSION"),
    pages: Pages {
        examples: &[
            (
                "What a pod gets: all TCP both ways, but for the proxy's own ports",
                "istio-iptables -b '*' -i '*' -d 15090,15021,15020",
            ),
            ("Only look: print the plan", "istio-iptables -b '*' -i '*' --dry-run"),
            (
                "In another network namespace",
                "istio-iptables --network-namespace /run/netns/demo -b '*' -i '*' --dual-stack",
            ),
            ("Remove it all; with --dry-run, show what would go", "istio-iptables --cleanup-only"),
        ],
        exit_status: &[
            (
                0,
                "Done: the whole plan is in force, or was; with --cleanup-only, nothing is left; with --run-validation, the pod is redirected.",
            ),
            (
                1,
                "Not done: the command line or the environment is wrong, or a step failed. The namespace is as it was.",
            ),
            (126, "With --run-validation: the pod is not redirected."),
        ],
        files: &[
            ("/etc/resolv.conf", "The servers whose queries --redirect-dns captures."),
            ("/etc/passwd, /etc/group", "Ids of users and groups given by name. No name service is asked."),
            ("/dev/termination-log", "With --run-validation: receives the result, if it exists."),
        ],
        see_also: &["istio-validation(8)", "iptables(8)", "nft(8)", "ip-netns(8)", "network_namespaces(7)"],
    },
    statuses: settings_cli::IPTABLES,
};

fn main() -> ExitCode {
    PROGRAM.main(env::args_os().skip(1), |settings| {
        rights::give_up(settings);
        run::run(settings)
    })
}
