//! The web page in a real browser: it shows what `redirectctl` says, treats everything typed as text, works by keyboard and for screen readers, on
//! narrow screens, in light and dark, and sends nothing anywhere.
//!
//! `make page` makes the page and runs these tests; `make test` compares the page's program with `redirectctl` (page_answers.rs). PAGE is the folder
//! of the page; PAGE_PICTURES a folder for pictures of it.

use std::collections::BTreeSet;
use std::fs;

use crate::browser_support::{Browser, CONTROL, ENTER, RIGHT, SHIFT, SPACE, Server, TAB, pictures};
use crate::page_support::{Case, Machines, PACKETS, errors};
use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_STANDARD as BASE64, Engine as _};
use serde_json::{Value, json};

/// Recordings that are shown at least; so that a page that shows nothing does not look like success.
const SHOWN: usize = 300;
/// Every which pair of neighbours is compared.
const PAIRS: usize = 12;
/// A picture in the documentation is not a larger.
const LARGEST_PICTURE: usize = 200_000;
const WIDE: (u32, u32) = (1280, 900);
/// The size of the pictures for the documentation.
const PICTURE: (u32, u32) = (1180, 1160);
const NARROW: (u32, u32) = (320, 640);

/// Asks a question by the address's fragment, as a link does, and returns what the page shows.
const ASK: &str = r"
    const [fields, done] = [arguments[0], arguments[arguments.length - 1]];
    const read = () => done({
        rules: document.querySelector('#rules:not([hidden]) pre')?.textContent ?? '',
        trace: document.querySelector('#trace:not([hidden]) pre')?.textContent ?? '',
        diff: document.querySelector('#diff:not([hidden]) pre')?.textContent ?? '',
        cells: [...document.querySelectorAll('#rules tbody tr:not(.chain) td:nth-child(2) code')].map((cell) => cell.textContent),
        wrong: [...document.querySelectorAll('#text-errors li')].map((item) => item.textContent),
        otherWrong: [...document.querySelectorAll('#other-errors li')].map((item) => item.textContent),
        fieldsWrong: ['address', 'nameservers', 'to', 'from', 'mark', 'as'].flatMap((name) => document.getElementById(`${name}-error`).textContent.split('\n').filter(Boolean)),
        decides: [...document.querySelectorAll('#rules tr.decides code')].map((cell) => cell.textContent),
        verdict: document.querySelector('#trace .decides code')?.textContent ?? null,
    });
    const fragment = `#${new URLSearchParams(fields)}`;
    addEventListener('hashchange', read, { once: true });
    location.hash = fragment;
";
const CHOOSE: &str = "document.getElementById(arguments[0]).click()";

/// The fields of a case, in the fragment's words.
fn fields(case: &Case, format: &str) -> Value {
    json!({"text": case.text, "address": case.address, "nameservers": case.nameservers.join(","), "format": format})
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|one| one.as_str().map(str::to_owned)).collect()
}

/// A page with everything on it, for what has to hold of all of it.
fn full(server: &Server) -> String {
    let text = "text=-b+*+-i+*+--redirect-dns+--dry-run&other=-b+*+-i+*+-o+3306&address=10.1.0.2,fd00:10::2&nameservers=10.96.0.10&to=198.51.100.1:3306&every=yes";
    server.url(&format!("plan.html#{text}"))
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn the_page_shows_what_redirectctl_says() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.ask(&full(&server))?;
    browser.script(CHOOSE, &[json!("trace-text")])?;
    let cases = Case::all()?;
    let machines = Machines::of(&cases)?;
    let (mut shown, mut problems) = (0, Vec::new());
    for (index, case) in cases.iter().enumerate() {
        let format = ["text", "json", "restore", "nft"][index % 4];
        let mut asked = fields(case, format);
        let packet = PACKETS[index % PACKETS.len()];
        packet.iter().for_each(|(name, value)| asked[name] = json!(value));
        let seen = browser.waiting_script(ASK, &[asked])?;
        let plan = case.redirectctl(&machines, "plan", &["--format", format])?;
        if plan.code() == Some(1) {
            if strings(&seen["wrong"]) != errors(&plan) {
                problems.push(format!("{}: {seen:#} {}", case.name, plan.stderr));
            }
            continue;
        }
        shown += 1;
        let flags: Vec<String> = packet.iter().map(|(flag, value)| format!("--{flag}={value}")).collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let trace = case.redirectctl(&machines, "trace", &flags)?;
        let is_traced = if trace.code() == Some(1) {
            let seen: BTreeSet<String> = strings(&seen["fieldsWrong"]).into_iter().collect();
            seen == errors(&trace).into_iter().collect()
        } else {
            seen["trace"] == json!(trace.stdout)
        };
        if seen["rules"] != json!(plan.stdout) || !is_traced {
            problems
                .push(format!("{}: {seen:#} {} {} {}", case.name, plan.stdout, trace.stdout, trace.stderr));
        }
    }
    ensure!(problems.is_empty(), "{} of {}\n{}", problems.len(), cases.len(), problems.join("\n"));
    ensure!(shown >= SHOWN, "only {shown} are shown");
    println!("{} questions, {shown} plans and traces", cases.len());
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn the_page_compares_as_redirectctl_does_and_its_table_has_every_rule() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.ask(&full(&server))?;
    let cases = Case::all()?;
    let machines = Machines::of(&cases)?;
    for (index, (before, after)) in cases.iter().zip(cases.iter().skip(1)).step_by(PAIRS).enumerate() {
        let output = ["text", "json"][index % 2];
        // Which way it is shown can be chosen where something is shown.
        browser.waiting_script(ASK, &[json!({"text": format!("-b {}", index + 1), "other": "-b 80"})])?;
        browser.script(CHOOSE, &[json!(format!("diff-{output}"))])?;
        let mut asked = fields(before, "table");
        asked["other"] = json!(after.text);
        let seen = browser.waiting_script(ASK, &[asked])?;
        let run = before.difference(after, &machines, &["--output", output])?;
        let name = format!("{} and {}", before.name, after.name);
        if run.code() == Some(1) {
            // A log's line is one line.
            let told = |text: &str, wrong: &Value| -> Vec<String> {
                let text = text.replace('\n', "\\n");
                strings(wrong).iter().map(|one| format!("flags:{text}: {one}")).collect()
            };
            let wrong = [told(&before.text, &seen["wrong"]), told(&after.text, &seen["otherWrong"])].concat();
            ensure!(wrong == errors(&run), "{name}: {wrong:#?} {}", run.stderr);
            continue;
        }
        ensure!(seen["diff"] == json!(run.stdout), "{name}: {seen:#} {}", run.stdout);
        let text = before.redirectctl(&machines, "plan", &[])?.stdout;
        let rules = text.lines().filter(|line| line.starts_with("      # ")).count();
        let cells = strings(&seen["cells"]);
        ensure!(cells.len() == rules, "{name}: {cells:#?} {text}");
        // Longer rules go over several lines of the text.
        let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let missing: Vec<&String> = cells.iter().filter(|cell| !joined.contains(cell.as_str())).collect();
        ensure!(missing.is_empty(), "{name}: {missing:#?} {text}");
    }
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn the_rule_that_decides_is_marked_in_the_table_of_rules() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.ask(&full(&server))?;
    for to in ["198.51.100.1:443", "[2001:db8::9]:443"] {
        let seen = browser.waiting_script(
            ASK,
            &[json!({"text": "-b '*' -i '*' --dual-stack", "address": "10.1.0.2, fd00::2", "to": to})],
        )?;
        ensure!(seen["verdict"] == json!("-j ISTIO_REDIRECT"), "{to}: {seen:#}");
        ensure!(seen["decides"] == json!(["-j ISTIO_REDIRECT"]), "{to}: {seen:#}");
    }
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn whatever_is_typed_is_text() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.ask(&full(&server))?;
    let attack = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>";
    let quoted = attack.replace('"', "\\\"");
    let annotations = format!(
        "traffic.sidecar.istio.io/excludeOutboundPorts: \"{quoted}\"\ntraffic.sidecar.istio.io/includeOutboundIPRanges: \"{quoted}\"\n\
         traffic.sidecar.istio.io/excludeOutboundPort: \"{quoted}\"\n"
    );
    let elements = "return document.querySelectorAll('img, main script, iframe, object, embed, [onerror], [style]').length";
    for asked in [
        json!({"text": annotations, "other": annotations, "address": attack, "to": attack, "from": attack, "as": attack, "mark": attack, "nameservers": attack}),
        json!({"text": annotations}),
        json!({"text": format!("-b '{attack}' -i '{attack}' --{attack} {attack}")}),
        json!({"text": format!("kind: Pod\nmetadata: {{name: '{attack}', labels: 7}}\nspec: {{}}")}),
        json!({"text": format!("kind: Pod\nmetadata: {{name: \"{quoted}\"}}\nspec: {{containers: [{{name: \"{quoted}\"}}]}}")}),
        // What is right is shown as well: a packet may come by an interface of any name.
        json!({"text": "-b '*' -i '*'", "interface": attack, "to": "10.1.0.2:80", "format": "svg"}),
    ] {
        browser.waiting_script(ASK, std::slice::from_ref(&asked))?;
        ensure!(browser.script(elements, &[])? == json!(0), "{asked}");
        ensure!(browser.script("return document.title", &[])? != json!("taken"), "{asked}");
    }
    for view in ["trace-picture", "trace-text", "trace-json", "trace-steps"] {
        browser.script(CHOOSE, &[json!(view)])?;
        ensure!(browser.script(elements, &[])? == json!(0), "{view}");
        let told = browser.script("return document.getElementById('trace').textContent", &[])?;
        ensure!(told.to_string().contains("onerror="), "{view}: {told}");
    }
    // All that is wrong is reported at once, and as it was typed.
    let seen = browser.waiting_script(ASK, &[json!({"text": annotations})])?;
    let wrong = strings(&seen["wrong"]);
    ensure!(wrong.len() == 2 && wrong.iter().all(|one| one.contains("<img src=x onerror=")), "{wrong:#?}");
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    Ok(())
}

/// What has the focus, and whether that is seen.
const FOCUS: &str = r"
    const focused = document.activeElement;
    const shown = focused.type === 'radio' ? focused.nextElementSibling : focused;
    const style = getComputedStyle(shown);
    const box = shown.getBoundingClientRect();
    return {
        name: focused === document.body ? 'nothing' : focused.id || focused.dataset.example || focused.textContent.trim().slice(0, 40),
        seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 && box.width > 0 && box.height > 0,
    };
";

#[test]
#[ignore = "needs the page and a browser: make page"]
fn the_keyboard_is_enough() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.surroundings(WIDE.0, WIDE.1, "light")?;
    browser.ask(&full(&server))?;
    let mut order = Vec::new();
    loop {
        browser.press(None, &TAB.to_string())?;
        let focus = browser.script(FOCUS, &[])?;
        // Behind the last stop comes the browser itself.
        if focus["name"] == json!("nothing") {
            break;
        }
        ensure!(focus["seen"] == json!(true), "the focus is not seen on {focus}");
        order.push(focus["name"].as_str().context("a name")?.to_owned());
        ensure!(order.len() < 100, "no end: {order:?}");
    }
    let expected = [
        "skip",
        "sidecar-cni",
        "Try it",
        "Overview",
        "Install",
        "redirectctl",
        "text",
        "sidecar",
        "annotations",
        "pod",
        "change",
        "compare",
        "other",
        "address",
        "nameservers",
        "as",
        "protocol",
        "to",
        "From, interface, mark, state",
        "from",
        "interface",
        "mark",
        "state",
        "every",
        "Follow the packet",
        "link",
        "trace-steps",
        "diff-list",
        "rules-table",
    ];
    ensure!(order == expected, "{order:#?}");

    // A question is typed and asked, and another view chosen, without a pointer.
    browser.script("document.getElementById('to').focus()", &[])?;
    browser.press(Some(CONTROL), "a")?;
    browser.press(None, &format!("[2001:db8::9]:80{ENTER}"))?;
    ensure!(browser.script(FOCUS, &[])?["name"] == json!("results"), "the answer has the focus");
    let status = browser.script("return document.getElementById('status').textContent", &[])?;
    ensure!(status.to_string().contains("The packet ends at: "), "{status}");
    let packet = browser.script("return document.querySelector('.way .packet').textContent", &[])?;
    ensure!(packet.to_string().contains("[2001:db8::9]:80"), "{packet}");
    browser.press(None, &TAB.to_string())?;
    browser.press(None, &RIGHT.to_string())?;
    ensure!(
        browser.script(FOCUS, &[])?["name"] == json!("trace-picture"),
        "arrows choose a view, and stay there"
    );
    ensure!(
        browser.script("return document.querySelector('#trace svg') !== null", &[])? == json!(true),
        "it is shown"
    );

    browser.script("document.getElementById('compare').focus()", &[])?;
    browser.press(None, &SPACE.to_string())?;
    ensure!(
        browser.script("return document.getElementById('second').hidden", &[])? == json!(true),
        "it is closed"
    );
    browser.press(Some(SHIFT), &TAB.to_string())?;
    ensure!(browser.script(FOCUS, &[])?["name"] == json!("change"), "backwards as well");
    Ok(())
}

/// A node of the accessibility tree: its role, its name, and whether it is invalid.
fn spoken(tree: &Value) -> Vec<(String, String, bool)> {
    let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
    let nodes = tree["nodes"].as_array().into_iter().flatten().filter(|node| node["ignored"] != json!(true));
    let invalid = |node: &Value| {
        let all = node["properties"].as_array().into_iter().flatten();
        all.into_iter().any(|one| one["name"] == "invalid" && one["value"]["value"] == "true")
    };
    nodes.map(|node| (text(&node["role"]), text(&node["name"]), invalid(node))).collect()
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn screen_readers_are_told_everything() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.ask(&full(&server))?;
    browser.script("document.getElementById('more').open = true", &[])?;
    let tree = spoken(&browser.devtools("Accessibility.getFullAXTree", &json!({}))?);
    for (role, name) in [
        ("heading", "Where does this packet go?"),
        ("heading", "The way of the packet"),
        ("heading", "What would change"),
        ("heading", "The rules"),
        ("form", "The question"),
        ("group", "A packet"),
        ("textbox", "A pod, its annotations, or flags"),
        ("textbox", "What would take its place"),
        ("textbox", "To address and port"),
        ("combobox", "Sent by"),
        ("combobox", "Protocol"),
        ("checkbox", "Show rules that are not about it, too"),
        ("button", "Follow the packet"),
        ("group", "Show as"),
        ("radio", "picture"),
        ("region", "The rules"),
        ("columnheader", "Who asked for it"),
        ("table", "table nat"),
        ("list", "Worth knowing"),
        ("navigation", "Site"),
    ] {
        ensure!(
            tree.iter().any(|(of, called, _)| of == role && called == name),
            "no {role} {name:?} in {tree:#?}"
        );
    }
    let speaks = ["button", "checkbox", "combobox", "img", "link", "radio", "region", "table", "textbox"];
    let nameless: Vec<_> =
        tree.iter().filter(|(role, name, _)| speaks.contains(&role.as_str()) && name.is_empty()).collect();
    ensure!(nameless.is_empty(), "{nameless:?}");
    let live = browser.script(
        "const status = document.getElementById('status'); return [status.role, status.ariaLive]",
        &[],
    )?;
    ensure!(live == json!(["status", "polite"]), "{live}");
    ensure!(tree.iter().any(|(role, ..)| role == "status"), "no status in {tree:#?}");

    browser.script(CHOOSE, &[json!("trace-picture")])?;
    let tree = spoken(&browser.devtools("Accessibility.getFullAXTree", &json!({}))?);
    ensure!(
        tree.iter().any(|(role, name, _)| ["img", "image"].contains(&role.as_str())
            && name.starts_with("The way of the packet: it ends at")),
        "{tree:#?}"
    );

    browser.waiting_script(ASK, &[json!({"text": "-b http", "to": "here"})])?;
    let tree = spoken(&browser.devtools("Accessibility.getFullAXTree", &json!({}))?);
    let invalid = |wanted: &str| tree.iter().any(|(_, name, invalid)| name == wanted && *invalid);
    ensure!(invalid("A pod, its annotations, or flags"), "{tree:#?}");
    ensure!(tree.iter().any(|(role, ..)| role == "alert"), "{tree:#?}");
    Ok(())
}

/// Texts with too little contrast to what is behind them: 4.5 to 1, or 3 to 1 where they are large.
const FAINT: &str = r"
    const parse = (text) => { const [red, green, blue, alpha] = text.match(/[\d.]+/g).map(Number); return { rgb: [red, green, blue], alpha: alpha ?? 1 }; };
    const light = (rgb) => { const [r, g, b] = rgb.map((one) => { const part = one / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = (element) => { for (let at = element; at; at = at.parentElement) { const colour = parse(getComputedStyle(at).backgroundColor); if (colour.alpha === 1) return colour.rgb; if (colour.alpha > 0) throw new Error('half-transparent'); } throw new Error('nothing behind'); };
    const ratio = (one, other) => { const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b); return (bright + 0.05) / (dark + 0.05); };
    const faint = [];
    let looked = 0;
    const look = (element, colour, size, weight, words) => {
        looked += 1;
        const large = size >= 24 || (size >= 18.66 && weight >= 700);
        const is = ratio(parse(colour).rgb, behind(element));
        if (is < (large ? 3 : 4.5)) faint.push(`${words.slice(0, 60)} (${element.tagName} ${element.className?.baseVal ?? element.className}): ${is.toFixed(2)}`);
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const style = getComputedStyle(element);
        if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest('.unseen')) continue;
        const svg = element.closest('svg');
        look(svg ? svg.parentElement : element, svg ? style.fill : style.color, parseFloat(style.fontSize), Number(style.fontWeight), walker.currentNode.textContent.trim());
    }
    for (const field of document.querySelectorAll('input:not([type]), textarea, select')) {
        if (!field.checkVisibility()) continue;
        const style = getComputedStyle(field);
        look(field, style.color, parseFloat(style.fontSize), 400, field.id);
        look(field, getComputedStyle(field, '::placeholder').color, parseFloat(style.fontSize), 400, `${field.id}'s placeholder`);
        // What says that there is a field: 3 to 1.
        const border = ratio(parse(style.borderTopColor).rgb, behind(field.parentElement));
        if (border < 3) faint.push(`border of ${field.id}: ${border.toFixed(2)}`);
    }
    return { faint, looked };
";

#[test]
#[ignore = "needs the page and a browser: make page"]
fn it_is_read_in_light_and_dark_and_on_narrow_screens() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    let views = [
        "trace-steps",
        "trace-picture",
        "trace-text",
        "diff-list",
        "diff-text",
        "rules-table",
        "rules-nft",
        "rules-svg",
    ];
    let wrong = "document.getElementById('to').value = 'here'; document.getElementById('text').value = '-b http';\
                 document.getElementById('ask').requestSubmit()";
    for scheme in ["light", "dark"] {
        for (width, height) in [WIDE, NARROW] {
            browser.surroundings(width, height, scheme)?;
            browser.ask(&full(&server))?;
            for step in views.iter().copied().chain(["wrong"]) {
                match step {
                    "wrong" => browser.script(wrong, &[])?,
                    view => browser.script(CHOOSE, &[json!(view)])?,
                };
                let seen = browser.script(FAINT, &[])?;
                ensure!(seen["faint"] == json!([]), "{scheme}, {width}, {step}: {seen:#}");
                ensure!(seen["looked"].as_u64() > Some(40), "{scheme}, {width}, {step}: {seen:#}");
                let wide = browser.script("return document.documentElement.scrollWidth", &[])?;
                ensure!(
                    wide.as_u64() <= Some(u64::from(width)),
                    "{scheme}, {step}: {wide} of {width} pixels"
                );
            }
        }
    }
    let light = "return getComputedStyle(document.documentElement).backgroundColor";
    browser.surroundings(WIDE.0, WIDE.1, "light")?;
    let paper = browser.script(light, &[])?;
    browser.surroundings(WIDE.0, WIDE.1, "dark")?;
    ensure!(paper != browser.script(light, &[])?, "dark is not light: {paper}");
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn a_link_holds_the_question_and_no_server_gets_it() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.ask(&server.url("plan.html"))?;
    let type_in = r"
        for (const [name, value] of Object.entries(arguments[0])) document.getElementById(name).value = value;
        document.getElementById('protocol').value = 'udp';
        document.getElementById('every').checked = true;
        document.getElementById('ask').requestSubmit();
        return location.href;
    ";
    let typed = json!({"text": "-b '*' --redirect-dns  # sekret-é", "address": "10.1.0.2", "nameservers": "10.96.0.10", "to": "10.96.0.10:53", "as": "7:8", "mark": "0x1", "state": "established"});
    let link = browser.script(type_in, std::slice::from_ref(&typed))?;
    let link = link.as_str().context("a link")?.to_owned();
    let seen = "return [document.getElementById('results').innerText, ...['text', 'address', 'nameservers', 'to', 'as', 'mark', 'state', 'protocol'].map((name) => document.getElementById(name).value), document.getElementById('every').checked]";
    let before = browser.script(seen, &[])?;
    ensure!(before[0].as_str().is_some_and(|text| text.contains("Ends at")), "{before}");
    // Another program follows the link.
    let other = Browser::start()?;
    other.ask(&link)?;
    ensure!(other.script(seen, &[])? == before, "{before:#} {:#}", other.script(seen, &[])?);

    let asked = server.asked();
    ensure!(
        asked.iter().all(|line| line.starts_with("GET ") && !line.contains("sekret") && !line.contains('?')),
        "{asked:#?}"
    );
    let elsewhere = "return performance.getEntriesByType('resource').map((one) => one.name).filter((name) => !name.startsWith(location.origin))";
    ensure!(browser.script(elsewhere, &[])? == json!([]), "something came from elsewhere");
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn opened_as_a_file_it_says_what_it_needs() -> Result<()> {
    let folder = std::env::var("PAGE").context("PAGE names no folder; make page sets it")?;
    let folder = fs::canonicalize(folder)?;
    let browser = Browser::start()?;
    browser.open(&format!("file://{}/plan.html", folder.display()))?;
    let status = browser.script("return document.getElementById('status').innerText", &[])?;
    ensure!(status.to_string().contains("a web server"), "{status}");
    browser.open(&format!("file://{}/docs/get-started/install.html", folder.display()))?;
    let text = browser.script("return document.querySelector('article h1').innerText", &[])?;
    ensure!(text.as_str().is_some_and(|text| !text.is_empty()), "{text}");
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn the_documentation_hangs_together() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    browser.surroundings(NARROW.0, NARROW.1, "light")?;
    let links = r"return [...document.querySelectorAll('a[href]')].map((link) => link.href).filter((href) => href.startsWith(location.origin))";
    let mut known: BTreeSet<String> = [server.url("index.html")].into();
    let mut open: Vec<String> = known.iter().cloned().collect();
    let mut pages = 0;
    while let Some(page) = open.pop() {
        browser.open(&page)?;
        pages += 1;
        let wide = browser.script("return document.documentElement.scrollWidth", &[])?;
        ensure!(wide.as_u64() <= Some(u64::from(NARROW.0)), "{page}: {wide} pixels");
        let all = strings(&browser.script(links, &[])?);
        for link in all {
            let (to, anchor) = link.split_once('#').unwrap_or((&link, ""));
            if known.insert(to.to_owned()) && to.ends_with(".html") {
                open.push(to.to_owned());
            }
            if to == page && !anchor.is_empty() {
                let found = browser
                    .script("return document.getElementById(arguments[0]) !== null", &[json!(anchor)])?;
                ensure!(found == json!(true), "{page}: no {anchor}");
            }
        }
    }
    ensure!(pages >= 25, "only {pages} pages");
    let there = r"
        const [all, done] = [arguments[0], arguments[1]];
        Promise.all(all.map(async (url) => [url, (await fetch(url)).status])).then((answers) => done(answers.filter(([, status]) => status !== 200)));
    ";
    browser.open(&server.url("index.html"))?;
    let gone = browser.waiting_script(there, &[json!(known)])?;
    ensure!(gone == json!([]), "{gone}");

    browser.surroundings(WIDE.0, WIDE.1, "dark")?;
    browser.open(&server.url("docs/reference/agent.html"))?;
    let faint = browser.script(FAINT, &[])?;
    ensure!(faint["faint"] == json!([]), "{faint:#}");
    browser.script("document.getElementById('words').focus()", &[])?;
    browser.press(None, "foreign rule")?;
    browser.until("what was found", "return document.querySelectorAll('#found a').length > 0")?;
    browser.press(None, &ENTER.to_string())?;
    browser.until(
        "the page that was found",
        "return !location.pathname.endsWith('agent.html') || location.hash !== ''",
    )?;
    let complaints = browser.complaints()?;
    ensure!(complaints.is_empty(), "{complaints:#?}");
    Ok(())
}

#[test]
#[ignore = "needs the page and a browser: make page"]
fn its_picture_is_taken() -> Result<()> {
    let (server, browser) = (Server::start()?, Browser::start()?);
    let question = "text=-b+'*'+-i+'*'+-d+15090%2C15021%2C15020&address=10.1.0.2&to=198.51.100.1%3A443";
    for scheme in ["light", "dark"] {
        browser.surroundings(PICTURE.0, PICTURE.1, scheme)?;
        browser.ask(&server.url(&format!("plan.html#{question}")))?;
        let taken = browser.devtools("Page.captureScreenshot", &json!({"format": "png"}))?;
        let taken = BASE64.decode(taken["data"].as_str().context("a picture")?)?;
        ensure!((20_000..LARGEST_PICTURE).contains(&taken.len()), "{scheme}: {} bytes", taken.len());
        if let Some(folder) = pictures() {
            fs::write(folder.join(format!("{scheme}.png")), taken)?;
        }
    }
    Ok(())
}
