//! YAML, of which JSON is a part.

use serde_json::Value;

/// The documents of a text.
///
/// # Errors
/// Why it is not YAML, in words.
pub fn documents(text: &str) -> Result<Vec<Value>, String> {
    // JSON first: not all of it is YAML, because its strings may have characters that YAML forbids. What is not JSON is
    // judged as YAML.
    if let Ok(document) = serde_json::from_str(text) {
        return Ok(vec![document]);
    }
    serde_saphyr::from_multiple(text).map_err(|error| {
        let text = error.without_snippet().to_string();
        format!("is not YAML: {}", text.lines().next().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_read_also_where_yaml_has_no_such_character() {
        // YAML forbids some that JSON strings may have as they are.
        let annotated = json!({"metadata": {"annotations": {"a": "80\u{7f}\u{85}\u{9b}\u{fffe}"}}});
        assert_eq!(documents(&annotated.to_string()), Ok(vec![annotated]));
        assert_eq!(documents("a: 1\n---\nb: 2\n"), Ok(vec![json!({"a": 1}), json!({"b": 2})]));
        assert!(documents("{\"a\": 1,}\n}").is_err());
    }
}
