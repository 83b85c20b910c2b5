// The table of members, each worker's step and its share of the data.

import { lagColor } from "/picture.js";
import { PHASES } from "/figures.js";
import { byName, bytes, color, el, fill, keep, number, percent, say, seconds } from "/words.js";

const total = (one) => (one.compute ?? 0) + (one.stage ?? 0) + (one.wait ?? 0) + (one.pull ?? 0);

// Of a step of a pipeline, the part in which this process computes.
const busy = (stage) => (stage.step_seconds ? stage.busy_seconds / stage.step_seconds : 0);

const COLUMNS = [
  ["member", (one) => one.name, (one) => one.name, "text"],
  ["state", (one) => one.state ?? "", (one) => (one.dead ? "dead" : one.state ?? ""), "text"],
  ["host", (one) => one.host ?? "", (one) => one.host ?? "", "text hide-phone"],
  ["pid", (one) => one.pid ?? 0, (one) => (one.pid ? String(one.pid) : ""), "hide-phone"],
  ["step", (one) => one.step ?? 0, (one) => (one.role === "worker" ? number(one.step ?? 0) : "")],
  ["lag", (one) => one.lag ?? 0, (one) => (one.role === "worker" ? String(one.lag ?? 0) : "")],
  ["step time", total, (one) => (one.role === "worker" ? (total(one) ? seconds(total(one)) : "–") : one.apply ? `${seconds(one.apply)} rules` : "")],
  ["samples/s", (one) => one.samples_per_second ?? 0, (one) => (one.samples_per_second ? number(one.samples_per_second) : "")],
  ["cores", (one) => one.cores ?? 0, (one) => number(Math.round(100 * (one.cores ?? 0)) / 100)],
  ["memory", (one) => one.memory_bytes ?? 0, (one) => bytes(one.memory_bytes ?? 0)],
  ["GPU", (one) => one.gpu_bytes ?? 0, (one) => (one.gpu_bytes ? bytes(one.gpu_bytes) + (one.gpu_busy == null ? "" : `, ${percent(one.gpu_busy)}`) : ""), "optional"],
  ["sends", (one) => one.sent_per_second ?? 0, (one) => `${bytes(one.sent_per_second ?? 0)}/s`],
  ["stages busy", (one) => one.stages?.length ?? 0, (one) => (one.stages ?? []).map((stage) => percent(busy(stage))).join(", "), "optional"],
  ["rtt", (one) => one.rtt_seconds ?? 0, (one) => seconds(one.rtt_seconds ?? 0), "hide-phone"],
];

let sortedBy = 0, isDown = false;

const dotColor = (one) => (one.role === "server" && !one.dead ? "var(--accent)" : lagColor(one.lag ?? 0, one.step ?? 0, one.dead));
const tagClass = (one) => `tag ${one.dead ? "bad" : one.state === "working" ? "" : "warn"}`;

let headed = "";
export function drawTable(table, members, chosen, choose) {
  const columns = COLUMNS.filter(([name, value, , kind]) => kind !== "optional" || members.some(value));
  const key = `${columns.length} ${sortedBy} ${isDown}`, body = table.tBodies[0];
  if (key !== headed || !table.tHead.firstChild) {
    if (key.split(" ")[0] !== headed.split(" ")[0]) fill(body); // rows have other cells
    headed = key;
    fill(table.tHead, el("tr", {}, ...columns.map(([name, , , kind = ""], index) => el("th", {
      class: `${kind} ${index === sortedBy ? "sorted" : ""}`, scope: "col",
      onclick: () => { isDown = sortedBy === index ? !isDown : index > 3; sortedBy = index; table.again(); },
    }, name + (index === sortedBy ? (isDown ? " ↓" : " ↑") : "")))));
  }
  table.again = () => drawTable(table, members, chosen, choose); // with the members of the newest look
  const value = columns[Math.min(sortedBy, columns.length - 1)][1];
  const rows = [...members].sort((a, b) => {
    const x = value(a), y = value(b);
    const order = typeof x === "string" ? byName(x, y) : x - y;
    return (isDown ? -order : order) || byName(a.name, b.name);
  });
  keep(body, rows, (one) => one.name, (one) => rowOfMember(one.name, columns, choose), (row, one) => {
    row.element.className = `${one.dead ? "dead" : ""} ${one.name === chosen ? "chosen" : ""}`;
    columns.forEach(([, , cell], index) => say(row.places[index], cell(one)));
    row.dot.style.background = dotColor(one);
    row.tag.className = tagClass(one);
  });
}

function rowOfMember(name, columns, choose) {
  const dot = el("i", { class: "dot" }), own = el("span"), tag = el("span");
  const cells = columns.map(([, , , kind = ""], index) => el("td", { class: kind }, ...[[dot, own], [tag]][index] ?? []));
  const element = el("tr", { tabIndex: 0, "data-member": name, onclick: () => choose(name), onkeydown: (event) => event.key === "Enter" && choose(name) }, ...cells);
  return { element, dot, tag, places: [own, tag, ...cells.slice(2)] };
}

export function drawLegend(parent) {
  const words = { data: "waiting for data", apply: "apply: the servers' rules, in the wait" };
  fill(parent, ...PHASES.map((phase) => { const mark = el("i"); mark.style.background = color(phase); return el("span", {}, mark, words[phase] ?? phase); }));
}

function bar(parts) {
  const marks = parts.map(() => el("i")), name = el("span"), end = el("span");
  marks.forEach((mark, index) => { mark.style.background = `var(--${parts[index]})`; mark.dataset.part = parts[index]; });
  return { element: el("div", { class: "bar-row" }, name, el("div", { class: "stack" }, ...marks), end), marks, name, end };
}

// Within compute the script waits for its loader; within the wait the servers apply, the slowest of them so long.
export function partsOf(one, members) {
  const applied = Math.max(0, ...members.filter((other) => other.role === "server" && !other.dead).map((other) => other.apply ?? 0));
  const apply = Math.min(applied, one.wait ?? 0), data = Math.min(one.data ?? 0, one.compute ?? 0);
  return { compute: (one.compute ?? 0) - data, data, stage: one.stage ?? 0, wait: (one.wait ?? 0) - apply, apply, pull: one.pull ?? 0 };
}

export function drawSplits(parent, members) {
  const workers = members.filter((one) => one.role === "worker" && total(one) && !one.dead).sort((a, b) => byName(a.name, b.name));
  if (!workers.length) { fill(parent, el("p", { class: "empty" }, "no step was made yet")); return; }
  const longest = Math.max(...workers.map(total));
  keep(parent, workers, (one) => one.name, () => bar(PHASES), (row, one) => {
    const parts = partsOf(one, members);
    PHASES.forEach((phase, index) => {
      row.marks[index].title = `${phase}: ${seconds(parts[phase])}`;
      row.marks[index].style.width = `${(100 * parts[phase]) / longest}%`;
    });
    say(row.name, one.name); say(row.end, seconds(total(one)));
  });
}

export function drawShares(parent, members) {
  const workers = members.filter((one) => one.role === "worker" && one.share).sort((a, b) => byName(a.name, b.name));
  document.getElementById("share-card").hidden = !workers.length; // scripts without a loader have none
  document.getElementById("member-split").classList.toggle("one", !workers.length);
  const most = Math.max(...workers.map((one) => one.share));
  keep(parent, workers, (one) => one.name, () => bar(["data"]), (row, one) => {
    row.marks[0].style.width = `${(100 * one.share) / most}%`;
    say(row.name, one.name); say(row.end, percent(one.share));
  });
}

// A bar for each process of each pipeline; what it does not fill of its row is the bubble.
export function drawStages(parent, members) {
  const pipelines = members.filter((one) => one.stages?.length && !one.dead).sort((a, b) => byName(a.name, b.name));
  const stages = pipelines.flatMap((one) => one.stages.map((stage) => ({ ...stage, worker: one.name })));
  document.getElementById("stage-card").hidden = !stages.length;
  keep(parent, stages, (stage) => `${stage.worker} ${stage.stage}`, () => bar(["compute"]), (row, stage) => {
    row.marks[0].style.width = percent(busy(stage)).replace(" ", "");
    row.element.title = `${stage.layers}; parameters ${bytes(stage.parameter_bytes ?? 0)}, to other stages ${bytes((stage.sent_bytes ?? 0) / Math.max(1, stage.num_steps))} a step`;
    say(row.name, `${stage.worker}, stage ${stage.stage}`); say(row.end, percent(busy(stage)));
  });
  const free = pipelines.map((one) => `${one.name} ${percent(1 - one.stages.reduce((sum, stage) => sum + busy(stage), 0) / one.stages.length)}`);
  say(document.getElementById("stage-note"), `of a step, each computes so long; bubble: ${free.slice(0, 8).join(", ")}`);
}

export function drawStaleness(parent, counts) {
  const whole = counts.reduce((sum, count) => sum + count, 0);
  if (!whole) { fill(parent, el("p", { class: "empty" }, "nothing was measured yet")); return; }
  const last = counts.reduce((found, count, index) => (count ? index : found), 0);
  const most = Math.max(...counts);
  const shown = counts.slice(0, Math.max(last + 1, 5));
  fill(parent, ...shown.map((count, index) => {
    const bar = el("i", { title: number(count) });
    bar.style.height = count ? `${Math.max(2, (78 * count) / most)}%` : "1px";
    const name = index < 2 ? String(index) : `${2 ** (index - 1)}–${2 ** index - 1}`;
    return el("div", { class: "column" }, el("span", {}, count ? percent(count / whole) : ""), bar, el("span", {}, name));
  }));
}
