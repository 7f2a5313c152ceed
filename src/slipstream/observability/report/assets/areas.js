// The ledger of one run as stacked areas: what each interval was spent on, in seconds of a step or as shares.

class Areas extends Plot {
  constructor(page, title, options = {}) {
    super(page, title, { ...options, format: duration, kind: "wide areas" });
  }

  get run() {
    return this.page.focused();
  }

  runs() {
    return [this.run];
  }

  /** Intervals with their edges on the axis and the height of each phase; kept until something changes. */
  bars() {
    const { run, state } = this;
    const made = [run.place, run.version, state.axis, state.perStep].join();
    if (this.madeOf !== made) {
      this.madeOf = made;
      this.names = PHASES.concat(Object.keys(run.sums.phases).filter((name) => !PHASES.includes(name))).filter((name) => run.sums.phases[name] > run.sums.all * 1e-5);
      this.kept = run.ledger.map((row) => this.bar(row)).filter((bar) => bar.high >= bar.low);
    }
    return this.kept;
  }

  bar(row) {
    const [low, high] = this.run.edges(this.state.axis, row);
    const seconds = this.names.map((name) => mean(row.phases?.[name]) || 0);
    const sum = seconds.reduce((one, other) => one + other, 0);
    const divisor = this.state.perStep ? row.steps || NaN : sum || NaN;
    return { row, low, high, parts: seconds.map((one) => one / divisor), sum: sum / divisor };
  }

  extent() {
    const bars = this.bars();
    return bars.length ? [bars.reduce((least, bar) => Math.min(least, bar.low), Infinity), bars.reduce((most, bar) => Math.max(most, bar.high), -Infinity)] : [0, 1];
  }

  /** Intervals without a step (an evaluation, a long save) have no height per step; a few that tower do not flatten all others. */
  heights(range) {
    if (!this.state.perStep) return [0, 1];
    const sums = this.bars().filter((bar) => bar.high > range[0] && bar.low < range[1] && Number.isFinite(bar.sum)).map((bar) => bar.sum);
    if (!sums.length) return [0, 1];
    sums.sort((one, other) => one - other);
    const most = sums[sums.length - 1];
    const usual = sums[Math.floor((sums.length - 1) * 0.97)];
    this.cut = most > usual * 2.5 ? usual * 1.6 : null;
    return [0, (this.cut ?? most) * 1.04];
  }

  yTicks() {
    const count = Math.max(2, Math.round((this.height - 40) / 38));
    if (!this.state.perStep) return [0, 0.25, 0.5, 0.75, 1].map((at) => ({ at, text: share(at) }));
    const unit = this.y[1] < 1e-3 ? [1e-6, "\u00b5s"] : this.y[1] < 1 ? [1e-3, "ms"] : [1, "s"];
    return linearTicks(0, this.y[1] / unit[0], count).map((tick) => ({ at: tick.at * unit[0], text: tick.at === 0 ? "0" : `${tick.text} ${unit[1]}` }));
  }

  paint(brush) {
    const bars = this.bars().filter((bar) => bar.high > this.x[0] && bar.low < this.x[1]);
    this.placed = new Map();
    for (const group of unbroken(this.perPixel(bars), (this.x[1] - this.x[0]) / 100)) {
      let floor = group.map(() => 0);
      this.names.forEach((name, place) => {
        const roof = group.map((bar, at) => floor[at] + (bar.parts[place] || 0));
        this.band(brush, group, floor, roof, this.page.theme.phase(name));
        this.place(brush, name, group, floor, roof);
        floor = roof;
      });
    }
    this.labels(brush);
    this.overflow(brush, bars);
  }

  /** More intervals than columns are averaged, so that an area is what it says. */
  perPixel(bars) {
    const most = Math.max(40, Math.floor((this.right - this.left) / 2));
    if (bars.length <= most) return bars;
    const size = Math.ceil(bars.length / most);
    const result = [];
    for (let from = 0; from < bars.length; from += size) {
      const some = bars.slice(from, from + size);
      const usable = some.filter((bar) => Number.isFinite(bar.sum));
      const weight = (bar) => (this.state.perStep ? bar.row.steps : bar.row.seconds) || 0;
      const total = usable.reduce((sum, bar) => sum + weight(bar), 0) || NaN;
      const parts = this.names.map((_, place) => usable.reduce((sum, bar) => sum + bar.parts[place] * weight(bar), 0) / total);
      result.push({ row: some[0].row, low: some[0].low, high: some[some.length - 1].high, parts, sum: parts.reduce((one, other) => one + other, 0) });
    }
    return result;
  }

  band(brush, group, floor, roof, color) {
    brush.beginPath();
    group.forEach((bar, at) => {
      const y = this.toY(roof[at]);
      if (at) brush.lineTo(this.toX(bar.low), y);
      else brush.moveTo(this.toX(bar.low), y);
      brush.lineTo(this.toX(bar.high), y);
    });
    for (let at = group.length - 1; at >= 0; at--) {
      const y = this.toY(floor[at]);
      brush.lineTo(this.toX(group[at].high), y);
      brush.lineTo(this.toX(group[at].low), y);
    }
    brush.closePath();
    brush.fillStyle = color;
    brush.fill();
    if (group.length > (this.right - this.left) / 8) return; // between narrow bars, lines would be all that one sees
    Object.assign(brush, { strokeStyle: this.colors.card, lineWidth: 0.75 });
    brush.stroke();
    brush.lineWidth = 1;
  }

  /** Finds where a band has most room for its name: as many neighbours as the name is wide, and the height that all of them have in common. */
  place(brush, name, group, floor, roof) {
    const needed = brush.measureText(name).width * 1.1 + 10;
    const edges = group.map((bar) => [this.toX(Math.max(bar.low, this.x[0])), this.toX(Math.min(bar.high, this.x[1]))]);
    const tops = roof.map((value) => Math.max(this.top, this.toY(value)));
    const bottoms = floor.map((value) => this.toY(value));
    for (let from = 0; from < group.length; from++) {
      let [top, bottom, to] = [-Infinity, Infinity, from - 1];
      do {
        to += 1;
        top = Math.max(top, tops[to]);
        bottom = Math.min(bottom, bottoms[to]);
      } while (to + 1 < group.length && edges[to][1] - edges[from][0] < needed);
      const height = bottom - top;
      if (edges[to][1] - edges[from][0] < needed) break;
      if (height > 15 && height > (this.placed.get(name)?.height ?? 0)) this.placed.set(name, { height, x: (edges[from][0] + edges[to][1]) / 2, y: (top + bottom) / 2 });
    }
  }

  /** Names stand in their own areas; one whose area is nowhere high enough has its name in the legend alone. */
  labels(brush) {
    Object.assign(brush, { textAlign: "center", textBaseline: "middle", font: this.page.theme.font.replace("11px", "600 11px") });
    for (const [name, { x, y }] of this.placed) {
      brush.fillStyle = readableOn(this.page.theme.phase(name));
      brush.fillText(name, x, y);
    }
    Object.assign(brush, { font: this.page.theme.font, textBaseline: "alphabetic" });
  }

  overflow(brush, bars) {
    if (!this.state.perStep || !this.cut) return;
    Object.assign(brush, { fillStyle: this.colors.ink });
    let free = -Infinity;
    for (const bar of bars) {
      const x = (this.toX(Math.max(bar.low, this.x[0])) + this.toX(Math.min(bar.high, this.x[1]))) / 2;
      if (!(bar.sum > this.y[1]) || x < free) continue;
      brush.beginPath();
      brush.moveTo(x, this.top + 1);
      brush.lineTo(x + 4, this.top + 6);
      brush.lineTo(x - 4, this.top + 6);
      brush.fill();
      free = x + 8;
    }
  }

  at(where) {
    const bars = this.bars();
    const found = bars.find((bar) => where >= bar.low && where < bar.high) || bars.find((bar) => where >= bar.low && where <= bar.high);
    return found || null;
  }

  readings(where) {
    this.bars();
    const { sums } = this.run;
    const bar = where === null ? null : this.at(where);
    const shown = (value) => (this.state.perStep ? duration(value) : share(value));
    return this.names.map((name, place) => {
      const whole = this.state.perStep ? sums.phases[name] / (sums.steps || NaN) : sums.phases[name] / (sums.all || NaN);
      return { label: name, text: shown(where === null ? whole : bar ? bar.parts[place] : NaN), color: this.page.theme.phase(name) };
    });
  }

  summary() {
    const { sums } = this.run;
    const parts = PHASES.filter((name) => sums.phases[name] > 0).map((name) => `${name} ${share(sums.phases[name] / sums.all)}`);
    return `${this.run.label}: ${counted(this.run.ledger.length, "interval")}. Shares of the whole time: ${parts.join(", ")}.`;
  }

  rows(range) {
    const bars = this.bars().filter((bar) => bar.high > range[0] && bar.low < range[1]);
    const skip = Math.max(1, Math.ceil(bars.length / ROWS));
    const shown = bars.filter((_, at) => at % skip === 0);
    return {
      head: ["Steps", "Seconds", ...this.names],
      rows: shown.map((bar) => [`${bar.row.first}\u2013${bar.row.last}`, number(bar.row.seconds), ...bar.parts.map((part) => (this.state.perStep ? duration(part) : share(part)))]),
      note: `${counted(shown.length, "interval")} of ${bars.length}; ${this.state.perStep ? "time of one step" : "shares"}, the mean over all ranks.`,
    };
  }

  model() {
    return { ...super.model(), bars: this.bars().length, names: this.names, perStep: this.state.perStep, labels: [...(this.placed || [])].map(([name, { x, y }]) => ({ name, x, y })) };
  }
}

/** Neighbours that touch; where time passed in between (a restart), a gap stays. */
function unbroken(bars, room) {
  const groups = [];
  let last = null;
  for (const bar of bars) {
    if (!Number.isFinite(bar.sum)) last = null;
    else {
      if (!last || bar.low - last.high > Math.max(room, (bar.high - bar.low) * 0.5) || bar.low < last.low) groups.push([]);
      groups[groups.length - 1].push(bar);
      last = bar;
    }
  }
  return groups;
}

/** Black or white, whichever can be read on a colour. */
function readableOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255).map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.26 ? "#10151b" : "#ffffff";
}
