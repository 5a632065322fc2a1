//! A sample of the recordings, for machines on which all of them would take hours.

use std::env;

/// All of them; where RECORDINGS_EVERY is a number, every one of that number, which is said on standard output.
///
/// # Panics
/// RECORDINGS_EVERY is not a number, or 0.
#[allow(clippy::print_stdout, reason = "the reader of a test's log has to know")]
pub fn of<T>(recordings: Vec<T>) -> Vec<T> {
    let Some(every) = env::var_os("RECORDINGS_EVERY") else { return recordings };
    let number = every.to_str().and_then(|every| every.parse().ok()).filter(|every| *every > 0);
    let number: usize = number.unwrap_or_else(|| panic!("RECORDINGS_EVERY is {every:?}, and no number"));
    let all = recordings.len();
    let sample: Vec<T> = recordings.into_iter().step_by(number).collect();
    println!("RECORDINGS_EVERY={number}: {} of {all} recordings", sample.len());
    sample
}
