// Curves: one line for each run that is shown, smoothed or as logged, with gaps where there was no number.

class Lines extends Plot {
  /** `source(run, axis, whole)` gives {x, y, old} or null; `whole` asks for all of it, not only for what is zoomed to. Options: floor (the y axis begins at it), plain (never smoothed), runsOf (which runs). */
  constructor(page, title, source, options = {}) {
    super(page, title, options);
    Object.assign(this, { source, floor: options.floor ?? null, plain: options.plain ?? false, logged: options.logged ?? false });
    this.cache = new Map();
    this.marksBehind = true;
  }

  runs() {
    return this.page.runs.filter((run) => run.shown && this.source(run, this.state.axis, true)?.x.length);
  }

  /** Lines of the runs shown; `y` is what is drawn, `raw` what was logged. */
  lines() {
    return this.runs().map((run) => {
      const line = this.source(run, this.state.axis);
      const weight = this.plain ? 0 : this.state.smoothing;
      let kept = this.cache.get(run);
      if (!kept || kept.raw !== line.y || kept.weight !== weight) {
        const { x } = this.source(run, this.state.axis, true);
        kept = { raw: line.y, weight, y: smoothed(line.x, line.y, weight, (x[x.length - 1] - x[0]) / 1000) };
        this.cache.set(run, kept);
      }
      return { run, x: line.x, raw: line.y, y: kept.y, old: line.old, passes: line.passes, weight, color: this.page.theme.run(run) };
    });
  }

  extent(axis) {
    let [low, high] = [Infinity, -Infinity];
    for (const run of this.runs()) {
      const { x, old } = this.source(run, axis, true);
      low = Math.min(low, x[0]);
      high = Math.max(high, x[x.length - 1]);
      if (old) high = Math.max(high, largest(old.x) || -Infinity);
    }
    return [low, high];
  }

  /** Places of the first point shown and of the one after the last, with one neighbour on each side. */
  window(x, [low, high]) {
    return [Math.max(0, lowerBound(x, low) - 1), Math.min(x.length, lowerBound(x, high) + 1)];
  }

  heights(range) {
    let [low, high, positive] = [Infinity, -Infinity, Infinity];
    const look = (value) => {
      if (!Number.isFinite(value)) return;
      if (value < low) low = value;
      if (value > high) high = value;
      if (value > 0 && value < positive) positive = value;
    };
    for (const line of this.lines()) {
      const [from, to] = this.window(line.x, range);
      for (let at = from; at < to; at++) {
        if (line.x[at] < range[0] || line.x[at] > range[1]) continue;
        look(line.raw[at]);
        if (line.weight) look(line.y[at]);
      }
      if (line.passes && line.old) line.old.x.forEach((x, at) => (x >= range[0] && x <= range[1] ? look(line.old.y[at]) : null));
    }
    this.remark = this.state.log && !this.plain && positive === Infinity && high >= low ? "linear: nothing above 0" : "";
    if (this.state.log && !this.plain && positive < Infinity) {
      this.logarithmic = true;
      [positive, high] = [Math.max(positive, 1e-300), Math.max(high, 1e-300)];
      if (high / positive < 1.001) return [positive * 0.9, positive * 1.1];
      const room = 10 ** ((Math.log10(high) - Math.log10(positive)) * 0.04);
      return [positive / room, Math.min(high * room, Number.MAX_VALUE)];
    }
    if (!(high >= low)) return [0, 1];
    if (this.floor !== null) return [this.floor, high > this.floor ? this.floor + (high - this.floor) * 1.06 : this.floor + 1];
    if (nearlyEqual(low, high)) {
      const half = Math.abs(high) * 0.1 || 1;
      return [low - half, high + half];
    }
    const room = (high - low) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  yTicks() {
    return this.format === bytes ? byteTicks(this.y, Math.max(2, Math.round((this.height - 40) / 38))) : super.yTicks();
  }

  paint(brush) {
    const lines = this.lines();
    this.drawMarks(brush);
    brush.lineJoin = "round";
    this.drawn = 0;
    for (const line of lines) {
      if (line.old) this.stroke(brush, line, line.old.y, { x: line.old.x, alpha: 0.35, width: 1, ordered: false });
      if (line.weight) this.stroke(brush, line, line.raw, { alpha: 0.22, width: 1 });
    }
    for (const line of lines) {
      this.drawn += this.stroke(brush, line, line.y, { alpha: 1, width: 1.75 });
      this.gaps(brush, line);
    }
  }

  stroke(brush, line, y, { x = line.x, alpha, width, ordered = true }) {
    const [from, to] = ordered ? this.window(x, this.x) : [0, x.length];
    const count = Math.min(WIDEST, Math.max(50, Math.ceil(this.right - this.left)));
    const shown = ordered ? columns(x, y, from, to, this.x[0], this.x[1], count) : { x, y };
    const dense = y === line.raw && shown.x.length > this.right - this.left;
    Object.assign(brush, { globalAlpha: alpha, lineWidth: dense ? Math.min(1.2, width) : width, strokeStyle: line.color, fillStyle: line.color });
    brush.setLineDash(this.page.theme.dash(line.run));
    brush.beginPath();
    let length = 0;
    for (let at = 0; at <= shown.x.length; at++) {
      const value = shown.y[at];
      const draws = at < shown.x.length && Number.isFinite(value) && !(this.logarithmic && value <= 0);
      const backwards = at > 0 && shown.x[at] < shown.x[at - 1];
      if (length === 1 && (!draws || backwards)) this.lonely(brush, this.toX(shown.x[at - 1]), this.toY(shown.y[at - 1]));
      if (!draws || backwards) length = 0;
      if (!draws) continue;
      if (length) brush.lineTo(this.toX(shown.x[at]), this.toY(value));
      else brush.moveTo(this.toX(shown.x[at]), this.toY(value));
      length += 1;
    }
    brush.stroke();
    brush.setLineDash([]);
    if (y === line.raw && ordered && shown.x.length <= 40) this.points(brush, shown);
    Object.assign(brush, { globalAlpha: 1, lineWidth: 1 });
    return shown.x.length;
  }

  /** Where there are few, one sees where they are. */
  points(brush, shown) {
    brush.beginPath();
    shown.x.forEach((x, at) => {
      if (!Number.isFinite(shown.y[at]) || (this.logarithmic && shown.y[at] <= 0)) return;
      brush.moveTo(this.toX(x) + 2.2, this.toY(shown.y[at]));
      brush.arc(this.toX(x), this.toY(shown.y[at]), 2.2, 0, 7);
    });
    brush.fill();
  }

  /** A point without neighbours is a dot: a line would not show it. */
  lonely(brush, x, y) {
    brush.moveTo(x + 2.5, y);
    brush.arc(x, y, 2.5, 0, 7);
    brush.moveTo(x, y);
  }

  /** A small cross on the axis where what was logged was no number. */
  gaps(brush, line) {
    const [from, to] = this.window(line.x, this.x);
    let last = -Infinity;
    Object.assign(brush, { strokeStyle: this.colors.bad, lineWidth: 1.5 });
    brush.beginPath();
    for (let at = from; at < to; at++) {
      if (!Number.isNaN(line.raw[at])) continue;
      const x = this.toX(line.x[at]);
      if (x - last < 5) continue;
      last = x;
      for (const side of [-1, 1]) {
        brush.moveTo(x - 3 * side, this.bottom - 8);
        brush.lineTo(x + 3 * side, this.bottom - 2);
      }
    }
    brush.stroke();
    brush.lineWidth = 1;
  }

  readings(where) {
    const lines = this.lines();
    return lines.map((line) => {
      const at = where === null ? lastNumber(line.raw) : this.placeAt(line.x, where);
      const value = at < 0 ? NaN : line.raw[at];
      const text = (one) => (this.format === number ? number(one, digitsFor(...this.y)) : this.format(one));
      const shown = Number.isNaN(value) && at >= 0 ? "no number" : `${text(value)}${where !== null && line.weight && at >= 0 ? ` (smoothed ${text(line.y[at])})` : ""}`;
      return { label: this.page.runs.length > 1 ? line.run.label : where === null ? "last" : "", text: shown, color: line.color, dash: this.page.theme.dashed(line.run), at: at < 0 ? null : [line.x[at], line.y[at]] };
    });
  }

  /** The place of the point at the cross-hair; -1 before the first and beyond the last. */
  placeAt(x, where) {
    const room = Math.max(((this.x[1] - this.x[0]) / (this.right - this.left)) * 2, x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) / 2 : 0);
    return x.length && where >= x[0] - room && where <= x[x.length - 1] + room ? nearestPlace(x, where) : -1;
  }

  following(from, direction, distance) {
    const places = this.lines()
      .map((line) => {
        const at = lowerBound(line.x, from + direction * distance * 0.25);
        return line.x[direction > 0 ? at : at - 1];
      })
      .filter((value) => Number.isFinite(value));
    if (!places.length) return from;
    const next = direction > 0 ? Math.min(...places) : Math.max(...places);
    return Math.abs(next - from) > distance * 3 && this.state.range ? from + direction * distance : next;
  }

  summary() {
    const lines = this.lines();
    if (!lines.length) return "Nothing to show.";
    const parts = lines.slice(0, 8).map((line) => {
      const numbers = Array.from(line.raw).filter(Number.isFinite);
      const bad = line.raw.length - numbers.length;
      if (!numbers.length) return `${line.run.label}: no number`;
      const least = numbers.reduce((one, other) => Math.min(one, other));
      const most = numbers.reduce((one, other) => Math.max(one, other));
      const text = `${line.run.label}: from ${this.format(numbers[0])} to ${this.format(numbers[numbers.length - 1])}, lowest ${this.format(least)}, highest ${this.format(most)}`;
      return bad ? `${text}, ${counted(bad, "value")} that ${bad === 1 ? "is" : "are"} no number` : text;
    });
    return `${counted(lines.length, "curve")} over ${this.words(this.x[0])} to ${this.words(this.x[1])}. ${parts.join(". ")}.`;
  }

  rows(range) {
    const lines = this.lines();
    const places = new Set();
    for (const line of lines) {
      const [from, to] = [lowerBound(line.x, range[0]), lowerBound(line.x, range[1] + 1e-12 * Math.abs(range[1]))];
      const skip = Math.max(1, Math.ceil((to - from) / ROWS));
      for (let at = from; at < to; at += skip) places.add(line.x[at]);
      if (to > from) places.add(line.x[to - 1]);
    }
    let xs = [...places].sort((one, other) => one - other);
    const skip = Math.max(1, Math.ceil(xs.length / ROWS));
    xs = xs.filter((_, at) => at % skip === 0 || at === xs.length - 1);
    const cell = (line, x) => {
      const at = nearestPlace(line.x, x);
      return at >= 0 && line.x[at] === x ? (this.format === number ? exact : this.format)(line.raw[at]) : "";
    };
    const total = lines.reduce((sum, line) => sum + line.x.length, 0);
    return {
      head: [{ step: "Step", relative: "Time since start", wall: "Time" }[this.state.axis], ...lines.map((line) => line.run.label)],
      rows: xs.map((x) => [along(this.state.axis, x).replace(/^step /, ""), ...lines.map((line) => cell(line, x))]),
      note: `${counted(xs.length, "row")} of ${counted(total, "point")} in the page; values as logged, without smoothing. The chart's zoom limits the rows.`,
    };
  }

  model() {
    return { ...super.model(), lines: this.lines().map((line) => ({ run: line.run.label, points: line.x.length, last: line.raw[lastNumber(line.raw)], color: line.color, old: line.old?.x.length ?? 0 })), drawn: this.drawn };
  }
}

function lastNumber(values) {
  for (let at = values.length - 1; at >= 0; at--) if (Number.isFinite(values[at])) return at;
  return values.length - 1;
}

function byteTicks([low, high], count) {
  const unit = 1024 ** Math.floor(Math.log2(Math.max(high, 1)) / 10);
  return linearTicks(low / unit, high / unit, count).map((tick) => ({ at: tick.at * unit, text: tick.at === 0 ? "0" : bytes(tick.at * unit) }));
}
