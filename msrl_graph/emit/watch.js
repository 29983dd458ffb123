"use strict";
// Messages are inserted into the page as text, never as HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...inside) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inside);
  return node;
}

function size(bytes) {
  for (const [unit, one] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (bytes >= one) return `${(bytes / one).toPrecision(3)} ${unit}`;
  return `${bytes} B`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const rounded = Math.round(seconds), minutes = Math.floor(rounded / 60) % 60, hours = Math.floor(rounded / 3600);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rounded % 60} s`;
}

const many = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const figure = (value) => (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)
  ? value.toExponential(1) : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }));

// The progress of each worker state, at the foot of its box in the picture.
// Boxes are in the order of `states` in the facts.
const boxes = [];
for (const group of document.querySelectorAll("svg .state")) {
  const box = group.querySelector("rect");
  box.classList.add("box");
  const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(box.getAttribute(name)));
  const bar = { x: x + 8, y: y + height - 7, height: 3.5, rx: 1.75 };
  const fill = element("svg:rect", { class: "fill", width: 0, ...bar });
  group.append(element("svg:rect", { class: "well", width: width - 16, ...bar }), fill);
  boxes.push({ group, fill, width: width - 16 });
}

function lamp(kind, words, colour) {
  $("lamp").className = `lamp ${kind} ${colour}`;
  $("lamp").lastChild.textContent = words;
  document.body.classList.toggle("stale", kind === "lost");
}

const ENDS = {
  done: ["has ended", "c1"], interrupted: ["was interrupted", "c2"], failed: ["failed", "lost"], fault: ["failed", "lost"],
};

function share(part, total) {
  return total ? `${Math.min(100, (100 * part) / total).toFixed(2)}%` : "0%";
}

// Rows of bars are reused from one update to the next, so that bars move and do not jump.
function reuse(parent, names, make) {
  const children = new Map([...parent.children].map((child) => [child.dataset.name, child]));
  const wanted = names.map((name) => {
    const child = children.get(name) ?? make(name);
    child.dataset.name = name;
    return child;
  });
  if (wanted.length !== parent.children.length || wanted.some((child, i) => parent.children[i] !== child))
    parent.replaceChildren(...wanted);
  return wanted;
}

function row(name) {
  const bars = [element("i", { class: "handed" }), element("i", { class: "done" }), element("span", { class: "says" })];
  return element("div", { class: "row" }, element("span", { title: name }, name), element("div", { class: "track" }, ...bars), element("span"));
}

function states(now) {
  $("task").textContent = now.task ? `${now.task}, for ${duration(now.seconds)}` : "";
  reuse($("states"), now.states.map((state) => state.node), row).forEach((line, i) => {
    const state = now.states[i], [, track, last] = line.children, total = Math.max(state.of, state.done);
    line.className = `row c${state.colour ?? 7}${state.runs ? " works" : ""}`;
    track.children[0].style.width = share(state.handed, total);
    track.children[1].style.width = share(state.done, total);
    last.textContent = `${state.done.toLocaleString("en")} of ${total.toLocaleString("en")}`
      + (state.handed > state.done ? `, ${state.handed.toLocaleString("en")} handed out` : "");
    line.title = `${state.node}: ${many(state.done, "row")} done, ${state.handed} handed out, ${state.of} known`;
    boxes[i].group.classList.toggle("works", state.runs);
    boxes[i].fill.setAttribute("width", total ? boxes[i].width * Math.min(1, state.done / total) : 0);
  });
}

function hosts(now) {
  const makeCard = () => element("div", { class: "host" }, element("span", {}, element("b"), element("span")), element("div"));
  reuse($("hosts"), now.hosts.map((host) => `host ${host.number}`), makeCard).forEach((card, i) => {
    const host = now.hosts[i], [heading, list] = card.children;
    heading.children[0].textContent = `host ${host.number}`;
    heading.children[1].textContent = (host.held === null ? "no warehouse" : `${size(host.held)} of rows`)
      + `, ${size(host.used)} of ${size(host.total)} memory used`;
    const most = Math.max(1, ...host.processes.map((process) => process.memory));
    reuse(list, host.processes.map((process) => process.name), row).forEach((line, n) => {
      const process = host.processes[n], [, track, last] = line.children;
      track.children[1].style.width = share(process.memory, most);
      track.children[2].textContent = process.does ? `${process.does}, ${duration(process.seconds)}` : "";
      last.textContent = process.memory ? size(process.memory) : "";
    });
  });
}

function waits(now) {
  if (!now.hosts.length) return $("waits").replaceChildren(element("p", { class: "none" }, "not known yet"));
  if (!now.waits.length) return $("waits").replaceChildren(element("p", { class: "none" }, "nothing is waiting"));
  const header = element("tr", {}, ...["process", "task", "for", "missing"].map((name) => element("th", {}, name)));
  const lines = now.waits.slice(0, 40).map((wait) => {
    const late = wait.seconds > 10 ? "right late" : "right";
    const cells = [[wait.who, "keep"], [wait.task, "keep"], [duration(wait.seconds), late], [wait.missing, ""]];
    return element("tr", {}, ...cells.map(([words, kind]) => element("td", { class: kind }, words.replaceAll("`", ""))));
  });
  const more = now.waits.length > lines.length ? [element("p", { class: "none" }, `and ${now.waits.length - lines.length} more`)] : [];
  $("waits").replaceChildren(element("table", {}, element("thead", {}, header), element("tbody", {}, ...lines)), ...more);
}

function figures(now) {
  const rate = now.figures.find(([name]) => name === "s");
  const remaining = now.total - now.done;
  const last = rate ? `; the last took ${rate[1]} s` : "";
  const until = rate && remaining > 0 && !now.ended ? `, at that pace ${duration(remaining * Number(rate[1]))} more` : "";
  const shown = [["iterations done", now.done.toLocaleString("en"), `of ${now.total.toLocaleString("en")}${last}${until}`]];
  for (const [name, value] of now.figures) if (name !== "s") shown.push([name, value, ""]);
  if (now.restarts) shown.push(["restarted", String(now.restarts), now.restarts === 1 ? "time" : "times"]);
  $("figures").replaceChildren(...shown.map(([name, value, more]) => element("div", {}, element("dt", {}, name), element("dd", {}, value), element("small", {}, more))));
}

// Curves: their data is requested when an iteration has ended, at most once a second.
const chosen = JSON.parse($("first").textContent);
const charts = [];
const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [360, 170, 48, 10, 20];

function chart(key, colour) {
  const select = element("select", { "aria-label": "which metric" }, element("option", {}, key));
  const output = element("output"), svg = element("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const it = { key, select, output, svg, points: [] };
  select.value = key;
  select.addEventListener("change", () => { it.key = select.value; requestCurves(true); });
  svg.addEventListener("pointermove", (event) => point(it, event));
  svg.addEventListener("pointerleave", () => point(it, null));
  charts.push(it);
  $("charts").append(element("div", { class: `chart c${colour}` }, select, output, svg));
}

function ticks(low, high) {
  const raw = (high - low) / 4.5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= raw);
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) values.push(n * step);
  return values;
}

function draw(it, data) {
  const points = data.points.filter(([, v]) => v !== null), evaluations = data.evaluations.filter(([, , v]) => v !== null);
  it.points = points;
  it.latest = points.length ? figure(points.at(-1)[1]) : "";
  it.output.textContent = it.latest;
  const values = [...points.map((p) => p[1]), ...evaluations.map((e) => e[2])];
  if (!values.length)
    return it.svg.replaceChildren(element("svg:text", { x: LEFT, y: HEIGHT / 2 }, "nothing yet"));
  let low = Math.min(...values), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  [low, high] = [low - room, high + room];
  const last = Math.max(...points.map((p) => p[0]), ...evaluations.map((e) => e[1]), 2);
  const begin = Math.min(...points.map((p) => p[0]), ...evaluations.map((e) => e[1]));
  const x = (n) => LEFT + ((WIDTH - LEFT - 8) * (n - begin)) / Math.max(1, last - begin);
  const y = (v) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - v)) / (high - low);
  it.x = x;
  const inside = [];
  for (const v of ticks(low, high)) {
    inside.push(element("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(v), y2: y(v) }));
    inside.push(element("svg:text", { class: "end", x: LEFT - 6, y: y(v) + 4 }, figure(v)));
  }
  inside.push(element("svg:text", { x: LEFT, y: HEIGHT - 4 }, String(begin)));
  inside.push(element("svg:text", { class: "end", x: WIDTH - 8, y: HEIGHT - 4 }, String(last)));
  const path = (pairs) => pairs.map(([n, v], i) => `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  inside.push(element("svg:path", { class: "curve", d: path(points) }));
  for (const name of new Set(evaluations.map((e) => e[0])))
    inside.push(element("svg:path", { class: "held-line", d: path(evaluations.filter((e) => e[0] === name).map((e) => [e[1], e[2]])) }));
  for (const [name, n, v] of evaluations)
    inside.push(element("svg:circle", { class: "held", cx: x(n), cy: y(v), r: 3.5 }, element("svg:title", {}, `${name} after ${n}: ${figure(v)}`)));
  if (points.length === 1) inside.push(element("svg:circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3, fill: "var(--c)" }));
  it.mark = element("svg:line", { class: "at", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  it.svg.replaceChildren(...inside, it.mark);
}

function point(it, event) {
  if (!it.points.length || !it.mark) return;
  it.mark.setAttribute("visibility", event ? "visible" : "hidden");
  if (!event) { it.output.textContent = it.latest; return; }
  const frame = it.svg.getBoundingClientRect(), position = ((event.clientX - frame.left) * WIDTH) / frame.width;
  const near = it.points.reduce((a, b) => (Math.abs(it.x(b[0]) - position) < Math.abs(it.x(a[0]) - position) ? b : a));
  it.mark.setAttribute("x1", it.x(near[0]));
  it.mark.setAttribute("x2", it.x(near[0]));
  it.output.textContent = `${near[0]}: ${figure(near[1])}`;
}

let requestedAt = 0, known = -1, requesting = false;
async function requestCurves(now = false) {
  if (requesting || (!now && Date.now() - requestedAt < 1000)) return;
  requesting = true;
  requestedAt = Date.now();
  try {
    const query = new URLSearchParams(location.search);
    for (const { key } of charts) query.append("key", key);
    const data = await (await fetch(`/curve?${query}`)).json();
    for (const it of charts) if (data[it.key]) draw(it, data[it.key]);
  } catch { /* the stream shows whether the run still answers */ }
  requesting = false;
}

function curves(now) {
  for (const { select, key } of charts) {
    const names = now.curves.includes(key) ? now.curves : [key, ...now.curves];
    if (names.length !== select.options.length) select.replaceChildren(...names.map((name) => element("option", {}, name)));
    select.value = key;
  }
  $("curves-about").textContent = "by iterations done; circles are evaluations";
  if (now.done !== known || now.ended) { known = now.done; requestCurves(Boolean(now.ended)); } else if (Date.now() - requestedAt > 4000) requestCurves();
}

let task = "";
function show(now) {
  // Bars of another iteration restart at once instead of running backwards.
  document.body.classList.toggle("reset", now.task !== task);
  task = now.task;
  $("line").textContent = now.ended
    ? now.reason || `${many(now.done, "iteration")} done, ${duration(now.elapsed)} since the start`
    : `${now.phase}${now.task ? ` in ${now.task}` : ""}, for ${duration(now.elapsed)} so far`;
  $("phase").textContent = now.ended ? "" : now.phase;
  $("progress").style.width = share(now.done, now.total);
  figures(now); states(now); hosts(now); waits(now); curves(now);
  $("log").hidden = !now.said.length;
  $("messages").replaceChildren(...now.said.toReversed().map(([when, message]) =>
    element("li", {}, element("time", {}, new Date(1000 * when).toLocaleTimeString("en-GB")), element("span", {}, message))));
  document.title = `${now.total ? Math.floor((100 * now.done) / now.total) : 0} % ${now.name}`;
}

chosen.forEach((key, i) => chart(key, [0, 4, 1][i]));
const stream = new EventSource(`/facts${location.search}`);
stream.onmessage = (event) => {
  const now = JSON.parse(event.data);
  show(now);
  if (now.ended === "died") return lamp("lost", "a process died; the run may be restarted", "");
  if (!now.ended) return lamp("runs", now.task ? "running" : "starting", "c1");
  const [words, colour] = ENDS[now.ended] ?? [now.ended, "c7"];
  lamp(colour === "lost" ? "lost" : "ended", words, colour);
  stream.close();
};
let answeredAt = Date.now();
stream.addEventListener("message", () => { answeredAt = Date.now(); });
setInterval(() => {
  if (stream.readyState === EventSource.CLOSED || Date.now() - answeredAt < 5000) return;
  lamp("lost", `no answer for ${duration((Date.now() - answeredAt) / 1000)}`, "");
}, 1000);
