//! Pages of the documentation, by address.

/// Where the folder `docs` is read, without a slash at the end: the variable is set while building (`scripts/release.sh`).
const ADDRESS: Option<&str> = option_env!("DOCUMENTATION_URL");

/// A text in which pages such as `docs/concepts/repair.md` are addresses, where this build has one. Otherwise they are paths of the repository.
#[must_use]
pub fn linked(text: &str) -> String {
    ADDRESS.filter(|address| !address.is_empty()).map_or_else(|| text.to_owned(), |address| at(address, text))
}

fn at(address: &str, text: &str) -> String {
    text.split("docs/").enumerate().fold(String::new(), |before, (index, part)| {
        // Not where it is a part of another path.
        let is_page = !before.ends_with(|c: char| c == '/' || c.is_alphanumeric());
        match index {
            0 => part.to_owned(),
            _ if is_page => format!("{before}{address}/docs/{part}"),
            _ => format!("{before}docs/{part}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_addresses_of_a_build_that_has_one() {
        let address = "https://example.com/mesh";
        for (text, expected) in [
            ("docs/a.md#b", "https://example.com/mesh/docs/a.md#b"),
            (
                "do it (docs/a/b.md); see docs/c.md",
                "do it (https://example.com/mesh/docs/a/b.md); see https://example.com/mesh/docs/c.md",
            ),
            ("/srv/docs/a.md and mydocs/b", "/srv/docs/a.md and mydocs/b"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(at(address, text), expected);
        }
    }
}
