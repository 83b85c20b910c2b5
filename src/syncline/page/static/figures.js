// What the page knows of a run: asked for once, then added to by each look.

const MOST_ROWS = 1500, MOST_POINTS = 3000, MOST_EVENTS = 3000, MOST_EARLY = 60;
// Of each metric when it is loaded: as many as a wide screen has pixels for.
const FIRST_POINTS = 600;
// Metrics in one request; and after one that failed, the next.
const AT_ONCE = 32, AGAIN_MS = 5000;
export const PHASES = ["compute", "data", "stage", "wait", "apply", "pull"];
const OF_WORKERS = PHASES.filter((phase) => phase !== "apply");

export async function get(path, values = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) for (const one of [value].flat()) query.append(name, one);
  const answer = await fetch(`${path}${query.size ? `?${query}` : ""}`);
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error ?? `${answer.status}`);
  return told;
}

const of = (name) => `/api/v1/runs/${encodeURIComponent(name)}`;

// The metrics of a run. A curve is loaded when it is wanted: a run may have ten thousand. Names are those of scripts,
// so they are keys of maps, never of objects.
export class Curves {
  constructor(run, names = []) { this.run = run; this.names = new Set(names); this.loaded = new Map(); this.pending = new Map(); this.problem = ""; this.notBefore = 0; }

  static async of(run) { return new Curves(run, (await get(of(run))).metrics); }

  get(name) { return this.loaded.get(name) ?? { step: [], at: [], value: [] }; }

  // Loads those that are not there yet. Whether there are new ones.
  async want(names) {
    const missing = names.filter((name) => this.names.has(name) && !this.loaded.has(name) && !this.pending.has(name));
    if (!missing.length || Date.now() < this.notBefore) return false;
    for (const name of missing) this.pending.set(name, []);
    try {
      for (let k = 0; k < missing.length; k += AT_ONCE) {
        const found = new Map(Object.entries((await get(`${of(this.run)}/curves`, { name: missing.slice(k, k + AT_ONCE), most: FIRST_POINTS })).curves));
        for (const name of missing.slice(k, k + AT_ONCE)) {
          this.loaded.set(name, found.get(name) ?? this.get(name));
          const early = this.pending.get(name) ?? [];
          this.pending.delete(name);
          for (const reading of early) this.add(...reading);
        }
      }
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
      this.notBefore = Date.now() + AGAIN_MS;
      for (const name of missing) this.pending.delete(name);
    }
    return true;
  }

  // A reading of a curve that is not loaded is not kept: it comes with the curve.
  add(name, step, at, value) {
    if (!this.names.has(name)) { this.names.add(name); this.loaded.set(name, this.get(name)); }
    this.pending.get(name)?.push([name, step, at, value]);
    const curve = this.loaded.get(name);
    if (!curve || (curve.at.length && at <= curve.at.at(-1))) return;
    curve.step.push(Math.max(step, (curve.step.at(-1) ?? -1) + 1e-6)); curve.at.push(at); curve.value.push(value);
    if (curve.at.length > MOST_POINTS) for (const column of ["step", "at", "value"]) curve[column] = curve[column].filter((_, index) => index % 2 === 0);
  }

  // Those of a fresh load, and what came here since it was asked for.
  replaceBy(fresh) {
    const before = this.loaded;
    for (const name of fresh.names) this.names.add(name);
    this.loaded = fresh.loaded;
    for (const [name, curve] of before) {
      const own = this.loaded.get(name);
      if (own) { const last = own.at.at(-1) ?? -Infinity; curve.at.forEach((at, index) => at > last && this.add(name, curve.step[index], at, curve.value[index])); }
      else if (!fresh.names.has(name)) this.loaded.set(name, curve); // newer than what is written
    }
  }
}

export class Run {
  constructor(name) {
    this.name = name; this.view = null; this.look = null; this.events = []; this.damage = "";
    this.rows = { at: [], columns: {} }; this.curves = new Curves(name); this.dead = new Map(); this.known = new Map(); this.problem = "";
    this.isLoaded = false; this.early = []; this.hasGap = false;
  }

  // `wanted`: of the names of metrics, those to load.
  async load(wanted) {
    this.view = await get(of(this.name));
    this.look = this.view.look;
    this.curves = new Curves(this.name, this.view.metrics);
    const parts = await Promise.allSettled([get(`${of(this.name)}/rows`), get(`${of(this.name)}/events`), this.curves.want(wanted(this.view.metrics))]);
    const [rows, events] = parts.map((part) => part.value);
    if (rows) this.rows = rows;
    if (events) { this.events = events.events; this.damage = events.damage ?? ""; }
    const problems = [...parts.filter((part) => part.reason).map((part) => part.reason.message), this.curves.problem].filter(Boolean);
    this.problem = this.view.is_live ? "" : problems[0] ?? "";
    if (this.look) this.noteDead(this.look.figures, this.look.events);
    this.isLoaded = true;
    for (const look of this.early.splice(0)) this.add(look);
  }

  get metrics() { return [...this.curves.names]; }

  // A member that died is shown as dead until another life of it works.
  noteDead(figures, events) {
    const alive = new Map((figures.members ?? []).map((one) => [one.name, one])), gone = figures.gone ?? [];
    for (const [name, one] of alive) this.known.set(name, one);
    for (const event of events ?? []) {
      const found = event.kind === "death" && /^(\S+) \(incarnation (\d+)\) is out/.exec(event.text);
      if (found) this.dead.set(found[1], { incarnation: Number(found[2]), at: event.at });
    }
    for (const name of gone) if (!this.dead.has(name)) this.dead.set(name, { incarnation: this.known.get(name)?.incarnation ?? 0, at: figures.at });
    for (const [name, told] of this.dead) {
      const one = alive.get(name);
      if (one && (one.incarnation ?? 0) > told.incarnation && figures.at - told.at > 3) this.dead.delete(name);
      else if (!one && !gone.includes(name) && figures.at - told.at > 30) this.dead.delete(name);
    }
    if (this.known.size > 2 * alive.size + 100) for (const name of this.known.keys()) if (!alive.has(name) && !this.dead.has(name)) this.known.delete(name);
  }

  get members() {
    const found = (this.look?.figures.members ?? []).map((one) => (this.dead.has(one.name) && (one.incarnation ?? 0) <= this.dead.get(one.name).incarnation ? { ...one, dead: true } : one));
    const names = new Set(found.map((one) => one.name));
    for (const name of this.dead.keys()) if (!names.has(name)) found.push({ ...(this.known.get(name) ?? { name, role: name.replace(/-\d+$/, "") }), peers: {}, cores: 0, sent_per_second: 0, dead: true });
    return found;
  }

  add(look) {
    if (!this.isLoaded) { this.early.push(look); if (this.early.length > MOST_EARLY) this.early.shift(); return; }
    const figures = look.figures, before = this.look;
    if (before && figures.at <= before.figures.at) return;
    // A browser that is slow, away or asleep gets the newest looks only, and another coordinator counts from one again.
    if (before && (look.number !== before.number + 1 || (figures.term ?? 0) !== (before.figures.term ?? 0))) this.hasGap = true;
    // Steps may be longer than a second: the last known split stays.
    const members = new Map((before?.figures.members ?? []).map((one) => [one.name, one]));
    for (const one of figures.members ?? []) {
      const last = members.get(one.name);
      if (last && last.incarnation === one.incarnation && !one.num_steps) for (const phase of OF_WORKERS) one[phase] = last[phase];
      if (last && last.incarnation === one.incarnation && !one.num_rounds) one.apply = last.apply;
    }
    this.look = look;
    this.noteDead(figures, look.events);
    this.addEvents(look.events ?? []);
    for (const reading of look.readings ?? []) this.curves.add(...reading);
    this.addRow(figures.at, rowOf(figures));
  }

  addEvents(events) {
    if (!events.length) return;
    const seen = new Set(this.events.map((event) => event.number)), fresh = events.filter((event) => !seen.has(event.number));
    if (!fresh.length) return;
    const isLater = fresh[0].number > (this.events.at(-1)?.number ?? 0);
    this.events.push(...fresh);
    if (!isLater) this.events.sort((a, b) => a.number - b.number);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, 500);
  }

  // After a gap: what was kept meanwhile, and what came here since it was asked for.
  catchUp(fresh) {
    const seen = new Set(this.events.map((event) => event.number));
    const missed = fresh.events.filter((event) => !seen.has(event.number));
    this.addEvents(fresh.events);
    if (this.look) this.noteDead(this.look.figures, missed);
    this.curves.replaceBy(fresh.curves);
    const rows = this.rows;
    if (!fresh.rows.at.length) return;
    this.rows = fresh.rows;
    rows.at.forEach((at, index) => this.addRow(at, Object.fromEntries(Object.entries(rows.columns).map(([name, column]) => [name, column[index]]))));
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
  const steps = sum(workers, "num_steps"), rounds = members.filter((one) => one.role === "server" && one.num_rounds);
  const row = {
    steps_per_second: figures.steps_per_second ?? 0, samples_per_second: figures.samples_per_second ?? 0,
    num_workers: workers.length, lag: Math.max(0, ...workers.map((one) => one.lag ?? 0)),
    cores: sum(members, "cores"), memory_bytes: sum(members, "memory_bytes"), gpu_bytes: sum(members, "gpu_bytes"),
    sent_per_second: sum(members, "sent_per_second"), received_per_second: sum(members, "received_per_second"),
  };
  for (const phase of steps ? OF_WORKERS : []) row[phase] = workers.reduce((total, one) => total + (one[phase] ?? 0) * (one.num_steps ?? 0), 0) / steps;
  const busy = members.filter((one) => one.gpu_busy != null);
  if (busy.length) row.gpu_busy = sum(busy, "gpu_busy") / busy.length;
  if (rounds.length) row.apply = Math.max(...rounds.map((one) => one.apply ?? 0));
  return row;
}

export const rowsOfMember = (name, member) => get(`${of(name)}/rows`, { member });
