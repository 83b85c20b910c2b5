// One chart: lines over steps or time, with a band from least to most, and marks where something happened.

import { color, el, fill, moment, number, when } from "/words.js";

const MARKS = { death: "bad", join: "good", checkpoint: "accent", stop: "warn", verdict: "warn", promotion: "warn", scale: "good", coordinator: "warn" };
export const PALETTE = ["accent", "data", "stage", "pull", "apply", "good", "warn", "bad"];
// Seconds between two times on an axis.
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, ...[1, 2, 7, 14, 30, 90, 365].map((days) => 86_400 * days)];
const charts = new Set();

export class Chart {
  // lines: [{label, color, width, dash}]; unit: formats a value; axis: "step" or "at"
  constructor(title, { unit = number, lines = [{ label: title }], axis = "at", marks = () => [], zero = false } = {}) {
    this.unit = unit; this.lines = lines; this.axis = axis; this.marks = marks; this.zero = zero;
    this.now = el("span", { class: "now" });
    this.names = el("span", { class: "names" });
    this.place = el("div", { class: "plot" });
    this.place.style.position = "relative";
    this.element = el("div", { class: "card" }, el("h3", {}, el("span", { title }, title), this.now), this.names, this.place);
    this.tip = el("div", { class: "tip", hidden: true });
    this.data = [[], ...lines.map(() => [])];
    this.width = 0;
    this.isDragged = this.isZoomed = false;
    charts.add(this);
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  draw() {
    if (!this.place.clientWidth) return;
    fill(this.names, ...(this.lines.length < 2 ? [] : this.lines.map((line, index) => {
      const mark = el("i");
      mark.style.background = color(line.color ?? PALETTE[index % PALETTE.length]);
      return el("span", {}, mark, line.label);
    })));
    this.plot?.destroy();
    this.width = this.place.clientWidth;
    const axis = {
      stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui", gap: 6,
    };
    const inTime = this.axis === "at";
    this.plot = new uPlot({
      width: this.width, height: 180, legend: { show: false }, padding: [10, 22, 0, 0],
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: inTime }, y: { range: (plot, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, size: 26, space: (plot, index, low, high) => (inTime ? (high - low > 86_400 ? 96 : 60) : 16 + 7 * number(high).length), ...(inTime ? { incrs: TIMES, values: (plot, splits) => splits.map((at) => moment(at, plot.scales.x.max - plot.scales.x.min)) } : { values: (plot, splits) => splits.map(number), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8] }) },
        { ...axis, size: 58, space: 34, values: (plot, splits) => splits.map((value) => this.unit(value)) },
      ],
      series: [{}, ...this.lines.map((line, index) => ({
        label: line.label, stroke: color(line.color ?? PALETTE[index % PALETTE.length]), width: line.width ?? 1.8,
        dash: line.dash, spanGaps: true, points: { show: (plot) => plot.data[0].length < 3, size: 5 },
        fill: this.lines.length === 1 ? color(line.color ?? PALETTE[0]) + "14" : undefined,
      }))],
      hooks: { drawClear: [(plot) => this.drawMarks(plot, false)], draw: [(plot) => this.drawMarks(plot, true)], setCursor: [(plot) => this.point(plot)], setSelect: [(plot) => { this.isZoomed ||= plot.select.width > 0; }] },
    }, this.data, this.place);
    this.isDragged = this.isZoomed = false;
    this.plot.over.addEventListener("mousedown", () => {
      this.isDragged = true;
      addEventListener("mouseup", () => { this.isDragged = false; }, { once: true });
    });
    this.plot.over.addEventListener("dblclick", () => { this.isZoomed = false; });
    this.place.append(this.tip);
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.zero) return [Math.min(0, low), high > 0 ? high * 1.08 : 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  // Lines below the grid and the curves, dots above them.
  drawMarks(plot, isAbove) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of this.marks()) {
      const name = MARKS[mark.kind];
      const x = plot.valToPos(this.axis === "at" ? mark.at : mark.step, "x", true);
      if (!name || x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color(name);
      if (isAbove) {
        ctx.beginPath(); ctx.arc(x, bbox.top, 3 * devicePixelRatio, 0, 7); ctx.fill();
      } else if (mark.kind !== "checkpoint") { // there may be hundreds: a dot is enough
        ctx.globalAlpha = 0.55;
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.lineWidth = devicePixelRatio;
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
        ctx.globalAlpha = 1;
      }
    }
    ctx.restore();
  }

  point(plot) {
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) { this.tip.hidden = true; return; }
    const x = plot.data[0][idx];
    const rows = this.lines.map((line, index) => [line, plot.data[index + 1][idx]]).filter(([, value]) => Number.isFinite(value));
    const parts = [el("div", {}, this.axis === "at" ? when(x) : `step ${number(x)}`)];
    for (const [line, value] of rows) parts.push(el("div", {}, rows.length > 1 ? `${line.label} ` : "", el("b", {}, this.unit(value))));
    const near = this.marks().filter((mark) => MARKS[mark.kind] && Math.abs(plot.valToPos(this.axis === "at" ? mark.at : mark.step, "x") - left) < 5);
    for (const mark of near.slice(0, 3)) parts.push(el("div", {}, mark.text.slice(0, 70)));
    this.tip.replaceChildren(...parts);
    this.tip.hidden = false;
    const offset = plot.over.offsetLeft + left + 12;
    this.tip.style.left = `${offset + this.tip.offsetWidth > this.width ? offset - this.tip.offsetWidth - 24 : offset}px`;
    this.tip.style.top = `${Math.max(0, Math.min(top, 120))}px`;
  }

  set(data, now = "") {
    this.data = data;
    this.now.textContent = now;
    if (!this.plot) this.draw();
    else if (this.isZoomed || this.isDragged) { this.plot.setData(data, false); this.plot.redraw(); } // the part that is looked at stays
    else this.plot.setData(data);
  }

  setLines(lines) {
    this.lines = lines;
    this.plot?.destroy();
    this.plot = null;
  }

  setAxis(axis) { this.axis = axis; this.plot?.destroy(); this.plot = null; }
  resize() { if (this.plot && this.place.clientWidth && Math.abs(this.place.clientWidth - this.width) > 1) this.draw(); else if (!this.plot) this.draw(); }
  remove() { charts.delete(this); this.plot?.destroy(); this.element.remove(); }
}

export function redrawAll() {
  for (const chart of charts) chart.draw();
}

// Several curves with different places on one axis.
export function joined(curves) {
  if (curves.length === 1) return [curves[0].x, curves[0].y];
  return uPlot.join(curves.map((curve) => [curve.x, curve.y]));
}
