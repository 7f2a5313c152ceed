// What is read rather than looked at: events, configuration with origins, environment, texts, tables, pictures.

function eventList(page) {
  const found = page.runs.flatMap((run) => run.events.map((event) => ({ ...event, run })));
  if (!found.length) return null;
  const kinds = [...new Set(found.map((event) => event.kind))].sort();
  const hidden = new Set();
  const list = make("div");
  const fill = () => {
    const events = page.runs.filter((run) => run.shown).flatMap((run) => run.events.map((event) => ({ ...event, run })));
    events.sort((one, other) => one.time - other.time);
    const shown = events.filter((event) => !hidden.has(event.kind));
    const last = shown.slice(-500);
    const rows = last.map((event) => Object.assign([moment(event.time), ...(page.runs.length > 1 ? [event.run.label] : []), Number.isFinite(event.step) ? number(event.step, 9) : "", Number.isFinite(event.rank) ? String(event.rank) : "", kindLabel(event.kind), eventText(event)], { className: `event ${(MARKS[event.kind] || MARKS.trace).tone}` }));
    const head = ["Time", ...(page.runs.length > 1 ? ["Run"] : []), "Step", "Rank", "Kind", "What"];
    const classes = ["text nowrap", ...(page.runs.length > 1 ? ["text"] : []), "number", "number", "text nowrap", "text wide-cell"];
    clear(list, scrolling(tableOf(head, rows, classes, "Events"), "Events"), shown.length > last.length ? make("p", { class: "note" }, `The last ${last.length} of ${shown.length}.`) : null);
  };
  const boxes = kinds.map((kind) => toggle(`${(MARKS[kind] || { word: kind }).word} (${found.filter((event) => event.kind === kind).length})`, true, (on) => {
    if (on) hidden.delete(kind);
    else hidden.add(kind);
    fill();
  }));
  page.refreshers.push(fill);
  return section("events", "Events and warnings", make("div", { class: "row" }, boxes), list);
}

function kindLabel(kind) {
  const { word, tone } = MARKS[kind] || { word: kind, tone: "neutral" };
  return make("span", { class: `kind ${tone}` }, word);
}

function eventText(event) {
  const details = [event.path, Number.isFinite(event.seconds) ? duration(event.seconds) : null].filter(Boolean).join(", ");
  return make("span", {}, String(event.text ?? ""), details ? make("span", { class: "more" }, details) : null, event.remedy ? make("span", { class: "more" }, String(event.remedy)) : null);
}

/** Nested settings as names with dots. */
function flattened(value, prefix = "", into = new Map()) {
  if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [name, one] of Object.entries(value)) flattened(one, prefix ? `${prefix}.${name}` : name, into);
  } else if (prefix) into.set(prefix, plainText(value));
  return into;
}

function plainText(value) {
  if (typeof value === "string") return value;
  return value === undefined ? "" : JSON.stringify(value);
}

/** One row for each name, one column for each run; rows that differ stand out. */
function comparison(page, label, columnsOf, origins = null) {
  const columns_ = page.runs.map(columnsOf);
  const names = [...new Set(columns_.flatMap((column) => [...column.keys()]))];
  if (!names.length) return null;
  const several = page.runs.length > 1;
  let search = "";
  let different = false;
  const place = make("div");
  const fill = () => {
    const rows = [];
    for (const name of names) {
      const values = columns_.map((column) => column.get(name));
      const differs = several && values.some((value) => value !== values[0]);
      const from = origins ? page.runs.map((run) => origins(run, name) || "") : [];
      if ((different && !differs) || !`${name} ${values.join(" ")} ${from.join(" ")}`.toLowerCase().includes(search)) continue;
      const cells = values.map((value, at) => make("span", { class: "value" }, value === undefined ? NOTHING : value, origins && several && from[at] ? make("span", { class: "more" }, from[at]) : null));
      const usual = from.length > 0 && from.every((one) => !one || /\bdefault$/.test(one));
      rows.push(Object.assign([name, ...cells, ...(origins && !several ? [from[0]] : [])], { usual, className: differs ? "differs" : usual ? "usual" : "" }));
    }
    rows.sort((one, other) => one.usual - other.usual || 0); // what somebody has set comes first
    const head = ["Name", ...page.runs.map((run) => (several ? run.label : "Value")), ...(origins && !several ? ["Origin"] : [])];
    clear(place, rows.length ? scrolling(tableOf(head, rows, ["code", ...values_(head)], label), label) : make("p", { class: "empty" }, "Nothing to show."));
  };
  const values_ = (head) => head.slice(1).map((title) => (title === "Origin" ? "text" : "code"));
  const tools = make("div", { class: "row" },
    make("input", { type: "search", placeholder: "Search", "aria-label": `Search ${label}`, oninput: (event) => { search = event.target.value.toLowerCase(); fill(); } }),
    several ? toggle("Only differences", false, (on) => { different = on; fill(); }) : null);
  fill();
  return make("div", { class: "comparison" }, make("h3", {}, label), names.length > 8 || several ? tools : null, place);
}

function configuration(page) {
  const option = (run, name) => (run.config.options || {})[name];
  const parts = [
    comparison(page, "Settings of the script", (run) => flattened(run.config.settings || {})),
    comparison(page, "Options", (run) => new Map(Object.entries(run.config.options || {}).map(([name, one]) => [name, plainText(one && typeof one === "object" && "value" in one ? one.value : one)])), (run, name) => option(run, name)?.origin),
  ].filter(Boolean);
  return parts.length ? section("config", "Configuration", parts) : null;
}

function environment(page) {
  const table = comparison(page, "Machine and installation", (run) => flattened(run.environment));
  return table ? section("environment", "Environment", make("details", {}, make("summary", {}, "Machine and installation, without secrets"), table)) : null;
}

function media(page) {
  const parts = [];
  for (const run of page.runs) {
    for (const [name, shots] of Object.entries(run.images)) parts.push(pictures(page, run, name, shots));
    for (const [name, table] of Object.entries(run.tables)) {
      const rows = (table.rows || []).slice(0, 500).map((row) => row.map(plainText));
      const note = [Number.isFinite(table.step) ? `step ${number(table.step, 9)}` : null, (table.count ?? rows.length) > rows.length ? `the first ${rows.length} of ${table.count} rows` : counted(rows.length, "row")].filter(Boolean).join(", ");
      parts.push(make("div", { class: "media" }, make("h3", {}, titled(page, run, name), make("span", { class: "count" }, note)), scrolling(tableOf((table.columns || []).map(plainText), rows, [], name), name)));
    }
    for (const [name, one] of Object.entries(run.texts)) {
      parts.push(make("div", { class: "media" }, make("h3", {}, titled(page, run, name), Number.isFinite(one.step) ? make("span", { class: "count" }, `step ${number(one.step, 9)}`) : null), make("p", { class: "logged-text" }, plainText(one.text))));
    }
  }
  return parts.length ? section("media", "Pictures, tables and texts", parts) : null;
}

function titled(page, run, name) {
  return page.runs.length > 1 ? `${name} \u2013 ${run.label}` : name;
}

/** Pictures of one name: a slider goes through the steps. */
function pictures(page, run, name, shots) {
  const place = make("div", { class: "pictures" });
  const note = make("output", { class: "count" });
  const show = (at) => {
    const shot = shots[at];
    note.textContent = [Number.isFinite(shot.step) ? `step ${number(shot.step, 9)}` : moment(shot.time), shot.left_out ? "left out: the page would become too large" : ""].filter(Boolean).join(", ");
    const sources = shot.sources || (shot.paths || []).map((path) => `/media/${encodeURIComponent(run.name)}/${encodeURIComponent(path.slice("media/".length))}`);
    clear(place, sources.map((source, which) => make("img", { src: source, alt: `${name}, picture ${which + 1} of ${sources.length}, ${note.textContent}`, loading: "lazy" })));
  };
  const slider = shots.length > 1 ? make("input", { type: "range", min: "0", max: String(shots.length - 1), value: String(shots.length - 1), "aria-label": `Step of ${name}`, oninput: (event) => show(Number(event.target.value)) }) : null;
  show(shots.length - 1);
  return make("div", { class: "media" }, make("h3", {}, titled(page, run, name), note), slider, place);
}

/** What is missing is told where one begins to read. */
function leftOutNote(page) {
  const place = make("p", { class: "note left-out" });
  page.refreshers.push(() => {
    const told = [...page.leftOut.map(([path, why]) => (why.includes(path) ? why : `${path} (${why})`)), ...page.runs.flatMap((run) => Object.keys(run.skipped).map((what) => (page.runs.length > 1 ? `${run.label}: ${what}` : what)))];
    const more = told.length > 3 ? `, and ${told.length - 3} more` : "";
    clear(place, told.length ? ["Left out: ", `${told.slice(0, 3).join("; ")}${more}. `, make("a", { href: "#skipped" }, "All that is left out")] : null);
    place.hidden = !told.length;
  });
  return place;
}

function leftOut(page) {
  const rows = page.runs.flatMap((run) => Object.entries(run.skipped).map(([what, count]) => [run.label, what, number(count)]));
  rows.unshift(...page.leftOut.map(([path, why]) => [path.split(/[/\\]/).pop(), why.includes(path) ? why : `${path}: ${why}`, "1"]));
  return rows.length ? section("skipped", "What could not be read", scrolling(tableOf(["Run", "What", "Times"], rows, ["text", "text", "number"], "Left out"), "Left out")) : null;
}
