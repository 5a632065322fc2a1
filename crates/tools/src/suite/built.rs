//! What cargo has built, from the messages that it writes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

/// A test program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// A suite by its own name, another program of tests by its package's; of unit tests with ` (unit tests)` behind it.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// Where cargo would run it: the package's folder.
    pub folder: PathBuf,
    /// Whether its tests are those of a library or a program, beside the code.
    pub has_unit_tests: bool,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    executable: Option<PathBuf>,
    #[serde(default)]
    manifest_path: PathBuf,
    #[serde(default)]
    profile: Profile,
    #[serde(default)]
    target: Target,
}

#[derive(Deserialize, Default)]
struct Profile {
    test: bool,
}

#[derive(Deserialize, Default)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// The test programs in a file of messages, one JSON object a line, suites first: they have the long tests.
pub fn programs(messages: &Path) -> Result<Vec<Program>> {
    let text = fs::read_to_string(messages).with_context(|| format!("cannot read {}", messages.display()))?;
    let mut programs: Vec<Program> = Vec::new();
    for line in text.lines() {
        let message: Message =
            serde_json::from_str(line).with_context(|| format!("not a message of cargo: {line}"))?;
        programs.extend(program(message));
    }
    programs.sort_by(|one, other| (one.has_unit_tests, &one.name).cmp(&(other.has_unit_tests, &other.name)));
    programs.dedup();
    Ok(programs)
}

fn program(message: Message) -> Option<Program> {
    let path = message.executable.filter(|_| message.profile.test)?;
    let folder = message.manifest_path.parent()?.to_owned();
    let has_unit_tests = message.target.kind.iter().all(|kind| kind != "test");
    let package = folder.file_name()?.to_string_lossy().into_owned();
    let name = match &*message.target.name {
        name if has_unit_tests => format!("{} (unit tests)", name.replace('_', "-")),
        "it" => package,
        name => name.to_owned(),
    };
    Some(Program { name, path, folder, has_unit_tests })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_among_all_messages() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let artifact = |kind: &str, name: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/e2e/Cargo.toml","target":{{"name":"{name}","kind":["{kind}"]}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let lines = [
            artifact("lib", "e2e_lib", true, "\"/t/lib\""),
            artifact("lib", "e2e_lib", false, "null"),
            artifact("bin", "demo", false, "\"/t/demo\""),
            artifact("test", "packets", true, "\"/t/packets\""),
            artifact("test", "it", true, "\"/t/it\""),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        fs::write(file.path(), lines.join("\n")).expect("writes");
        let found = programs(file.path()).expect("are read");
        let names: Vec<&str> = found.iter().map(|program| &*program.name).collect();
        assert_eq!(names, ["e2e", "packets", "e2e-lib (unit tests)"]);
        assert_eq!((&*found[1].folder, found[1].has_unit_tests), (Path::new("/w/e2e"), false));
    }
}
