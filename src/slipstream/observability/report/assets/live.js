// The page while a run goes on: views from the server, news as server-sent events, detail when one zooms in, and a word when the connection is lost.
// Views and messages are numbered (`at`): a view holds all messages up to its number, so none is lost or taken twice between the two.

class Live {
  constructor(page) {
    Object.assign(this, { page, points: 2000, asked: 0, loading: false, waiting: [], names: null });
    page.state.listen((changed) => {
      if (changed.includes("range") || changed.includes("axis")) this.later();
    });
  }

  /** The stream comes first: what it tells while the views are on their way is kept for after them. */
  start() {
    this.say("waiting", "Connecting");
    const source = new EventSource("/api/events");
    source.addEventListener("open", () => this.load());
    source.addEventListener("error", () => {
      this.say("lost", "Connection lost; trying again");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.start(), 2000);
    });
    source.addEventListener("update", (event) => this.update(JSON.parse(event.data)));
    source.addEventListener("runs", (event) => this.listed(JSON.parse(event.data)));
  }

  async load() {
    if (this.loading) return;
    this.loading = true;
    try {
      const names = (await this.ask("/api/runs")).map((one) => one.name);
      const views = await Promise.all(names.map((name) => this.view(name)));
      this.page.replace(views);
      const read = Math.min(1, ...views.map((view) => view.read ?? 1));
      if (read < 1) this.say("waiting", `Live; ${Math.floor(read * 100)} % read so far`);
      else this.say(...(names.length ? ["live", "Live"] : ["waiting", "Waiting for the first run"]));
      if (this.page.state.range) this.later();
      if (this.differs()) this.again(300);
    } catch {
      this.say("lost", "Connection lost; trying again");
      this.again(2000); // a run may have gone between the list and its view
    }
    this.loading = false;
    const waiting = this.waiting;
    this.waiting = [];
    for (const news of waiting) this.update(news);
  }

  async ask(path) {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  view(name, low = null, high = null, more = {}) {
    const query = new URLSearchParams({ run: name, points: String(this.points), ...more });
    if (low !== null) query.set("low", String(low));
    if (high !== null) query.set("high", String(high));
    return this.ask(`/api/view?${query}`);
  }

  /** One more run has begun, or one is gone. */
  listed(runs) {
    this.names = runs.map((one) => one.name);
    if (!this.loading && this.differs()) this.load();
  }

  differs() {
    const known = new Set(this.page.runs.map((one) => one.name));
    return this.names !== null && (this.names.length !== known.size || this.names.some((name) => !known.has(name)));
  }

  again(milliseconds) {
    clearTimeout(this.turn);
    this.turn = setTimeout(() => this.load(), milliseconds);
  }

  update(news) {
    const { page } = this;
    if (this.loading) {
      this.waiting.push(news);
      return;
    }
    const run = page.runs.find((one) => one.name === news.run);
    if (!run || news.at <= run.at) return;
    if (news.reload || news.at > run.at + 1) {
      this.load(); // a file was begun anew, or a message was missed
      return;
    }
    run.at = news.at;
    if (run.append(news)) page.build();
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
        const view = await this.view(run.name, Math.floor(low - room), Math.ceil(high + room), { only: "series" });
        if (turn !== this.asked) return;
        run.detail = { series: new Map(Object.entries(view.series || {}).map(([name, given]) => [name, new Series(given)])) };
      } catch {
        return; // the word about the connection comes from the stream of events
      }
    }
    page.news();
  }
}
