//! Nothing of the demo is left on the machine.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::screen::Screen;

/// Everything the demo makes outside its own process is in one of these folders, under a name with its process id.
const PLACES: [&str; 3] = ["/run/netns", "/etc/netns", "/tmp"];

/// Shows that nothing is left.
pub(crate) fn show(screen: &mut Screen) -> Result<()> {
    let own = format!("e2e-{}-", std::process::id());
    let temporary = std::env::temp_dir();
    let places = PLACES.map(Path::new).into_iter().chain([temporary.as_path()]);
    let entries = places.flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten());
    let left = entries.map(|entry| entry.path());
    let mut left: Vec<String> = left
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&own)))
        .map(|path| path.display().to_string())
        .collect();
    left.sort();
    left.dedup();
    let found = if left.is_empty() { "nothing".to_owned() } else { left.join(", ") };
    screen.part("The end")?;
    screen.check("namespaces, folders and files of the demo left:", &found, left.is_empty(), "nothing")
}
