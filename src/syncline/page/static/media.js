// Images, histograms and texts of a run: a card for each name, with a slider over the steps that are kept.

import { get } from "/figures.js";
import { el, fill, number } from "/words.js";

const MOST_CARDS = 40, WAIT_MS = 1500;
const order = { image: 0, histogram: 1, text: 2 };

export class Media {
  constructor(place, note, section, link) {
    this.place = place; this.note = note; this.section = section; this.link = link;
    this.cards = new Map(); this.name = ""; this.timer = 0;
  }

  // The list is asked for again: when a run is opened, and a little after a look names new ones, when they are kept.
  async load(name) {
    clearTimeout(this.timer); this.timer = 0;
    if (name !== this.name) { this.cards.clear(); fill(this.place); this.name = name; this.show([]); }
    if (!name) return;
    try {
      const found = await get(`/api/v1/runs/${encodeURIComponent(name)}/media`);
      if (name === this.name) this.show(found.media);
    } catch { /* a run that has just begun has none */ }
  }

  later(name) {
    if (!this.timer) this.timer = setTimeout(() => this.load(name), WAIT_MS);
  }

  show(entries) {
    const byName = new Map();
    for (const entry of entries) byName.set(entry.name, [...(byName.get(entry.name) ?? []), entry]);
    const names = [...byName.keys()].sort((a, b) => order[byName.get(a)[0].kind] - order[byName.get(b)[0].kind] || a.localeCompare(b, "en", { numeric: true }));
    this.section.hidden = this.link.hidden = !names.length;
    this.note.textContent = names.length > MOST_CARDS ? `${MOST_CARDS} of ${names.length}` : "";
    for (const name of names.slice(0, MOST_CARDS)) {
      if (!this.cards.has(name)) {
        const card = new Card(this.name, name);
        this.cards.set(name, card);
        this.place.append(card.element);
      }
      this.cards.get(name).set(byName.get(name));
    }
  }
}

class Card {
  constructor(run, name) {
    this.run = run; this.entries = []; this.follows = true; this.shown = 0;
    this.when = el("span", { class: "now" });
    this.body = el("div", { class: "media-body" });
    this.slider = el("input", { type: "range", min: 0, "aria-label": `Step of ${name}`, oninput: () => {
      this.follows = Number(this.slider.value) === this.entries.length - 1;
      this.draw();
    } });
    this.element = el("div", { class: "card", "data-media": name }, el("h3", {}, el("span", { title: name }, name), this.when), this.body, this.slider);
  }

  set(entries) {
    const at = this.entries[Number(this.slider.value)]?.id;
    this.entries = entries;
    this.slider.max = entries.length - 1;
    this.slider.hidden = entries.length < 2;
    const same = entries.findIndex((entry) => entry.id >= at);
    this.slider.value = this.follows || same < 0 ? entries.length - 1 : same;
    this.draw();
  }

  async draw() {
    const entry = this.entries[Number(this.slider.value)];
    this.when.textContent = `step ${number(entry.step)}`;
    this.when.title = `reported by ${entry.member}`;
    if (entry.id === this.shown) return;
    this.shown = entry.id;
    const path = `/api/v1/runs/${encodeURIComponent(this.run)}/media/${entry.id}`;
    if (entry.kind === "image") {
      const image = el("img", { src: path, alt: `${entry.name} at step ${entry.step}` });
      await image.decode().catch(() => {});
      if (this.shown === entry.id) fill(this.body, image);
      return;
    }
    try {
      const answer = await fetch(path);
      if (!answer.ok) throw new Error();
      const made = entry.kind === "text" ? el("pre", {}, await answer.text()) : histogram(await answer.json());
      if (this.shown === entry.id) fill(this.body, made);
    } catch { if (this.shown === entry.id) fill(this.body, el("p", { class: "empty" }, "it is not kept any more")); }
  }
}

function histogram(told) {
  const most = Math.max(1, ...told.counts), edges = told.edges;
  const bars = told.counts.map((count, index) => {
    const bar = el("i", { title: `${number(edges[index])} to ${number(edges[index + 1])}: ${number(count)}` });
    bar.style.height = count ? `${Math.max(1.5, (100 * count) / most)}%` : "0";
    return bar;
  });
  const mean = told.num ? told.sum / told.num : 0;
  const spread = told.num ? Math.sqrt(Math.max(0, told.sum_squares / told.num - mean * mean)) : 0;
  const words = `${number(told.num)} values, mean ${number(mean)}, deviation ${number(spread)}${told.num_not_finite ? `; ${number(told.num_not_finite)} not finite` : ""}`;
  return el("div", {}, el("div", { class: "bins" }, ...bars), el("div", { class: "ends" }, el("span", {}, number(edges[0])), el("span", {}, number(edges.at(-1)))), el("small", {}, words));
}
