//! What `redirectctl` says of a node's configuration directory is what its agent does.

use std::fs;

use anyhow::{Result, ensure};
use e2e::net_dirs::{self, Expected};
use redirectctl::node::NodeConfiguration;

#[test]
fn every_directory_is_judged_as_the_agent_judges_it() -> Result<()> {
    for case in net_dirs::all() {
        let folder = tempfile::tempdir()?;
        let net = folder.path().join("net.d");
        fs::create_dir(&net)?;
        case.write(&net);
        let node = NodeConfiguration::read(&net)?;
        let codes: Vec<&str> = node.findings.iter().map(|finding| finding.cause.code()).collect();
        ensure!(codes == case.finding.iter().collect::<Vec<_>>(), "{}: {:?}", case.name, node.findings);
        // An agent that is ready has seen the plugin called, where the files leave that open.
        let is_called = matches!(case.expected, Expected::Called | Expected::Open(_));
        ensure!(is_called || node.conf.is_none() || node.is_open, "{}: {:?}", case.name, node.order);
        if let Expected::Open(part) | Expected::NotCalled(part) = &case.expected {
            // The agent names the file with the entry, redirectctl the plugins of the other.
            let seen = node.findings.iter().flat_map(|finding| &finding.seen).any(|seen| seen.contains(part));
            ensure!(seen, "{}: {:?}", case.name, node.findings);
        }
    }
    Ok(())
}
