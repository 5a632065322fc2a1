//! Durations as settings write them.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::panic)
)]

use core::time::Duration;
use redirect_core::values::Problem;

/// Reads a duration such as `500ms`, `5s`, `1.5s` or `1m30s`; units are ns, us, µs, ms, s, m, h.
///
/// # Errors
/// [`Problem::NotADuration`], also where it is longer than u64 nanoseconds (584 years).
pub fn parse_duration(text: &str) -> Result<Duration, Problem> {
    const UNITS: [(&str, u64); 7] = [
        ("ns", 1),
        ("us", 1_000),
        ("µs", 1_000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("m", 60_000_000_000),
        ("h", 3_600_000_000_000),
    ];
    let mut rest = text;
    let mut total = Duration::ZERO;
    if rest.is_empty() {
        return Err(Problem::NotADuration);
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or(Problem::NotADuration)?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let (_, nanos) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(Problem::NotADuration)?;
        total =
            scaled(number, *nanos).and_then(|part| total.checked_add(part)).ok_or(Problem::NotADuration)?;
        rest = tail;
    }
    Ok(total)
}

/// `number` (digits with at most one point) times `nanos` nanoseconds.
fn scaled(number: &str, nanos: u64) -> Option<Duration> {
    /// Digits behind the point that can make a difference, and whose number fits.
    const DIGITS: usize = 18;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let fraction = fraction.get(..DIGITS).unwrap_or(fraction);
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let numerator: u64 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let denominator = 10_u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let part = u128::from(numerator).checked_mul(u128::from(nanos))?.checked_div(u128::from(denominator))?;
    let total = whole.checked_mul(nanos)?.checked_add(u64::try_from(part).ok()?)?;
    Some(Duration::from_nanos(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(parse_duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_duration("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("100µs"), Ok(Duration::from_micros(100)));
        assert_eq!(parse_duration("1.5000000000000000000000s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("0.9999999999999999999999s"), Ok(Duration::from_nanos(999_999_999)));
        assert_eq!(parse_duration("0.000000000000277778h"), Ok(Duration::from_nanos(1)));
        let long = "1.23456789012345678901.2s";
        for bad in ["", "5", "s", "5 s", "-5s", "1.2.3s", long, "99999999999999h", ".s"] {
            assert_eq!(parse_duration(bad), Err(Problem::NotADuration), "{bad:?}");
        }
    }
}
