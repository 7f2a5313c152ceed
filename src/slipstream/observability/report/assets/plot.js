// What every chart has in common: a canvas with axes, a zoom that all charts share, a cross-hair, marks of events, the keyboard, and its data as a table.

const MARGIN = { top: 16, right: 14, bottom: 22 };
const ROWS = 200; // of the data as a table
const WIDEST = 1200; // columns that are worth drawing

class Plot {
  /** `page` has state, theme, runs, tip, status. A kind of chart fills in `extent`, `heights`, `paint`, `readings`, `summary` and `rows`. */
  constructor(page, title, { name = title, format = number, kind = "" } = {}) {
    Object.assign(this, { page, title, name, format, dirty: true, visible: false, tabled: false, marks: [], remark: "" });
    this.element = make("figure", { class: `chart ${kind}`, "data-name": name }, make("figcaption", {}, make("h4", {}, title)), make("div", { class: "plot" }));
    if (!page.crowded) this.furnish();
  }

  /** What a chart needs to be drawn and used; where there are very many, each gets it when it first comes into sight. */
  furnish() {
    const { name, title } = this;
    if (this.canvas) return;
    this.canvas = make("canvas", { role: "img", tabindex: "0", "aria-describedby": "keys", "aria-label": name });
    this.overlay = make("canvas", { class: "overlay", "aria-hidden": "true" });
    this.legend = make("div", { class: "legend", "aria-hidden": "true" });
    this.table = make("div", { class: "data", hidden: true });
    this.tools = make("div", { class: "tools" }, this.larger(), this.tabling());
    clear(this.element, make("figcaption", {}, make("h4", {}, title), this.tools), this.legend, make("div", { class: "plot" }, this.canvas, this.overlay), this.table);
    this.listen();
  }

  /** Gives back the memory of what is drawn; it is drawn again when it comes into sight. */
  rest() {
    if (!this.canvas) return;
    for (const canvas of [this.canvas, this.overlay]) canvas.width = canvas.height = 0;
    this.dirty = true;
  }

  get state() {
    return this.page.state;
  }

  get colors() {
    return this.page.theme.colors;
  }

  button(label, drawing, press) {
    return make("button", { type: "button", class: "quiet", title: label, "aria-label": `${label}: ${this.name}`, "aria-pressed": "false", onclick: press }, icon(drawing));
  }

  larger() {
    const button = this.button("Larger", ICONS.larger, () => {
      const large = this.element.classList.toggle("large");
      button.setAttribute("aria-pressed", String(large));
      this.draw();
    });
    return button;
  }

  tabling() {
    const button = this.button("Data as table", ICONS.table, () => {
      this.tabled = !this.tabled;
      this.table.hidden = !this.tabled;
      button.setAttribute("aria-pressed", String(this.tabled));
      this.fillTable();
    });
    return button;
  }

  // ---- size and scales

  measure() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    for (const canvas of [this.canvas, this.overlay]) {
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
    }
    Object.assign(this, { width, height, ratio });
  }

  brush(canvas) {
    const brush = canvas.getContext("2d");
    brush.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    brush.clearRect(0, 0, this.width, this.height);
    brush.font = this.page.theme.font;
    return brush;
  }

  /** The x range that is shown: the shared zoom, or everything. */
  span() {
    if (this.state.range) return this.state.range;
    const [low, high] = this.extent(this.state.axis);
    if (!(high >= low)) return [0, 1];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  toX(value) {
    return this.left + ((value - this.x[0]) / (this.x[1] - this.x[0])) * (this.right - this.left);
  }

  fromX(pixel) {
    return this.x[0] + ((pixel - this.left) / (this.right - this.left)) * (this.x[1] - this.x[0]);
  }

  toY(value) {
    const [low, high] = this.y;
    const part = this.logarithmic ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return this.bottom - part * (this.bottom - this.top);
  }

  // ---- drawing

  draw() {
    this.dirty = true;
    if (this.visible) this.drawNow();
  }

  drawNow() {
    this.dirty = false;
    this.furnish();
    this.measure();
    if (!this.width) return;
    const brush = this.brush(this.canvas);
    this.x = this.span();
    this.logarithmic = false;
    this.y = this.heights(this.x);
    const ticks = this.yTicks();
    this.left = Math.ceil(Math.max(26, ...ticks.map((tick) => brush.measureText(tick.text).width + 10)));
    this.right = this.width - MARGIN.right;
    this.top = MARGIN.top;
    this.bottom = this.height - MARGIN.bottom;
    this.grid(brush, ticks);
    brush.save();
    brush.beginPath();
    brush.rect(this.left, 0, this.right - this.left, this.bottom + 1);
    brush.clip();
    this.marks = this.state.marks ? gathered(this) : [];
    this.paint(brush);
    if (!this.marksBehind) this.drawMarks(brush);
    brush.restore();
    for (const mark of this.marks) glyph(brush, looks(mark).shape, mark.x, this.top - 9, this.colors[looks(mark).tone], this.colors.card);
    this.over(brush);
    this.canvas.setAttribute("aria-label", visible(`${this.name}. ${this.summary()}`));
    this.drawOver();
    if (this.tabled) this.fillTable();
  }

  yTicks() {
    const count = Math.max(2, Math.round((this.height - 40) / 38));
    return this.logarithmic ? logTicks(this.y[0], this.y[1], count) : linearTicks(this.y[0], this.y[1], count);
  }

  grid(brush, ticks) {
    brush.textBaseline = "middle";
    brush.textAlign = "right";
    brush.lineWidth = 1;
    for (const tick of ticks) {
      const at = Math.round(this.toY(tick.at)) + 0.5;
      if (at < this.top - 1 || at > this.bottom + 1) continue;
      this.rule(brush, this.left, at, this.right, at, this.colors.grid);
      brush.fillStyle = this.colors.soft;
      brush.fillText(tick.text, this.left - 6, at);
    }
    this.rule(brush, this.left, this.bottom + 0.5, this.right, this.bottom + 0.5, this.colors.faint);
    brush.textBaseline = "alphabetic";
    brush.textAlign = "center";
    brush.fillStyle = this.colors.soft;
    let free = -Infinity;
    for (const tick of ticksAlong(this.state.axis, this.x[0], this.x[1], Math.max(2, Math.floor((this.right - this.left) / 80)))) {
      const half = brush.measureText(tick.text).width / 2;
      const at = clamp(this.toX(tick.at), half + 2, this.width - half - 2);
      if (at - half < free) continue;
      this.rule(brush, this.toX(tick.at), this.bottom + 1, this.toX(tick.at), this.bottom + 4, this.colors.faint);
      brush.fillText(tick.text, at, this.height - 6);
      free = at + half + 8;
    }
  }

  rule(brush, fromX, fromY, toX, toY, color) {
    brush.strokeStyle = color;
    brush.beginPath();
    brush.moveTo(fromX, fromY);
    brush.lineTo(toX, toY);
    brush.stroke();
  }

  over() {}

  /** The cross-hair, a selection under way, and the values where the cross-hair stands. */
  drawOver() {
    if (!this.width || this.x === undefined) return;
    const brush = this.brush(this.overlay);
    const { hover } = this.state;
    const inside = hover !== null && hover >= this.x[0] && hover <= this.x[1];
    if (inside) {
      this.rule(brush, Math.round(this.toX(hover)) + 0.5, this.top - 6, Math.round(this.toX(hover)) + 0.5, this.bottom, this.colors.soft);
    }
    const readings = this.readings(inside ? hover : null);
    for (const one of inside ? readings : []) if (one.at) this.dot(brush, this.toX(one.at[0]), this.toY(one.at[1]), one.color);
    if (this.pulled) {
      const [from, to] = this.pulled;
      brush.globalAlpha = 0.16;
      brush.fillStyle = this.colors.accent;
      brush.fillRect(Math.min(from, to), this.top, Math.abs(to - from), this.bottom - this.top);
      brush.globalAlpha = 1;
      for (const at of this.pulled) this.rule(brush, at, this.top, at, this.bottom, this.colors.accent);
    }
    this.fillLegend(readings, [this.remark, inside ? this.words(hover) : ""].filter(Boolean).join(" \u00b7 "));
  }

  dot(brush, x, y, color) {
    if (!Number.isFinite(y) || y < this.top - 3 || y > this.bottom + 3) return;
    brush.beginPath();
    brush.arc(x, y, 3.5, 0, 7);
    brush.fillStyle = color;
    brush.fill();
    brush.lineWidth = 1.5;
    brush.strokeStyle = this.colors.card;
    brush.stroke();
    brush.lineWidth = 1;
  }

  fillLegend(readings, where) {
    if (readings.length > 9) readings = [...readings.filter((one) => one.at !== null), ...readings.filter((one) => one.at === null)]; // those that say something first
    const items = readings.slice(0, 9).map((one) => make("span", { class: "item" }, one.color ? swatch(one.color, one.dash) : null, make("span", { class: "label" }, one.label), make("b", {}, one.text)));
    if (readings.length > 9) items.push(make("span", { class: "item" }, `and ${readings.length - 9} more`));
    clear(this.legend, items, where ? make("span", { class: "where" }, where) : null);
  }

  // ---- events on the axis

  drawMarks(brush) {
    for (const mark of this.marks) {
      const { tone, shape } = looks(mark);
      const color = this.colors[tone];
      brush.globalAlpha = 0.45;
      brush.setLineDash(tone === "good" ? [2, 3] : shape === "turn" ? [] : [4, 3]);
      this.rule(brush, Math.round(mark.x) + 0.5, this.top - 4, Math.round(mark.x) + 0.5, this.bottom, color);
      brush.setLineDash([]);
      brush.globalAlpha = 1;
    }
  }

  /** What the marks near a place say, or null. */
  marksAt(pixel) {
    const near = this.marks.filter((mark) => Math.abs(mark.x - pixel) <= 5);
    return near.length ? near.flatMap((mark) => mark.events) : null;
  }

  // ---- the pointer and the keyboard

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.pull(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => this.forget());
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", () => this.state.set({ range: null }));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.leave());
  }

  pull(event) {
    if (event.button !== 0 || this.x === undefined) return;
    this.canvas.setPointerCapture(event.pointerId);
    const at = clamp(event.offsetX, this.left, this.right);
    this.pulled = [at, at];
  }

  move(event) {
    if (this.x === undefined) return;
    const at = clamp(event.offsetX, this.left, this.right);
    if (this.pulled) this.pulled[1] = at;
    this.state.set({ hover: this.fromX(at) });
    if (this.pulled) this.drawOver();
    this.point(event);
  }

  point(event) {
    const events = this.marksAt(event.offsetX);
    if (events) this.page.tip.show(event.clientX, event.clientY, eventLines(events));
    else this.page.tip.hide();
  }

  release() {
    const pulled = this.pulled;
    this.forget();
    if (!pulled || Math.abs(pulled[1] - pulled[0]) < 5) return;
    this.zoom(this.fromX(Math.min(...pulled)), this.fromX(Math.max(...pulled)));
  }

  forget() {
    this.pulled = null;
    this.drawOver();
  }

  leave() {
    this.page.tip.hide();
    this.state.set({ hover: null });
  }

  /** All charts go to this range; never beyond everything, never below what can be told apart. */
  zoom(low, high) {
    const [first, last] = this.extent(this.state.axis);
    const least = Math.max((last - first) * 1e-6, this.state.axis === "step" ? 1 : 1e-3);
    if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
    const whole = low <= first && high >= last;
    this.state.set({ range: whole ? null : [Math.max(low, first), Math.min(high, last)] });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.x === undefined) return;
    const [low, high] = this.x;
    const middle = this.state.hover ?? (low + high) / 2;
    const pan = (part) => this.pan(part * (high - low));
    const scale = (factor) => this.zoom(middle - (middle - low) * factor, middle + (high - middle) * factor);
    const does = {
      "+": () => scale(0.5),
      "=": () => scale(0.5),
      "-": () => scale(2),
      "_": () => scale(2),
      0: () => this.state.set({ range: null }),
      ArrowLeft: () => (event.shiftKey ? pan(-0.25) : this.walk(-1)),
      ArrowRight: () => (event.shiftKey ? pan(0.25) : this.walk(1)),
      Home: () => this.walkTo(low),
      End: () => this.walkTo(high),
      Escape: () => this.leave(),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }

  pan(distance) {
    const [low, high] = this.x;
    const [first, last] = this.extent(this.state.axis);
    const moved = clamp(distance, Math.min(0, first - low), Math.max(0, last - high));
    if (moved) this.zoom(low + moved, high + moved);
  }

  /** The cross-hair goes on by one point that can be seen; at the edge of a zoomed chart, the chart follows. */
  walk(direction) {
    const [low, high] = this.x;
    const from = this.state.hover ?? (direction > 0 ? low : high) - (direction * (high - low)) / 50;
    const to = this.following(from, direction, (high - low) / 50);
    if (to > high || to < low) this.pan((direction * (high - low)) / 4);
    this.walkTo(clamp(to, ...this.x));
  }

  following(from, direction, distance) {
    return from + direction * distance;
  }

  walkTo(value) {
    this.state.set({ hover: value });
    const said = this.readings(value).slice(0, 6).map((one) => `${one.label} ${one.text}`);
    const events = this.marksAt(this.toX(value));
    this.page.say([this.words(value), ...said, ...(events || []).slice(0, 3).map((one) => `${one.kind}: ${one.text}`)].join(", "));
  }

  // ---- words

  /** A place on the axis; a whole step where all steps are whole. */
  words(value) {
    return along(this.state.axis, this.state.axis === "step" && this.page.runs.every((run) => run.whole) ? Math.round(value) : value);
  }

  fillTable() {
    if (!this.tabled) return;
    const { head, rows, note } = this.rows(this.x || this.span());
    const kinds = head.map(() => "number");
    clear(this.table, scrolling(tableOf(head, rows, kinds, `Data of ${this.name}`), `Data of ${this.name}`), make("p", { class: "note" }, note));
  }

  /** For tests and the console. */
  model() {
    return { name: this.name, x: this.x, y: this.y, log: this.logarithmic, marks: this.marks.map((mark) => ({ x: mark.x, kind: mark.kind, count: mark.events.length })) };
  }
}
