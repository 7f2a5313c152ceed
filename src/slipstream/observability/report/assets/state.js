// What the reader has chosen, colours included. Charts listen; nothing else is shared between them.

class State {
  constructor() {
    this.axis = "step";
    this.smoothing = 0;
    this.log = false;
    this.marks = true;
    this.range = null; // what all charts are zoomed to, on the axis chosen
    this.hover = null; // where the cross-hair stands
    this.focus = 0; // the run whose ledger, ranks and memory are shown
    this.perStep = true;
    this.relative = true; // the heat map compares ranks with each other
    this.listeners = [];
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  set(changes) {
    const changed = Object.keys(changes).filter((name) => this[name] !== changes[name]);
    if (!changed.length) return;
    Object.assign(this, changes);
    if (changed.includes("axis")) Object.assign(this, { range: null, hover: null });
    for (const listener of this.listeners) listener(changed);
  }

  /** Says that data have changed, though no choice has. */
  tell(what) {
    for (const listener of this.listeners) listener([what]);
  }
}

// Told apart by lightness as well as by hue, so that they differ for people who see few hues; beyond the eighth, lines are dashed.
const RUN_COLORS = {
  light: ["#0b6fb8", "#d1540a", "#11805f", "#a33b86", "#8a6a00", "#3a3f9e", "#b3263a", "#4d5560"],
  dark: ["#5cb3f5", "#ff9a4d", "#3fd0a0", "#ee8fd2", "#e3c23c", "#a3a8ff", "#ff7d8a", "#b6bfca"],
};
const PHASE_COLORS = {
  light: { forward: "#2f7fc1", backward: "#12507f", optimizer: "#7fb8de", data: "#e8b53a", communication: "#e07b2c", waiting: "#b5301c", checkpoint: "#7d5fb2", evaluation: "#4aa88a", other: "#c3c8cf" },
  dark: { forward: "#4a98da", backward: "#2566a0", optimizer: "#9accf0", data: "#e9bd4f", communication: "#e58a42", waiting: "#d4513b", checkpoint: "#9a80d0", evaluation: "#53b899", other: "#59616b" },
};
const MARKS = {
  start: { shape: "line", tone: "neutral", word: "start" },
  restart: { shape: "turn", tone: "strong", word: "restart" },
  restore: { shape: "turn", tone: "good", word: "restored" },
  checkpoint: { shape: "flag", tone: "good", word: "checkpoint" },
  guard: { shape: "diamond", tone: "bad", word: "guard" },
  warning: { shape: "triangle", tone: "bad", word: "warning" },
  memory: { shape: "square", tone: "bad", word: "out of memory" },
  trace: { shape: "circle", tone: "neutral", word: "trace" },
  end: { shape: "line", tone: "neutral", word: "end" },
};

/** The colours of the page as it is now: light or dark. */
class Theme {
  constructor() {
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", () => this.apply());
    matchMedia("print").addEventListener("change", () => this.apply());
    this.chosen = this.remembered();
    this.changed = () => {};
    this.apply();
  }

  remembered() {
    try {
      return localStorage.getItem("slipstream-theme");
    } catch {
      return null; // a page opened from a file may have no memory
    }
  }

  get dark() {
    return !matchMedia("print").matches && (this.chosen ? this.chosen === "dark" : this.system.matches);
  }

  flip() {
    this.chosen = this.dark ? "light" : "dark";
    try {
      localStorage.setItem("slipstream-theme", this.chosen);
    } catch {
      // not remembered, then
    }
    this.apply();
  }

  apply() {
    this.name = this.dark ? "dark" : "light";
    document.documentElement.dataset.theme = this.name;
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colors = Object.fromEntries(["page", "card", "ink", "soft", "faint", "grid", "accent", "bad", "good", "strong", "neutral"].map((name) => [name, read(name)]));
    this.font = `11px ${read("font")}`;
    this.changed?.();
  }

  run(run) {
    const palette = RUN_COLORS[this.name];
    return palette[run.color % palette.length];
  }

  dash(run) {
    return [[], [6, 3], [2, 3], [8, 3, 2, 3]][Math.floor(run.color / RUN_COLORS.light.length) % 4];
  }

  /** The class of a swatch whose line is dashed. */
  dashed(run) {
    const kind = Math.floor(run.color / RUN_COLORS.light.length) % 4;
    return kind ? `dash-${kind}` : "";
  }

  phase(name) {
    return PHASE_COLORS[this.name][name] || PHASE_COLORS[this.name].other;
  }
}
