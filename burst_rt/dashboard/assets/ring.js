// The ranks on a circle and what goes from each to each: thickness and words say bytes a second; slow and silent links differ in colour,
// in their dashes and in words.

import { el, svg, text, attribute } from "./dom.js";
import { looks, rate } from "./format.js";

const SIZE = 400;
const MIDDLE = SIZE / 2;
const ARROWS = 24; // on larger ones no link has room for an arrow
const TIP = 11; // of an arrow, along the link
const NAMED = 12; // on larger rings only links that are not well have words

export class Ring {
  constructor() {
    this.node = svg("svg", { viewBox: `-44 -6 ${SIZE + 88} ${SIZE + 12}`, role: "img" });
    this.title = svg("title");
    this.links = svg("g");
    this.nodes = svg("g");
    this.words = svg("g");
    this.sum = svg("text", { class: "sum" });
    this.of = svg("text", { class: "of" });
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
    const near = new Set();
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
      // Words of neighbours would cover each other on a large ring, or links that cross it; what stands below it names them all.
      const shown = (ranks.length <= NAMED && !this.crossed) || (link.state !== "ok" && !near.has(link.sender) && !near.has(link.receiver));
      if (shown) near.add(link.sender).add(link.receiver);
      text(word, shown ? said : "");
      attribute(word, "class", `rate ${link.state}`);
    }
    for (const rank of present.ranks) attribute(this.circles.get(rank.rank), "class", `node ${looks(rank)}`);
    text(this.sum, ranks.length > 1 ? rate(total) : "");
    // Links through the middle leave no room there.
    const large = ranks.length > NAMED && !this.crossed;
    const [x, y] = this.crossed ? [-40, 36] : [MIDDLE, MIDDLE + (large ? 24 : ranks.length > 1 ? 16 : 44)];
    for (const [node, at] of [[this.sum, y - (large ? 44 : 26)], [this.of, y]]) {
      attribute(node, "x", x);
      attribute(node, "y", at);
      node.style.textAnchor = this.crossed ? "start" : "middle";
    }
    const way = ranks.length > ARROWS && this.onward ? ", clockwise" : "";
    text(this.of, links.length ? `over ${links.length} links${way}` : "nothing sent yet");
    text(this.title, `Ring of ${ranks.length} ranks, ${rate(total)}${bad.length ? `; ${bad.slice(0, 8).join(", ")}` : ""}`);
    const says = bad.length ? `${bad.length} of ${links.length} links slow or silent: ${bad.slice(0, 4).join(", ")}` : "";
    text(this.legend, says);
  }

  build(ranks, links) {
    const many = ranks.length;
    const node = many <= 8 ? 21 : many <= 16 ? 16 : many <= 32 ? 11 : Math.max(3, 340 / many);
    this.radius = many === 1 ? 0 : MIDDLE - node - (many === 2 ? 8 : many <= NAMED ? 34 : 24);
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
    this.onward = links.every((link) => this.steps(link) === 1);
    this.crossed = links.some((link) => this.steps(link) > 1 && this.steps(link) < many - 1);
    attribute(this.node, "class", many <= 8 ? "few" : many > NAMED && !this.crossed ? "large" : "");
    for (const link of links) if (this.order.has(link.sender) && this.order.has(link.receiver)) this.draw(link, node);
  }

  steps({ sender, receiver }) {
    return (this.order.get(receiver) - this.order.get(sender) + this.order.size) % this.order.size;
  }

  // Neighbours: an arc outside the circle one way, inside the other. Others: a bow through the middle. Of two ranks the arcs stand so far
  // apart that the sum has room between them.
  draw(link, node) {
    const [ax, ay] = this.place(link.sender);
    const [bx, by] = this.place(link.receiver);
    const steps = this.steps(link);
    const onward = steps === 1;
    const backward = !onward && steps === this.order.size - 1;
    const length = Math.hypot(bx - ax, by - ay);
    const [nx, ny] = [(by - ay) / length, -(bx - ax) / length]; // to the left of the way: outwards, clockwise
    const two = this.order.size === 2;
    const bow = two ? length * 0.5 : onward ? Math.min(46, length * 0.2) : length * (backward ? 0.12 : 0.08);
    const [cx, cy] = [(ax + bx) / 2 + nx * bow, (ay + by) / 2 + ny * bow];
    const gap = node + (this.order.size <= ARROWS ? 5 : 1);
    const from = towards(ax, ay, cx, cy, gap);
    const tipped = Math.min(TIP, (length - 2 * gap) / 2);
    const to = towards(bx, by, cx, cy, this.order.size <= ARROWS ? gap + tipped - 2 : gap);
    const end = towards(bx, by, cx, cy, gap - 2);
    const line = svg("path", { d: `M${from} Q${cx.toFixed(1)} ${cy.toFixed(1)} ${to}` });
    const tip = svg("path", { d: arrow(end, to) });
    // Beside the line, whichever way that is: words are wider than they are high.
    const out = (onward ? 1 : backward ? -1 : 0) * (Math.abs(nx) * (this.order.size <= 8 ? 45 : 30) + Math.abs(ny) * 8 + 8);
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
  return `M${ex} ${ey} L${fx - dy * 0.55} ${fy + dx * 0.55} L${fx + dy * 0.55} ${fy - dx * 0.55} Z`;
}
