// The head of the page: the runs with their key figures, which are also the legend and the choice of runs; and the controls of all charts.

const STATES = { running: "running", finished: "finished", failed: "failed", killed: "failed", interrupted: "interrupted", ended: "interrupted" }; // and the looks of each

function figure(label, value, title = null) {
  return make("div", { class: "figure", title }, make("dt", {}, label), make("dd", {}, value));
}

function lastStep(run) {
  let most = NaN;
  for (const one of run.series.values()) if (one.steps.length) most = largest([most, largest(one.steps)]);
  return most;
}

/** Figures of one run: only those that are known. */
function figures(run) {
  const { sums, info } = run;
  const attempts = info.attempts || [];
  const world = attempts.length ? attempts[attempts.length - 1].world_size : run.ranks || null;
  const busy = sums.seconds || NaN;
  const troubles = run.events.filter((event) => ["guard", "warning", "memory"].includes(event.kind)).length;
  const found = [["Started", moment(info.started ?? run.started)], ["Took", duration(run.ended - run.started)]];
  if (world) found.push(["Processes", number(world)]);
  if (sums.steps) found.push(["Steps", number(sums.steps, 9)]);
  else if (Number.isFinite(lastStep(run))) found.push(["Last step logged", number(lastStep(run), 9)]);
  if (sums.samples) found.push(["Samples/s", short(sums.samples / busy)]);
  if (sums.tokens) found.push(["Tokens/s", short(sums.tokens / busy)]);
  const mfu = mean(run.ledger.map((row) => row.mfu ?? NaN));
  if (Number.isFinite(mfu)) found.push(["FLOPs used", share(mfu)]);
  const memory = largest(sums.ranks.map((one) => largest([one.device])));
  const host = largest(sums.ranks.map((one) => one.host));
  if (Number.isFinite(memory)) found.push(["Device memory", bytes(memory)]);
  else if (Number.isFinite(host)) found.push(["Memory", bytes(host)]);
  if (attempts.length > 1) found.push(["Restarts", number(attempts.length - 1)]);
  found.push(["Warnings", number(troubles)]);
  return found;
}

function runCard(page, run) {
  const state = STATES[run.info.state] ? run.info.state : "unknown";
  const silent = Number.isFinite(run.info.silent) ? `, silent for ${run.info.silent < 3600 ? `${Math.round(run.info.silent / 60)} min` : duration(run.info.silent)}` : "";
  const title = `${run.label}${run.info.project ? `, project ${run.info.project}` : ""}`;
  const name = make("span", { class: "name" }, run.label);
  const several = page.runs.length > 1;
  const box = several ? make("input", { type: "checkbox", checked: run.shown, "aria-label": `Show ${title}`, onchange: (event) => page.show(run, event.target.checked) }) : null;
  const git = run.info.git;
  const versions = Object.entries(run.info.versions || {}).map(([what, version]) => `${what} ${version}`);
  const small = [run.info.project, git ? `${String(git.commit || "").slice(0, 9)}${git.branch ? ` on ${git.branch}` : ""}${git.dirty ? ", with changes" : ""}` : null, ...versions].filter(Boolean);
  return make(
    "article",
    { class: `run ${run.shown ? "" : "hidden-run"}`, "data-run": run.label },
    make("div", { class: "run-head" }, make(several ? "label" : "div", { class: "run-name" }, box, swatch(page.theme.run(run), page.theme.dashed(run)), name), make("span", { class: `state ${STATES[state] || ""}` }, `${state}${silent}`), several ? make("button", { type: "button", class: "quiet text", "aria-label": `Show ${run.label} alone`, onclick: () => page.only(run) }, "only") : null),
    make("dl", { class: "figures" }, figures(run).map(([label, value]) => figure(label, value))),
    small.length ? make("p", { class: "note" }, small.join(" \u00b7 ")) : null,
    Array.isArray(run.info.command) && run.info.command.length ? make("p", { class: "command" }, make("code", {}, run.info.command.join(" "))) : null,
  );
}

function overview(page) {
  const cards = make("div", { class: "runs" }, page.runs.map((run) => runCard(page, run)));
  const all = make("p", { class: "row" }, make("button", { type: "button", class: "quiet text", onclick: () => page.showAll(true) }, "Show all"), make("button", { type: "button", class: "quiet text", onclick: () => page.showAll(false) }, "Show none"));
  return section("runs", page.runs.length > 1 ? "Runs" : "The run", page.runs.length > 2 ? all : null, cards, leftOutNote(page));
}

/** The bar that stays in sight: what holds for all charts. */
function controls(page) {
  const { state } = page;
  const amount = make("output", { class: "amount" }, "0");
  const slider = make("input", {
    type: "range", id: "smoothing", min: "0", max: "0.995", step: "0.005", value: "0",
    oninput: (event) => {
      const weight = Number(event.target.value);
      amount.textContent = weight ? trimmed(weight.toFixed(3)) : "0";
      state.set({ smoothing: weight });
    },
  });
  const reset = make("button", { type: "button", class: "quiet text", id: "reset", disabled: true, onclick: () => state.set({ range: null }) }, icon(ICONS.reset), "Reset zoom");
  state.listen((changed) => {
    if (changed.includes("range") || changed.includes("axis")) reset.disabled = !state.range;
  });
  const filter = make("input", { type: "search", id: "filter", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: (event) => page.filter(event.target.value) });
  return make(
    "div",
    { class: "controls", role: "toolbar", "aria-label": "All charts" },
    choices("Horizontal axis", [["step", "Step"], ["relative", "Time"], ["wall", "Clock"]], state.axis, (axis) => state.set({ axis })),
    make("label", { class: "slider" }, make("span", {}, "Smoothing"), slider, amount),
    toggle("Log scale", state.log, (log) => state.set({ log })),
    toggle("Events", state.marks, (marks) => state.set({ marks })),
    reset,
    filter,
  );
}

function header(page, title) {
  const status = make("span", { class: "status", id: "status", role: "status", hidden: true });
  const themed = make("button", { type: "button", class: "quiet", id: "theme", title: "Light or dark", "aria-label": "Light or dark", onclick: () => page.theme.flip() }, icon(ICONS.theme));
  const links = make("nav", { "aria-label": "Sections", class: "sections" });
  page.links = links;
  page.status = status;
  page.heading = make("h1", {}, title);
  return make("header", { class: "top" }, page.heading, status, links, themed);
}
