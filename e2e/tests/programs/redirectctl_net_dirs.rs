//! What `redirectctl` says of a node's configuration directory is what its agent does.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::net_dirs::{ALL, Expected};
use e2e::redirectctl::redirectctl;
use serde_json::Value;

/// The findings that concern the directory.
const CODES: [&str; 4] = ["no-plugin-entry", "entry-unreadable", "plugin-not-seen-called", "plugin-order"];

#[test]
fn every_directory_is_judged_as_the_agent_judges_it() -> Result<()> {
    for case in ALL {
        let folder = tempfile::tempdir()?;
        let (net, netns) = (folder.path().join("net.d"), folder.path().join("netns"));
        [&net, &netns].into_iter().try_for_each(fs::create_dir)?;
        case.write(&net);
        let pods = folder.path().join("pods.json");
        fs::write(&pods, r#"{"kind":"List","items":[]}"#)?;
        let [net, netns, pods] = [&net, &netns, &pods].map(|path| path.display().to_string());
        let args = ["scan", "-f", &pods, "--netns-dir", &netns, "--cni-conf-dir", &net];
        let output = redirectctl(&[&args[..], &["--agent", "127.0.0.1:1", "--output", "json"]].concat())?;
        let scan: Value = serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?;
        let findings = scan["node"].as_array().context("findings")?;
        let codes = findings.iter().filter_map(|finding| finding["code"].as_str());
        let codes: Vec<&str> = codes.filter(|code| CODES.contains(code)).collect();
        ensure!(codes == case.finding.into_iter().collect::<Vec<_>>(), "{}: {codes:?}\n{scan:#}", case.name);
        if let Expected::NotCalled(part) | Expected::Open(part) = case.expected {
            ensure!(scan["node"].to_string().contains(part) || case.finding == Some("no-plugin-entry"), "{}: {scan:#}", case.name);
        }
    }
    Ok(())
}
