"use strict";
// All that is told is put into the page as text, never as HTML.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function made(tag, attributes = {}, ...inside) {
  const found = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...inside);
  return found;
}

function size(bytes) {
  for (const [unit, one] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (bytes >= one) return `${(bytes / one).toPrecision(3)} ${unit}`;
  return `${bytes} B`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

const many = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const figure = (value) => (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)
  ? value.toExponential(1) : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }));

// What the picture shows of each worker state: how far it is, at the foot of its box.
// Boxes stand in the order in which states are told.
const boxes = [];
for (const group of document.querySelectorAll("svg .state")) {
  const box = group.querySelector("rect");
  box.classList.add("box");
  const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(box.getAttribute(name)));
  const bar = { x: x + 8, y: y + height - 7, height: 3.5, rx: 1.75 };
  const fill = made("svg:rect", { class: "fill", width: 0, ...bar });
  group.append(made("svg:rect", { class: "well", width: width - 16, ...bar }), fill);
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

function share(part, whole) {
  return whole ? `${Math.min(100, (100 * part) / whole).toFixed(2)}%` : "0%";
}

// Rows of bars are kept from one look to the next, so that bars move and do not jump.
function kept(parent, names, make) {
  const there = new Map([...parent.children].map((child) => [child.dataset.name, child]));
  const wanted = names.map((name) => {
    const found = there.get(name) ?? make(name);
    found.dataset.name = name;
    return found;
  });
  if (wanted.length !== parent.children.length || wanted.some((child, i) => parent.children[i] !== child))
    parent.replaceChildren(...wanted);
  return wanted;
}

function row(name) {
  const bars = [made("i", { class: "handed" }), made("i", { class: "done" }), made("span", { class: "says" })];
  return made("div", { class: "row" }, made("span", { title: name }, name), made("div", { class: "track" }, ...bars), made("span"));
}

function states(now) {
  $("task").textContent = now.task ? `${now.task}, for ${duration(now.seconds)}` : "";
  kept($("states"), now.states.map((s) => s.node), row).forEach((line, i) => {
    const s = now.states[i], [, track, last] = line.children, whole = Math.max(s.of, s.done);
    line.className = `row c${s.colour ?? 7}${s.runs ? " works" : ""}`;
    track.children[0].style.width = share(s.handed, whole);
    track.children[1].style.width = share(s.done, whole);
    last.textContent = `${s.done.toLocaleString("en")} of ${whole.toLocaleString("en")}`
      + (s.handed > s.done ? `, ${s.handed.toLocaleString("en")} handed` : "");
    line.title = `${s.node}: ${many(s.done, "row")} done, ${s.handed} handed out, ${s.of} known`;
    boxes[i].group.classList.toggle("works", s.runs);
    boxes[i].fill.setAttribute("width", whole ? boxes[i].width * Math.min(1, s.done / whole) : 0);
  });
}

function hosts(now) {
  const host = () => made("div", { class: "host" }, made("span", {}, made("b"), made("span")), made("div"));
  kept($("hosts"), now.hosts.map((h) => `host ${h.number}`), host).forEach((card, i) => {
    const h = now.hosts[i], [head, list] = card.children;
    head.children[0].textContent = `host ${h.number}`;
    head.children[1].textContent = (h.held === null ? "no warehouse" : `${size(h.held)} of rows`)
      + `, ${size(h.used)} of ${size(h.total)} memory used`;
    const most = Math.max(1, ...h.processes.map((p) => p.memory));
    kept(list, h.processes.map((p) => p.name), row).forEach((line, n) => {
      const p = h.processes[n], [, track, last] = line.children;
      track.children[1].style.width = share(p.memory, most);
      track.children[2].textContent = p.does ? `${p.does}, ${duration(p.seconds)}` : "";
      last.textContent = p.memory ? size(p.memory) : "";
    });
  });
}

function waits(now) {
  if (!now.hosts.length) return $("waits").replaceChildren(made("p", { class: "none" }, "not known yet"));
  if (!now.waits.length) return $("waits").replaceChildren(made("p", { class: "none" }, "nobody waits"));
  const head = made("tr", {}, ...["who", "in", "for", ""].map((name) => made("th", {}, name)));
  const lines = now.waits.slice(0, 40).map((w) => {
    const late = w.seconds > 10 ? "right late" : "right";
    const cells = [[w.who, "keep"], [w.task, "keep"], [duration(w.seconds), late], [w.missing, ""]];
    return made("tr", {}, ...cells.map(([words, kind]) => made("td", { class: kind }, words.replaceAll("`", ""))));
  });
  const more = now.waits.length > lines.length ? [made("p", { class: "none" }, `and ${now.waits.length - lines.length} more`)] : [];
  $("waits").replaceChildren(made("table", {}, made("thead", {}, head), made("tbody", {}, ...lines)), ...more);
}

function figures(now) {
  const rate = now.figures.find(([name]) => name === "s");
  const left = now.total - now.done;
  const last = rate ? `; the last took ${rate[1]} s` : "";
  const until = rate && left > 0 && !now.ended ? `, at that pace ${duration(left * Number(rate[1]))} more` : "";
  const shown = [["iterations done", now.done.toLocaleString("en"), `of ${now.total.toLocaleString("en")}${last}${until}`]];
  for (const [name, value] of now.figures) if (name !== "s") shown.push([name, value, ""]);
  if (now.restarts) shown.push(["started anew", String(now.restarts), now.restarts === 1 ? "time" : "times"]);
  $("figures").replaceChildren(...shown.map(([name, value, more]) => made("div", {}, made("dt", {}, name), made("dd", {}, value), made("small", {}, more))));
}

// Curves: what is drawn is asked for when an iteration has ended, at most once a second.
const chosen = JSON.parse($("first").textContent);
const charts = [];
const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [360, 170, 48, 10, 20];

function chart(key, colour) {
  const select = made("select", { "aria-label": "which metric" }, made("option", {}, key));
  const output = made("output"), svg = made("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const found = { key, select, output, svg, points: [] };
  select.value = key;
  select.addEventListener("change", () => { found.key = select.value; ask(true); });
  svg.addEventListener("pointermove", (event) => point(found, event));
  svg.addEventListener("pointerleave", () => point(found, null));
  charts.push(found);
  $("charts").append(made("div", { class: `chart c${colour}` }, select, output, svg));
}

function ticks(low, high) {
  const raw = (high - low) / 4.5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= raw);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function draw(it, data) {
  const points = data.points.filter(([, v]) => v !== null), held = data.evaluations.filter(([, , v]) => v !== null);
  it.points = points;
  it.latest = points.length ? figure(points.at(-1)[1]) : "";
  it.output.textContent = it.latest;
  const values = [...points.map((p) => p[1]), ...held.map((e) => e[2])];
  if (!values.length)
    return it.svg.replaceChildren(made("svg:text", { x: LEFT, y: HEIGHT / 2 }, "nothing yet"));
  let low = Math.min(...values), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  [low, high] = [low - room, high + room];
  const last = Math.max(...points.map((p) => p[0]), ...held.map((e) => e[1]), 2);
  const begin = Math.min(...points.map((p) => p[0]), ...held.map((e) => e[1]));
  const x = (n) => LEFT + ((WIDTH - LEFT - 8) * (n - begin)) / Math.max(1, last - begin);
  const y = (v) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - v)) / (high - low);
  it.x = x;
  const inside = [];
  for (const v of ticks(low, high)) {
    inside.push(made("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(v), y2: y(v) }));
    inside.push(made("svg:text", { class: "end", x: LEFT - 6, y: y(v) + 4 }, figure(v)));
  }
  inside.push(made("svg:text", { x: LEFT, y: HEIGHT - 4 }, String(begin)));
  inside.push(made("svg:text", { class: "end", x: WIDTH - 8, y: HEIGHT - 4 }, String(last)));
  const path = (some) => some.map(([n, v], i) => `${i ? "L" : "M"}${x(n).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  inside.push(made("svg:path", { class: "curve", d: path(points) }));
  for (const name of new Set(held.map((e) => e[0])))
    inside.push(made("svg:path", { class: "held-line", d: path(held.filter((e) => e[0] === name).map((e) => [e[1], e[2]])) }));
  for (const [name, n, v] of held)
    inside.push(made("svg:circle", { class: "held", cx: x(n), cy: y(v), r: 3.5 }, made("svg:title", {}, `${name} after ${n}: ${figure(v)}`)));
  if (points.length === 1) inside.push(made("svg:circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3, fill: "var(--c)" }));
  it.mark = made("svg:line", { class: "at", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  it.svg.replaceChildren(...inside, it.mark);
}

function point(it, event) {
  if (!it.points.length || !it.mark) return;
  it.mark.setAttribute("visibility", event ? "visible" : "hidden");
  if (!event) { it.output.textContent = it.latest; return; }
  const frame = it.svg.getBoundingClientRect(), at = ((event.clientX - frame.left) * WIDTH) / frame.width;
  const near = it.points.reduce((a, b) => (Math.abs(it.x(b[0]) - at) < Math.abs(it.x(a[0]) - at) ? b : a));
  it.mark.setAttribute("x1", it.x(near[0]));
  it.mark.setAttribute("x2", it.x(near[0]));
  it.output.textContent = `${near[0]}: ${figure(near[1])}`;
}

let asked = 0, known = -1, asking = false;
async function ask(now = false) {
  if (asking || (!now && Date.now() - asked < 1000)) return;
  asking = true;
  asked = Date.now();
  try {
    const query = new URLSearchParams(location.search);
    for (const { key } of charts) query.append("key", key);
    const data = await (await fetch(`/curve?${query}`)).json();
    for (const it of charts) if (data[it.key]) draw(it, data[it.key]);
  } catch { /* the stream tells whether the run is there */ }
  asking = false;
}

function curves(now) {
  for (const { select, key } of charts) {
    const names = now.curves.includes(key) ? now.curves : [key, ...now.curves];
    if (names.length !== select.options.length) select.replaceChildren(...names.map((name) => made("option", {}, name)));
    select.value = key;
  }
  $("of").textContent = "by iterations done; circles are evaluations";
  if (now.done !== known || now.ended) { known = now.done; ask(Boolean(now.ended)); } else if (Date.now() - asked > 4000) ask();
}

let task = "";
function show(now) {
  // Bars of another iteration begin anew, and do not run backwards.
  document.body.classList.toggle("anew", now.task !== task);
  task = now.task;
  $("line").textContent = now.ended
    ? now.reason || `${many(now.done, "iteration")} done, ${duration(now.elapsed)} since the start`
    : `${now.phase}${now.task ? ` in ${now.task}` : ""}, for ${duration(now.elapsed)} so far`;
  $("phase").textContent = now.ended ? "" : now.phase;
  $("whole").style.width = share(now.done, now.total);
  figures(now); states(now); hosts(now); waits(now); curves(now);
  $("told").hidden = !now.said.length;
  $("said").replaceChildren(...now.said.toReversed().map(([when, words]) =>
    made("li", {}, made("time", {}, new Date(1000 * when).toLocaleTimeString("en-GB")), made("span", {}, words))));
  document.title = `${now.total ? Math.floor((100 * now.done) / now.total) : 0} % ${now.name}`;
}

chosen.forEach((key, i) => chart(key, [0, 4, 1][i]));
const stream = new EventSource(`/facts${location.search}`);
stream.onmessage = (event) => {
  const now = JSON.parse(event.data);
  show(now);
  if (now.ended === "died") return lamp("lost", "something died; it may be started anew", "");
  if (!now.ended) return lamp("runs", now.task ? "running" : "starting", "c1");
  const [words, colour] = ENDS[now.ended] ?? [now.ended, "c7"];
  lamp(colour === "lost" ? "lost" : "ended", words, colour);
  stream.close();
};
let heard = Date.now();
stream.addEventListener("message", () => { heard = Date.now(); });
setInterval(() => {
  if (stream.readyState === EventSource.CLOSED || Date.now() - heard < 5000) return;
  lamp("lost", `no answer for ${duration((Date.now() - heard) / 1000)}`, "");
}, 1000);
