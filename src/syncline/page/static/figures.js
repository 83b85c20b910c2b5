// What the page knows of a run: asked for once, then added to by each look.

const MOST_ROWS = 1500, MOST_POINTS = 3000;
// Of each metric when a run is opened: as many as a wide screen has pixels for.
const FIRST_POINTS = 600;

export async function get(path, values = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) for (const one of [value].flat()) query.append(name, one);
  const answer = await fetch(`${path}${query.size ? `?${query}` : ""}`);
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error ?? `${answer.status}`);
  return told;
}

const of = (name) => `/api/v1/runs/${encodeURIComponent(name)}`;

export async function curvesOf(name, metrics) {
  const found = {};
  for (let k = 0; k < metrics.length; k += 32) {
    const part = metrics.slice(k, k + 32);
    Object.assign(found, (await get(`${of(name)}/curves`, { name: part, most: FIRST_POINTS })).curves);
  }
  return found;
}

export class Run {
  constructor(name) {
    this.name = name; this.view = null; this.look = null; this.events = []; this.damage = "";
    this.rows = { at: [], columns: {} }; this.curves = {}; this.dead = new Map(); this.problem = "";
  }

  async load() {
    this.view = await get(of(this.name));
    this.look = this.view.look;
    const parts = await Promise.allSettled([get(`${of(this.name)}/rows`), get(`${of(this.name)}/events`), curvesOf(this.name, this.view.metrics.slice(0, 128))]);
    const [rows, events, curves] = parts.map((part) => part.value);
    if (rows) this.rows = rows;
    if (events) { this.events = events.events; this.damage = events.damage ?? ""; }
    if (curves) this.curves = curves;
    this.problem = parts.filter((part) => part.reason && !this.view.is_live).map((part) => part.reason.message)[0] ?? "";
    if (this.look) this.noteDead(this.look);
  }

  get metrics() { return Object.keys(this.curves); }

  // A member that died is shown as dead until another life of it works.
  noteDead(look) {
    const alive = new Map((look.figures.members ?? []).map((one) => [one.name, one]));
    for (const one of alive.values()) this.known = { ...(this.known ?? {}), [one.name]: one };
    for (const event of look.events ?? []) {
      const found = event.kind === "death" && /^(\S+) \(incarnation (\d+)\) is out/.exec(event.text);
      if (found) this.dead.set(found[1], { incarnation: Number(found[2]), at: event.at });
    }
    for (const name of look.figures.gone ?? []) if (!this.dead.has(name)) this.dead.set(name, { incarnation: this.known?.[name]?.incarnation ?? 0, at: look.figures.at });
    for (const [name, told] of this.dead) {
      const one = alive.get(name);
      if (one && (one.incarnation ?? 0) > told.incarnation && look.figures.at - told.at > 3) this.dead.delete(name);
      else if (!one && !(look.figures.gone ?? []).includes(name) && look.figures.at - told.at > 30) this.dead.delete(name);
    }
  }

  get members() {
    const found = (this.look?.figures.members ?? []).map((one) => (this.dead.has(one.name) && (one.incarnation ?? 0) <= this.dead.get(one.name).incarnation ? { ...one, dead: true } : one));
    const names = new Set(found.map((one) => one.name));
    for (const name of this.dead.keys()) if (!names.has(name)) found.push({ ...(this.known?.[name] ?? { name, role: name.replace(/-\d+$/, "") }), peers: {}, cores: 0, sent_per_second: 0, dead: true });
    return found;
  }

  add(look) {
    const figures = look.figures;
    if (this.look && figures.at <= this.look.figures.at) return;
    // Steps may be longer than a second: the last known split stays.
    const before = new Map((this.look?.figures.members ?? []).map((one) => [one.name, one]));
    for (const one of figures.members ?? []) {
      const last = before.get(one.name);
      if (last && last.incarnation === one.incarnation && !one.num_steps) for (const phase of ["compute", "data", "stage", "wait", "pull"]) one[phase] = last[phase];
      if (last && last.incarnation === one.incarnation && !one.num_rounds) one.apply = last.apply;
    }
    this.look = look;
    this.noteDead(look);
    const seen = this.events.at(-1)?.number ?? 0;
    this.events.push(...(look.events ?? []).filter((event) => event.number > seen));
    if (this.events.length > 3000) this.events.splice(0, 500);
    for (const [name, step, at, value] of look.readings ?? []) {
      const curve = (this.curves[name] ??= { step: [], at: [], value: [], low: [], high: [] });
      if (curve.at.length && at <= curve.at.at(-1)) continue;
      curve.step.push(Math.max(step, (curve.step.at(-1) ?? -1) + 1e-6)); curve.at.push(at); curve.value.push(value);
      if (curve.at.length > MOST_POINTS) for (const column of ["step", "at", "value"]) curve[column] = curve[column].filter((_, index) => index % 2 === 0);
    }
    this.addRow(figures.at, rowOf(figures));
  }

  addRow(at, row) {
    const rows = this.rows;
    if (rows.at.length && at <= rows.at.at(-1)) return;
    rows.at.push(at);
    for (const name of Object.keys(row)) rows.columns[name] ??= new Array(rows.at.length - 1).fill(null);
    for (const [name, column] of Object.entries(rows.columns)) column.push(row[name] ?? null);
    if (rows.at.length > MOST_ROWS) {
      rows.at = rows.at.filter((_, index) => index % 2 === 0 || index > MOST_ROWS / 2);
      for (const name of Object.keys(rows.columns)) rows.columns[name] = rows.columns[name].filter((_, index) => index % 2 === 0 || index > MOST_ROWS / 2);
    }
  }
}

const sum = (members, field) => members.reduce((total, one) => total + (one[field] ?? 0), 0);

// The same columns as those that are kept: see whole_row in coordinator/recording.py.
export function rowOf(figures) {
  const members = figures.members ?? [], workers = members.filter((one) => one.role === "worker");
  const steps = sum(workers, "num_steps");
  const row = {
    steps_per_second: figures.steps_per_second ?? 0, samples_per_second: figures.samples_per_second ?? 0,
    num_workers: workers.length, lag: Math.max(0, ...workers.map((one) => one.lag ?? 0)),
    cores: sum(members, "cores"), memory_bytes: sum(members, "memory_bytes"), gpu_bytes: sum(members, "gpu_bytes"),
    sent_per_second: sum(members, "sent_per_second"), received_per_second: sum(members, "received_per_second"),
  };
  for (const phase of steps ? ["compute", "data", "stage", "wait", "pull"] : []) row[phase] = workers.reduce((total, one) => total + (one[phase] ?? 0) * (one.num_steps ?? 0), 0) / steps;
  return row;
}

export const rowsOfMember = (name, member) => get(`${of(name)}/rows`, { member });
