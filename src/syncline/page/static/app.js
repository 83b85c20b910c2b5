// Puts the page together: asks for a run, listens to its looks, and draws what changed.

import { Chart, joined, PALETTE, redrawAll } from "/charts.js";
import { Curves, get, PHASES, Run, rowsOfMember } from "/figures.js";
import { Media } from "/media.js";
import { drawLegend, drawShares, drawSplits, drawStages, drawStaleness, drawTable } from "/members.js";
import { draw as drawPicture } from "/picture.js";
import { bytes, duration, el, fill, number, percent, seconds, when } from "/words.js";

const $ = (id) => document.getElementById(id);
let run = null, live = null, list = [], axis = "step", chosen = "", isAway = false, filter = "", isDue = false, opening = 0, isCatchingUp = false;
const MOST_CHARTS = 24, CATCH_UP_MS = 2000;
const overlays = new Map(); // run -> its Curves
const metricCharts = new Map();
const OPTIONAL = new Set(["samples_per_second", "gpu_bytes", "gpu_busy"]); // no chart of zeros
let stepCharts = [], machineCharts = [], memberCharts = [];
const media = new Media($("media-cards"), $("media-note"), $("media"), $("media-link"));
const marks = () => run?.events ?? [];

// -- settings of the page -------------------------------------------------------------------------------

const kept = { get: (name) => { try { return localStorage.getItem(name); } catch { return null; } }, set: (name, value) => { try { localStorage.setItem(name, value); } catch { /* private window */ } } };
if (kept.get("theme")) document.documentElement.dataset.theme = kept.get("theme");
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  kept.set("theme", document.documentElement.dataset.theme);
  redrawAll(); drawNow();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { redrawAll(); drawNow(); });
for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll("[data-axis]")) other.classList.toggle("on", other === button);
    for (const chart of metricCharts.values()) chart.setAxis(axis);
    drawMetrics();
  });
}
$("filter").addEventListener("input", () => { filter = $("filter").value.toLowerCase(); drawMetrics(); });

// -- runs -----------------------------------------------------------------------------------------------

async function begin() {
  const told = await get("/api/v1/runs");
  live = told.live; list = told.runs;
  if (live && !list.some((one) => one.name === live)) list.unshift({ name: live, is_live: true, changed_at: 0 });
  fill($("run"), ...list.map((one) => el("option", { value: one.name }, one.name)));
  fill($("overlay-list"), ...(list.length > 1 ? list.map(overlayLine) : [el("p", {}, "No other runs in this folder.")]));
  const wanted = new URLSearchParams(location.search).get("run");
  await open(list.some((one) => one.name === wanted) ? wanted : live ?? list[0]?.name);
  if (live) listen();
}

function overlayLine(one) {
  const box = el("input", { type: "checkbox", onchange: async () => {
    if (box.checked) {
      try { overlays.set(one.name, await Curves.of(one.name)); } catch (error) { box.checked = false; box.title = error.message; }
    } else overlays.delete(one.name);
    for (const chart of metricCharts.values()) chart.remove();
    metricCharts.clear();
    if (run?.isLoaded) drawMetrics();
  } });
  return el("label", { "data-run": one.name }, box, one.name);
}

// Nothing of the run before stays. Of two quick choices the later one counts, whichever is loaded first.
async function open(name) {
  const turn = ++opening;
  clear();
  if (!name) { document.body.dataset.ready = "yes"; showNotices([["info", "There are no runs in this folder yet", "Start one: syncline run train.py"]]); return; }
  run = new Run(name);
  const own = run;
  $("run").value = name;
  for (const line of $("overlay-list").children) line.hidden = line.dataset.run === name; // it is shown already
  try { await own.load(shownOf); } catch (error) {
    if (turn !== opening) return;
    run = null;
    document.body.dataset.ready = "yes";
    showNotices([["bad", `${name} cannot be shown`, error.message]]);
    $("state").textContent = "not shown"; $("state").className = "chip bad";
    return;
  }
  if (turn !== opening) return;
  makeCharts();
  drawNow();
  media.load(name);
}

function clear() {
  run = null; chosen = "";
  for (const chart of [...metricCharts.values(), ...stepCharts, ...machineCharts, ...memberCharts]) chart.remove();
  metricCharts.clear(); stepCharts = []; machineCharts = []; memberCharts = [];
  showNotices([]);
  for (const place of ["one-member", "tiles", "picture", "splits", "shares", "staleness", "legend", "event-list"]) fill($(place));
  fill($("member-table").tBodies[0]);
  for (const note of ["metrics-note", "members-note", "events-note", "foot"]) $(note).textContent = "";
  $("filter").hidden = $("share-card").hidden = true;
  $("state").textContent = "…"; $("state").className = "chip";
  drawnEvents = ""; pictureAt = 0;
  document.querySelector("#metric-charts > .empty")?.remove();
  media.load("");
}

$("run").addEventListener("change", () => { history.replaceState(null, "", `?run=${encodeURIComponent($("run").value)}`); open($("run").value); });

function listen() {
  const source = new EventSource("/api/v1/stream");
  source.addEventListener("look", (event) => {
    isAway = false;
    if (run?.name !== live) return;
    const isFirst = !run.look;
    run.add(JSON.parse(event.data));
    if (!run.isLoaded) return;
    if (isFirst && !stepCharts.length) makeCharts();
    if (run.hasGap && !isCatchingUp) { isCatchingUp = true; setTimeout(catchUp, CATCH_UP_MS, run); }
    if (run.look?.media?.length) media.later(run.name);
    drawSoon();
  });
  source.addEventListener("error", () => {
    isAway = true; drawSoon();
    if (source.readyState === EventSource.CLOSED) setTimeout(() => { source.close(); listen(); }, 2000);
  });
}

// Looks that did not come had events and readings: they are asked for, when they are written.
async function catchUp(own) {
  own.hasGap = false;
  try {
    const fresh = new Run(own.name);
    await fresh.load(() => shownOf(own.metrics));
    own.catchUp(fresh);
    if (run === own) media.later(own.name);
  } catch { own.hasGap = true; } // the next look tries it again
  isCatchingUp = false;
  if (run === own) drawSoon();
}

function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; drawNow(); });
}

// -- drawing --------------------------------------------------------------------------------------------

function drawNow() {
  if (!run?.isLoaded) return;
  drawState(); drawNotices(); drawTiles(); drawMetrics(); drawMembers(); drawSeries(); drawEvents();
  document.body.dataset.ready = "yes";
}

function drawState() {
  const figures = run.look?.figures, isLive = run.name === live;
  const [text, kind] = !isLive ? ["ended", "idle"] : isAway ? (figures?.verdict ? ["ended", "idle"] : ["away", "warn"]) : figures?.verdict ? ["ended", "idle"] : figures?.seconds ? ["running", "live"] : ["starting", "warn"];
  const chip = $("state");
  chip.textContent = text; chip.className = `chip ${kind}`;
  document.title = `${run.name} · Syncline`;
  $("foot").textContent = figures ? `${run.name} · generation ${figures.generation ?? 0} · term ${figures.term ?? 0} · as of ${when(figures.at)}` : run.name;
}

function notice(kind, title, text = "") {
  return el("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, el("span", { class: "mark" }, kind === "info" ? "i" : "!"), el("div", {}, el("b", {}, title), text ? el("p", {}, text) : null));
}

const BAD = new Set(["hang", "diverging"]), MILD = new Set(["flat"]);
let noticed = "";
function drawNotices() {
  const found = [], figures = run.look?.figures;
  if (isAway && run.name === live && !figures?.verdict) found.push(["warn", "The coordinator does not answer", "The page goes on when it is back. If the job has ended, syncline page shows its run."]);
  if (figures?.verdict) found.push([/^all /.test(figures.verdict) || figures.stop ? "info" : "bad", figures.stop ? `Stopped by ${figures.stop}` : `The job is over: ${figures.verdict}`, ""]);
  if (figures?.why && !figures.verdict) found.push(["warn", figures.why[0].toUpperCase() + figures.why.slice(1), ""]);
  const dead = run.members.filter((one) => one.dead).map((one) => one.name);
  if (dead.length && !figures?.verdict) found.push(["bad", `${dead.slice(0, 4).join(", ")}${dead.length > 4 ? ` and ${dead.length - 4} more` : ""} ${dead.length > 1 ? "are" : "is"} dead`, "The others go on. The launcher starts members again."]);
  for (const verdict of figures?.verdict ? [] : run.look?.verdicts ?? []) found.push([BAD.has(verdict.kind) ? "bad" : MILD.has(verdict.kind) ? "info" : "warn", verdict.text, verdict.advice ?? ""]);
  const problem = run.problem || (isAway ? "" : run.curves.problem);
  if (problem) found.push(["warn", "Some readings of this run cannot be shown", problem]);
  showNotices(found);
}

function showNotices(found) {
  const text = JSON.stringify(found);
  if (text === noticed) return;
  noticed = text;
  fill($("notices"), ...found.map((one) => notice(...one)));
}

function tile(label, value, under = "", part = null) {
  const made = el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "under", title: under }, under));
  if (part !== null) { const bar = el("i"); bar.style.width = `${Math.min(100, 100 * part)}%`; made.append(el("div", { class: "track" }, bar)); }
  return made;
}

function drawTiles() {
  const figures = run.look?.figures;
  if (!figures) { fill($("tiles"), tile("step", "–", "no look at this job yet")); return; }
  const members = run.members, alive = members.filter((one) => !one.dead);
  const workers = alive.filter((one) => one.role === "worker").length, servers = alive.filter((one) => one.role === "server").length;
  const epochs = figures.epochs ?? [], epoch = epochs.at(-1);
  const tiles = [tile("step", number(figures.step ?? 0), figures.steps_per_second ? `${number(figures.steps_per_second)} a second` : " ")];
  if (epoch) {
    const done = epoch.num_samples ? epoch.num_done / epoch.num_samples : 0;
    const left = epoch.num_samples && figures.samples_per_second && !epoch.is_steps ? (epoch.num_samples - epoch.num_done) / figures.samples_per_second : 0;
    tiles.push(tile(epoch.is_steps ? "of all steps" : `epoch ${epoch.epoch + 1}`, epoch.num_samples ? percent(done) : number(epoch.num_done), left ? `${duration(left)} left` : " ", done));
  }
  tiles.push(tile("throughput", number(figures.samples_per_second || (figures.steps_per_second ?? 0)), figures.samples_per_second ? "samples/s" : "steps/s"));
  for (const [name, value] of Object.entries(figures.readings ?? {}).slice(0, 3)) tiles.push(tile(name, number(value), " "));
  const dead = members.length - alive.length;
  tiles.push(tile("members", `${workers} + ${servers}`, dead ? `${dead} dead` : `${workers === 1 ? "worker" : "workers"}, ${servers === 1 ? "server" : "servers"}`));
  const waits = (figures.waits ?? []).map((one) => one[3] ?? one.seconds ?? 0);
  tiles.push(tile("running for", duration(figures.seconds ?? 0), waits.length && Math.max(...waits) >= 1 ? `longest wait ${seconds(Math.max(...waits))}` : " "));
  fill($("tiles"), ...tiles);
}

const shownOf = (names) => names.filter((name) => name.toLowerCase().includes(filter)).slice(0, MOST_CHARTS);

function drawMetrics() {
  if (!run?.isLoaded) return;
  const names = run.metrics, num_found = names.filter((name) => name.toLowerCase().includes(filter)).length;
  $("filter").hidden = names.length < 7;
  $("metrics-note").textContent = num_found > MOST_CHARTS ? `${MOST_CHARTS} of ${number(num_found)}: filter for others` : "";
  const shown = new Set(shownOf(names));
  for (const curves of [run.curves, ...overlays.values()]) curves.want([...shown]).then((isNew) => isNew && drawSoon());
  for (const [name, chart] of metricCharts) if (!shown.has(name)) { chart.remove(); metricCharts.delete(name); }
  const others = [...overlays].filter(([name]) => name !== run.name);
  for (const name of shown) {
    if (!metricCharts.has(name)) {
      const lines = [{ label: run.name }, ...others.map(([other], index) => ({ label: other, color: PALETTE[(index + 1) % PALETTE.length], width: 1.3, dash: [5, 4] }))];
      const chart = new Chart(name, { axis, lines, marks });
      metricCharts.set(name, chart);
      $("metric-charts").append(chart.element);
    }
    const own = run.curves.get(name), began = own.at[0] ?? 0;
    const curves = [{ x: own[axis], y: own.value }];
    for (const [, found] of others) {
      const curve = found.get(name);
      const shift = axis === "at" ? began - (curve.at[0] ?? 0) : 0;
      curves.push({ x: curve[axis].map((x) => x + shift), y: curve.value });
    }
    metricCharts.get(name).set(joined(curves), number(own.value.at(-1)));
  }
  const empty = document.querySelector("#metric-charts > .empty");
  if (!shown.size && !empty) $("metric-charts").append(el("p", { class: "empty" }, names.length ? "no metric has this in its name" : "The script reports no metrics: job.report(loss=loss) draws them here."));
  if (shown.size) empty?.remove();
}

function choose(name) {
  chosen = name === chosen ? "" : name;
  for (const chart of memberCharts) chart.remove();
  memberCharts = [];
  fill($("one-member"));
  drawMembers();
  if (chosen) drawOneMember(chosen);
}

async function drawOneMember(name) {
  const own = run;
  let rows, problem = "";
  try { rows = await rowsOfMember(own.name, name); } catch (error) { problem = error.message; }
  if (chosen !== name || run !== own) return;
  if (problem) { fill($("one-member"), notice("info", `There is no history of ${name}`, problem)); return; }
  const made = [[rows.columns.compute ? "step of " + name : name + ": rules of a round", PHASES, seconds], [name + ": cores", ["cores"], number], [name + ": memory", ["memory_bytes"], bytes], [name + ": network", ["sent_per_second", "received_per_second"], (value) => `${bytes(value)}/s`]];
  const place = el("div", { class: "charts" });
  fill($("one-member"), place);
  for (const [title, columns, unit] of made) {
    const lines = columns.filter((column) => rows.columns[column]);
    if (!lines.length) continue;
    const chart = new Chart(title, { unit, marks, zero: true, lines: lines.map((column) => ({ label: column.replace("_per_second", ""), color: PHASES.includes(column) ? column : undefined })) });
    memberCharts.push(chart);
    place.append(chart.element);
    chart.set([rows.at, ...lines.map((column) => rows.columns[column])]);
  }
}

let pictureAt = 0;
function drawMembers() {
  const members = run.members;
  $("members-note").textContent = members.length ? `${members.filter((one) => !one.dead).length} alive` : "";
  drawTable($("member-table"), members, chosen, choose);
  if (members.length < 60 || Date.now() - pictureAt > 3000) { pictureAt = Date.now(); drawPicture($("picture"), members, choose); }
  drawShares($("shares"), members);
  drawLegend($("legend"));
  drawSplits($("splits"), members);
  drawStages($("stages"), members);
  drawStaleness($("staleness"), run.look?.figures.staleness_counts ?? []);
}

function makeCharts() {
  if (stepCharts.length) return;
  const make = (parent, specs) => specs.map(([title, columns, unit, labels]) => {
    const lines = columns.map((column, index) => ({ label: labels?.[index] ?? column.replaceAll("_", " "), color: PHASES.includes(column) ? column : undefined }));
    const chart = new Chart(title, { unit, marks, lines, zero: true });
    chart.columns = columns;
    parent.append(chart.element);
    return chart;
  });
  const rate = (value) => `${bytes(value)}/s`;
  stepCharts = make($("step-charts"), [["samples a second", ["samples_per_second"], number], ["steps a second", ["steps_per_second"], number], ["time of a step, mean of the workers", PHASES, seconds, PHASES.map((phase) => (phase === "apply" ? "apply (in the wait)" : phase))]]);
  machineCharts = make($("machine-charts"), [["memory of all members", ["memory_bytes"], bytes], ["cores kept busy", ["cores"], number], ["sent and received", ["sent_per_second", "received_per_second"], rate, ["sent", "received"]], ["GPU memory", ["gpu_bytes"], bytes], ["GPUs busy, part of the time", ["gpu_busy"], percent]]);
}

function drawSeries() {
  const { at, columns } = run.rows;
  const none = new Array(at.length).fill(null);
  for (const chart of [...stepCharts, ...machineCharts]) {
    const data = chart.columns.map((column) => columns[column] ?? none);
    const last = data.length === 1 ? data[0].at(-1) : null;
    chart.element.hidden = OPTIONAL.has(chart.columns[0]) && !data[0].some((value) => value > 0);
    if (chart.element.hidden) continue;
    chart.set([at, ...data], last === null || last === undefined ? "" : chart.unit(last));
  }
}

let drawnEvents = "";
function drawEvents() {
  const last = run.events.at(-1);
  const key = `${run.name} ${run.events.length} ${last?.number}`;
  $("events-note").textContent = run.damage ? `up to a damage of the file: ${run.damage}` : "";
  if (key === drawnEvents) return;
  drawnEvents = key;
  const newest = run.events.slice(-300).reverse();
  if (!newest.length) { fill($("event-list"), el("li", { class: "empty" }, "nothing has happened yet")); return; }
  fill($("event-list"), ...newest.map((event) => el("li", {}, el("time", {}, when(event.at)), el("span", { class: "step" }, `step ${number(event.step)}`), el("span", { class: "what" }, el("span", { class: `kind ${event.kind}` }, event.kind), event.text))));
}

begin().catch((error) => fill($("notices"), notice("bad", "The page cannot be filled", error.message)));
