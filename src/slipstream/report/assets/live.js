// The page while a run goes on: views from the server, news as server-sent events, detail when one zooms in, and a word when the connection is lost.

class Live {
  constructor(page) {
    this.page = page;
    this.points = 2000;
    this.asked = 0;
    page.state.listen((changed) => {
      if (changed.includes("range") || changed.includes("axis")) this.later();
    });
  }

  async start() {
    await this.load();
    this.listen();
  }

  async load() {
    try {
      const runs = await this.ask("/api/runs");
      const names = (Array.isArray(runs) ? runs : runs.runs || []).map((one) => (typeof one === "string" ? one : one.name));
      const views = await Promise.all(names.map((name) => this.view(name)));
      this.page.replace(views);
      this.say("live", "Live");
    } catch {
      this.say("lost", "Connection lost; trying again");
    }
  }

  async ask(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  view(name, low = null, high = null) {
    const query = new URLSearchParams({ run: name, points: String(this.points) });
    if (low !== null) query.set("low", String(low));
    if (high !== null) query.set("high", String(high));
    return this.ask(`/api/view?${query}`);
  }

  listen() {
    const source = new EventSource("/api/events");
    let lost = false;
    source.addEventListener("open", () => {
      if (lost) this.load(); // what was missed in between
      lost = false;
      this.say("live", "Live");
    });
    source.addEventListener("error", () => {
      lost = true;
      this.say("lost", "Connection lost; trying again");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.listen(), 2000);
    });
    source.addEventListener("update", (event) => this.update(JSON.parse(event.data)));
  }

  update(news) {
    const { page } = this;
    const run = page.runs.find((one) => one.name === news.run);
    if (!run || news.reload) {
      this.load();
      return;
    }
    const fresh = run.append(news);
    if (fresh) page.build();
    else page.news();
    if (page.state.range) this.later();
  }

  say(kind, text) {
    const { status } = this.page;
    status.hidden = false;
    status.className = `status ${kind}`;
    if (status.textContent !== text) status.textContent = text;
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.detail(), 150);
  }

  /** More points of the part that is shown; what comes too late is not taken. */
  async detail() {
    const { page } = this;
    const { range, axis } = page.state;
    const turn = ++this.asked;
    if (!range) {
      for (const run of page.runs) run.detail = null;
      page.news();
      return;
    }
    for (const run of page.runs.filter((one) => one.shown)) {
      const [low, high] = axis === "step" ? range : range.map((at) => run.stepAt(axis === "wall" ? at : at + run.started));
      if (!Number.isFinite(low) || !Number.isFinite(high)) continue;
      const room = Math.max(1, (high - low) * 0.1);
      try {
        const view = await this.view(run.name, Math.floor(low - room), Math.ceil(high + room));
        if (turn !== this.asked) return;
        run.detail = { series: new Map(Object.entries(view.series || {}).map(([name, given]) => [name, new Series(given)])) };
      } catch {
        return; // the word about the connection comes from the stream of events
      }
    }
    page.news();
  }
}
