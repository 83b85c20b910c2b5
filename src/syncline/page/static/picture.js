// The members as a picture: servers above, workers below, or all in a circle where every process has both.

import { bytes, byName } from "/words.js";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

// By the part of its own steps that a worker is behind.
export function lagColor(lag, step, dead) {
  if (dead) return "var(--bad)";
  if (lag < 2 || lag < 0.01 * step) return "var(--good)";
  return lag < 5 || lag < 0.1 * step ? "var(--warn)" : "var(--bad)";
}

function places(members, width) {
  const servers = members.filter((one) => one.role === "server"), workers = members.filter((one) => one.role !== "server");
  const found = new Map();
  const row = (list, top, gap) => {
    const columns = Math.max(1, Math.min(list.length, Math.floor((width - 20) / gap)));
    const rows = Math.max(1, Math.ceil(list.length / columns));
    list.forEach((one, index) => {
      const line = Math.floor(index / columns), inLine = line === rows - 1 ? list.length - line * columns : columns;
      found.set(one.name, { x: ((index % columns) + 0.5) * (width / inLine), y: top + line * gap * 0.62, member: one });
    });
    return top + (rows - 1) * gap * 0.62;
  };
  const low = row(servers, 44, servers.length > 12 ? 44 : 96);
  const bottom = row(workers, low + (servers.length ? 120 : 0), workers.length > 60 ? 30 : workers.length > 16 ? 52 : 104);
  return { found, height: bottom + 46 };
}

export function draw(parent, members, choose) {
  if (parent.matches(":active")) return; // a click that has begun ends on what it began on
  const width = Math.max(300, parent.clientWidth || 600);
  const known = [...members].sort((a, b) => byName(a.name, b.name));
  const { found, height } = places(known, width);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Members and what they send to each other" });
  const edges = new Map();
  for (const one of known) {
    for (const [other, rate] of Object.entries(one.peers ?? {})) {
      if (!found.has(other) || one.dead) continue;
      const key = [one.name, other].sort().join(" ↔ ");
      edges.set(key, (edges.get(key) ?? 0) + rate);
    }
  }
  const most = Math.max(1, ...edges.values());
  const drawn = [...edges].sort((a, b) => b[1] - a[1]).slice(0, 600);
  for (const [key, rate] of drawn) {
    const [a, b] = key.split(" ↔ ").map((name) => found.get(name));
    const bend = a.y === b.y ? 36 : 0, middle = (a.y + b.y) / 2 - bend;
    const line = svg("path", {
      d: `M${a.x} ${a.y} C${a.x} ${middle} ${b.x} ${middle} ${b.x} ${b.y}`, fill: "none", stroke: "var(--accent)",
      "stroke-width": (0.8 + 4 * Math.sqrt(rate / most)).toFixed(2), "stroke-opacity": (0.18 + 0.4 * Math.sqrt(rate / most)).toFixed(2),
      "stroke-linecap": "round",
    });
    line.append(svg("title", {}, `${key}: ${bytes(rate)}/s`));
    picture.append(line);
  }
  const small = known.length > 40;
  for (const { x, y, member } of found.values()) {
    const group = svg("g", { cursor: "pointer", tabindex: "0", "data-member": member.name });
    const fill = lagColor(member.lag ?? 0, member.step ?? 0, member.dead);
    const size = small ? 6 : 13;
    group.append(member.role === "server"
      ? svg("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size, rx: small ? 2 : 5, fill: member.dead ? fill : "var(--accent)", stroke: "var(--card)", "stroke-width": 3 })
      : svg("circle", { cx: x, cy: y, r: size, fill, stroke: "var(--card)", "stroke-width": 3 }));
    group.append(svg("title", {}, `${member.name}${member.dead ? " is dead" : ""}: lag ${member.lag ?? 0}, sends ${bytes(member.sent_per_second ?? 0)}/s`));
    if (!small) {
      const above = member.role === "server";
      group.append(svg("text", { x, y: above ? y - 22 : y + 30, "text-anchor": "middle", class: "who" }, member.name));
    }
    group.addEventListener("click", () => choose(member.name));
    picture.append(group);
  }
  if (!known.length) picture.append(svg("text", { x: 10, y: 24 }, "no members yet"));
  parent.replaceChildren(picture);
}
