//! `istio-validation`: the init container that holds a pod back while its traffic would bypass the proxy.

use dlmalloc::GlobalDlmalloc;
use istio_validation::{NoVerdict, needed, report, run};
use privileges::keep_only;
use redirect_core::settings::{Key, RawSettings};
use settings_cli::{Pages, Program};
use std::{env, process::ExitCode};

/// musl's own asks the kernel for every few pages, and gives them back at once.
#[global_allocator]
static ALLOCATOR: GlobalDlmalloc = GlobalDlmalloc;

const PROGRAM: Program = Program {
    name: "istio-validation",
    about: "Proves by traffic that this pod is redirected to its sidecar proxy. Exit code 0: it is; 126: it is not, \
            and the termination message says why; 1: the settings cannot be understood.",
    version: env!("CARGO_PKG_VERSION"),
    pages: Pages {
        examples: &[
            (
                "As an init container, with what the injector gives istio-init",
                "istio-validation -b '*' -i '*' -u 1337",
            ),
            (
                "Wait longer for rules that are still to come",
                "istio-validation -b '*' -i '*' --probe-timeout 30s",
            ),
            (
                "From the node, in a pod's network namespace",
                "istio-validation --network-namespace /run/netns/demo -b '*' -i '*'",
            ),
        ],
        exit_status: &[
            (0, "The pod is redirected."),
            (1, "The command line or the environment is wrong, or the pod cannot be checked."),
            (126, "The pod is not redirected; the log and the termination message say why."),
        ],
        files: &[
            (
                "/dev/termination-log",
                "Gets the verdict as one JSON object, where it is there (--termination-log).",
            ),
            ("/etc/resolv.conf", "The servers whose queries --redirect-dns captures."),
        ],
        see_also: &["istio-iptables(8)", "network_namespaces(7)"],
    },
    statuses: settings_cli::VALIDATION,
};

fn main() -> ExitCode {
    PROGRAM.main(env::args_os().skip(1), validate)
}

fn validate(settings: &RawSettings) -> ExitCode {
    if let Err(error) = keep_only(needed(settings)) {
        log::warn!(target: logging::DEFAULT_SCOPE, "{error}");
    }
    match run(settings) {
        Ok(verdict) => {
            let file = settings.get(Key::TerminationLog).0;
            report(&verdict, Some(file).filter(|path| !path.is_empty()));
            verdict.exit_code().into()
        }
        Err(NoVerdict::Input(errors)) => {
            settings_cli::report(&errors);
            ExitCode::FAILURE
        }
        Err(error) => {
            log::error!(target: logging::DEFAULT_SCOPE, "{error}");
            ExitCode::FAILURE
        }
    }
}
