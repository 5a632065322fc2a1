// Puts questions to the program of this page and shows what it answers. Whatever somebody typed reaches the page as text and never as
// HTML; what is right or wrong is for the program to say.

import init, { answer } from "./program/web.js";

const FIELDS = ["address", "nameservers", "as", "to", "from", "interface", "mark"];
const FORMATS = ["table", "text", "restore", "nft", "json", "svg"];
const FORMS = { pod: "Read as a pod’s manifest.", annotations: "Read as annotations of an injected pod.", flags: "Read as flags of istio-iptables." };

const POD = `apiVersion: v1
kind: Pod
metadata:
  name: cart-0
  namespace: shop
  annotations:
    sidecar.istio.io/status: "{}"
    traffic.sidecar.istio.io/excludeOutboundPorts: "3306"
spec:
  containers:
  - name: app
  - name: istio-proxy
    args: [proxy, sidecar]
    env:
    - name: ISTIO_META_DNS_CAPTURE
      value: "true"
status:
  podIPs:
  - ip: 10.1.0.2
`;
const SIDECAR = "-b '*' -i '*' -d 15090,15021,15020";
const EXAMPLES = {
  sidecar: { text: SIDECAR, address: "10.1.0.2", to: "198.51.100.1:443" },
  annotations: {
    text: 'traffic.sidecar.istio.io/includeOutboundIPRanges: "10.0.0.0/8"\ntraffic.sidecar.istio.io/excludeInboundPorts: "8080"\n',
    address: "10.1.0.2", as: "outside", to: "10.1.0.2:8080",
  },
  pod: { text: POD, to: "10.96.0.10:53", protocol: "udp" },
  change: { text: SIDECAR, other: SIDECAR + " -o 3306", address: "10.1.0.2, fd00:10::2", to: "198.51.100.1:3306" },
};

const at = (id) => document.getElementById(id);

/** An element with attributes, and texts or elements in it. */
function make(name, attributes = {}, ...inner) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inner);
  return element;
}

// --- The question: from the fields, and as the part of the address that no server gets.

let format = "table";

function asked() {
  const packet = Object.fromEntries(["as", "from", "interface", "mark"].map((name) => [name, at(name).value.trim()]));
  const to = at("to").value.trim();
  const isPacket = to !== "" || Object.values(packet).some((value) => value !== "");
  return {
    text: at("text").value,
    other: at("second").hidden ? null : at("other").value,
    address: at("address").value.trim(),
    nameservers: at("nameservers").value.trim(),
    format: format === "table" ? "text" : format,
    packet: isPacket
      ? { ...packet, to: at("protocol").value === "udp" && !to.includes("/") ? `${to}/udp` : to, state: at("state").value, every: at("every").checked }
      : null,
  };
}

function toFragment() {
  const words = new URLSearchParams();
  words.set("text", at("text").value);
  if (!at("second").hidden) words.set("other", at("other").value);
  for (const name of FIELDS) if (at(name).value !== "") words.set(name, at(name).value);
  if (at("protocol").value !== "tcp") words.set("protocol", at("protocol").value);
  if (at("state").value !== "new") words.set("state", at("state").value);
  if (at("every").checked) words.set("every", "yes");
  if (format !== "table") words.set("format", format);
  return `#${words}`;
}

function fromFragment() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (words.has("text")) fill(Object.fromEntries(words));
  else fill(EXAMPLES.sidecar);
}

/** Fills in all fields; those that nothing is said of are emptied. */
function fill(said) {
  at("text").value = said.text ?? "";
  at("other").value = said.other ?? "";
  compare(said.other !== undefined);
  for (const name of FIELDS) at(name).value = said[name] ?? "";
  at("protocol").value = said.protocol === "udp" ? "udp" : "tcp";
  at("state").value = said.state ?? "new";
  if (at("state").selectedIndex < 0) at("state").value = "new";
  at("every").checked = said.every === "yes";
  format = FORMATS.includes(said.format) ? said.format : "table";
  if (said.from || said.interface || said.mark || said.state || said.every) at("more").open = true;
}

function compare(isWanted) {
  at("second").hidden = !isWanted;
  at("compare").setAttribute("aria-expanded", String(isWanted));
  at("compare").textContent = isWanted ? "Do not compare" : "Compare with another";
}

// --- The answer.

function show(answered, question) {
  const errors = wrongFields(answered);
  const sides = [["text", answered.side], ["other", answered.other]];
  for (const [name, side] of sides) {
    list(at(`${name}-errors`), side?.errors ?? []);
    invalid(at(name), Boolean(side?.errors.length));
    const form = at(name === "text" ? "form" : "other-form");
    form.textContent = side ? FORMS[side.form] : "";
  }
  const notices = [...(answered.side?.notices ?? []), ...(answered.other?.notices ?? [])];
  list(at("notices"), [...new Set(notices)]);
  at("notices").hidden = notices.length === 0;
  showTrace(answered, question);
  showDiff(answered.diff);
  showRules(answered);
  at("status").textContent = summary(answered, errors);
  document.body.dataset.state = "answered";
}

/** Errors that name a flag go to its field; says how many errors there are in all. */
function wrongFields(answered) {
  const all = [...answered.errors, ...(answered.trace?.errors ?? [])];
  for (const name of ["address", "nameservers", "as", "to", "from", "mark"]) {
    const starts = name === "nameservers" ? "name servers:" : `flag --${name}:`;
    const own = all.filter((error) => error.startsWith(starts));
    at(`${name}-error`).textContent = own.join("\n");
    invalid(at(name), own.length > 0);
    if (own.length > 0 && at("more").contains(at(name))) at("more").open = true;
  }
  const rest = all.filter((error) => !/^(flag --(address|as|to|from|mark):|name servers:)/.test(error));
  if (rest.length > 0) at("to-error").textContent = [at("to-error").textContent, ...rest].filter(Boolean).join("\n");
  return all.length + (answered.side?.errors.length ?? 0) + (answered.other?.errors.length ?? 0);
}

function invalid(field, isWrong) {
  if (isWrong) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
}

function list(place, texts) {
  place.replaceChildren(...texts.map((text) => make("li", {}, text)));
}

function summary(answered, errors) {
  if (errors > 0) return errors === 1 ? "One thing is wrong." : `${errors} things are wrong.`;
  const side = answered.side;
  if (side.leftAlone) return `The pod is not redirected: ${side.leftAlone}.`;
  const rules = side.tables.flatMap((table) => table.chains).reduce((sum, chain) => sum + chain.rows.length, 0);
  const parts = [];
  if (answered.trace) parts.push(`The packet ends at: ${answered.trace.end}.`);
  if (answered.diff) parts.push(changes(answered.diff));
  parts.push(rules === 1 ? "One rule." : `${rules} rules.`);
  return parts.join(" ");
}

function changes(diff) {
  const rules = diff.removed.length + diff.added.length;
  if (rules === 0 && diff.traffic.length === 0) return "Nothing would change.";
  const traffic = diff.traffic.length === 0 ? "no packet changes its fate" : `${diff.traffic.length} kind${diff.traffic.length === 1 ? "" : "s"} of traffic would go elsewhere`;
  return `${rules} rule${rules === 1 ? "" : "s"} would change, and ${traffic}.`;
}

/** What was answered before is no answer now. */
function empty(id) {
  at(id).querySelectorAll(":scope > :not(.title), fieldset").forEach((old) => old.remove());
}

/** A section of the answer, shown in one of several ways. */
function views(id, ways, chosen, choose) {
  const section = at(id);
  section.hidden = false;
  const title = section.querySelector(".title");
  const focused = title.contains(document.activeElement) ? document.activeElement.value : undefined;
  empty(id);
  const options = Object.keys(ways).map((name) => {
    const radio = make("input", { type: "radio", name: `${id}-view`, value: name, id: `${id}-${name}` });
    radio.checked = name === chosen;
    radio.addEventListener("change", () => choose(name));
    return make("span", {}, radio, make("label", { for: `${id}-${name}` }, name));
  });
  title.append(make("fieldset", { class: "views" }, make("legend", { class: "unseen" }, "Show as"), ...options));
  if (focused !== undefined) at(`${id}-${chosen}`)?.focus();
  section.append(ways[chosen]());
}

const chosenViews = { trace: "steps", diff: "list" };

function view(id, ways) {
  const choose = (name) => { chosenViews[id] = name; view(id, ways); };
  views(id, ways, chosenViews[id], choose);
}

/** What may be wider than the page, and is moved sideways by itself. */
function wide(label, inner) {
  return make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, inner);
}

const plain = (label, text) => () => wide(label, make("pre", {}, text));

/** A picture that the program has drawn. It is read as XML: nothing in it is run, and it has no text but what was escaped. */
function picture(label, svg) {
  const drawn = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", label);
  return wide(label, make("div", { class: "picture" }, drawn));
}

// --- The way of a packet.

let met = new Map();

function showTrace(answered) {
  const trace = answered.trace;
  met = new Map();
  at("trace").hidden = !trace || trace.errors.length > 0;
  if (at("trace").hidden) return empty("trace");
  for (const [number, step] of trace.way.steps.entries()) {
    if (step.step !== "rule" || step.outcome === "unmatched") continue;
    // The kernel’s name of a table begins with the family.
    const key = [step.table.split(" ").pop(), step.chain, step.number].join(" ");
    if (met.get(key) !== "decides") met.set(key, number === trace.way.decided ? "decides" : "met");
  }
  met.family = trace.way.packet.destination.startsWith("[") ? "numberV6" : "numberV4";
  view("trace", {
    steps: () => steps(trace),
    picture: () => picture(`The way of the packet: it ends at ${trace.end}`, trace.svg),
    text: plain("The way as text", trace.text),
    json: plain("The way as JSON", trace.json),
  });
}

function steps(trace) {
  const way = make("ol", { class: "way" });
  way.append(make("li", { class: "start" }, make("p", { class: "packet" }, trace.packet)));
  let inner = null;
  for (const [number, step] of trace.way.steps.entries()) {
    if (step.step === "hook") {
      inner = make("ul", {});
      way.append(make("li", { class: "hook" }, make("h3", {}, step.hook, ...by(step)), inner));
      continue;
    }
    const line = stepLine(step, trace.said[number], number === trace.way.decided);
    if (line) (inner ?? way).append(line);
  }
  way.querySelectorAll("li.hook > ul:empty").forEach((empty) => empty.remove());
  const kind = trace.way.end.fate;
  way.append(make("li", { class: `end ${kind}` }, make("p", {}, "Ends at: ", make("strong", {}, trace.end))));
  return way;
}

const by = (step) => (step.interface ? [make("small", {}, ` ${["OUTPUT", "POSTROUTING"].includes(step.hook) ? "out" : "in"} by ${step.interface}`)] : []);

function stepLine(step, said, decides) {
  const words = {
    chain: () => make("li", { class: "chain" }, `table ${step.table}, chain ${step.chain}, priority ${step.priority}`),
    rule: () => ruleLine(step, said, decides),
    policy: () => make("li", { class: "change" }, `policy of ${step.chain}: drop`),
    mark: () => make("li", { class: "change" }, `its mark becomes ${hex(step.mark)}`),
    connectionMark: () => make("li", { class: "change" }, `the mark of its connection becomes ${hex(step.mark)}`),
    destination: () => make("li", { class: "change" }, `its destination becomes ${step.destination}`),
    zone: () => make("li", { class: "change" }, `connection tracking’s zone becomes ${step.zone}`),
    route: () => make("li", { class: "change" }, `it is routed by ${step.interface ?? "another interface"}`),
  };
  return words[step.step]?.() ?? null;
}

const hex = (mark) => (mark === undefined ? "unknown" : `0x${mark.toString(16)}`);

function ruleLine(step, said, decides) {
  if (step.outcome === "unmatched" && !at("every").checked) return null;
  const line = make("li", { class: `rule depth-${Math.min(step.depth, 4)} ${step.outcome}` }, make("span", { class: "place" }, `${step.chain} ${step.number}`), " ", ruleText(step.text));
  if (step.outcome === "unmatched") line.append(make("p", { class: "why" }, `not about it: ${step.condition}`));
  if (step.outcome === "unknown") line.append(make("p", { class: "why" }, `may be about it: ${step.condition}`));
  if (step.outcome === "matched" && step.purpose) line.append(make("p", { class: "why" }, said ? `${step.purpose} [${said}]` : step.purpose));
  if (decides) {
    line.classList.add("decides");
    line.append(make("p", { class: "verdict" }, "This rule decides."));
  }
  return line;
}

/** A rule with its target set off: what it does is what one looks for. */
function ruleText(rule) {
  const code = make("code", {});
  const start = rule.search(/(^| )-j /);
  if (start < 0) code.append(rule);
  else code.append(rule.slice(0, start), start === 0 ? "" : " ", make("b", {}, rule.slice(start).trimStart()));
  return code;
}

// --- What a change would change.

function showDiff(diff) {
  at("diff").hidden = !diff;
  if (!diff) return empty("diff");
  view("diff", { list: () => differences(diff), text: plain("The difference as text", diff.text), json: plain("The difference as JSON", diff.json) });
}

function differences(diff) {
  const all = make("div", { class: "differences" });
  all.append(make("h3", {}, "Traffic that changes its fate"));
  if (diff.traffic.length === 0) all.append(make("p", {}, "None: both mean the same."));
  else {
    const rows = diff.traffic.map((cells) => make("tr", {}, ...cells.map((cell, column) => make("td", { "data-head": ["Traffic", "Before", "After"][column] }, cell))));
    const whole = table(["Traffic", "Before", "After"], make("tbody", {}, ...rows), "traffic");
    whole.setAttribute("aria-label", "Traffic that changes its fate");
    all.append(whole);
  }
  all.append(make("h3", {}, "Rules"));
  const line = (sign, word, [family, rule]) => make("li", { class: word }, make("span", { class: "sign" }, sign), make("span", { class: "unseen" }, `${word} `), make("span", { class: "place" }, family), " ", ruleText(rule));
  const lines = [...diff.removed.map((one) => line("−", "removed", one)), ...diff.added.map((one) => line("+", "added", one))];
  all.append(lines.length === 0 ? make("p", {}, "They are the same.") : make("ul", { class: "changed" }, ...lines));
  return all;
}

function table(heads, body, name) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  return make("table", { class: name }, head, ...[body].flat());
}

// --- The rules.

function showRules(answered) {
  const side = answered.side;
  at("rules").hidden = !side || side.errors.length > 0;
  if (at("rules").hidden) return empty("rules");
  const ways = { table: () => tables(side) };
  for (const name of FORMATS.slice(1)) {
    const label = `The rules as ${name}`;
    ways[name] = name === "svg" && !side.leftAlone ? () => picture(label, side.written) : plain(label, side.written);
  }
  views("rules", ways, format, (name) => { format = name; ask(); });
}

function tables(side) {
  const all = make("div", {});
  if (side.leftAlone) all.append(make("p", { class: "left-alone" }, `The pod is not redirected: ${side.leftAlone}.`));
  else if (side.tables.length === 0) all.append(make("p", {}, "No rules: nothing is redirected."));
  for (const one of side.tables) {
    const bodies = one.chains.map((chain) => chainRows(one.table, chain));
    const whole = table(["No.", "Rule", "What it is for", "Who asked for it"], bodies, "rules");
    whole.prepend(make("caption", {}, "table ", make("b", {}, one.table)));
    all.append(whole);
  }
  return all;
}

function chainRows(name, chain) {
  const title = make("th", { scope: "rowgroup", colspan: "4" }, chain.chain);
  if (chain.isHook) title.append(make("small", {}, " packets come here by themselves"));
  const body = make("tbody", {}, make("tr", { class: "chain" }, title));
  for (const row of chain.rows) {
    const kind = met.get([name, chain.chain, row[met.family]].join(" "));
    const number = make("td", { class: "number" }, numbers(row));
    if (kind) number.append(make("span", { class: "unseen" }, kind === "decides" ? " decides about the packet" : " is about the packet"));
    const rule = make("td", { "data-head": "Rule" }, ruleText(row.rule));
    if (row.only) rule.prepend(make("span", { class: "only" }, row.only), " ");
    body.append(make("tr", kind ? { class: kind } : {}, number, rule, make("td", { "data-head": "For" }, row.purpose), make("td", { "data-head": "By" }, ...unbroken(row.said))));
  }
  return body;
}

/** Names of settings are not parted at their dashes. */
const unbroken = (text) => text.split(" ").flatMap((word) => [make("span", { class: "word" }, word), " "]);

function numbers(row) {
  if (row.numberV4 && row.numberV6 && row.numberV4 !== row.numberV6) return `${row.numberV4}, ${row.numberV6}`;
  return String(row.numberV4 ?? row.numberV6 ?? "");
}

// --- What happens when.

function ask() {
  const question = asked();
  history.replaceState(null, "", toFragment());
  try {
    show(JSON.parse(answer(JSON.stringify(question))), question);
  } catch (error) {
    // A program that has stopped cannot go on; the question is in the address, and is asked anew.
    at("status").textContent = `The page’s program stopped (${error.message}). Load the page again.`;
    document.body.dataset.state = "stopped";
  }
}

let waiting;
function soon() {
  document.body.dataset.state = "asking";
  clearTimeout(waiting);
  waiting = setTimeout(ask, 150);
}

async function start() {
  fromFragment();
  await init();
  ask();
  at("ask").addEventListener("input", soon);
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(waiting);
    ask();
    at("results").focus();
  });
  at("skip").addEventListener("click", (event) => { event.preventDefault(); at("results").focus(); });
  at("compare").addEventListener("click", () => { compare(at("second").hidden); ask(); if (!at("second").hidden) at("other").focus(); });
  for (const button of document.querySelectorAll("[data-example]")) {
    button.addEventListener("click", () => { fill(EXAMPLES[button.dataset.example]); ask(); });
  }
  at("link").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      at("status").textContent = "The link is copied. What is behind its # reaches no server.";
    } catch {
      at("status").textContent = "The link is in the address bar. What is behind its # reaches no server.";
    }
  });
  addEventListener("hashchange", () => { fromFragment(); ask(); });
}

start().catch((error) => {
  at("status").textContent = `The page’s program cannot be started: ${error.message}`;
  document.body.dataset.state = "stopped";
});
