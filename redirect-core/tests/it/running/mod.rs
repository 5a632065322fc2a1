//! Runs the examples of the package that is tested.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every package uses everything

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

/// Cargo builds examples along with the tests of a package, unless it is asked for single tests.
pub fn run(example: &str, arguments: &[&str], input: &str) -> Output {
    run_of(Path::new(env!("CARGO_MANIFEST_DIR")), example, arguments, input)
}

/// The same with an example of the package in this folder.
pub fn run_of(package: &Path, example: &str, arguments: &[&str], input: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    let program = program.parent().and_then(Path::parent).unwrap().join("examples").join(example);
    assert!(
        is_up_to_date(&program, package),
        "{0} is missing or older than its source: run all tests of {1}, or 'cargo build --examples' there first",
        program.display(),
        package.display()
    );
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // An example that ends without reading all of it is judged by its output.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn is_up_to_date(program: &Path, package: &Path) -> bool {
    let written = |path: &Path| fs::metadata(path).and_then(|file| file.modified());
    let Ok(built) = written(program) else { return false };
    let mut folders = vec![package.join("src"), package.join("examples")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if written(&path).unwrap() > built {
                return false;
            }
        }
    }
    true
}

/// What an example prints when it succeeds; it must have nothing to complain about, nor the compiler.
pub fn printed(example: &str, arguments: &[&str], input: &str) -> String {
    let output = run(example, arguments, input);
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && complaints.is_empty(), "{example}: {}: {complaints}", output.status);
    String::from_utf8(output.stdout).unwrap()
}
