//! The whole of a run, from settings to a verdict.

use crate::{
    ValidationRequest,
    address::AddressWatch,
    prove,
    reason::Reason,
    stop::{Interrupted, Stop},
    verdict::ValidationReport,
    walk::ProcessIdentity,
};
use netns_apply::{
    facts::{self, NameFiles},
    netns::{Netns, NetnsError},
};
use privileges::CapabilitySet;
use redirect_core::{
    Redirect,
    options::BackendChoice,
    settings::{InputErrors, Key, RawSettings, Source},
    values::Problem,
};
use settings_cli::RunOptions;
use std::{io, net::IpAddr, time::Instant};

/// Why no verdict was reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoVerdict {
    /// The settings are wrong.
    #[error("{0}")]
    Input(InputErrors),
    /// The pod cannot be checked.
    #[error("cannot read {what}: {cause}")]
    Facts {
        /// What could not be read.
        what: &'static str,
        /// Why not.
        cause: io::Error,
    },
    /// The network namespace that the settings name cannot be entered.
    #[error("{named_by}: {cause}")]
    Namespace {
        /// Who named it.
        named_by: Source,
        /// Why not.
        cause: NetnsError,
    },
}

/// The capabilities that a validation with these settings needs: none in a pod, where it runs as the proxy's user. Root sends its packets as the proxy, enters
/// the namespace that is named, and writes the verdict where requested, which may be in another program's directory.
#[must_use]
pub fn needed(settings: &RawSettings) -> CapabilitySet {
    let mut needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
    if !settings.get(Key::NetworkNamespace).0.is_empty() {
        needed |= CapabilitySet::SYS_ADMIN;
    }
    if settings.get(Key::TerminationLog).1 != Source::Default {
        needed |= CapabilitySet::DAC_OVERRIDE;
    }
    needed
}

/// Validates what these settings ask for. While the pod has no address it waits for one, within the same time.
///
/// # Errors
/// Wrong settings, all errors together; or the pod cannot be checked. A pod without address is not an error but a
/// verdict.
pub fn run(settings: &RawSettings) -> Result<ValidationReport, NoVerdict> {
    let stop = Stop::on_signals().ok();
    let (path, named_by) = settings.get(Key::NetworkNamespace);
    // Signals are held back here, so that they are on the thread inside as well.
    Netns::run_in(path, || run_here(settings, stop.as_ref()))
        .unwrap_or_else(|cause| Err(NoVerdict::Namespace { named_by, cause }))
}

fn run_here(settings: &RawSettings, stop: Option<&Stop>) -> Result<ValidationReport, NoVerdict> {
    let start = Instant::now();
    let mut settings = settings.clone();
    settings.set(Key::RunValidation, "true", Source::Default);
    let options = RunOptions::parse(&settings);
    let timeout =
        options.as_ref().ok().and_then(|o| o.validation).map_or_else(Default::default, |v| v.timeout);
    let deadline = start + timeout;
    let found = await_redirect(&settings, deadline, stop);
    let (options, found) = match (options, found) {
        (Ok(options), found) => (options, found?),
        (Err(mut errors), Err(NoVerdict::Input(others))) => {
            errors.extend(others);
            return Err(NoVerdict::Input(errors));
        }
        (Err(errors), _) => return Err(NoVerdict::Input(errors)),
    };
    let Some(validation) = options.validation else { return Err(NoVerdict::Input(InputErrors::default())) };
    let (redirect, addresses) = match found {
        Ok(found) => found,
        Err(reason) => {
            let mut verdict = ValidationReport::new(reason, ProcessIdentity::own());
            verdict.elapsed = start.elapsed();
            return Ok(verdict);
        }
    };
    Ok(prove(&ValidationRequest {
        redirect: &redirect,
        addresses: &addresses,
        validation,
        native_nftables: options.backend == BackendChoice::NativeNft,
        who: ProcessIdentity::of_sender(&redirect),
        start,
        deadline,
        stop,
    }))
}

/// The redirection that the settings ask for in this pod, and its addresses; or the reason against: no address came, or a signal did.
type Found = Result<(Redirect, Vec<IpAddr>), Reason>;

fn await_redirect(
    settings: &RawSettings,
    deadline: Instant,
    stop: Option<&Stop>,
) -> Result<Found, NoVerdict> {
    let nameservers = NameFiles::dns_servers(settings)
        .map_err(|cause| NoVerdict::Facts { what: "/etc/resolv.conf", cause })?;
    // Before the first look, so that no address is missed between looking and waiting.
    let watch = AddressWatch::start().ok();
    loop {
        let addresses = facts::addresses().map_err(|cause| NoVerdict::Facts {
            what: "the pod's addresses",
            cause: io::Error::other(cause),
        })?;
        let facts = facts::of_namespace(&addresses).with_nameservers(&nameservers);
        match Redirect::parse(settings, &facts) {
            Ok(redirect) => return Ok(Ok((redirect, addresses))),
            Err(errors) if errors.iter().any(|error| error.problem != Problem::NoAddress) => {
                // An address may still come.
                return Err(NoVerdict::Input(errors.without_namespace()));
            }
            Err(_) => {}
        }
        match watch.as_ref().map(|watch| watch.wait(deadline, stop)) {
            Some(Ok(true)) => {}
            Some(Ok(false)) | None => return Ok(Err(Reason::NoAddress)),
            Some(Err(Interrupted)) => return Ok(Err(Reason::Interrupted)),
        }
    }
}
