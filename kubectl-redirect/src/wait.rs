//! `--wait`: a command is tried until its answer is good, or the time is over.

use std::time::Duration;

use presentation::Printable;
use tokio::time::{Instant, sleep};

use crate::terminal::{note, print};
use crate::{CommandFailure, FINE};

/// How long to wait, where that is not said.
pub(crate) const USUAL_WAIT: &str = "5m";
/// The pauses between attempts grow from this to that.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What is good enough, and how long to try.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitGoal {
    /// How long to wait until nothing is wrong; not at all if none is said.
    pub wait: Option<Duration>,
    /// Whether warnings count for nothing.
    pub ignores_warnings: bool,
}

/// What a command has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandText {
    /// All of it.
    pub(crate) text: Printable,
    /// What it comes to, in a line.
    pub(crate) headline: String,
    /// The exit code.
    pub(crate) code: u8,
}

impl CommandText {
    /// Shows it. The result is the exit code.
    pub(crate) fn print(&self) -> Result<u8, CommandFailure> {
        print(&self.text)?;
        Ok(self.code)
    }
}

/// An answer, or what it still lacks.
pub(crate) type Attempt = Result<CommandText, CommandFailure>;

/// The last answer: a good one, or the one when the time was over.
///
/// # Errors
/// The first attempt was not possible, as without a right: that is not waited for. Later, an API server may restart.
pub(crate) async fn until_fine(
    wait: Option<Duration>,
    mut attempt: impl AsyncFnMut() -> Result<Attempt, CommandFailure>,
) -> Result<CommandText, CommandFailure> {
    let end = wait.map(|wait| Instant::now() + wait);
    let (mut last, mut pause, mut told) = (attempt().await?, FIRST_PAUSE, String::new());
    loop {
        let left = end.map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()));
        let headline = match &last {
            Ok(answer) if answer.code == FINE => return last,
            Ok(answer) => answer.headline.clone(),
            Err(failure) => failure.to_string(),
        };
        if left.is_zero() {
            return last;
        }
        if headline != told {
            note(&Printable::line(&format!("waiting: {headline}")));
            told = headline;
        }
        sleep(pause.min(left)).await;
        pause = LONGEST_PAUSE.min(pause * 2);
        last = attempt().await.unwrap_or_else(Err);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FAILED, FOUND};

    const SHORT: Option<Duration> = Some(Duration::from_millis(20));

    /// How often it was tried, and what came of that, if attempts end like this and then like the last of them.
    async fn tried(
        wait: Option<Duration>,
        ends: &[Result<Attempt, CommandFailure>],
    ) -> (usize, Result<u8, String>) {
        let mut count = 0;
        let last = until_fine(wait, async || {
            count += 1;
            ends[(count - 1).min(ends.len() - 1)].clone()
        });
        let last = last.await;
        (count, last.map(|answer| answer.code).map_err(|failure| failure.0))
    }

    fn answer(code: u8) -> Result<Attempt, CommandFailure> {
        Ok(Ok(CommandText { text: Printable::default(), headline: format!("code {code}"), code }))
    }

    #[tokio::test]
    async fn it_is_tried_until_nothing_is_wrong_or_the_time_is_over() {
        let none = || Ok(Err(CommandFailure::of("no agent found")));
        let lost = || Err(CommandFailure::of("no response"));
        assert_eq!(tried(None, &[answer(FOUND)]).await, (1, Ok(FOUND)), "without --wait");
        assert_eq!(tried(SHORT, &[answer(FINE)]).await, (1, Ok(FINE)));
        assert_eq!(tried(SHORT, &[answer(FOUND)]).await, (2, Ok(FOUND)), "the last when the time is over");
        assert_eq!(tried(SHORT, &[answer(FAILED), answer(FINE)]).await, (2, Ok(FINE)));
        assert_eq!(tried(SHORT, &[none(), answer(FINE)]).await, (2, Ok(FINE)));
        assert_eq!(tried(SHORT, &[none()]).await, (2, Err("no agent found".to_owned())));
        assert_eq!(tried(SHORT, &[lost(), answer(FINE)]).await, (1, Err("no response".to_owned())));
        let long = Some(Duration::from_secs(600));
        assert_eq!(tried(long, &[answer(FOUND), lost(), answer(FINE)]).await, (3, Ok(FINE)));
    }
}
