//! YAML, of which JSON is a part.

use serde_json::Value;

/// The documents of a text.
///
/// # Errors
/// It is no YAML, in words.
pub fn documents(text: &str) -> Result<Vec<Value>, String> {
    serde_saphyr::from_multiple(text).map_err(|error| {
        let text = error.without_snippet().to_string();
        format!("is no YAML: {}", text.lines().next().unwrap_or_default())
    })
}
