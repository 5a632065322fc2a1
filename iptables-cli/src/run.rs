//! From settings to a programmed, and perhaps validated, namespace.

use crate::report;
use anyhow::Context;
use netns_apply::{
    ApplyOptions, Live, Programs, apply_and_search, cleanup, cleanup_preview, facts, netns::Netns,
};
use redirect_core::{
    Redirect, Tproxy,
    options::BackendChoice,
    settings::{InputErrors, Key, NamespaceFacts, Notice, RawSettings},
};
use settings_cli::{Action, RunOptions};
use std::{
    env,
    fs::OpenOptions,
    io::{self, Write},
    process::ExitCode,
};

/// Carries out what the settings ask for, in the namespace they name, and logs why where that fails.
pub(crate) fn run(settings: &RawSettings) -> ExitCode {
    let (path, source) = settings.get(Key::NetworkNamespace);
    match Netns::run_in(path, || program(settings)) {
        // The validation enters the namespace itself: it must handle signals here.
        Ok(Ok(Some(options))) => validate(settings, &options).unwrap_or_else(|error| report::failure(&error)),
        Ok(Ok(None)) => ExitCode::SUCCESS,
        Ok(Err(error)) => report::failure(&error),
        Err(error) => {
            settings_cli::report(&wrong_anywhere(settings));
            report::failure(&anyhow::anyhow!("{source}: {error}"))
        }
    }
}

/// What is wrong with the settings whatever the namespace.
fn wrong_anywhere(settings: &RawSettings) -> InputErrors {
    let mut errors = RunOptions::parse(settings).err().unwrap_or_default();
    let facts = NamespaceFacts::new(&[]).with_names(&facts::NameFiles);
    errors.extend(Redirect::parse(settings, &facts).err().unwrap_or_default().without_namespace());
    errors
}

/// What is done inside the namespace. Everything is read, and every error collected, before anything is done. Returns the options of a
/// validation that is to follow.
fn program(settings: &RawSettings) -> anyhow::Result<Option<RunOptions>> {
    let options = RunOptions::parse(settings);
    let redirect = redirect_here(settings)?;
    match options {
        Ok(options) if options.action == Action::Cleanup => {
            clean_up(&options, redirect, settings)?;
            return Ok(None);
        }
        // A pod that is only validated may still be waiting for its address.
        Ok(options) if options.action == Action::Nothing && options.validation.is_some() => {
            return Ok(Some(options));
        }
        Ok(_) | Err(_) => {}
    }
    let (options, redirect) = together(options, redirect)?;
    let about = redirect.notices();
    report::warn(about.iter().filter(|notice| !notice.concerns_all_pods()));
    report::warn(options.notices(settings));
    let plan = redirect.plan();
    report::planned(&plan);
    if options.dry_run {
        let native = (options.backend == BackendChoice::NativeNft).then_some(options.native_form);
        print(&plan.program_text(native), &options)?;
        return Ok(None);
    }
    if options.action != Action::Nothing {
        let apply_options = apply_options(&options, settings);
        let outcome = apply_and_search(&plan, &apply_options)?;
        report::done(&plan, &redirect, &outcome, !about.contains(&Notice::NothingCaptured));
    }
    Ok(Some(options).filter(|options| options.validation.is_some()))
}

/// What the settings ask for in this network namespace.
fn redirect_here(settings: &RawSettings) -> anyhow::Result<Result<Redirect, InputErrors>> {
    let addresses = facts::addresses().context("this network namespace")?;
    let nameservers = facts::NameFiles::dns_servers(settings).context("cannot read /etc/resolv.conf")?;
    let facts = facts::of_namespace(&addresses).with_nameservers(&nameservers);
    Ok(Redirect::parse(settings, &facts))
}

/// Removes everything. What the settings say is wrong is reported here, too; that the namespace has no address is not:
/// it may have lost it.
fn clean_up(
    options: &RunOptions,
    redirect: Result<Redirect, InputErrors>,
    settings: &RawSettings,
) -> anyhow::Result<()> {
    redirect.err().unwrap_or_default().without_namespace().into_result(())?;
    report::warn(options.notices(settings));
    let apply_options = apply_options(options, settings);
    if options.dry_run {
        return print(&cleanup_preview(&apply_options)?, options);
    }
    report::cleaned(&cleanup(&apply_options)?);
    Ok(())
}

/// Both, or the errors of both.
fn together<A, B>(a: Result<A, InputErrors>, b: Result<B, InputErrors>) -> Result<(A, B), InputErrors> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (Err(mut a), Err(b)) => {
            a.extend(b);
            Err(a)
        }
        (Err(errors), Ok(_)) | (Ok(_), Err(errors)) => Err(errors),
    }
}

fn apply_options(options: &RunOptions, settings: &RawSettings) -> ApplyOptions {
    ApplyOptions::default()
        .backend(options.backend)
        .native_form(options.native_form)
        .force(options.action == Action::ForceApply)
        .programs(Programs::in_path(&env::var_os("PATH").unwrap_or_default()))
        .tproxy(tproxy(settings))
}

/// The routing the settings name, also where the mode is another: an earlier run's may be left.
fn tproxy(settings: &RawSettings) -> Option<Tproxy> {
    let mark = settings.get(Key::TproxyMark).0.parse().ok()?;
    let table = settings.get(Key::TproxyRouteTable).0.parse().ok()?;
    Some(Tproxy::new(mark, table))
}

/// Prints what a dry run shows, and appends it to the file asked for.
fn print(text: &str, options: &RunOptions) -> anyhow::Result<()> {
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    if let Some(path) = &options.dry_run_file {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written
            .with_context(|| format!("environment variable DRY_RUN_FILE_PATH: cannot append to {path:?}"))?;
    }
    Ok(())
}

/// Proves by traffic that the redirection works; says why where it does not, and which rules are the reason where this process may
/// read them.
fn validate(settings: &RawSettings, options: &RunOptions) -> anyhow::Result<ExitCode> {
    let mut verdict = istio_validation::run(settings)?;
    if !verdict.is_redirected() {
        let read = || {
            let live = Live::now(None, &apply_options(options, settings)).ok()?;
            Some((live, redirect_here(settings).ok()?.ok()?.plan()))
        };
        let (path, _) = settings.get(Key::NetworkNamespace);
        if let Ok(Some((live, plan))) = Netns::run_in(path, read) {
            verdict.name_rules(|family| live.rules(family, Some(&plan)));
        }
    }
    istio_validation::report(&verdict, options.termination_log.as_deref());
    Ok(verdict.exit_code().into())
}
