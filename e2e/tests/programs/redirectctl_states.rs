//! Broken pods, each broken in one way: `redirectctl` names the cause of each, finds nothing wrong with a whole one, and changes nothing.

use std::fs;
use std::iter;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use e2e::redirectctl::{self, Patient, program, redirectctl};
use serde::Deserialize;
use serde_json::{Value, json};
use test_support::process::{self, Output, SHORT};
use test_support::project;

/// The codes of a report's findings that are more than notes.
fn causes(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().into_iter().flatten();
    let bad = findings.filter(|finding| finding["severity"] != "note");
    bad.map(|finding| finding["code"].as_str().unwrap_or("?").to_owned()).collect()
}

fn report(patient: &Patient) -> Result<Value> {
    let netns = patient.namespace().path().display().to_string();
    let manifest = patient.manifest()?;
    let output = redirectctl(&["netns", &netns, "-f", &manifest, "--output", "json"])?;
    let report: Value = serde_json::from_str(&output.stdout).with_context(|| output.stderr.clone())?;
    let code = if causes(&report).is_empty() { 0 } else { 2 };
    ensure!(output.code() == Some(code), "exit code {:?}, wanted {code}", output.code());
    Ok(report)
}

#[test]
fn a_whole_pod_is_found_to_be_one() -> Result<()> {
    for state in redirectctl::whole() {
        let patient = state.patient(0)?;
        let before = patient.namespace().snapshot()?;
        let report = report(&patient).with_context(|| state.name.clone())?;
        assert_eq!(causes(&report), Vec::<String>::new(), "{}: {report:#}", state.name);
        let changes = patient.namespace().snapshot()?.changes_since(&before);
        assert!(changes.is_empty(), "{}: {changes:?}", state.name);
    }
    Ok(())
}

#[test]
fn every_broken_state_is_seen_with_its_cause() -> Result<()> {
    let mut wrong = Vec::new();
    for state in redirectctl::broken() {
        let told = state.patient(0).and_then(|patient| report(&patient));
        match told.with_context(|| state.name.clone()) {
            Ok(report) if causes(&report) == state.causes() => {}
            Ok(report) => wrong.push(format!(
                "{}: {:?}, wanted {}\n{report:#}",
                state.name,
                causes(&report),
                state.cause
            )),
            Err(error) => wrong.push(format!("{error:#}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn what_is_told_fits_a_terminal_and_says_what_to_do() -> Result<()> {
    for state in redirectctl::broken() {
        let patient = state.patient(0)?;
        let netns = patient.namespace().path().display().to_string();
        let output = redirectctl(&["netns", &netns, "-f", &patient.manifest()?])?;
        let text = &output.stdout;
        assert!(
            state.causes().iter().all(|cause| text.contains(cause)) && text.contains("what to do:"),
            "{}: {text}",
            state.name
        );
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{}: {text}", state.name);
        assert!(!text.contains('\u{1b}'), "no colours where there is no terminal: {text}");
    }
    Ok(())
}

/// Without IPv6 on lo the route of its own is missing, and the agent misses nothing.
#[test]
fn a_pod_in_ambient_mode_has_what_it_can_have_without_ipv6() -> Result<()> {
    let patient = redirectctl::patient("enrolled in ambient mode", 0)?;
    patient.namespace().sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1")?.ok()?;
    let report = report(&patient)?;
    assert_eq!(causes(&report), Vec::<String>::new(), "{report:#}");
    assert_eq!(report["dataPlane"], "ambient");
    let netns = patient.namespace().path().display().to_string();
    redirectctl(&["verify", "--ambient", "--redirect-dns", "--netns", &netns])?.ok()?;
    Ok(())
}

#[test]
fn a_rule_of_others_is_named_with_its_place() -> Result<()> {
    let report = report(&redirectctl::patient("foreign accept", 0)?)?;
    let seen = report["findings"][0]["seen"][0].as_str().unwrap_or_default();
    for word in ["table ip nat", "chain OUTPUT", "hook output, priority -100", "rule 1", "-j ACCEPT"] {
        assert!(seen.contains(word), "{word}: {seen}");
    }
    Ok(())
}

#[test]
fn a_difference_says_what_the_rule_is_for_and_who_asked_for_it() -> Result<()> {
    let patient = redirectctl::patient("capture removed", 0)?;
    let netns = patient.namespace().path().display().to_string();
    let output = redirectctl(&["verify", "--netns", &netns, "-f", &patient.manifest()?])?;
    assert_eq!(output.code(), Some(2), "{}", output.stdout);
    let text = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("is missing") && text.contains("it is there for this:"), "{text}");
    Ok(())
}

#[test]
fn a_packet_is_followed_through_rules_of_others_as_well() -> Result<()> {
    // These pods have a route to their own network only.
    const NEIGHBOUR: &str = "10.1.0.9:80";
    let trace = |name: &str, who: &str, to: &str| -> Result<String> {
        let patient = redirectctl::patient(name, 0)?;
        let netns = patient.namespace().path().display().to_string();
        let output =
            redirectctl(&["trace", "--netns", &netns, "-f", &patient.manifest()?, "--as", who, "--to", to])?
                .ok()?;
        Ok(output.stdout)
    };
    let whole = trace("redirected", "app", NEIGHBOUR)?;
    assert!(whole.contains("ends at: proxy, outbound listener (port 15001)"), "{whole}");
    let broken = trace("foreign accept", "app", NEIGHBOUR)?;
    assert!(broken.contains("ends at: untouched"), "{broken}");
    let dropped = trace("foreign drop", "app", NEIGHBOUR)?;
    assert!(dropped.contains("ends at: dropped"), "{dropped}");
    let excluded = trace("port excluded", "outside", "10.1.0.2:8080")?;
    assert!(
        excluded.contains("ends at: untouched") && excluded.contains("excludeInboundPorts"),
        "{excluded}"
    );
    Ok(())
}

#[test]
fn the_page_of_troubles_shows_what_is_really_told() -> Result<()> {
    let mut shown = Shown::new();
    for state in redirectctl::broken() {
        let symptom = state.symptom.as_deref();
        let symptom = symptom.with_context(|| format!("{}: has no symptom", state.name))?;
        let patient = state.patient(0)?;
        let netns = patient.namespace().path().display().to_string();
        let output = redirectctl(&["netns", &netns, "-f", &patient.manifest()?])?;
        let lines = output
            .stdout
            .lines()
            .skip_while(|line| !["traffic", "error", "warning"].iter().any(|word| line.starts_with(word)));
        let findings: Vec<&str> = lines.collect();
        shown.add(symptom, &findings);
    }
    shown.compare("states")
}

/// What is reported of troubles: which findings, for docs/tasks/troubleshooting.md, and every line, as `e2e/fixtures/troubles-PART.txt`.
struct Shown {
    page: String,
    lines: String,
}

impl Shown {
    fn new() -> Self {
        Self { page: String::new(), lines: String::new() }
    }

    fn add(&mut self, symptom: &str, lines: &[&str]) {
        let is_bad = |line: &&&str| line.starts_with("error") || line.starts_with("warning");
        let codes = lines.iter().filter(is_bad).filter_map(|line| {
            let code = line.split_whitespace().nth(1)?.trim_end_matches(':');
            Some(format!("[{code}](#{code})"))
        });
        let codes: Vec<String> = codes.collect();
        self.page += &format!("- {symptom}: {}\n", codes.join(", "));
        self.lines += &format!("# {symptom}\n\n{}\n\n", lines.join("\n"));
    }

    /// Compares with the page and the file; with UPDATE_DOCS=1 both are written.
    fn compare(&self, part: &str) -> Result<()> {
        // Tests of a process run side by side.
        static WRITING: Mutex<()> = Mutex::new(());
        let _one = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        let path = project::file("docs/tasks/troubleshooting.md");
        let file = project::file(format!("e2e/fixtures/troubles-{part}.txt"));
        let mut page = fs::read_to_string(&path)?;
        let begin = format!("<!-- {part} -->\n");
        let start = page.find(&begin).context("a place for it")? + begin.len();
        let end = start + page[start..].find("<!-- end -->").context("an end of it")?;
        if std::env::var_os("UPDATE_DOCS").is_some() {
            page.replace_range(start..end, &self.page);
            fs::write(path, page)?;
            fs::write(file, &self.lines)?;
        } else {
            let run = "run UPDATE_DOCS=1 cargo test -p e2e --test programs redirectctl_states::";
            assert_eq!(&page[start..end], self.page, "{run}");
            assert_eq!(fs::read_to_string(file)?, self.lines, "{run}");
        }
        Ok(())
    }
}

/// Something wrong with a node.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeState {
    symptom: String,
    cause: String,
    /// Objects of the cluster.
    #[serde(default)]
    objects: Vec<Value>,
    /// The plugins behind the primary one, if not ours alone.
    plugins: Option<Vec<String>>,
    /// What happens in the node's folders: `net.d`, and /run/istio-cni with a kubeconfig.
    #[serde(default)]
    script: String,
}

const OVER: &str = r#"{"kind": "Pod", "metadata": {"namespace": "shop", "name": "cart-0"}, "spec": {"containers": [{"name": "app"}]},
    "status": {"phase": "Succeeded"}}"#;

impl NodeState {
    /// Checks a pod that is over, on a node in this state that has a `/run` of its own.
    fn look(&self) -> Result<Output> {
        let folder =
            tempfile::Builder::new().prefix(&format!("e2e-{}-node", std::process::id())).tempdir()?;
        fs::create_dir(folder.path().join("net.d"))?;
        let plugins = self.plugins.clone().unwrap_or_else(|| vec!["istio-cni".to_owned()]);
        let plugins: Vec<Value> =
            iter::once("ptp".to_owned()).chain(plugins).map(|kind| json!({"type": kind})).collect();
        let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": plugins});
        fs::write(folder.path().join("net.d/10-net.conflist"), list.to_string())?;
        let mut objects = self.objects.clone();
        objects.push(serde_json::from_str(OVER)?);
        fs::write(folder.path().join("pods.json"), json!({"kind": "List", "items": objects}).to_string())?;
        let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]});
        fs::write(folder.path().join("kubeconfig"), kubeconfig.to_string())?;
        // Nothing listens on port 1.
        let script = format!(
            "mount -t tmpfs none /run && mkdir /run/istio-cni && cp kubeconfig /run/istio-cni/istio-cni-kubeconfig
             {}
             exec \"$0\" pod shop/cart-0 -f pods.json --cni-conf-dir net.d --agent 127.0.0.1:1",
            self.script
        );
        let mut command =
            process::command("unshare", ["--mount", "--propagation=private", "sh", "-euc", &script]);
        process::run(command.arg(program()).current_dir(folder.path()), SHORT)
    }
}

#[test]
fn what_is_wrong_with_a_node_is_seen_and_shown_on_the_page_of_troubles() -> Result<()> {
    let whole = NodeState::default().look()?;
    ensure!(
        whole.code() == Some(0) && whole.stdout.starts_with("not redirected, as intended\n"),
        "{whole:?}"
    );
    let mut shown = Shown::new();
    let broken: Vec<NodeState> = serde_saphyr::from_str(include_str!("../../fixtures/node-states.yaml"))?;
    for state in broken {
        let output = state.look()?;
        let is_bad = |line: &&str| line.starts_with("error") || line.starts_with("warning");
        let bad: Vec<&str> = output.stdout.lines().filter(is_bad).collect();
        ensure!(output.code() == Some(2) && bad.len() == 1, "{}: {output:?}", state.symptom);
        ensure!(bad[0].contains(&format!("{}:", state.cause)), "wanted {}: {bad:?}", state.cause);
        let lines: Vec<&str> = output.stdout.lines().skip_while(|line| !is_bad(line)).collect();
        shown.add(&state.symptom, &lines);
    }
    shown.compare("nodes")
}

/// A pod that was emptied, and in which somebody else has a rule as well.
#[test]
fn what_it_means_comes_first_and_a_rule_of_others_is_not_hidden() -> Result<()> {
    let whole = redirectctl::whole()[0].patient(0)?;
    whole
        .namespace()
        .sh("iptables-nft -t nat -F ISTIO_OUTPUT; iptables-nft -t nat -I PREROUTING -j ACCEPT")?;
    let netns = whole.namespace().path().display().to_string();
    let text = redirectctl(&["netns", &netns, "-f", &whole.manifest()?])?.stdout;
    let place = |what: &str| text.find(what).with_context(|| format!("{what}: {text}"));
    let (outbound, inbound) = (
        place("traffic  all IPv4 outbound connections bypass the proxy")?,
        place("traffic  all IPv4 inbound connections bypass the proxy")?,
    );
    let (foreign, differs) = (place("error    foreign-rule:")?, place("error    rules-differ:")?);
    assert!(outbound.max(inbound) < foreign.min(differs), "{text}");
    let report = report(&whole)?;
    assert_eq!(report["consequences"].as_array().map(Vec::len), Some(2), "{report:#}");
    Ok(())
}
