// The table of members, each worker's step and its share of the data.

import { lagColor } from "/picture.js";
import { byName, bytes, color, el, fill, number, percent, seconds } from "/words.js";

export const PHASES = ["compute", "data", "stage", "wait", "pull"];
const total = (one) => (one.compute ?? 0) + (one.stage ?? 0) + (one.wait ?? 0) + (one.pull ?? 0);

const COLUMNS = [
  ["member", (one) => one.name, (one) => el("span", {}, dot(one), one.name), "text"],
  ["state", (one) => one.state ?? "", (one) => tag(one), "text"],
  ["host", (one) => one.host ?? "", (one) => one.host ?? "", "text hide-phone"],
  ["pid", (one) => one.pid ?? 0, (one) => (one.pid ? String(one.pid) : ""), "hide-phone"],
  ["step", (one) => one.step ?? 0, (one) => (one.role === "worker" ? number(one.step ?? 0) : "")],
  ["lag", (one) => one.lag ?? 0, (one) => (one.role === "worker" ? String(one.lag ?? 0) : "")],
  ["step time", total, (one) => (one.role === "worker" ? (total(one) ? seconds(total(one)) : "–") : one.apply ? `${seconds(one.apply)} rules` : "")],
  ["samples/s", (one) => one.samples_per_second ?? 0, (one) => (one.samples_per_second ? number(one.samples_per_second) : "")],
  ["cores", (one) => one.cores ?? 0, (one) => number(Math.round(100 * (one.cores ?? 0)) / 100)],
  ["memory", (one) => one.memory_bytes ?? 0, (one) => bytes(one.memory_bytes ?? 0)],
  ["GPU", (one) => one.gpu_bytes ?? 0, (one) => (one.gpu_bytes ? bytes(one.gpu_bytes) : ""), "optional"],
  ["sends", (one) => one.sent_per_second ?? 0, (one) => `${bytes(one.sent_per_second ?? 0)}/s`],
  ["rtt", (one) => one.rtt_seconds ?? 0, (one) => seconds(one.rtt_seconds ?? 0), "hide-phone"],
];

let sortedBy = 0, isDown = false;

function dot(one) {
  const made = el("i", { class: "dot" });
  made.style.background = one.role === "server" && !one.dead ? "var(--accent)" : lagColor(one.lag ?? 0, one.step ?? 0, one.dead);
  return made;
}

function tag(one) {
  const state = one.dead ? "dead" : one.state ?? "";
  const kind = one.dead ? "bad" : state === "working" ? "" : "warn";
  return el("span", { class: `tag ${kind}` }, state);
}

export function drawTable(table, members, chosen, choose) {
  const columns = COLUMNS.filter(([name, value, , kind]) => kind !== "optional" || members.some(value));
  const head = el("tr", {}, ...columns.map(([name, , , kind = ""], index) => el("th", {
    class: `${kind} ${index === sortedBy ? "sorted" : ""}`, scope: "col",
    onclick: () => { isDown = sortedBy === index ? !isDown : index > 3; sortedBy = index; drawTable(table, members, chosen, choose); },
  }, name + (index === sortedBy ? (isDown ? " ↓" : " ↑") : ""))));
  const value = columns[Math.min(sortedBy, columns.length - 1)][1];
  const rows = [...members].sort((a, b) => {
    const x = value(a), y = value(b);
    const order = typeof x === "string" ? byName(x, y) : x - y;
    return (isDown ? -order : order) || byName(a.name, b.name);
  });
  fill(table.tHead, head);
  fill(table.tBodies[0], ...rows.map((one) => el("tr", {
    class: `${one.dead ? "dead" : ""} ${one.name === chosen ? "chosen" : ""}`, tabIndex: 0, "data-member": one.name,
    onclick: () => choose(one.name), onkeydown: (event) => event.key === "Enter" && choose(one.name),
  }, ...columns.map(([, , cell, kind = ""]) => el("td", { class: kind }, cell(one))))));
}

export function drawLegend(parent) {
  const words = { compute: "compute", data: "waiting for data", stage: "stage", wait: "wait", pull: "pull" };
  fill(parent, ...PHASES.map((phase) => { const mark = el("i"); mark.style.background = color(phase); return el("span", {}, mark, words[phase]); }));
}

export function drawSplits(parent, members) {
  const workers = members.filter((one) => one.role === "worker" && total(one) && !one.dead).sort((a, b) => byName(a.name, b.name));
  if (!workers.length) { fill(parent, el("p", { class: "empty" }, "no step was made yet")); return; }
  const longest = Math.max(...workers.map(total));
  fill(parent, ...workers.map((one) => {
    const parts = { ...one, compute: Math.max(0, (one.compute ?? 0) - (one.data ?? 0)) };
    const stack = el("div", { class: "stack" }, ...PHASES.map((phase) => {
      const part = el("i", { title: `${phase}: ${seconds(parts[phase] ?? 0)}` });
      part.style.width = `${(100 * (parts[phase] ?? 0)) / longest}%`;
      part.style.background = `var(--${phase})`;
      return part;
    }));
    return el("div", { class: "bar-row" }, el("span", {}, one.name), stack, el("span", {}, seconds(total(one))));
  }));
}

export function drawShares(parent, members) {
  const workers = members.filter((one) => one.role === "worker" && one.share).sort((a, b) => byName(a.name, b.name));
  document.getElementById("share-card").hidden = !workers.length; // scripts without a loader have none
  document.getElementById("member-split").classList.toggle("one", !workers.length);
  if (!workers.length) return;
  const most = Math.max(...workers.map((one) => one.share));
  fill(parent, ...workers.map((one) => {
    const bar = el("i");
    bar.style.width = `${(100 * one.share) / most}%`;
    bar.style.background = "var(--data)";
    return el("div", { class: "bar-row" }, el("span", {}, one.name), el("div", { class: "stack" }, bar), el("span", {}, percent(one.share)));
  }));
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
