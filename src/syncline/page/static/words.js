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
  parent.replaceChildren(...children);
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

export function byName(a, b) {
  return a.localeCompare(b, "en", { numeric: true });
}
