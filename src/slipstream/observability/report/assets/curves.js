// The charts of what was logged, grouped by what stands before the first slash of a name.

const MANY = 150; // charts, beyond which they are furnished when they come into sight, and groups are closed at first

function groupOf(name) {
  const at = name.indexOf("/");
  return at > 0 ? name.slice(0, at) : "";
}

function curves(page) {
  const names = new Set(page.runs.flatMap((run) => [...run.series.keys()]));
  page.crowded = names.size > MANY;
  const groups = new Map();
  for (const name of names) {
    const group = groupOf(name);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  const order = [...groups.keys()].sort((one, other) => (one === "" ? -1 : other === "" ? 1 : 0)); // else as they were logged first
  const few = names.size <= 6 && order.some((group) => groups.get(group).length === 1); // then headings would only scatter them
  const chartOf = (name, group) => {
    const title = few || !group ? name : name.slice(group.length + 1) || name;
    return page.add(new Lines(page, title, (run, axis, whole) => run.line(name, axis, whole), { name, logged: true }));
  };
  const gridOf = (charts) => make("div", { class: "charts" }, charts.map((chart) => chart.element));
  const all = () => gridOf(order.flatMap((group) => groups.get(group).map((name) => chartOf(name, group))));
  let shown = 0;
  const parts = few || (order.length === 1 && !order[0]) ? all() : order.map((group) => {
    const charts = groups.get(group).map((name) => chartOf(name, group));
    const grid = gridOf(charts);
    const open = !page.crowded || !shown || shown + charts.length <= MANY;
    shown += charts.length;
    return make("details", { class: "group", open, "data-group": group }, make("summary", {}, make("h3", {}, group || "without a prefix"), make("span", { class: "count" }, counted(charts.length, "chart"))), grid);
  });
  const returns = make("div");
  page.refreshers.push(() => clear(returns, page.runs.map((run) => returnNote(page, run))));
  const none = make("p", { class: "empty" }, page.live ? "Nothing has been logged yet." : "Nothing was logged.");
  return section("curves", "Curves", returns, names.size ? parts : none);
}

/** A word about steps that begin anew although the run did not: no axis of steps can show that well. */
function returnNote(page, run) {
  const names = [...run.returning.keys()];
  if (!names.length) return null;
  const [name] = names;
  const { count, values } = run.series.get(name);
  const often = `${count > values.length ? "at least " : ""}${counted(run.returning.get(name), "time")}`;
  const others = names.length > 1 ? ` (and those of ${counted(names.length - 1, "other name")})` : "";
  return make("p", { class: "note returns" }, `${page.runs.length > 1 ? `${run.label}: the` : "The"} steps of ${name}${others} go back ${often} without a restart: log with a step that counts on. The line is the last pass, and the earlier ones are faint; over time, all are in order.`);
}
