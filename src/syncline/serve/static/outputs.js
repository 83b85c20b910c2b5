// An answer as people read it: a label with its scores, a number, a picture, else the values.

import { el, fill, number } from "/page/words.js";

const MOST_SCORES = 10, MOST_VALUES = 200, LEAST_PIXELS = 8;

// `specs`: the outputs as the model describes them; JSON does not tell 1.0 from the class 1.
export function showOutputs(parent, output, labels, specs) {
  const isNamed = output !== null && typeof output === "object" && !Array.isArray(output);
  const named = isNamed ? Object.entries(output) : [["", output]];
  const isReal = (name) => ((name ? specs.find((spec) => spec.name === name) : specs[0])?.datatype ?? "").startsWith("FP");
  fill(parent, ...named.map(([name, value]) => el("div", { class: "output" }, name ? el("h3", {}, name) : null, ...shown(value, labels, isReal(name)))));
}

function shown(value, labels, isReal) {
  if (!Array.isArray(value)) return [el("div", { class: "label" }, labelOf(value, isReal ? [] : labels))];
  const sides = sidesOf(value);
  if (sides.length === 1 && sides[0] === 1) return shown(value[0], labels, isReal);
  if (sides.length === 1 && sides[0] > 1 && value.every((one) => typeof one === "number")) return scores(value, labels);
  const picture = pictureOf(value, sides);
  if (picture) return [picture];
  return [el("pre", {}, JSON.stringify(value).slice(0, 20_000))];
}

function labelOf(value, labels) {
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  return Number.isInteger(value) && labels[value] !== undefined ? labels[value] : String(value);
}

// Scores of classes, the largest first; a long list of other numbers looks the same and is cut.
function scores(values, labels) {
  const order = values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
  // Not Math.min(...values): a call takes some 100,000 arguments at most.
  const [low, high, sum] = values.reduce(([a, b, c], one) => [Math.min(a, one), Math.max(b, one), c + one], [0, -Infinity, 0]);
  const isShares = low === 0 && Math.abs(sum - 1) < 0.01;  // a full bar is then all of it, else the largest score
  const span = isShares ? 1 : high - low || 1;
  const rows = order.slice(0, MOST_SCORES).map((index, place) => {
    const meter = el("i");
    meter.style.width = `${(100 * (values[index] - low) / span).toFixed(1)}%`;
    return el("div", { class: place ? "score" : "score top" }, el("span", { title: labels[index] ?? String(index) }, labels[index] ?? String(index)), el("div", { class: "meter" }, meter), el("span", {}, number(values[index])));
  });
  const rest = values.length - rows.length;
  return [
    el("div", { class: "label" }, labels[order[0]] ?? String(order[0])),
    el("div", { class: "scores" }, ...rows),
    rest > 0 ? el("p", { class: "hint" }, `and ${rest} smaller ones`) : null,
    values.length <= MOST_VALUES ? el("details", {}, el("summary", {}, "In their order"), el("pre", {}, values.map((one) => number(one)).join(", "))) : null,
  ];
}

function sidesOf(value) {
  const sides = [];
  for (let here = value; Array.isArray(here); here = here[0]) sides.push(here.length);
  return sides;
}

function pictureOf(value, sides) {
  const isChannels = (length) => length === 1 || length === 3;
  let at, width, height;
  if (sides.length === 2) { [height, width] = sides; at = (x, y) => value[y][x]; }
  else if (sides.length === 3 && isChannels(sides[0])) { [, height, width] = sides; at = (x, y, c) => value[Math.min(c, sides[0] - 1)][y][x]; }
  else if (sides.length === 3 && isChannels(sides[2])) { [height, width] = sides; at = (x, y, c) => value[y][x][Math.min(c, sides[2] - 1)]; }
  else return null;
  const flat = value.flat(2);
  if (height < LEAST_PIXELS || width < LEAST_PIXELS || !flat.every((one) => typeof one === "number")) return null;
  const [low, high] = flat.reduce(([a, b], one) => [Math.min(a, one), Math.max(b, one)], [Infinity, -Infinity]);
  const canvas = el("canvas", { width, height }), context = canvas.getContext("2d"), data = context.createImageData(width, height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const colour = [0, 1, 2].map((c) => 255 * (at(x, y, c) - low) / (high - low || 1));
      data.data.set([...colour, 255], 4 * (y * width + x));
    }
  }
  context.putImageData(data, 0, 0);
  return canvas;
}
