"use strict";
/* A line chart in SVG: draw(host, series, axis, { log, metric, interval }). A series has x, y, low, high, color, dashed, mark, visible. */

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

/* About `count` round numbers between a and b. */
function ticks(a, b, count) {
  const raw = (b - a) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw) || power;
  const found = [];
  for (let v = Math.ceil(a / step - 1e-9) * step; v <= b + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

function logTicks(a, b, room) {
  const found = [];
  for (let e = Math.floor(Math.log10(a)); e <= Math.ceil(Math.log10(b)); e++)
    for (const m of Math.log10(b / a) * 3 < room ? [1, 2, 5] : [1])
      if (m * 10 ** e >= a * 0.999 && m * 10 ** e <= b * 1.001) found.push(m * 10 ** e);
  return found;
}

function short(v) {
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (size >= 1e4) return (v / 1e3).toLocaleString("en", { maximumFractionDigits: 0 }) + "k";
  return String(Number(v.toPrecision(size >= 100 ? 4 : 3)));
}

/* The range of all values; with intervals, of the means and half as much around them, since few seeds have wide ones. */
function spanned(means, values, interval) {
  const low = Math.min(...values), high = Math.max(...values), least = Math.min(...means), most = Math.max(...means);
  const room = interval ? (most - least) / 2 : 0;
  return room > 0 ? [Math.max(low, least - room), Math.min(high, most + room)] : [low, high];
}

function limits(shown, values, { metric, interval }) {
  const [low, high] = spanned(shown.flatMap(s => s.y), values, interval);
  if (metric.percent) {
    const pad = Math.max(0.5, (high - low) * 0.05);
    return [Math.max(0, low - pad), Math.min(100, high + pad)];
  }
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low - pad, high + pad];
}

function draw(host, series, axis, options) {
  host.textContent = "";
  const width = Math.max(280, host.clientWidth), height = Math.round(Math.min(460, Math.max(270, width * 0.46)));
  const left = options.metric.percent ? 40 : 60, right = width < 500 ? 12 : 22, top = 24, bottom = 44;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${options.metric.name} over ${axis.name}` }, host);
  const shown = series.filter(s => s.visible);
  const xs = shown.flatMap(s => s.x), ys = shown.flatMap(s => s.low.length ? s.low.concat(s.high) : s.y);
  for (const s of shown) if (s.mark) ys.push(s.mark.y);
  if (!xs.length) {
    make("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "name" }, svg, "No series selected");
    return;
  }
  const logs = options.log && Math.min(...xs) > 0;
  const x0 = logs ? Math.min(...xs) : 0, x1 = Math.max(...xs, x0 * 1.01 || 1e-9);
  const [y0, y1] = limits(shown, ys, options);
  const px = v => left + (width - left - right) * (logs ? Math.log(v / x0) / Math.log(x1 / x0) : (v - x0) / (x1 - x0));
  const py = v => top + (height - top - bottom) * (1 - (v - y0) / (y1 - y0));

  const inside = make("clipPath", { id: "inside" }, svg);
  make("rect", { x: left, y: top, width: width - left - right, height: height - top - bottom }, inside);
  const grid = make("g", { class: "grid" }, svg);
  for (const t of ticks(y0, y1, height / 60)) {
    make("line", { x1: left, x2: width - right, y1: py(t), y2: py(t) }, grid);
    make("text", { x: left - 8, y: py(t) + 4, "text-anchor": "end", class: "tick" }, svg, short(t));
  }
  for (const t of logs ? logTicks(x0, x1, width / 90) : ticks(x0, x1, width / 110))
    make("text", { x: px(t), y: height - bottom + 20, "text-anchor": "middle", class: "tick" }, svg, short(t));
  make("text", { x: left, y: height - 6, class: "name" }, svg, axis.label);
  make("text", { x: 2, y: 6, class: "name" }, svg, options.metric.percent ? "%" : options.metric.name);

  for (const s of shown) {
    const at = s.x.map(px);
    if (s.low.length) {
      const edge = s.high.map((v, i) => `${at[i]},${py(v)}`).concat(s.low.map((v, i) => `${at[i]},${py(v)}`).reverse());
      make("polygon", { points: edge.join(" "), fill: s.color, class: "band", "clip-path": "url(#inside)" }, svg);
    }
    make("polyline", { points: s.y.map((v, i) => `${at[i].toFixed(1)},${py(v).toFixed(1)}`).join(" "), stroke: s.color, class: "curve" + (s.dashed ? " original" : ""), "data-series": s.label }, svg);
    if (s.x.length === 1) make("circle", { cx: at[0], cy: py(s.y[0]), r: 3, fill: s.color }, svg);
    if (s.mark) {
      const mx = s.mark.x === null ? width - right : px(Math.min(x1, Math.max(x0, s.mark.x))), my = py(s.mark.y);
      make("path", { d: `M${mx},${my - 5.5}L${mx + 5.5},${my}L${mx},${my + 5.5}L${mx - 5.5},${my}Z`, stroke: s.color, class: "mark" }, svg);
    }
  }
  hover(host, svg, shown, axis, options, { px, py, x0, x1, left, right, top, bottom, width, height, logs });
}

/* The index of the point nearest to v, or null if v is more than a step outside the series. */
function at(s, v) {
  const end = s.x.length - 1, step = end ? (s.x[end] - s.x[0]) / end : s.x[0];
  if (v < s.x[0] - step || v > s.x[end] + step) return null;
  let a = 0, b = end;
  while (a < b) { const m = (a + b) >> 1; if (s.x[m] < v) a = m + 1; else b = m; }
  return a > 0 && v - s.x[a - 1] < s.x[a] - v ? a - 1 : a;
}

function hover(host, svg, shown, axis, { metric, interval }, box) {
  const say = v => metric.percent ? v.toFixed(2) : String(Number(v.toPrecision(4)));
  const layer = make("g", { style: "display:none" }, svg);
  const hair = make("line", { class: "hair", y1: box.top, y2: box.height - box.bottom }, layer);
  const dots = shown.map(s => make("circle", { r: 3.6, fill: s.color }, layer));
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  host.appendChild(tip);
  const move = event => {
    const scale = box.width / svg.getBoundingClientRect().width;
    const mouse = Math.min(box.width - box.right, Math.max(box.left, (event.clientX - svg.getBoundingClientRect().left) * scale));
    const share = (mouse - box.left) / (box.width - box.left - box.right);
    const v = box.logs ? box.x0 * (box.x1 / box.x0) ** share : box.x0 + share * (box.x1 - box.x0);
    const found = shown.map(s => at(s, v));
    const points = new Set(shown.map((s, i) => found[i] === null ? null : s.x[found[i]]).filter(x => x !== null));
    const here = points.size === 1 ? [...points][0] : v;  // snap to a point that all series share
    layer.style.display = tip.hidden = "";
    hair.setAttribute("x1", box.px(here));
    hair.setAttribute("x2", box.px(here));
    shown.forEach((s, i) => {
      dots[i].style.display = found[i] === null ? "none" : "";
      if (found[i] === null) return;
      dots[i].setAttribute("cx", box.px(s.x[found[i]]));
      dots[i].setAttribute("cy", box.py(s.y[found[i]]));
    });
    const sign = metric.higher ? 1 : -1;
    const rows = shown.map((s, i) => [s, found[i]]).filter(r => r[1] !== null).sort((a, b) => sign * (b[0].y[b[1]] - a[0].y[a[1]]));
    tip.textContent = "";
    const head = document.createElement("b");
    head.textContent = axis.tell(here);
    tip.appendChild(head);
    for (const [s, i] of rows.slice(0, 14)) {
      const row = document.createElement("div"), name = document.createElement("span"), value = document.createElement("span");
      const line = document.createElement("i");
      line.style.borderTopColor = s.color;
      if (s.dashed) line.style.borderTopStyle = "dashed";
      name.append(line, s.label);
      const half = s.low.length && interval ? s.high[i] - s.y[i] : null;
      value.textContent = say(s.y[i]) + (half === null ? "" : ` ± ${say(half)}`);
      row.append(name, value);
      tip.appendChild(row);
    }
    const place = mouse / scale, room = host.clientWidth;
    tip.style.bottom = `${box.bottom + 10}px`;
    tip.style.left = place < room / 2 ? `${place + 16}px` : "";
    tip.style.right = place < room / 2 ? "" : `${room - place + 16}px`;
  };
  const leave = () => { layer.style.display = "none"; tip.hidden = true; };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
}
