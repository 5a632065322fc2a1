//! What must be true of every text that people read.

use redirect_core::settings::InputErrors;

/// One line that a terminal takes for text: no newline, no control character, nothing that turns the direction of writing.
///
/// # Panics
/// It is not.
pub fn is_one_safe_line(text: &str) {
    let is_harmful =
        |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}');
    assert!(!text.contains(is_harmful), "not one safe line: {text:?}");
}

/// Lines of such text.
///
/// # Panics
/// They are not.
pub fn is_safe(text: &str) {
    // `lines` would take a carriage return off the end of a line.
    text.split('\n').for_each(is_one_safe_line);
}

/// Errors for an operator: at least one, each of one line that says something.
///
/// # Panics
/// They are not.
pub fn are_told(errors: &InputErrors) {
    assert!(errors.iter().count() > 0, "refused without an error");
    for error in errors {
        let text = error.to_string();
        assert!(text.contains(": "), "{text:?} does not say where it is from");
        is_one_safe_line(&text);
    }
    is_one_safe_line(&errors.to_string());
}
