// The runs, as the page holds them: numbers from the embedded views (packed or plain), lines ready to draw for each x axis, and what comes in live.

const PHASES = ["forward", "backward", "optimizer", "data", "communication", "waiting", "checkpoint", "evaluation", "other"];
const KEPT = 8000; // points of a live series, beyond which it is thinned in the page

/** Numbers come as a list, or packed: "f8:", "f4:" or "i4:" and base64 of little-endian numbers. Null is a gap. */
function unpacked(given) {
  if (typeof given !== "string") return Float64Array.from(given || [], (value) => (value === null ? NaN : value));
  const kind = given.slice(0, 3);
  const text = atob(given.slice(3));
  const raw = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) raw[at] = text.charCodeAt(at);
  const typed = { "f8:": Float64Array, "f4:": Float32Array, "i4:": Int32Array }[kind];
  return kind === "f8:" ? new typed(raw.buffer) : Float64Array.from(new typed(raw.buffer));
}

function joined(one, other) {
  const result = new Float64Array(one.length + other.length);
  result.set(one);
  result.set(other, one.length);
  return result;
}

class Series {
  constructor(given) {
    this.steps = unpacked(given.steps);
    this.times = unpacked(given.times);
    this.values = unpacked(given.values);
    this.count = given.count ?? this.values.length;
    this.whole = this.steps.every(Number.isInteger);
    this.version = 0;
    this.lines = new Map();
  }

  append(given) {
    const more = new Series(given);
    for (const name of ["steps", "times", "values"]) this[name] = joined(this[name], more[name]);
    this.count = given.count ?? this.count + more.values.length;
    this.whole = this.whole && more.whole;
    if (this.values.length > KEPT) this.thin();
    this.version += 1;
    this.lines.clear();
  }

  /** Every bucket keeps its first, lowest, highest and last point, so no spike is lost. */
  thin() {
    const places = Float64Array.from(this.values, (_, at) => at);
    const kept = columns(places, this.values, 0, places.length, 0, places.length, KEPT / 8).x;
    for (const name of ["steps", "times", "values"]) this[name] = Float64Array.from(kept, (at) => this[name][at]);
  }

  /** The line over an axis, in order. Where a restart repeated steps, the last attempt is the line and what it replaced is `old`. */
  line(axis, started) {
    if (!this.lines.has(axis)) this.lines.set(axis, this.ordered(axis, started));
    return this.lines.get(axis);
  }

  ordered(axis, started) {
    const x = axis === "step" ? this.steps : axis === "wall" ? this.times : this.times.map((time) => time - started);
    const keep = new Uint8Array(x.length);
    let least = Infinity;
    let dropped = 0;
    for (let at = x.length - 1; at >= 0; at--) {
      if (x[at] < least || (x[at] === least && keep[at + 1])) { // of two at one place, both stay if nothing lies between them
        keep[at] = 1;
        least = x[at];
      } else dropped += 1;
    }
    if (!dropped) return { x, y: this.values, old: null };
    const pick = (values, wanted) => values.filter((_, at) => keep[at] === wanted);
    return { x: pick(x, 1), y: pick(this.values, 1), old: { x: pick(x, 0), y: pick(this.values, 0) } };
  }

  /** How often the step is smaller than the one before although no attempt began between the two. */
  returns(beginnings) {
    let count = 0;
    for (let at = 1; at < this.steps.length; at++) {
      if (this.steps[at] >= this.steps[at - 1]) continue;
      const next = lowerBound(beginnings, this.times[at - 1]);
      if (!(beginnings[next] <= this.times[at])) count += 1;
    }
    return count;
  }
}

/** The ledger as rows, whether it came as rows or as columns. */
function ledgerRows(given) {
  if (!given) return [];
  if (Array.isArray(given)) return given;
  const rowsOf = (columns_, at) => Object.fromEntries(Object.entries(columns_ || {}).map(([name, column]) => [name, column ? column[at] : null]));
  return (given.time || []).map((_, at) => {
    const row = {};
    for (const [name, column] of Object.entries(given)) {
      row[name] = Array.isArray(column) ? column[at] : column && typeof column === "object" ? rowsOf(column, at) : column;
    }
    return row;
  });
}

class Run {
  constructor(view, place) {
    this.place = place; // in the list of runs
    this.color = place; // of the palette; stays when other runs come
    this.shown = true;
    this.detail = null;
    this.take(view);
  }

  take(view) {
    this.name = String(view.name ?? "run");
    this.label = String(view.label ?? this.name);
    this.info = view.info || {};
    this.config = view.config || {};
    this.environment = view.environment || {};
    this.series = new Map(Object.entries(view.series || {}).map(([name, given]) => [name, new Series(given)]));
    this.ledger = ledgerRows(view.ledger);
    this.events = [...(view.events || [])];
    this.images = view.images || {};
    this.tables = view.tables || {};
    this.texts = view.texts || {};
    this.skipped = view.skipped || {};
    this.at = view.at ?? 0;
    this.version = (this.version || 0) + 1;
    this.detail = null;
    this.totals = null;
  }

  /** What is new since the last message of a live page. Answers whether something came that needs a new chart. */
  append(news) {
    let fresh = false;
    for (const [name, given] of Object.entries(news.series || {})) {
      if (this.series.has(name)) this.series.get(name).append(given);
      else {
        this.series.set(name, new Series(given));
        fresh = true;
      }
    }
    const rows = ledgerRows(news.ledger);
    fresh = fresh || (rows.length > 0 && !this.ledger.length);
    this.ledger.push(...rows);
    this.events.push(...(news.events || []));
    for (const name of ["info", "config", "environment", "skipped"]) if (news[name]) this[name] = news[name];
    for (const name of ["images", "tables", "texts"]) {
      if (!news[name]) continue;
      this[name] = news[name];
      fresh = true;
    }
    this.version += 1;
    this.totals = null;
    return fresh;
  }

  get whole() {
    for (const one of this.series.values()) if (!one.whole) return false;
    return true;
  }

  get started() {
    if (Number.isFinite(this.info.started)) return this.info.started;
    let least = Infinity;
    for (const one of this.series.values()) if (one.times.length) least = Math.min(least, one.times[0]);
    return Number.isFinite(least) ? least : this.ledger.length ? this.ledger[0].time - this.ledger[0].seconds : 0;
  }

  get ended() {
    if (Number.isFinite(this.info.ended)) return this.info.ended;
    let most = this.started;
    for (const one of this.series.values()) if (one.times.length) most = Math.max(most, one.times[one.times.length - 1]);
    if (this.ledger.length) most = Math.max(most, this.ledger[this.ledger.length - 1].time);
    return most;
  }

  /** When attempts began, in order. */
  get beginnings() {
    const restarts = this.events.filter((event) => event.kind === "restart" || event.kind === "restore").map((event) => event.time);
    const attempts = Array.isArray(this.info.attempts) ? this.info.attempts.map((one) => one?.started ?? one?.time) : [];
    return Float64Array.from([...restarts, ...attempts].filter(Number.isFinite)).sort();
  }

  /** Names whose steps go back without a restart, with how often; kept until something changes. */
  get returning() {
    if (this.returned?.version !== this.version) {
      const { beginnings } = this;
      const found = new Map();
      for (const [name, series] of this.series) {
        const count = series.returns(beginnings);
        if (count) found.set(name, count);
      }
      this.returned = { version: this.version, found };
    }
    return this.returned.found;
  }

  /** The line of a name; the whole of it, or the part that is zoomed to with more points where the server gave them. */
  line(name, axis, whole = false) {
    const series = (!whole && this.detail?.series.get(name)) || this.series.get(name);
    return series ? { ...series.line(axis, this.started), passes: axis === "step" && this.returning.has(name) } : null;
  }

  /** Where something lies on an axis. What has no step lies at the step that was logged last before it. */
  along(axis, step, time) {
    if (axis === "wall") return time;
    if (axis === "relative") return time - this.started;
    return Number.isFinite(step) ? step : this.stepAt(time);
  }

  stepAt(time) {
    let found = null;
    for (const one of this.series.values()) if (!found || one.times.length > found.times.length) found = one;
    if (!found || !found.times.length) return NaN;
    return found.steps[Math.max(0, lowerBound(found.times, time + 1e-9) - 1)];
  }

  /** Begin and end of an interval of the ledger on an axis. */
  edges(axis, row) {
    if (axis === "step") return [row.first, row.last + 1];
    const end = axis === "wall" ? row.time : row.time - this.started;
    return [end - row.seconds, end];
  }

  get ranks() {
    return this.ledger.reduce((most, row) => Math.max(most, ...Object.values(row.phases || {}).map((one) => one?.length || 0)), 0);
  }

  /** Sums over the whole ledger: seconds of each phase (the mean over ranks), steps, samples; and for each rank. */
  get sums() {
    this.totals ??= summed(this);
    return this.totals;
  }
}

function summed(run) {
  const phases = Object.fromEntries(PHASES.map((name) => [name, 0]));
  const sums = { phases, all: 0, seconds: 0, steps: 0, samples: 0, tokens: 0, ranks: [] };
  for (let rank = 0; rank < run.ranks; rank++) sums.ranks.push({ own: 0, waiting: 0, slowest: 0, steps: 0, host: NaN, device: NaN });
  for (const row of run.ledger) {
    sums.seconds += row.seconds || 0;
    sums.steps += row.steps || 0;
    sums.samples += row.samples || 0;
    sums.tokens += row.tokens || 0;
    for (const [name, values] of Object.entries(row.phases || {})) {
      const seconds = mean(values) || 0;
      phases[name] = (phases[name] || 0) + seconds;
      sums.all += seconds;
    }
    sums.ranks.forEach((one, rank) => {
      const own = ownSeconds(row, rank);
      if (Number.isFinite(own)) {
        one.own += own;
        one.steps += row.steps || 0;
        one.waiting += row.phases?.waiting?.[rank] || 0;
      }
      one.slowest += row.slowest?.[rank] || 0;
      one.host = largest([one.host, row.memory?.host?.[rank] ?? NaN]);
      one.device = largest([one.device, row.memory?.device?.[rank] ?? NaN]);
    });
  }
  return sums;
}

/** What a rank did in an interval, without waiting for others; NaN where it has not told. */
function ownSeconds(row, rank) {
  let sum = 0;
  let told = false;
  for (const [name, values] of Object.entries(row.phases || {})) {
    const seconds = values?.[rank];
    if (!Number.isFinite(seconds)) continue;
    told = true;
    if (name !== "waiting" && name !== "communication") sum += seconds;
  }
  return told ? sum : NaN;
}
