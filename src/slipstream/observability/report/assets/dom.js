// Elements are made here and nowhere else: text goes in as text, never as markup. Styles are set through properties, which a strict policy allows.

const SVG = "http://www.w3.org/2000/svg";

/** make("button", {class: "quiet", "aria-pressed": "false", onclick: f}, "Text", child, ...) */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : SPOKEN.has(name) ? visible(String(value)) : String(value));
  }
  element.append(...contents(children));
  return element;
}

const SPOKEN = new Set(["title", "aria-label", "alt"]);

function contents(children) {
  return children.flat().filter((child) => child !== null && child !== undefined).map((child) => (typeof child === "string" ? visible(child) : child));
}

/** Characters that turn the direction of what follows are spelled out: a name shall not look like another one. */
function visible(text) {
  return text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16)}`);
}

/** A small drawing of straight lines, which says nothing to those who do not see it: the text beside it does. */
function icon(path) {
  const drawing = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "path");
  drawing.setAttribute("viewBox", "0 0 16 16");
  drawing.setAttribute("aria-hidden", "true");
  drawing.classList.add("icon");
  line.setAttribute("d", path);
  drawing.append(line);
  return drawing;
}

const ICONS = {
  table: "M2 3.5h12v9H2zM2 6.5h12M2 9.5h12M6.5 3.5v9",
  larger: "M9.5 2.5h4v4M13.5 2.5l-4.5 4.5M6.5 13.5h-4v-4M2.5 13.5l4.5-4.5",
  reset: "M3 8a5 5 0 1 0 1.6-3.7M3 2.5v3h3",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
};

function clear(element, ...children) {
  element.replaceChildren(...contents(children));
  return element;
}

/** A table with a head; cells are texts or elements. `kinds` gives a class to each column: "number", "text", "code". */
function tableOf(head, rows, kinds = [], caption = "") {
  const cells = (tag, row) => row.map((cell, at) => make(tag, { class: kinds[at] || null, scope: tag === "th" ? "col" : null }, cell));
  return make(
    "table",
    {},
    caption ? make("caption", { class: "unseen" }, caption) : null,
    make("thead", {}, make("tr", {}, cells("th", head))),
    make("tbody", {}, rows.map((row) => make("tr", { class: row.className || null }, cells("td", row)))),
  );
}

/** A table may be wider than the page: it scrolls by itself, and the keyboard reaches it. */
function scrolling(table, label) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

function swatch(color, shape = "") {
  return make("span", { class: `swatch ${shape}`, "aria-hidden": "true", "--color": color });
}

/** One choice out of a few, as a row of radio buttons. */
function choices(label, options, current, change) {
  const name = `choice-${label.replace(/\W+/g, "-")}`;
  const buttons = options.map(([value, text]) =>
    make("label", {}, make("input", { type: "radio", name, value, checked: value === current, onchange: () => change(value) }), make("span", {}, text)),
  );
  return make("fieldset", { class: "choices" }, make("legend", { class: "unseen" }, label), buttons);
}

function toggle(label, current, change) {
  return make("label", { class: "toggle" }, make("input", { type: "checkbox", checked: current, onchange: (event) => change(event.target.checked) }), make("span", {}, label));
}

function section(id, title, ...children) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...children);
}
