//! Configurations as the CNI project's own library reads them: which it loads, and which plugins it then runs, in which order.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context, Result, ensure};
use cni_core::net_dir::{Directory, File, Network};
use e2e::cnitool::CniTool;
use test_support::netns::{Families, Namespace};

/// Says its name, and adds nothing.
const PLUGIN: &str = "#!/bin/sh\necho \"${0##*/}\" >> CALLS\necho '{\"cniVersion\":\"1.0.0\"}'\n";
const TYPES: [&str; 3] = ["first", "second", "istio-cni"];

/// Files of a directory whose network is called `net`.
const CASES: &[&[(&str, &str)]] = &[
    &[(
        "10-a.conflist",
        r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"first"},{"type":"istio-cni"}]}"#,
    )],
    &[("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net","plugins":[]}"#)],
    &[("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"first"},{}]}"#)],
    &[("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net","plugins":{"type":"first"}}"#)],
    &[("10-a.conflist", r#"{"cniVersion":1,"name":"net","plugins":[{"type":"first"}]}"#)],
    &[(
        "10-a.conflist",
        r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"first"}],"plugins":[{"type":"second"}]}"#,
    )],
    &[("10-a.conflist", "")],
    &[("10-a.conflist", "{broken")],
    &[("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net"}"#)],
    &[
        ("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net"}"#),
        ("net/20-b.conf", r#"{"type":"second"}"#),
        ("net/10-a.conf", r#"{"type":"first"}"#),
        ("net/zz-istio-cni.conf", r#"{"cniVersion":"0.3.1","name":"istio-cni","type":"istio-cni"}"#),
        ("net/30.json", "{"),
        ("other/10.conf", "{"),
    ],
    &[
        ("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"istio-cni"}]}"#),
        ("net/10-a.conf", r#"{"type":"first"}"#),
    ],
    &[
        (
            "10-a.conflist",
            r#"{"cniVersion":"1.0.0","name":"net","loadOnlyInlinedPlugins":true,"plugins":[{"type":"second"}]}"#,
        ),
        ("net/10-a.conf", "{"),
    ],
    &[
        ("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net","loadOnlyInlinedPlugins":true}"#),
        ("net/10-a.conf", r#"{"type":"first"}"#),
    ],
    &[
        ("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"first"}]}"#),
        ("net/10-a.conf", "{broken"),
    ],
    &[("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"net"}"#), ("net/10-a.conf", r#"{"name":"x"}"#)],
    &[("10-a.conf", r#"{"cniVersion":"1.0.0","name":"net","type":"first"}"#)],
];

#[test]
fn configurations_are_read_as_libcni_reads_them() -> Result<()> {
    for files in CASES {
        let mut tool = CniTool::new()?;
        let (calls, plugins) = (tool.state_dir().join("calls"), tool.state_dir().join("bin"));
        fs::create_dir(&plugins)?;
        for name in TYPES {
            let plugin = plugins.join(name);
            fs::write(&plugin, PLUGIN.replace("CALLS", &calls.display().to_string()))?;
            fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755))?;
        }
        tool.add_plugin_dir(&plugins);
        for (name, text) in *files {
            let path = tool.conf_dir().join(name);
            fs::create_dir_all(path.parent().context("a folder")?)?;
            fs::write(path, text)?;
        }
        let pod = Namespace::empty(Families::V4)?;
        let answer = tool.add("net", &pod)?;
        let called = fs::read_to_string(&calls).unwrap_or_default();
        let file = |(name, text): &(&str, &str)| File { name: (*name).into(), text: Ok((*text).into()) };
        let directory = Directory::new(files.iter().map(file).collect());
        let (_, read) = directory.read().next().context("a file")?;
        let ours: Vec<&str> = read.iter().flat_map(Network::types).collect();
        ensure!(called.lines().collect::<Vec<_>>() == ours, "{files:?}: {called:?}, {ours:?}; {answer:?}");
    }
    Ok(())
}
