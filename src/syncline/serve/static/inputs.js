// One field for each input of the model: a picture to draw or choose where its shape is that of one, else numbers.

import { el, fill } from "/page/words.js";

const LEAST_PIXELS = 8, MOST_PIXELS = 512, PAD = 224;

// How an input of this shape is a picture: its size and where its channels are; null if it is none.
export function layoutOf(shape) {
  const sides = shape.slice(1);
  const isSide = (length) => length === -1 || length >= LEAST_PIXELS;
  const isChannels = (length) => length === 1 || length === 3;
  if (sides.length === 2 && sides.every((length) => length >= LEAST_PIXELS)) return { height: sides[0], width: sides[1], channels: 1, order: "hw" };
  if (sides.length !== 3) return null;
  if (isChannels(sides[0]) && isSide(sides[1]) && isSide(sides[2])) return { height: sides[1], width: sides[2], channels: sides[0], order: "chw" };
  if (isChannels(sides[2]) && isSide(sides[0]) && isSide(sides[1])) return { height: sides[0], width: sides[1], channels: sides[2], order: "hwc" };
  return null;
}

export function fieldOf(spec) {
  const layout = /^(FP|UINT8)/.test(spec.datatype) ? layoutOf(spec.shape) : null;
  return layout ? new PictureField(spec, layout) : new NumbersField(spec);
}

const told = (spec) => `${spec.datatype} ${spec.shape.length > 1 ? spec.shape.slice(1).map((n) => (n === -1 ? "any" : n)).join(" × ") : ""}`;

class NumbersField {
  constructor(spec) {
    this.spec = spec;
    this.sides = spec.shape.slice(1);
    this.count = this.sides.includes(-1) ? null : this.sides.reduce((a, b) => a * b, 1);
    this.text = el("textarea", { id: `input-${spec.name}`, spellcheck: false, oninput: () => this.check() });
    this.hint = el("p", { class: "hint" });
    const few = this.count !== null && this.count <= 4096;
    if (few) this.set(() => 0);
    this.node = el("div", { class: "field" },
      el("h3", {}, el("label", { htmlFor: this.text.id }, spec.name), el("small", {}, told(spec))), this.text, this.hint,
      few ? el("div", { class: "line" },
        el("button", { type: "button", onclick: () => { this.set(() => 0); this.check(); } }, "Zeros"),
        el("button", { type: "button", onclick: () => { this.set(this.chance()); this.check(); } }, "Random")) : null);
    this.check();
  }

  chance() {
    if (this.spec.datatype === "BOOL") return () => Math.random() < 0.5;
    if (this.spec.datatype.startsWith("FP")) return () => Number((2 * Math.random() - 1).toFixed(3));
    return () => Math.floor(10 * Math.random());
  }

  set(make) {
    const isBool = this.spec.datatype === "BOOL";
    this.text.value = Array.from({ length: this.count }, () => (isBool ? Boolean(make()) : make())).join(", ");
  }

  // One row: as JSON if it is that, else numbers with anything between them.
  value() {
    const text = this.text.value.trim();
    if (text.startsWith("[")) return JSON.parse(text);
    const words = text.split(/[\s,;]+/).filter(Boolean);
    const values = words.map((word) => (this.spec.datatype === "BOOL" ? /^(true|1)$/i.test(word) : Number(word)));
    const bad = words.find((word, index) => typeof values[index] === "number" && !Number.isFinite(values[index]));
    if (bad !== undefined) throw new Error(`“${bad.slice(0, 20)}” is not a number`);
    return this.sides.length || values.length !== 1 ? values : values[0];
  }

  check() {
    let words = this.count === null ? "Numbers, or nested lists as JSON." : `${this.count} numbers.`, isBad = false;
    try {
      const found = this.value();
      const number = Array.isArray(found) ? found.flat(Infinity).length : 1;
      if (this.count !== null && number !== this.count) { words = `${number} of ${this.count} numbers.`; isBad = true; }
    } catch (error) { words = error.message; isBad = true; }
    this.hint.textContent = words;
    this.hint.classList.toggle("bad", isBad);
  }
}

class PictureField {
  constructor(spec, layout) {
    this.spec = spec;
    this.layout = layout;
    const isReal = spec.datatype.startsWith("FP");
    this.pad = el("canvas", { class: "pad", width: PAD, height: PAD, tabIndex: 0 });
    this.pad.setAttribute("role", "img");
    this.pad.setAttribute("aria-label", `Draw ${spec.name} here, or drop a picture`);
    this.seen = el("canvas", { class: "seen" });
    this.scale = el("select", { onchange: () => this.look() }, ...(isReal ? ["0 … 1", "-1 … 1", "0 … 255"] : ["0 … 255"]).map((name) => el("option", {}, name)));
    this.invert = el("input", { type: "checkbox", onchange: () => this.look() });
    const file = el("input", { type: "file", accept: "image/*", onchange: () => { if (file.files[0]) this.load(file.files[0]); } });
    this.node = el("div", { class: "field" },
      el("h3", {}, spec.name, el("small", {}, told(spec))),
      el("div", { class: "pads" },
        el("figure", {}, this.pad, el("figcaption", {}, "draw, drop or paste")),
        el("figure", {}, this.seen, el("figcaption", {}, "what the model gets"))),
      el("div", { class: "line" },
        el("label", { class: "file" }, "Choose a picture", file),
        el("button", { type: "button", onclick: () => this.clear() }, "Clear"),
        el("button", { type: "button", onclick: () => this.swap() }, "As numbers"),
        el("label", {}, "values", this.scale),
        el("label", {}, this.invert, "inverted")));
    this.context = this.pad.getContext("2d", { willReadFrequently: true });
    this.listen();
    this.clear();
  }

  listen() {
    let last = null;
    const at = (event) => { const box = this.pad.getBoundingClientRect(); return [(event.clientX - box.left) * PAD / box.width, (event.clientY - box.top) * PAD / box.height]; };
    this.pad.addEventListener("pointerdown", (event) => { last = at(event); this.pad.setPointerCapture(event.pointerId); this.draw(last, last); });
    this.pad.addEventListener("pointermove", (event) => { if (last) { const here = at(event); this.draw(last, here); last = here; } });
    for (const name of ["pointerup", "pointercancel"]) this.pad.addEventListener(name, () => { last = null; });
    this.pad.addEventListener("dragover", (event) => { event.preventDefault(); this.pad.classList.add("over"); });
    this.pad.addEventListener("dragleave", () => this.pad.classList.remove("over"));
    this.pad.addEventListener("drop", (event) => { event.preventDefault(); this.pad.classList.remove("over"); if (event.dataTransfer.files[0]) this.load(event.dataTransfer.files[0]); });
    document.addEventListener("paste", (event) => { const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/")); if (file && this.node.isConnected) this.load(file); });
  }

  draw(from, to) {
    this.source = null;
    Object.assign(this.context, { strokeStyle: "#fff", lineWidth: 18, lineCap: "round", lineJoin: "round" });
    this.context.beginPath(); this.context.moveTo(...from); this.context.lineTo(...to); this.context.stroke();
    this.look();
  }

  clear() {
    this.source = null;
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, PAD, PAD);
    this.look();
  }

  async load(file) {
    try { this.source = await createImageBitmap(file); } catch { return; }
    const scale = Math.min(PAD / this.source.width, PAD / this.source.height);
    const [width, height] = [this.source.width * scale, this.source.height * scale];
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, PAD, PAD);
    this.context.drawImage(this.source, (PAD - width) / 2, (PAD - height) / 2, width, height);
    this.look();
  }

  // Draws what the model gets: the picture at its size, in its colours.
  look() {
    const side = (length, own) => (length === -1 ? Math.max(LEAST_PIXELS, Math.min(MOST_PIXELS, own)) : length);
    const from = this.source ?? this.pad;
    this.width = side(this.layout.width, from.width);
    this.height = side(this.layout.height, from.height);
    this.seen.width = this.width;
    this.seen.height = this.height;
    const context = this.seen.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "high";
    context.drawImage(from, 0, 0, this.width, this.height);
    const data = context.getImageData(0, 0, this.width, this.height);
    for (let i = 0; i < data.data.length; i += 4) {
      let [r, g, b] = data.data.subarray(i, i + 3);
      if (this.layout.channels === 1) r = g = b = Math.round(0.299 * r + 0.587 * g + 0.114 * b);
      if (this.invert.checked) [r, g, b] = [255 - r, 255 - g, 255 - b];
      data.data.set([r, g, b, 255], i);
    }
    context.putImageData(data, 0, 0);
    this.pixels = data.data;
  }

  // One row: flat, in the order that the shape says.
  value() {
    const { channels, order } = this.layout, area = this.width * this.height, values = new Array(area * channels);
    const [low, high] = this.scale.value.split(" … ").map(Number);
    const scaled = (byte) => (high === 255 ? byte : Number((low + (high - low) * byte / 255).toFixed(5)));
    for (let pixel = 0; pixel < area; pixel++) {
      for (let channel = 0; channel < channels; channel++) {
        values[order === "chw" ? channel * area + pixel : pixel * channels + channel] = scaled(this.pixels[4 * pixel + channel]);
      }
    }
    return nested(values, { hw: [this.height, this.width], chw: [channels, this.height, this.width], hwc: [this.height, this.width, channels] }[order]);
  }
}

function nested(values, sides) {
  if (sides.length <= 1) return values;
  const part = values.length / sides[0];
  return Array.from({ length: sides[0] }, (_, index) => nested(values.slice(index * part, (index + 1) * part), sides.slice(1)));
}

export function showInputs(parent, specs) {
  const fields = specs.map((spec) => fieldOf(spec));
  fields.forEach((field, index) => {
    field.swap = () => { // a table of numbers may have the shape of a picture
      fields[index] = new NumbersField(field.spec);
      field.node.replaceWith(fields[index].node);
    };
  });
  fill(parent, ...fields.map((field) => field.node));
  return fields;
}
