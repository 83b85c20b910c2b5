// Numbers and times as people read them, and elements of the page. Text is only ever set as text.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function fill(parent, ...children) {
  kept.delete(parent);
  parent.replaceChildren(...children);
}

// Keeps an element for each item, in the order of the items. What is there already is changed, not made again: a click
// that began before a look ends on the same element. `make` returns {element, …}, which `update` gets with the item.
const kept = new WeakMap();
export function keep(parent, items, keyOf, make, update) {
  if (!kept.has(parent)) { parent.replaceChildren(); kept.set(parent, new Map()); }
  const known = kept.get(parent), keys = new Set(items.map(keyOf));
  for (const [key, made] of known) if (!keys.has(key)) { made.element.remove(); known.delete(key); }
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const made = known.get(key);
    update(made, item);
    if (made.element === place) place = place.nextSibling;
    else parent.insertBefore(made.element, place);
  }
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100) return value.toFixed(0);
  if (Number.isInteger(value)) return String(value);
  if (size >= 0.001 || size === 0) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) return `${number(value / size)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${number(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1e3)} ms`;
  if (value < 120) return `${number(value)} s`;
  return duration(value);
}

export function duration(value) {
  const total = Math.max(0, Math.round(value));
  const hours = Math.floor(total / 3600), minutes = Math.floor((total % 3600) / 60), rest = total % 60;
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${rest} s`;
  return `${rest} s`;
}

export const percent = (value) => `${Math.round(100 * value)} %`;
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

// A place on an axis of `span` seconds: with its day where the axis has several.
export function moment(at, span) {
  const time = clock(at);
  if (span <= 86_400 && !time.startsWith("00:00:00")) return time.slice(0, span > 600 ? 5 : 8);
  return time.startsWith("00:00") ? day(at) : `${day(at)} ${time.slice(0, 5)}`;
}

// With its day, unless that is today.
export const when = (at) => (day(at) === day(Date.now() / 1000) ? clock(at) : `${day(at)} ${clock(at)}`);
const day = (at) => new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });

export function byName(a, b) {
  return a.localeCompare(b, "en", { numeric: true });
}
