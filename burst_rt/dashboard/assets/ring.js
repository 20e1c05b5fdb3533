// The ranks on a circle and what goes from each to each: thickness and words say bytes a second; slow and silent links differ in colour,
// in their dashes and in words.

import { el, svg, text, attribute } from "./dom.js";
import { looks, rate } from "./format.js";

const SIZE = 400;
const MIDDLE = SIZE / 2;
const ARROWS = 24; // and on still larger ones no link has an arrow
const NAMED = 12; // on larger rings only links that are not well have words

export class Ring {
  constructor() {
    this.node = svg("svg", { viewBox: `-38 4 ${SIZE + 76} ${SIZE - 8}`, role: "img" });
    this.title = svg("title");
    this.links = svg("g");
    this.nodes = svg("g");
    this.words = svg("g");
    this.sum = svg("text", { x: MIDDLE, y: MIDDLE - 8, class: "sum" });
    this.of = svg("text", { x: MIDDLE, y: MIDDLE + 14, class: "of" });
    this.node.append(this.title, this.links, this.nodes, this.words, this.sum, this.of);
    this.legend = el("div", { class: "legend" });
    this.known = "";
  }

  place(rank) {
    const angle = (2 * Math.PI * this.order.get(rank)) / this.order.size - Math.PI / 2;
    return [MIDDLE + this.radius * Math.cos(angle), MIDDLE + this.radius * Math.sin(angle)];
  }

  update(present) {
    const ranks = present.ranks.map((rank) => rank.rank);
    const links = present.links.filter((link) => link.sender !== link.receiver);
    const known = `${ranks}|${links.map((link) => `${link.sender}>${link.receiver}`)}`;
    if (known !== this.known) {
      this.known = known;
      this.build(ranks, links);
    }
    let total = 0;
    const bad = [];
    const most = Math.max(1, ...links.map((link) => link.bytes_per_s));
    for (const link of links) {
      total += link.bytes_per_s;
      if (link.state !== "ok") bad.push(`${link.sender} to ${link.receiver} ${link.state}`);
      const { line, tip, word } = this.made.get(`${link.sender}>${link.receiver}`);
      const look = link.state !== "ok" ? link.state : link.bytes_per_s > 0 ? "ok" : "idle";
      attribute(line, "class", `link ${look}`);
      attribute(tip, "class", `tip ${look}`);
      attribute(line, "stroke-width", (1.2 + 3.2 * Math.sqrt(link.bytes_per_s / most)).toFixed(1));
      const said = link.state === "silent" ? "silent" : link.state === "slow" ? `slow ${rate(link.bytes_per_s)}` : rate(link.bytes_per_s);
      text(word, ranks.length <= NAMED || link.state !== "ok" ? said : "");
      attribute(word, "class", `rate ${link.state}`);
    }
    for (const rank of present.ranks) attribute(this.circles.get(rank.rank), "class", `node ${looks(rank)}`);
    text(this.sum, rate(total));
    text(this.of, links.length ? `over ${links.length} links` : "nothing sent yet");
    text(this.title, `Ring of ${ranks.length} ranks, ${rate(total)}${bad.length ? `; ${bad.slice(0, 8).join(", ")}` : ""}`);
    const says = bad.length ? `${bad.length} of ${links.length} links slow or silent: ${bad.slice(0, 4).join(", ")}` : "";
    text(this.legend, says);
  }

  build(ranks, links) {
    const many = ranks.length;
    const node = many <= 8 ? 21 : many <= 16 ? 16 : many <= 32 ? 11 : Math.max(3, 340 / many);
    this.radius = many === 1 ? 0 : MIDDLE - node - (many <= NAMED ? 25 : 14);
    this.order = new Map(ranks.map((rank, i) => [rank, i]));
    this.circles = new Map();
    this.made = new Map();
    for (const group of [this.links, this.nodes, this.words]) group.replaceChildren();
    for (const rank of ranks) {
      const [x, y] = this.place(rank);
      const circle = svg("circle", { cx: x, cy: y, r: node, class: "node" });
      this.circles.set(rank, circle);
      this.nodes.append(circle);
      if (node >= 9) {
        const label = svg("text", { x, y });
        if (node < 14) label.setAttribute("font-size", "10");
        label.textContent = rank;
        this.nodes.append(label);
      }
    }
    for (const link of links) if (this.order.has(link.sender) && this.order.has(link.receiver)) this.draw(link, node);
  }

  // Neighbours: an arc outside the circle one way, inside the other. Others: a bow through the middle.
  draw(link, node) {
    const [ax, ay] = this.place(link.sender);
    const [bx, by] = this.place(link.receiver);
    const steps = (this.order.get(link.receiver) - this.order.get(link.sender) + this.order.size) % this.order.size;
    const onward = steps === 1;
    const backward = !onward && steps === this.order.size - 1;
    const length = Math.hypot(bx - ax, by - ay);
    const [nx, ny] = [(by - ay) / length, -(bx - ax) / length]; // to the left of the way: outwards, clockwise
    const two = this.order.size === 2;
    const bow = onward ? Math.min(46, length * (two ? 0.3 : 0.2)) : length * (backward ? 0.12 : 0.08);
    const [cx, cy] = [(ax + bx) / 2 + nx * bow, (ay + by) / 2 + ny * bow];
    const gap = node + (this.order.size <= ARROWS ? 5 : 1);
    const from = towards(ax, ay, cx, cy, gap);
    const to = towards(bx, by, cx, cy, this.order.size <= ARROWS ? gap + 6 : gap);
    const end = towards(bx, by, cx, cy, gap - 1);
    const line = svg("path", { d: `M${from} Q${cx.toFixed(1)} ${cy.toFixed(1)} ${to}` });
    const tip = svg("path", { d: arrow(end, to) });
    // Beside the line, whichever way that is: words are wider than they are high.
    const out = (onward ? 1 : backward ? -1 : 0) * (Math.abs(nx) * 28 + Math.abs(ny) * 6 + 7);
    const word = svg("text", { x: (ax + bx) / 4 + cx / 2 + nx * out, y: (ay + by) / 4 + cy / 2 + ny * out });
    this.links.append(line, ...(this.order.size <= ARROWS ? [tip] : []));
    this.words.append(word);
    this.made.set(`${link.sender}>${link.receiver}`, { line, tip, word });
  }
}

function towards(x, y, cx, cy, distance) {
  const length = Math.hypot(cx - x, cy - y) || 1;
  return [x + ((cx - x) / length) * distance, y + ((cy - y) / length) * distance].map((n) => n.toFixed(1)).join(" ");
}

function arrow(end, from) {
  const [ex, ey] = end.split(" ").map(Number);
  const [fx, fy] = from.split(" ").map(Number);
  const [dx, dy] = [ex - fx, ey - fy];
  return `M${ex} ${ey} L${fx - dy * 0.62} ${fy + dx * 0.62} L${fx + dy * 0.62} ${fy - dx * 0.62} Z`;
}
