//! Programs under a seccomp profile, as a container runtime runs them.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CloneFlags, unshare};
use seccompiler::{BpfProgram, apply_filter, compile_from_json};
use serde_json::{Value, json};

/// What happens to a call that the profile does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlisted {
    /// It fails, as under a container runtime.
    Fails,
    /// It ends the program, so that no tolerated failure goes unnoticed.
    Kills,
}

/// Becomes a program under a profile. Returns only where that fails.
///
/// # Errors
/// The profile has something that is not understood here, or the program does not start.
pub fn become_confined(profile: &Path, unlisted: Unlisted, program: &[&str]) -> Result<()> {
    let [name, args @ ..] = program else { bail!("no program") };
    confine(profile, unlisted)?;
    Err(Command::new(name).args(args).exec()).with_context(|| format!("cannot start {name}"))
}

/// Tries what no container of the project needs, under a profile; says what was let through.
///
/// # Errors
/// The profile has something that is not understood here.
pub fn try_what_is_forbidden(profile: &Path) -> Result<String> {
    confine(profile, Unlisted::Fails)?;
    let attempts: [(&str, nix::Result<()>); 11] = [
        ("unshare a user namespace", unshare(CloneFlags::CLONE_NEWUSER)),
        ("unshare a mount namespace", unshare(CloneFlags::CLONE_NEWNS)),
        ("unshare a process namespace", unshare(CloneFlags::CLONE_NEWPID)),
        (
            "mount",
            nix::mount::mount(
                Some("none"),
                "/proc/self/fd",
                Some("tmpfs"),
                nix::mount::MsFlags::empty(),
                None::<&str>,
            ),
        ),
        ("umount", nix::mount::umount("/nowhere")),
        ("chroot", nix::unistd::chroot("/")),
        ("ptrace", nix::sys::ptrace::traceme()),
        ("personality", nix::sys::personality::get().map(drop)),
        ("sethostname", nix::unistd::sethostname("x")),
        ("a packet socket", socket_of(nix::sys::socket::AddressFamily::Packet)),
        ("a vsock socket", socket_of(nix::sys::socket::AddressFamily::Vsock)),
    ];
    let refused = |result: &nix::Result<()>| *result == Err(nix::errno::Errno::EPERM);
    let through = attempts.iter().filter(|(_, result)| !refused(result));
    Ok(through.map(|(what, result)| format!("{what}: {result:?}\n")).collect())
}

fn socket_of(family: nix::sys::socket::AddressFamily) -> nix::Result<()> {
    use nix::sys::socket::{SockFlag, SockType, socket};
    socket(family, SockType::Datagram, SockFlag::empty(), None).map(drop)
}

fn confine(profile: &Path, unlisted: Unlisted) -> Result<()> {
    let text = fs::read_to_string(profile).with_context(|| format!("cannot read {}", profile.display()))?;
    // The one that refuses with an error of its own comes first: the other lets its calls through, and the strictest answer counts.
    for filter in filters(&serde_json::from_str(&text)?, unlisted)? {
        apply_filter(&filter)?;
    }
    Ok(())
}

/// A filter has one answer for the calls that it lists, so the calls let through have one, and each error has one.
fn filters(profile: &Value, unlisted: Unlisted) -> Result<Vec<BpfProgram>> {
    ensure!(profile["defaultAction"] == "SCMP_ACT_ERRNO", "the profile lets through what it does not list");
    let unlisted = match unlisted {
        Unlisted::Fails => json!({"errno": 1}),
        Unlisted::Kills => json!("kill_process"),
    };
    let mut through = Vec::new();
    let mut programs = Vec::new();
    for rule in profile["syscalls"].as_array().context("syscalls")? {
        let parts = parts_of(rule)?;
        through.extend(parts.iter().cloned());
        match rule["action"].as_str() {
            Some("SCMP_ACT_ALLOW") => {}
            Some("SCMP_ACT_ERRNO") => {
                programs.push(compiled(&json!("allow"), &json!({"errno": rule["errnoRet"]}), &parts)?);
            }
            other => bail!("action {other:?}"),
        }
    }
    programs.push(compiled(&unlisted, &json!("allow"), &through)?);
    Ok(programs)
}

/// A rule in the words of seccompiler, for each of its names that this architecture has.
fn parts_of(rule: &Value) -> Result<Vec<Value>> {
    let conditions = rule["args"].as_array().into_iter().flatten().map(|arg| {
        let (op, value) = match arg["op"].as_str() {
            Some("SCMP_CMP_EQ") => (json!("eq"), &arg["value"]),
            // Those bits, compared with the second value.
            Some("SCMP_CMP_MASKED_EQ") => (json!({"masked_eq": arg["value"]}), &arg["valueTwo"]),
            other => bail!("comparison {other:?}"),
        };
        Ok(json!({"index": arg["index"], "type": "dword", "op": op, "val": value}))
    });
    let conditions: Vec<Value> = conditions.collect::<Result<_>>()?;
    let names = rule["names"].as_array().context("names")?.iter();
    let parts = names.map(|name| match &conditions[..] {
        [] => json!({"syscall": name}),
        _ => json!({"syscall": name, "args": conditions}),
    });
    let is_known =
        |part: &Value| compiled(&json!("allow"), &json!("trap"), std::slice::from_ref(part)).is_ok();
    Ok(parts.filter(is_known).collect())
}

fn compiled(mismatch: &Value, matched: &Value, rules: &[Value]) -> Result<BpfProgram> {
    let text = json!({"filter": {"mismatch_action": mismatch, "match_action": matched, "filter": rules}})
        .to_string();
    let mut filters = compile_from_json(text.as_bytes(), env::consts::ARCH.try_into()?)?;
    filters.remove("filter").context("no filter came out")
}
