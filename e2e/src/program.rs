//! The programs under test.

use anyhow::{Context, Result, ensure};
use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use test_support::process;

/// The PATH that programs under test get.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Building may have to wait for another build to end.
const BUILD: Duration = Duration::from_secs(900);

/// The program of a package: the one its variable names (`ISTIO_CNI` for `istio-cni`), else the workspace's, built when a test process first asks
/// for it.
///
/// Cargo builds programs beside the tests of their own package only; for tests of another package, this does.
///
/// # Errors
/// It cannot be built.
pub fn under_test(package: &str) -> Result<PathBuf> {
    if let Some(program) = env::var_os(package.to_uppercase().replace('-', "_")) {
        return Ok(program.into());
    }
    let program = built()?.join(package);
    ensure!(program.exists(), "{} was not built", program.display());
    Ok(program)
}

/// The folder of the workspace's programs, all built. One alone would be built with other features of the libraries that it shares with the rest,
/// and those would be compiled again for the next. Cargo takes a second to find out that nothing needs building, so it is asked once per process.
/// Where `BUILT_PROGRAMS` names a folder, they are there, and there need be no cargo.
///
/// # Errors
/// They cannot be built.
pub fn built() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("BUILT_PROGRAMS") {
        return Ok(folder.into());
    }
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(folder) = &*built {
        return Ok(folder.clone());
    }
    Ok(built.insert(build()?).clone())
}

/// The folder that cargo builds into.
///
/// # Errors
/// This program is in none.
pub fn target_folder() -> Result<PathBuf> {
    target_folder_of(&env::current_exe()?)
}

/// By what cargo keeps in it in any case: it adds a `CACHEDIR.TAG` only to a folder that it has made itself.
fn target_folder_of(program: &Path) -> Result<PathBuf> {
    let target = program.ancestors().find(|folder| folder.join(".rustc_info.json").exists());
    target.map(Path::to_owned).with_context(|| format!("{} is in no target folder", program.display()))
}

fn build() -> Result<PathBuf> {
    let target = target_folder()?;
    let mut command = cargo(&["build", "--workspace", "--bins"], &target);
    process::run(&mut command, BUILD)?.ok()?;
    Ok(target.join("debug"))
}

/// Cargo for this workspace and a target folder, without the variables that it sets for tests: the build scripts of some crates read them, and all that is
/// made of those would be compiled again.
pub fn cargo(args: &[&str], target: &Path) -> Command {
    let workspace = test_support::project::file("Cargo.toml");
    let mut command = process::command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), args);
    command.args(["--quiet", "--locked", "--manifest-path"]).arg(workspace).arg("--target-dir").arg(target);
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// As where a volume is mounted there, or a script has made it.
    #[test]
    fn a_target_folder_is_found_that_was_there_before_cargo() -> Result<()> {
        let workspace = tempfile::tempdir()?;
        let target = workspace.path().join("target");
        let package = workspace.path().join("package");
        fs::create_dir_all(&target)?;
        fs::create_dir_all(package.join("src"))?;
        fs::write(
            package.join("Cargo.toml"),
            "[package]\nname = \"empty\"\nedition = \"2024\"\n[workspace]\n",
        )?;
        fs::write(package.join("src/main.rs"), "fn main() {}\n")?;
        let mut build = process::command(
            env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
            ["build", "--quiet", "--offline"],
        );
        process::run(build.current_dir(&package).arg("--target-dir").arg(&target), BUILD)?.ok()?;
        assert_eq!(target_folder_of(&target.join("debug/empty"))?, target);
        assert!(target_folder_of(&package.join("src/main.rs")).is_err());
        Ok(())
    }
}
