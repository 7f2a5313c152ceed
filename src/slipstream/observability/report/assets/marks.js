// Checkpoints, restarts, warnings: where they lie on a chart, how they look, what they say. Shape and colour both tell them apart.

/** The events of the runs that are shown, those that lie on one place gathered into one mark, the gravest of which gives the looks. */
function gathered(plot) {
  const order = ["memory", "guard", "warning", "restart", "restore", "checkpoint", "trace"];
  const marks = [];
  const found = [];
  for (const run of plot.runs()) {
    for (const event of run.events) {
      const at = run.along(plot.state.axis, event.step, event.time);
      if (!order.includes(event.kind) || !(at >= plot.x[0] && at <= plot.x[1])) continue;
      found.push({ x: plot.toX(at), event: { ...event, run, at } });
    }
  }
  found.sort((one, other) => one.x - other.x);
  for (const { x, event } of found) {
    const last = marks[marks.length - 1];
    if (last && x - last.x < 7) last.events.push(event);
    else marks.push({ x, events: [event] });
  }
  for (const mark of marks) {
    mark.kind = order.find((kind) => mark.events.some((event) => event.kind === kind));
  }
  return marks;
}

function looks(mark) {
  return MARKS[mark.kind] || MARKS.trace;
}

function glyph(brush, shape, x, y, color, paper) {
  const paths = {
    flag: [[-4.5, -4], [4.5, -4], [0, 4]],
    diamond: [[0, -5], [4.5, 0], [0, 5], [-4.5, 0]],
    triangle: [[0, -5], [5, 4], [-5, 4]],
    square: [[-4, -4], [4, -4], [4, 4], [-4, 4]],
  };
  brush.beginPath();
  if (shape === "turn") brush.arc(x, y, 3.6, -0.4, 4.4);
  else if (shape === "circle") brush.arc(x, y, 3, 0, 7);
  else if (paths[shape]) paths[shape].forEach(([right, down], at) => (at ? brush.lineTo(x + right, y + down) : brush.moveTo(x + right, y + down)));
  else return;
  brush.lineWidth = 1.5;
  if (shape === "turn") {
    brush.strokeStyle = color;
    brush.stroke();
    brush.beginPath();
    [[-4, -5.5], [1.2, -3.6], [-3.2, -0.4]].forEach(([right, down], at) => (at ? brush.lineTo(x + right, y + down) : brush.moveTo(x + right, y + down)));
    brush.fillStyle = color;
    brush.fill();
  } else {
    brush.closePath();
    brush.fillStyle = color;
    brush.fill();
    brush.strokeStyle = paper;
    brush.lineWidth = 1;
    brush.stroke();
  }
  brush.lineWidth = 1;
}

/** What a tooltip says about events: [strong text, text] each. */
function eventLines(events) {
  const several = new Set(events.map((event) => event.run)).size > 1;
  const lines = events.slice(0, 6).map((event) => {
    const where = [several ? event.run.label : "", Number.isFinite(event.step) ? `step ${number(event.step, 9)}` : "", Number.isFinite(event.rank) ? `rank ${event.rank}` : ""];
    return [(MARKS[event.kind] || MARKS.trace).word, [where.filter(Boolean).join(", "), event.text].filter(Boolean).join(": "), event.remedy || ""];
  });
  if (events.length > 6) lines.push(["", `and ${events.length - 6} more`, ""]);
  return lines;
}

/** One floating box of text, shared by all charts. */
class Tip {
  constructor() {
    this.element = make("div", { class: "tip", role: "tooltip", hidden: true });
    document.body.append(this.element);
  }

  show(x, y, lines) {
    clear(this.element, lines.map(([strong, text, more]) => make("p", {}, strong ? make("b", {}, strong) : null, strong ? " " : null, text, more ? make("span", { class: "more" }, more) : null)));
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    this.element.style.left = `${clamp(x + 14, 4, Math.max(4, innerWidth - width - 4))}px`;
    this.element.style.top = `${y + height + 20 > innerHeight ? Math.max(4, y - height - 12) : y + 16}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}
