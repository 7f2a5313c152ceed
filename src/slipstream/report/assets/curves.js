// The charts of what was logged, grouped by what stands before the first slash of a name.

function groupOf(name) {
  const at = name.indexOf("/");
  return at > 0 ? name.slice(0, at) : "";
}

function curves(page) {
  const names = new Set(page.runs.flatMap((run) => [...run.series.keys()]));
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
    return page.add(new Lines(page, title, (run, axis, whole) => run.line(name, axis, whole), { name }));
  };
  const gridOf = (charts) => make("div", { class: "charts" }, charts.map((chart) => chart.element));
  const all = () => gridOf(order.flatMap((group) => groups.get(group).map((name) => chartOf(name, group))));
  const parts = few || (order.length === 1 && !order[0]) ? all() : order.map((group) => {
    const charts = groups.get(group).map((name) => chartOf(name, group));
    const grid = gridOf(charts);
    return make("details", { class: "group", open: true, "data-group": group }, make("summary", {}, make("h3", {}, group || "without a prefix"), make("span", { class: "count" }, counted(charts.length, "chart"))), grid);
  });
  const none = make("p", { class: "empty" }, page.live ? "Nothing has been logged yet." : "Nothing was logged.");
  return section("curves", "Curves", names.size ? parts : none);
}
