// Where the time went: the ledger as areas, its sums, what it means; samples and tokens in a second; ranks; memory.

const MEANINGS = {
  forward: "the model, forwards",
  backward: "the model, backwards",
  optimizer: "optimizer, clipping, zeroing",
  data: "waiting for the next batch",
  communication: "exchange between ranks that nothing hides",
  waiting: "waiting for the slowest rank",
  checkpoint: "training stood still for a save",
  evaluation: "passes without a backward",
  other: "the rest of the loop",
};

/** One line each on what stands out, most important first; of the run in focus. */
function verdicts(run) {
  const { sums } = run;
  const part = (name) => (sums.phases[name] || 0) / (sums.all || NaN);
  const said = [];
  const exchange = part("communication") + part("waiting");
  if (run.ranks > 1) {
    const slowest = sums.ranks.reduce((most, one, rank) => (one.slowest > sums.ranks[most].slowest ? rank : most), 0);
    const often = sums.ranks[slowest].slowest / (sums.steps || NaN);
    said.push(`Exchange between ranks takes ${share(exchange, 2)} of the time: ${share(part("communication"), 2)} communication, ${share(part("waiting"), 2)} waiting for the slowest.`);
    if (often > 1.5 / run.ranks && part("waiting") > 0.03) said.push(`Rank ${slowest} was the last in ${share(often, 2)} of the steps: the others waited for it.`);
  }
  if (part("data") > 0.15) said.push(`The loop waits for data in ${share(part("data"), 2)} of the time: more workers in the loader may help.`);
  if (part("checkpoint") > 0.05) said.push(`Saving stops the training for ${share(part("checkpoint"), 2)} of the time: async saving may help.`);
  if (part("other") > 0.3) said.push(`${share(part("other"), 2)} of the time is spent in the script itself, outside of model, loader and optimizer.`);
  return said;
}

function totals(page) {
  const runs = page.runs.filter((run) => run.ledger.length);
  const names = PHASES.concat([...new Set(runs.flatMap((run) => Object.keys(run.sums.phases)))].filter((name) => !PHASES.includes(name)));
  const shown = names.filter((name) => runs.some((run) => run.sums.phases[name] > 0));
  const label = (name) => make("span", { class: "phase" }, swatch(page.theme.phase(name), "box"), name, make("span", { class: "meaning" }, MEANINGS[name] || ""));
  const columns_ = (run, name) => {
    const { sums } = run;
    return [duration(sums.phases[name] / (sums.steps || NaN)), share(sums.phases[name] / (sums.all || NaN))];
  };
  const head = ["Phase", ...runs.flatMap((run) => (runs.length > 1 ? [`${run.label}, a step`, "share"] : ["A step", "Share"]))];
  const rows = shown.map((name) => [label(name), ...runs.flatMap((run) => columns_(run, name))]);
  rows.push(Object.assign(["All", ...runs.flatMap((run) => [duration(run.sums.all / (run.sums.steps || NaN)), "100 %"])], { className: "sum" }));
  rows.push(["Samples in a second", ...runs.flatMap((run) => [run.sums.samples ? short(run.sums.samples / run.sums.seconds) : NOTHING, ""])]);
  return scrolling(tableOf(head, rows, ["text", ...runs.flatMap(() => ["number", "number"])], "Sums of the ledger"), "Sums of the ledger");
}

/** Which run the areas, ranks and memory are of. */
function focusing(page) {
  const runs = page.runs.filter((run) => run.ledger.length);
  if (runs.length < 2) return null;
  const select = make("select", { onchange: (event) => page.state.set({ focus: Number(event.target.value) }) }, runs.map((run) => make("option", { value: String(run.place), selected: run.place === page.state.focus }, run.label)));
  const follow = (changed) => {
    if (changed.includes("focus")) select.value = String(page.state.focus);
  };
  follow.temporary = true; // as long as this select is on the page
  page.state.listen(follow);
  return make("label", { class: "field" }, make("span", {}, "Run"), select);
}

function rates(page) {
  const per = (field) => (run, axis) => rateLine(run, axis, field);
  const kinds = [["samples", "samples per second", short], ["tokens", "tokens per second", short], ["mfu", "share of the FLOPs the machine could do", share]];
  return kinds
    .filter(([field]) => page.runs.some((run) => run.ledger.some((row) => Number.isFinite(row[field]))))
    .map(([field, title, format]) => page.add(new Lines(page, title, per(field), { format, floor: 0 })).element);
}

/** A line through the intervals of the ledger; kept with the run until it changes. */
function ledgerLine(run, axis, key, value) {
  run.made ??= new Map();
  const place = `${key} ${axis}`;
  const kept = run.made.get(place);
  if (kept && kept.version === run.version) return kept.line;
  const rows = run.ledger.filter((row) => row.seconds > 0);
  const x = Float64Array.from(rows, (row) => (axis === "step" ? row.last : axis === "wall" ? row.time : row.time - run.started));
  const line = new Series({ steps: [], times: [], values: [] });
  Object.assign(line, { steps: x, times: x, values: Float64Array.from(rows, value) });
  const made = line.ordered("step", 0);
  run.made.set(place, { version: run.version, line: made });
  return made;
}

/** A rate over the intervals. What came after the last step (a last checkpoint) has no steps: it has no rate, rather than one of 0. */
function rateLine(run, axis, field) {
  if (!run.ledger.some((row) => Number.isFinite(row[field]))) return null;
  return ledgerLine(run, axis, field, (row) => (field === "mfu" ? row.mfu ?? NaN : row.steps ? (row[field] || 0) / row.seconds : NaN));
}

function memoryLine(run, axis, place) {
  if (!run.ledger.some((row) => row.memory?.[place])) return null;
  return ledgerLine(run, axis, `memory ${place}`, (row) => largest(row.memory?.[place]));
}

function time(page) {
  if (!page.runs.some((run) => run.ledger.length)) return null;
  const areas = page.add(new Areas(page, "Time of a step"));
  const words = make("ul", { class: "verdicts" });
  const sums = make("div");
  page.refreshers.push(() => {
    clear(words, verdicts(page.focused()).map((text) => make("li", {}, text)));
    clear(sums, totals(page));
  });
  const unit = choices("Height of the areas", [["step", "Seconds of a step"], ["share", "Share"]], page.state.perStep ? "step" : "share", (value) => page.state.set({ perStep: value === "step" }));
  return section("time", "Where the time went", make("div", { class: "row" }, focusing(page), unit), words, areas.element, sums, make("div", { class: "charts" }, rates(page)));
}

function ranks(page) {
  if (!page.runs.some((run) => run.ledger.length)) return null;
  const heat = page.add(new Heat(page, "Work of each rank, without waiting"));
  const table = make("div");
  page.refreshers.push(() => clear(table, rankTable(page.focused())));
  const scale = choices("Colours of the ranks", [["median", "Against the median"], ["seconds", "Seconds of a step"]], page.state.relative ? "median" : "seconds", (value) => page.state.set({ relative: value === "median" }));
  return section("ranks", "Ranks", make("div", { class: "row" }, focusing(page), scale), heat.element, make("details", {}, make("summary", {}, "Sums of each rank"), table));
}

function rankTable(run) {
  const { sums } = run;
  const device = sums.ranks.some((one) => Number.isFinite(one.device));
  const head = ["Rank", "Own work, a step", "Waiting, a step", "Last of all in", "Memory", ...(device ? ["Device memory"] : [])];
  const rows = sums.ranks.map((one, rank) => [String(rank), duration(one.own / one.steps), duration(one.waiting / one.steps), run.ranks > 1 ? `${share(one.slowest / sums.steps)} of steps` : NOTHING, bytes(one.host), ...(device ? [bytes(one.device)] : [])]);
  return scrolling(tableOf(head, rows, head.map(() => "number"), "Sums of each rank"), "Sums of each rank");
}

function memory(page) {
  const places = [["host", "memory of the process that has most"], ["device", "device memory of the rank that has most"]];
  const charts = places
    .filter(([place]) => page.runs.some((run) => run.ledger.some((row) => row.memory?.[place])))
    .map(([place, title]) => page.add(new Lines(page, title, (run, axis) => memoryLine(run, axis, place), { format: bytes, floor: 0, plain: true })).element);
  return charts.length ? section("memory", "Memory", make("p", { class: "note" }, "High-water marks of each interval; the largest of all ranks. The sums of each rank stand with the ranks."), make("div", { class: "charts" }, charts)) : null;
}
