//! From settings to a programmed, and perhaps validated, namespace.

use crate::report;
use anyhow::Context;
use netns_apply::{ApplyOptions, Programs, apply, cleanup, facts};
use redirect_core::{
    Redirect, RulePlan, Tproxy,
    options::{Action, BackendChoice, RunOptions},
    render,
    settings::{InputErrors, Key, NamespaceFacts, RawSettings, Source},
};
use std::{
    env,
    fs::OpenOptions,
    io::{self, Write},
    process::ExitCode,
};

/// Carries out what the settings ask for. Everything is read, and every error collected, before anything is done.
pub(crate) fn run(settings: &RawSettings) -> anyhow::Result<ExitCode> {
    let options = RunOptions::parse(settings);
    let addresses = facts::addresses().context("cannot list the addresses of this network namespace")?;
    let nameservers = facts::dns_servers().context("cannot read /etc/resolv.conf")?;
    let facts = NamespaceFacts { addresses: &addresses, nameservers: &nameservers, names: &facts::NameFiles };
    let redirect = Redirect::parse(settings, &facts);
    match &options {
        Ok(options) if options.action == Action::Cleanup => return clean_up(options, redirect, settings),
        // A pod that is only validated may still be waiting for its address.
        Ok(options) if options.action == Action::Nothing && options.validation.is_some() => {
            return validate(settings, options);
        }
        Ok(_) | Err(_) => {}
    }
    let (options, redirect) = together(options, redirect)?;
    let plan = redirect.plan();
    report::planned(&plan);
    if options.dry_run {
        dry_run(&plan, &options)?;
        return Ok(ExitCode::SUCCESS);
    }
    if options.action != Action::Nothing {
        let outcome = apply(&plan, &apply_options(&options, settings))?;
        report::done(&plan, &redirect, &outcome);
    }
    if options.validation.is_some() { validate(settings, &options) } else { Ok(ExitCode::SUCCESS) }
}

/// Removes everything. What the settings say is wrong is reported here, too; that the namespace has no address is not:
/// it may have lost it.
fn clean_up(
    options: &RunOptions,
    redirect: Result<Redirect, InputErrors>,
    settings: &RawSettings,
) -> anyhow::Result<ExitCode> {
    match redirect {
        Err(errors) if errors.iter().any(|error| error.source != Source::Namespace) => {
            return Err(errors.into());
        }
        Ok(_) | Err(_) => {}
    }
    if !options.dry_run {
        report::cleaned(&cleanup(&apply_options(options, settings))?);
    }
    Ok(ExitCode::SUCCESS)
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
    ApplyOptions {
        backend: options.backend,
        native_form: options.native_form,
        force: options.action == Action::ForceApply,
        programs: Programs::in_path(&env::var_os("PATH").unwrap_or_default()),
        tproxy: tproxy(settings),
        ..ApplyOptions::default()
    }
}

/// The routing the settings name, also where the mode is another: an earlier run's may be left.
fn tproxy(settings: &RawSettings) -> Option<Tproxy> {
    let mark = settings.get(Key::TproxyMark).0.parse().ok()?;
    let table = settings.get(Key::TproxyRouteTable).0.parse().ok()?;
    Some(Tproxy { mark, table })
}

/// Prints the plan, as input for the program that would apply it, and appends it to the file asked for.
fn dry_run(plan: &RulePlan, options: &RunOptions) -> anyhow::Result<()> {
    let mut text = String::new();
    if options.backend == BackendChoice::NativeNft {
        text += &render::nft_text(plan);
    } else {
        for family in plan.families() {
            text += &format!("# {family}\n{}", render::restore_text(&plan.rules(*family)));
        }
    }
    if let Some(routes) = plan.policy_routes() {
        for family in &routes.families {
            let option = if *family == redirect_core::Family::V4 { "-4" } else { "-6" };
            let (mark, table) = (routes.tproxy.mark, routes.tproxy.table);
            text += &format!("# ip {option} rule add fwmark {mark} lookup {table}\n");
            text += &format!("# ip {option} route add local default dev lo table {table}\n");
        }
    }
    if let Some(address) = plan.loopback_address() {
        text += &format!("# ip -6 addr add {address}/128 dev lo\n");
    }
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    if let Some(path) = &options.dry_run_file {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written
            .with_context(|| format!("environment variable DRY_RUN_FILE_PATH: cannot append to {path:?}"))?;
    }
    Ok(())
}

/// Proves by traffic that the redirection works; says why where it does not.
fn validate(settings: &RawSettings, options: &RunOptions) -> anyhow::Result<ExitCode> {
    let verdict = istio_validation::run(settings)?;
    istio_validation::report(&verdict, options.termination_log.as_deref());
    Ok(verdict.exit_code().into())
}
