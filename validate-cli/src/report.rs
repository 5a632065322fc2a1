//! A verdict's report: to people by the log, to machines by the container's termination message.

use crate::sandbox;
use crate::verdict::ValidationReport;
use redirect_core::settings::Key;
use std::{
    fs::File,
    io::{ErrorKind, Write},
};

/// Logs a verdict line by line, what is wrong as an error and the rest as information, and writes its JSON to the termination message file.
///
/// The usual file is the kubelet's to make, so it is never created; any other is.
pub fn report(verdict: &ValidationReport, termination_log: Option<&str>) {
    for (wrong, line) in verdict.lines() {
        let level = if wrong { log::Level::Error } else { log::Level::Info };
        log::log!(target: logging::DEFAULT_SCOPE, level, "{line}");
    }
    if verdict.reason.is_redirected() == Some(false)
        && let Some(sandbox) = sandbox::of_this_process()
    {
        log::error!(
            target: logging::DEFAULT_SCOPE,
            "this container runs in {sandbox}, a sandbox that rules on the node do not bind: take runtimeClassName, or the proxy, from the pod"
        );
    }
    let Some(path) = termination_log else { return };
    let usual = path == Key::TerminationLog.setting().default;
    let open = |create| File::options().write(true).truncate(true).create(create).open(path);
    // An existing file is never opened for creation: the kernel refuses that for files of other programs in
    // folders such as /tmp (sysctl fs.protected_regular).
    let file = match open(false) {
        Err(error) if error.kind() == ErrorKind::NotFound && !usual => open(true),
        opened => opened,
    };
    let written = file.and_then(|mut file| {
        file.write_all(verdict.json().as_bytes()).inspect_err(|_| {
            // Half an object is invalid JSON: an empty file serves a reader better, and Kubernetes takes the log's end in its place.
            let _ = file.set_len(0);
        })
    });
    match written {
        Ok(()) => {}
        Err(error) if usual && error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            log::warn!(target: logging::DEFAULT_SCOPE, "cannot write the verdict to {path:?}: {error}");
        }
    }
}
