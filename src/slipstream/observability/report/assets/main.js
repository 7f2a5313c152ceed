// The page: builds its sections from the views, and redraws what is in sight when something changes.

class Page {
  constructor(given) {
    this.live = given.live;
    this.leftOut = given.left_out || []; // folders that look like runs: [path, why]
    this.crowded = false;
    this.state = new State();
    this.theme = new Theme();
    this.tip = new Tip();
    this.runs = given.views.map((view, place) => new Run(view, place));
    this.spoken = make("div", { class: "unseen", "aria-live": "polite" });
    this.body = make("main", { id: "main" });
    document.body.append(
      make("a", { class: "skip", href: "#main" }, "Skip to the charts"),
      header(this, given.title),
      controls(this),
      this.body,
      make("p", { class: "unseen", id: "keys" }, "With the keyboard: left and right move the cross-hair, with shift they move the view, plus and minus zoom, 0 shows everything, escape hides the cross-hair."),
      this.spoken,
      make("footer", {}, given.made ? `Made ${moment(given.made)} by Slipstream ${given.version}. ` : `Slipstream ${given.version}. `, "In a chart: drag to zoom, double click for everything; with the keyboard \u2190 \u2192, shift \u2190 \u2192, +, \u2212, 0."),
    );
    this.sight = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "200px" });
    this.plots = [];
    this.build();
    this.state.listen((changed) => this.changed(changed));
    this.theme.changed = () => this.build();
    this.watchSize();
  }

  /** Everything below the controls, anew: for other runs, new names, other colours. What was open or large stays so. */
  build() {
    const kept = new Map(this.plots.map((plot) => [plot.name, { large: plot.element.classList.contains("large"), tabled: plot.tabled }]));
    const groups = new Map([...this.body.querySelectorAll("details.group")].map((one) => [one.dataset.group, one.open]));
    const focused = this.plots.find((plot) => plot.canvas && plot.canvas === document.activeElement)?.name;
    this.sight.disconnect();
    this.plots = [];
    this.refreshers = [];
    this.state.listeners = this.state.listeners.filter((listener) => !listener.temporary);
    this.pickFocus();
    const parts = [overview(this), curves(this), time(this), ranks(this), memory(this), eventList(this), media(this), configuration(this), environment(this), leftOut(this)].filter(Boolean);
    clear(this.body, parts);
    for (const group of this.body.querySelectorAll("details.group")) group.open = groups.get(group.dataset.group) ?? group.open;
    clear(this.links, parts.map((part) => make("a", { href: `#${part.id}` }, { runs: "Runs", time: "Time", config: "Config", events: "Events", media: "Media", skipped: "Left out" }[part.id] || part.querySelector("h2").textContent)));
    for (const refresh of this.refreshers) refresh();
    for (const plot of this.plots) {
      if (kept.get(plot.name)?.large) plot.element.classList.add("large");
      if (kept.get(plot.name)?.tabled || plot.name === focused) plot.furnish();
      if (kept.get(plot.name)?.tabled) plot.tools.lastChild.click();
      this.sight.observe(plot.element);
      if (plot.name === focused) plot.canvas.focus();
    }
    this.byElement = new Map(this.plots.map((plot) => [plot.element, plot]));
    this.filter(this.wanted || "");
    this.fitting();
    if (!this.plots.length) this.drawn();
  }

  add(plot) {
    this.plots.push(plot);
    return plot;
  }

  pickFocus() {
    const usable = this.runs.filter((run) => run.ledger.length);
    if (!usable.some((run) => run.place === this.state.focus)) this.state.focus = usable.length ? usable[0].place : 0;
  }

  focused() {
    return this.runs[this.state.focus] || this.runs[0];
  }

  seen(entries) {
    for (const entry of entries) {
      const plot = this.byElement.get(entry.target);
      if (!plot) continue;
      plot.visible = entry.isIntersecting;
      if (plot.visible && plot.dirty) plot.drawNow();
      else if (!plot.visible && this.crowded) plot.rest();
    }
    this.drawn();
  }

  /** Marks, once, that what is in sight stands there. */
  drawn() {
    if (this.first) return;
    this.first = true;
    requestAnimationFrame(() => setTimeout(() => performance.mark("slipstream-drawn")));
  }

  changed(names) {
    if (names.length === 1 && names[0] === "hover") return this.soon("hover");
    if (names.includes("focus")) for (const refresh of this.refreshers) refresh();
    return this.soon("all");
  }

  /** One redraw for each frame, of what is in sight; the rest is drawn when it comes into sight. */
  soon(what) {
    if (what === "all") for (const plot of this.plots) plot.dirty = true;
    if (this.planned) return;
    this.planned = requestAnimationFrame(() => {
      this.planned = null;
      for (const plot of this.plots) {
        if (!plot.visible) continue;
        if (plot.dirty) plot.drawNow();
        else plot.drawOver();
      }
    });
  }

  news() {
    for (const refresh of this.refreshers) refresh();
    const cards = this.body.querySelector(".runs");
    if (!cards.contains(document.activeElement)) clear(cards, this.runs.map((run) => runCard(this, run)));
    this.soon("all");
  }

  replace(views) {
    const before = new Map(this.runs.map((run) => [run.name, run]));
    const focused = this.runs[this.state.focus]?.name;
    this.runs = views.map((view, place) => new Run(view, place));
    const known = this.runs.filter((run) => before.has(run.name));
    const taken = new Set(known.map((run) => before.get(run.name).color));
    for (const run of this.runs) {
      const same = before.get(run.name);
      run.shown = same ? same.shown : true;
      run.color = 0;
      while (!same && taken.has(run.color)) run.color += 1;
      if (same) run.color = same.color;
      taken.add(run.color);
    }
    this.state.focus = Math.max(0, this.runs.findIndex((run) => run.name === focused));
    if (this.runs.length === 1) document.title = this.heading.textContent = visible(this.runs[0].label);
    this.build();
  }

  show(run, shown) {
    run.shown = shown;
    for (const card of this.body.querySelectorAll(".run")) card.classList.toggle("hidden-run", !this.runs.find((one) => one.label === card.dataset.run).shown);
    for (const box of this.body.querySelectorAll(".run input")) box.checked = this.runs.find((one) => one.label === box.closest(".run").dataset.run).shown;
    for (const refresh of this.refreshers) refresh();
    this.soon("all");
  }

  only(wanted) {
    for (const run of this.runs) run.shown = run === wanted;
    if (wanted.ledger.length) this.state.set({ focus: wanted.place });
    this.show(wanted, true);
  }

  showAll(shown) {
    for (const run of this.runs) run.shown = shown;
    if (this.runs.length) this.show(this.runs[0], shown);
  }

  filter(text) {
    this.wanted = text;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const plot of this.plots) {
      if (!(plot instanceof Lines) || !plot.logged) continue;
      plot.element.hidden = !words.every((word) => plot.name.toLowerCase().includes(word));
    }
    for (const group of this.body.querySelectorAll("details.group")) {
      group.hidden = !group.querySelector("figure:not([hidden])");
      if (words.length && !group.hidden) group.open = true; // what one looks for is not to be hidden
    }
  }

  say(text) {
    this.spoken.textContent = text;
  }

  watchSize() {
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth !== width) {
        width = innerWidth;
        this.fitting();
        this.soon("all");
      }
    });
    addEventListener("beforeprint", () => {
      for (const plot of this.plots.slice(0, 2 * MANY)) plot.drawNow();
    });
  }

  /** The bar of controls stays in sight below the top; anchors keep clear of both. */
  fitting() {
    const bar = document.querySelector(".controls");
    document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`);
  }
}

const given = JSON.parse(document.getElementById("data").textContent);
const page = new Page(given);
window.slipstream = { page, model: (name) => page.plots.find((plot) => plot.name === name)?.model() };
if (given.live) new Live(page).start();
