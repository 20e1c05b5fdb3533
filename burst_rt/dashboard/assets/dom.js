// Elements, and nothing that parses: whatever comes from a run becomes text.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// Writes only what changed: most of a page does not.
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function table(columns, rows) {
  const head = el("tr", {}, ...columns.map(([name, kind]) => el("th", { class: kind || "", scope: "col" }, name)));
  const body = rows.map(({ cells, chosen }) => el("tr", { class: chosen ? "chosen" : "" },
    ...cells.map((cell, i) => el("td", { class: columns[i][1] || "" }, cell))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

export function panel(title, note, ...body) {
  const hint = el("span", { class: "muted" }, note || "");
  const box = el("div", { class: "body" }, ...body);
  return { node: el("section", { class: "panel" }, el("div", { class: "head" }, el("h2", {}, title), hint), box), hint, box };
}
