"use strict";
/* The page: its state, the tables and the list of runs. The numbers are the JSON in #data. */

const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);

function element(tag, given, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {}))
    if (name in node && name !== "list") node[name] = value; else node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/* One unit for all speeds: the largest in which the longest series lasts at least one at the lowest speed. */
const longest = Math.max(0, ...data.series.map(s => s.megabits.at(-1) / 2 + s.compute.at(-1)));
const [period, seconds] = [["hours", 3600], ["minutes", 60], ["seconds", 1]].find(u => longest >= u[1]) || ["seconds", 1];
const wallClock = mbps => ({
  name: `${mbps} Mbps`,
  label: () => `simulated ${period} at ${mbps} Mbps`,
  x: s => s.megabits.map((m, i) => (m / mbps + s.compute[i]) / seconds),
  tell: v => (period === "hours" && v < 1 ? `${(v * 60).toFixed(1)} minutes` : `${v.toFixed(2)} ${period}`) + ` at ${mbps} Mbps`,
});
const AXES = [
  { name: "rounds", label: () => "rounds", x: s => s.rounds, tell: v => `round ${Math.max(1, Math.round(v))}` },
  { name: "bytes", label: unit => `${unit} sent both ways by all clients`, x: s => s.sent, tell: (v, unit) => `${Number(v.toPrecision(3))} ${unit}` },
  ...[2, 10, 50].map(wallClock),
];
const state = { group: null, panel: null, axis: AXES[0], log: false, hidden: new Set() };

/* The series of the chosen group by panel, with colours. The first original is grey. */
function panels() {
  const found = new Map();
  for (const [number, label] of state.group.members) {
    const s = { ...data.series[number], label, key: number };
    found.set(s.panel, (found.get(s.panel) || []).concat([s]));
  }
  for (const list of found.values()) {
    const grey = list.find(s => s.original);
    list.filter(s => s !== grey).forEach((s, i) => { s.color = `var(--c${i % 9})`; });
    if (grey) grey.color = "var(--soft)";
  }
  return found;
}
const chosen = () => panels().get(state.panel) || [];
const visible = s => !state.hidden.has(s.key);

function redraw() {
  const list = chosen();
  if (!list.length) return;
  const { metric, unit } = list[0];
  const axis = { ...state.axis, label: state.axis.label(unit), tell: v => state.axis.tell(v, unit) };
  $("scored").textContent = metric.name[0].toUpperCase() + metric.name.slice(1);
  draw($("chart"), list.map(s => ({
    label: s.label, x: state.axis.x(s), y: s.mean, low: s.low, high: s.high, color: s.color, dashed: s.original,
    visible: visible(s), mark: paperMark(s),
  })), axis, { log: state.log, metric, interval: data.texts.interval });
  const noted = list.some(s => s.paper && visible(s)), bands = list.some(s => s.low.length && visible(s));
  const timed = state.axis.name.includes("Mbps");
  $("caption").textContent = [
    `${list.some(s => s.scored === "Validation") ? "Validation" : "Test"} ${metric.name}${metric.higher ? "" : " (lower is better)"}.`,
    noted ? "Diamonds are the paper's numbers." : "", bands ? data.texts.band : "",
    timed ? "Time is the transfer of one client's bytes at this speed (a megabit is 10^6 bits) plus its measured share of our computing time." : "",
    timed && noted ? "The minutes in the tables use the paper's megabit and computing time." : "",
  ].filter(Boolean).join(" ");
}

function paperMark(s) {
  if (!s.paper) return null;
  const i = s.rounds.indexOf(s.paper.round);
  return { y: s.paper.accuracy, x: i < 0 ? null : state.axis.x(s)[i] };
}

function choose(group, panel) {
  const there = ((state.group = group), panels());
  state.panel = there.has(panel) ? panel : [...there.keys()].sort((a, b) => there.get(b).length - there.get(a).length)[0] || null;
  $("pick").hidden = data.groups.length < 2;
  $("group").replaceChildren(...data.groups.map(g => element("option", { textContent: g.name, selected: g === group })));
  $("panels").replaceChildren(...[...there.keys()].map(name => element("button", {
    type: "button", role: "tab", ariaSelected: String(name === state.panel), textContent: name,
    onclick: () => choose(group, name),
  })));
  showLegend();
  redraw();
}

function showAxes() {
  $("axis").replaceChildren(...AXES.map(axis => element("button", {
    type: "button", role: "radio", ariaChecked: String(axis === state.axis), textContent: axis.name,
    onclick: () => { state.axis = axis; showAxes(); redraw(); },
  })));
}

function showLegend() {
  $("legend").replaceChildren(...chosen().map(s => {
    const line = element("i");
    line.style.borderTopColor = s.color;
    if (s.original) line.style.borderTopStyle = "dashed";
    const toggle = element("button", { type: "button", ariaPressed: String(visible(s)), title: "Click to hide or show. Double-click to show only this one." }, line, s.label);
    toggle.onclick = () => { if (!state.hidden.delete(s.key)) state.hidden.add(s.key); pressed(); };
    toggle.ondblclick = () => {
      const all = chosen(), alone = all.every(o => o.key === s.key || !visible(o));
      for (const o of all) if (alone || o.key === s.key) state.hidden.delete(o.key); else state.hidden.add(o.key);
      pressed();
    };
    const more = element("button", { type: "button", className: "more", title: "Config and environment", ariaLabel: `config and environment of ${s.label}`, textContent: "i", onclick: () => detail(s.runs) });
    return element("span", {}, toggle, more);
  }));
}

/* Updates the buttons in place: new buttons would interrupt a double click. */
function pressed() {
  chosen().forEach((s, i) => { $("legend").children[i].firstChild.ariaPressed = String(visible(s)); });
  redraw();
}

/* A dot plot for each column with at least two accuracies: per row the paper's diamond, our dot and its whisker. */
function strips(t) {
  const found = t.columns.map((column, c) => ({ column, dots: t.rows.map(r => ({ name: r.name, ...r.cells[c] })).filter(d => d.value !== undefined) }));
  return found.filter(f => f.dots.length > 1).map(({ column, dots }) => {
    const all = dots.flatMap(d => [d.value - d.spread, d.value + d.spread].concat(d.number === undefined ? [] : [d.number]));
    const [low, high] = spanned(dots.map(d => d.value), all, data.texts.interval), room = Math.max(0.4, (high - low) * 0.08);
    const inside = v => Math.min(high + room, Math.max(low - room, v));
    const name = 14 + 8 * Math.max(...dots.map(d => d.name.length)), width = name + 230, height = 22 * dots.length + 26;
    const x = v => name + 212 * (v - low + room) / (high - low + 2 * room), svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": column });
    for (const v of ticks(low - room, high + room, 4)) {
      make("line", { x1: x(v), x2: x(v), y1: 2, y2: height - 20, class: "rule" }, svg);
      make("text", { x: x(v), y: height - 5, "text-anchor": "middle", class: "tick" }, svg, short(v));
    }
    dots.forEach((d, i) => {
      const y = 13 + 22 * i;
      make("text", { x: name - 10, y: y + 4, "text-anchor": "end", class: "tick" }, svg, d.name);
      if (d.spread) make("line", { x1: x(inside(d.value - d.spread)), x2: x(inside(d.value + d.spread)), y1: y, y2: y, class: "whisker" }, svg);
      if (d.number !== undefined) make("path", { d: `M${x(d.number)},${y - 5}l5,5l-5,5l-5,-5Z`, class: "mark" }, svg);
      make("title", {}, make("circle", { cx: x(d.value), cy: y, r: 4, class: "dot" }, svg), `${d.name}: ${d.ours}` + (t.paper ? `, paper ${d.paper}` : ""));
    });
    return element("figure", { className: "strip" }, element("figcaption", { textContent: column }), svg);
  });
}

function showTables() {
  $("tablelist").replaceChildren(...data.tables.map(t => {
    const head = element("tr", {}, element("th", {}), ...t.columns.map(c => element("th", t.paper ? { className: "wide", colSpan: 2, textContent: c } : { textContent: c })));
    const body = t.rows.map(row => element("tr", {}, element("td", { textContent: row.name }), ...row.cells.flatMap(cell => {
      if (!cell) return t.paper ? [element("td"), element("td")] : [element("td")];
      const ours = element("td", { className: "ours " + cell.state });
      ours.append(cell.runs.length ? element("button", { type: "button", textContent: cell.ours, onclick: () => detail(cell.runs) }) : cell.ours);
      return t.paper ? [element("td", { className: "paper", textContent: cell.paper }), ours] : [ours];
    })));
    const cells = t.rows.flatMap(r => r.cells).filter(Boolean).length;
    const count = t.filled === cells || !t.paper ? "" : t.filled ? `${t.filled} of ${cells}` : "not run here";
    return element("details", { className: "study" + (t.filled ? "" : " empty"), open: t.filled > 0, id: t.name },
      element("summary", {}, element("h3", { textContent: t.title }), element("span", { className: "where", textContent: t.source }), element("span", { className: "count", textContent: count })),
      element("div", { className: "body" },
        element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))),
        element("div", { className: "strips" }, ...strips(t))),
      element("div", { className: "notes" }, ...t.notes.map(n => element("p", { textContent: n })), ...(t.paper ? [element("p", {}, element("code", { textContent: `fedpara reproduce ${t.name}` }))] : [])));
  }));
}

function list(title, values) {
  const rows = Object.entries(values).map(([k, v]) => element("div", {}, element("dt", { textContent: k }), element("dd", { textContent: Array.isArray(v) ? v.join(" ") : typeof v === "object" ? JSON.stringify(v) : String(v) })));
  return [element("h4", { textContent: title }), element("dl", {}, ...rows)];
}

function detail(names) {
  $("detailbody").replaceChildren(...names.flatMap(name => {
    const run = data.runs[name];
    const facts = [`${run.rounds} rounds`, run.score || "", `${run.sent} ${data.unit}`, run.seconds ? `${run.seconds} s` : ""];
    return [element("h3", { textContent: name }), element("p", { textContent: facts.filter(Boolean).join(" · ") }), ...list("config", run.config), ...list("environment", run.environment)];
  }));
  $("detail").showModal();
  $("detail").scrollTop = 0;
}

function showRuns() {
  const wanted = $("search").value.toLowerCase();
  const rows = Object.entries(data.runs).filter(([name]) => name.toLowerCase().includes(wanted)).map(([name, run]) => element("tr", {},
    element("td", {}, element("button", { type: "button", textContent: name, onclick: () => detail([name]) })),
    ...[run.rounds, run.score || "–", run.sent, run.seconds ? Number(run.seconds.toFixed(run.seconds < 10 ? 1 : 0)) : "–"].map(v => element("td", { textContent: String(v) }))));
  const head = ["run", "rounds", "score", `${data.unit} sent`, "seconds"].map(h => element("th", { textContent: h }));
  $("runlist").replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

function start() {
  const ofPaper = data.tables.filter(t => t.paper);
  const filled = ofPaper.reduce((n, t) => n + t.filled, 0), all = ofPaper.flatMap(t => t.rows.flatMap(r => r.cells)).filter(Boolean).length;
  document.title = data.texts.name;
  for (const name of ["heading", "lead", "hint"]) $(name).textContent = data.texts[name];
  if (ofPaper.length) $("counts").textContent = `${Object.keys(data.runs).length} runs. ${filled} of the paper's ${all} cells have our number.`;
  $("group").onchange = event => choose(data.groups[event.target.selectedIndex], state.panel);
  $("log").onchange = event => { state.log = event.target.checked; redraw(); };
  $("search").oninput = showRuns;
  $("theme").onclick = () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  };
  $("detail").addEventListener("click", event => { if (event.target === $("detail")) $("detail").close(); });
  if (!data.series.length) $("curves").hidden = true;
  if (!data.tables.length) $("tables").hidden = true;
  showAxes();
  showTables();
  showRuns();
  choose(data.groups[0], null);
  let waiting = 0;
  new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); }).observe($("curves"));
}

start();
