// Ranks over time: how long each worked for a step, without waiting for others. A straggler is a row, or a part of one, that stands out.

const SLOWER = 0.5; // as much slower than the median as the scale goes

class Heat extends Plot {
  constructor(page, title) {
    super(page, title, { format: duration, kind: "wide heat" });
    this.furnish();
    this.overlay.parentElement.classList.add("ranks");
  }

  get run() {
    return this.page.focused();
  }

  runs() {
    return [this.run];
  }

  /** For each interval: edges, and for each rank the seconds of a step and how much that is above the median of the ranks. */
  cells() {
    const { run, state } = this;
    const made = [run.place, run.version, state.axis].join();
    if (this.madeOf !== made) {
      this.madeOf = made;
      const ranks = run.ranks;
      this.kept = run.ledger.filter((row) => row.steps > 0).map((row) => {
        const [low, high] = run.edges(state.axis, row);
        const own = Array.from({ length: ranks }, (_, rank) => ownSeconds(row, rank) / row.steps);
        const usual = median(own);
        return { row, low, high, own, above: own.map((value) => value / usual - 1) };
      });
      const all = this.kept.flatMap((cell) => cell.own).filter(Number.isFinite).sort((one, other) => one - other);
      this.scale = [all[Math.floor(all.length * 0.02)] || 0, all[Math.floor(all.length * 0.98)] || 1];
    }
    return this.kept;
  }

  get comparing() {
    return this.state.relative && this.run.ranks > 1;
  }

  extent() {
    const cells = this.cells();
    return cells.length ? [cells.reduce((least, cell) => Math.min(least, cell.low), Infinity), cells.reduce((most, cell) => Math.max(most, cell.high), -Infinity)] : [0, 1];
  }

  measure() {
    const ranks = Math.max(1, this.run.ranks);
    const row = clamp(Math.floor(360 / ranks), 3, this.element.classList.contains("large") ? 34 : 22);
    this.canvas.parentElement.style.setProperty("--height", `${Math.max(ranks * row, 26) + MARGIN.top + MARGIN.bottom}px`);
    super.measure();
  }

  heights() {
    return [Math.max(1, this.run.ranks), 0];
  }

  yTicks() {
    const ranks = Math.max(1, this.run.ranks);
    const skip = Math.max(1, Math.ceil(ranks / Math.max(1, Math.floor((this.height - 38) / 13))));
    return Array.from({ length: ranks }, (_, rank) => rank).filter((rank) => rank % skip === 0).map((rank) => ({ at: rank + 0.5, text: skip === 1 && ranks <= 16 ? `rank ${rank}` : String(rank) }));
  }

  color(cell, rank) {
    if (!Number.isFinite(cell.own[rank])) return this.colors.grid;
    const dark = this.page.theme.name === "dark";
    if (this.comparing) {
      const part = clamp(cell.above[rank] / SLOWER, -1, 1);
      const far = part >= 0 ? (dark ? [255, 138, 76] : [196, 62, 10]) : dark ? [70, 150, 220] : [43, 120, 185];
      const near = dark ? [38, 44, 52] : [238, 240, 243];
      return blend(near, far, Math.abs(part));
    }
    const part = clamp((cell.own[rank] - this.scale[0]) / (this.scale[1] - this.scale[0] || 1), 0, 1);
    return dark ? blend([34, 42, 54], [255, 196, 110], part) : blend([232, 239, 246], [12, 58, 105], part);
  }

  paint(brush) {
    const cells = this.cells().filter((cell) => cell.high > this.x[0] && cell.low < this.x[1]);
    const ranks = this.run.ranks;
    const height = (this.bottom - this.top) / Math.max(1, ranks);
    const gap = height > 8 ? 1 : 0;
    for (const cell of this.perPixel(cells)) {
      const left = this.toX(cell.low);
      const width = Math.max(1, this.toX(cell.high) - left);
      for (let rank = 0; rank < ranks; rank++) {
        brush.fillStyle = this.color(cell, rank);
        brush.fillRect(left, this.top + rank * height, width + 0.4, height - gap);
      }
    }
  }

  /** More intervals than pixels: the slowest of those on one place is shown, for it is what one looks for. */
  perPixel(cells) {
    const most = Math.max(1, Math.floor(this.right - this.left));
    if (cells.length <= most) return cells;
    const size = Math.ceil(cells.length / most);
    const result = [];
    for (let from = 0; from < cells.length; from += size) {
      const some = cells.slice(from, from + size);
      const own = some[0].own.map((_, rank) => largest(some.map((cell) => cell.own[rank])));
      const above = own.map((_, rank) => largest(some.map((cell) => cell.above[rank])));
      result.push({ row: some[0].row, low: some[0].low, high: some[some.length - 1].high, own, above });
    }
    return result;
  }

  cellAt(where) {
    return this.cells().find((cell) => where >= cell.low && where <= cell.high) || null;
  }

  point(event) {
    const events = this.marksAt(event.offsetX);
    const cell = this.cellAt(this.fromX(event.offsetX));
    const rank = Math.floor((event.offsetY - this.top) / ((this.bottom - this.top) / Math.max(1, this.run.ranks)));
    if (events && event.offsetY < this.top) this.page.tip.show(event.clientX, event.clientY, eventLines(events));
    else if (cell && rank >= 0 && rank < this.run.ranks) this.page.tip.show(event.clientX, event.clientY, this.told(cell, rank));
    else this.page.tip.hide();
  }

  told(cell, rank) {
    const { row } = cell;
    const lines = [[`rank ${rank}`, `steps ${number(row.first, 9)} to ${number(row.last, 9)}`, ""]];
    if (!Number.isFinite(cell.own[rank])) return [...lines, ["", "has not told", ""]];
    const above = cell.above[rank];
    const compared = this.run.ranks > 1 ? `${share(Math.abs(above))} ${above >= 0 ? "slower" : "faster"} than the median` : "";
    lines.push(["", `${duration(cell.own[rank])} of its own for each step`, compared]);
    const parts = PHASES.filter((name) => row.phases?.[name]?.[rank] > 0).map((name) => `${name} ${duration(row.phases[name][rank] / row.steps)}`);
    lines.push(["", parts.join(" \u00b7 "), ""]);
    if (row.slowest?.[rank] && this.run.ranks > 1) lines.push(["", `the last of all in ${number(row.slowest[rank])} of ${counted(row.steps, "step")}`, ""]);
    return lines;
  }

  readings(where) {
    const cell = where === null ? null : this.cellAt(where);
    if (!cell) return this.scaleItems();
    const slowest = cell.own.reduce((most, value, rank) => (value > (cell.own[most] ?? -1) ? rank : most), 0);
    return [
      { label: "median", text: duration(median(cell.own)) },
      { label: `slowest, rank ${slowest}`, text: duration(cell.own[slowest]) },
    ];
  }

  /** The legend of colours. */
  scaleItems() {
    const item = (color, label) => ({ label, text: "", color });
    const fake = (above) => this.color({ own: [1], above: [above] }, 0);
    if (this.comparing) return [item(fake(-SLOWER), `${share(SLOWER)} faster`), item(fake(0), "as the median"), item(fake(SLOWER / 2), `${share(SLOWER / 2)} slower`), item(fake(SLOWER), `${share(SLOWER)} slower`)];
    const middle = (this.scale[0] + this.scale[1]) / 2;
    return [this.scale[0], middle, this.scale[1]].map((own) => item(this.color({ own: [own], above: [0] }, 0), duration(own)));
  }

  summary() {
    const { ranks, steps } = this.run.sums;
    const parts = ranks.slice(0, 16).map((one, rank) => `rank ${rank} ${duration(one.own / one.steps)} for each step, last in ${share(one.slowest / steps)} of steps`);
    return `${this.run.label}, time of its own for each rank: ${parts.join("; ")}.`;
  }

  rows(range) {
    const cells = this.cells().filter((cell) => cell.high > range[0] && cell.low < range[1]);
    const skip = Math.max(1, Math.ceil(cells.length / ROWS));
    const shown = cells.filter((_, at) => at % skip === 0);
    const ranks = Array.from({ length: Math.min(64, this.run.ranks) }, (_, rank) => rank);
    return {
      head: ["Steps", ...ranks.map((rank) => `rank ${rank}`)],
      rows: shown.map((cell) => [`${cell.row.first}\u2013${cell.row.last}`, ...ranks.map((rank) => duration(cell.own[rank]))]),
      note: `${counted(shown.length, "interval")} of ${cells.length}; time of its own for each step, without communication and waiting.`,
    };
  }

  model() {
    return { ...super.model(), ranks: this.run.ranks, cells: this.cells().length, relative: this.comparing };
  }
}

function blend(from, to, part) {
  return `rgb(${from.map((one, at) => Math.round(one + (to[at] - one) * part)).join(",")})`;
}
