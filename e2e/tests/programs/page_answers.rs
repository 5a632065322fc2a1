//! The program of the web page says what `redirectctl` says: to every recorded command line, to packets by each, to pairs of them, and to
//! manifests. The page itself is for `make page` (page_browser.rs); what it shows is what is compared here.

use std::fs;
use std::path::Path;

use crate::page_support::{Case, Machines, PACKETS, errors, of_manifest};
use anyhow::{Context, Result, ensure};
use e2e::iptables::in_parallel;
use test_support::process::Output;
use test_support::sample;
use web::{Form, PacketQuestion, PageQuestion, Side, answer};

const THREADS: usize = 2;
/// Every which pair of neighbours is compared.
const PAIRS: usize = 5;
/// Recordings that are understood at least; so that a program that refuses everything does not look like success.
const UNDERSTOOD: usize = 300;

fn question(case: &Case) -> PageQuestion {
    PageQuestion {
        text: case.text.clone(),
        address: case.address.clone(),
        nameservers: case.nameservers.join(","),
        ..PageQuestion::default()
    }
}

/// Where the page says something else than a run.
fn disagreement(what: &str, run: &Output, said: &str, wrong: &[String]) -> Option<String> {
    if run.code() == Some(1) {
        let told = errors(run);
        let agrees = told == wrong && !told.is_empty();
        return (!agrees).then(|| format!("{what}: redirectctl says\n{}\nthe page\n{wrong:#?}", run.stderr));
    }
    let agrees = run.stdout == said && wrong.is_empty();
    (!agrees).then(|| format!("{what}: redirectctl says\n{}\nthe page\n{said}{wrong:?}", run.stdout))
}

#[test]
fn the_page_plans_every_recorded_command_line_as_redirectctl_does() -> Result<()> {
    let cases = Case::all()?;
    let machines = Machines::of(&cases)?;
    let understood = cases.iter().filter(|case| {
        let side = answer(&question(case)).side;
        side.is_some_and(|side| side.form == Form::Flags && side.errors.is_empty())
    });
    let understood = understood.count();
    ensure!(understood >= UNDERSTOOD, "only {understood} are understood");
    let cases = sample::part(cases, 4, 0);
    let problems = in_parallel(THREADS, &cases, |index, case| {
        let rare = ["restore", "nft", "svg"];
        let mut problems = Vec::new();
        for format in ["text", "json", rare[index % rare.len()]] {
            let asked = PageQuestion { format: format.to_owned(), ..question(case) };
            let side = answer(&asked).side.context("an answer")?;
            let run = case.redirectctl(&machines, "plan", &["--format", format])?;
            problems.extend(disagreement(
                &format!("{} as {format}", case.name),
                &run,
                &side.written,
                &side.errors,
            ));
        }
        Ok(problems)
    });
    ensure!(problems.is_empty(), "{} disagreements\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn the_page_traces_packets_as_redirectctl_does() -> Result<()> {
    let cases = sample::part(Case::all()?, 4, 1);
    let machines = Machines::of(&cases)?;
    let problems = in_parallel(THREADS, &cases, |index, case| {
        let said = PACKETS[index % PACKETS.len()];
        let asked = PageQuestion { packet: Some(way(said)), ..question(case) };
        let answered = answer(&asked);
        let Some(trace) = answered.trace else { return Ok(Vec::new()) };
        let flags: Vec<String> = said.iter().map(|(flag, value)| format!("--{flag}={value}")).collect();
        let mut problems = Vec::new();
        for (more, written) in
            [(&[][..], &trace.text), (&["--output", "json"], &trace.json), (&["--format", "svg"], &trace.svg)]
        {
            let words: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
            let run = case.redirectctl(&machines, "trace", &words)?;
            problems.extend(disagreement(&format!("{} {words:?}", case.name), &run, written, &trace.errors));
        }
        Ok(problems)
    });
    ensure!(problems.is_empty(), "{} disagreements\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

fn way(said: &[(&str, &str)]) -> PacketQuestion {
    let of =
        |flag: &str| said.iter().find(|(name, _)| *name == flag).map_or("", |(_, value)| value).to_owned();
    PacketQuestion {
        sender: of("as"),
        to: of("to"),
        from: of("from"),
        interface: of("interface"),
        mark: of("mark"),
        state: of("state"),
        every: false,
    }
}

#[test]
fn the_page_compares_as_redirectctl_does() -> Result<()> {
    let cases = Case::all()?;
    let machines = Machines::of(&cases)?;
    let pairs: Vec<(&Case, &Case)> = cases.iter().zip(cases.iter().skip(1)).step_by(PAIRS).collect();
    let problems = in_parallel(THREADS, &pairs, |_, (before, after)| {
        let asked = PageQuestion { other: Some(after.text.clone()), ..question(before) };
        let answered = answer(&asked);
        // A log's line is one line.
        let wrong = |side: Option<Side>, text: &str| -> Vec<String> {
            let text = text.replace('\n', "\\n");
            side.into_iter()
                .flat_map(|side| side.errors)
                .map(|error| format!("flags:{text}: {error}"))
                .collect()
        };
        let mut errors = wrong(answered.side, &before.text);
        errors.extend(wrong(answered.other, &after.text));
        let (text, json) = answered.diff.map(|diff| (diff.text, diff.json)).unwrap_or_default();
        let mut problems = Vec::new();
        for (more, written) in [(&[][..], text), (&["--output", "json"], json)] {
            let run = before.difference(after, &machines, more)?;
            problems.extend(disagreement(
                &format!("{} and {}", before.name, after.name),
                &run,
                &written,
                &errors,
            ));
        }
        Ok(problems)
    });
    ensure!(problems.is_empty(), "{} disagreements\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

const ANNOTATIONS: &str =
    "traffic.sidecar.istio.io/excludeOutboundPorts: \"3306\"\nsidecar.istio.io/interceptionMode: TPROXY\n";

/// A pod with an injected sidecar: more fields of its metadata, its spec, and its status.
fn pod(metadata: &str, spec: &str, status: &str) -> String {
    format!(
        "kind: Pod\nmetadata:\n  name: cart-0\n  namespace: shop\n  annotations:\n    sidecar.istio.io/status: \"{{}}\"\n{metadata}\
         spec:\n  containers: [{{name: app}}, {{name: istio-proxy, args: [proxy, sidecar]}}]\n{spec}{status}"
    )
}

#[test]
fn the_page_reads_manifests_as_redirectctl_does() -> Result<()> {
    let whole = pod("", "", "status: {podIPs: [{ip: 10.1.0.7}, {ip: \"fd00::7\"}]}\n");
    let manifests = [
        whole.clone(),
        pod(
            "    traffic.sidecar.istio.io/excludeOutboundPorts: \"3306,x\"\n    traffic.sidecar.istio.io/includeOutboundIPRanges: 10.0.0.0/33\n",
            "",
            "",
        ),
        pod("    traffic.sidecar.istio.io/excludeInboundPorts: \"<img src=x onerror=alert(1)>\"\n", "", ""),
        pod("", "  hostNetwork: true\n", ""),
        pod("", "  initContainers: [{name: istio-init}]\n", ""),
        "kind: Pod\nmetadata: {name: bare}\nspec: {containers: [{name: app}]}\n".to_owned(),
        "kind: Job\nmetadata: {name: a, labels: {x: 1}}\nspec: {}\n".to_owned(),
        format!("{whole}---\n{whole}"),
        format!("kind: List\nitems:\n- {}\n", whole.trim_end().replace('\n', "\n  ")),
        "a: [\n".to_owned(),
        "kind: List\nitems: []\n".to_owned(),
    ];
    let folder = tempfile::tempdir()?;
    for (index, manifest) in manifests.iter().enumerate() {
        let file = folder.path().join(format!("{index}.yaml"));
        fs::write(&file, manifest)?;
        for format in ["text", "json"] {
            let asked =
                PageQuestion { text: manifest.clone(), format: format.to_owned(), ..PageQuestion::default() };
            let side = answer(&asked).side.context("an answer")?;
            let run = of_manifest("plan", &file, &["--format", format])?;
            let wrong = side.errors.iter().map(|error| in_file(&file, error, &run)).collect::<Vec<_>>();
            let problem = disagreement(manifest, &run, &side.written, &wrong);
            ensure!(problem.is_none(), "{}", problem.unwrap_or_default());
        }
    }
    Ok(())
}

/// `redirectctl` names the file where the error is about what is in it.
fn in_file(file: &Path, error: &str, run: &Output) -> String {
    let named = format!("{}: {error}", file.display());
    if run.stderr.contains(&named) { named } else { error.to_owned() }
}

#[test]
fn annotations_alone_are_those_of_an_injected_pod() -> Result<()> {
    let indented: String = ANNOTATIONS.lines().map(|line| format!("    {line}\n")).collect();
    let side =
        |text: String| answer(&PageQuestion { text, ..PageQuestion::default() }).side.context("an answer");
    let wanted = side(pod(&indented, "", ""))?;
    ensure!(wanted.form == Form::Pod && wanted.written.contains("TPROXY"), "{wanted:?}");
    for text in [
        ANNOTATIONS.to_owned(),
        format!("annotations:\n{indented}"),
        format!("metadata:\n  annotations:\n{indented}"),
    ] {
        let told = side(text.clone())?;
        ensure!(told.form == Form::Annotations && told.written == wanted.written, "{text}: {told:?}");
    }
    let wrong = side("traffic.sidecar.istio.io/excludeOutboundPorts: 3306\n".to_owned())?;
    ensure!(wrong.errors.len() == 1, "a number is not an annotation: {:?}", wrong.errors);
    Ok(())
}

#[test]
fn what_is_no_question_is_answered_in_words() {
    for text in ["", "{", "7", r#"{"packets":1}"#] {
        let answered = web::answer_json(text);
        assert!(answered.contains("the page does not fit its program"), "{text}: {answered}");
    }
}
