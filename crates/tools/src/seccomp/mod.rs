//! Seccomp profiles of the project's containers: written from lists that say why each system call is in them, and held to what programs were seen
//! to call.

mod calls;
mod profile;
mod trace;

use std::collections::BTreeSet;
use std::env;
use std::fs;

use anyhow::{Context, Result, bail, ensure};

use calls::Calls;

const USAGE: &str = "usage: seccomp profile LIST
       seccomp object LIST
       seccomp compare LIST PROGRAM,... TRACE...

profile  prints the profile that container runtimes read.
object   prints the same as an object of the Security Profiles Operator.
compare  fails where a program was seen (by strace -f) to make a call that the list does not have, or was never seen to make one that the list says
         was seen.";

/// The program `seccomp`.
pub fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["profile", list] => say(&profile::for_runtimes(&read(list)?)?),
        ["object", list] => say(&profile::for_the_operator(&read(list)?)?),
        ["compare", list, programs, ref traces @ ..] if !traces.is_empty() => {
            compare(list, programs, traces)?;
        }
        _ => bail!("{USAGE}"),
    }
    Ok(())
}

fn read(list: &str) -> Result<Calls> {
    let text = fs::read_to_string(list).with_context(|| format!("cannot read {list}"))?;
    Calls::parse(&text).with_context(|| list.to_owned())
}

fn compare(list: &str, programs: &str, traces: &[&str]) -> Result<()> {
    let listed = read(list)?;
    let programs: Vec<&str> = programs.split(',').collect();
    let mut seen = BTreeSet::new();
    for trace in traces {
        let text = fs::read(trace).with_context(|| format!("cannot read {trace}"))?;
        seen.extend(trace::calls_of(&programs, &String::from_utf8_lossy(&text)));
    }
    ensure!(!seen.is_empty(), "none of {} is in these traces", programs.join(", "));
    let differences = listed.differences(&seen);
    for difference in &differences {
        say(difference);
    }
    ensure!(differences.is_empty(), "{list} is not what was seen");
    say(&format!("{list}: {} calls seen, all listed", seen.len()));
    Ok(())
}

#[allow(clippy::print_stdout, reason = "what was asked for")]
fn say(text: &str) {
    println!("{text}");
}
