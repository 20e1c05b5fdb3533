// Many ranks on one screen: a tile a rank, by host, in the order that a reader asks for. The odd one out comes first.

import { el, text, attribute } from "./dom.js";
import { bytes, looks, measure, SIGNS } from "./format.js";
import { fill, meters, Split, state } from "./card.js";
import { job } from "./live.js";
import { ODD, outliers, valueOf } from "./outliers.js";

const SETTLE_MS = 5000; // tiles that change places with every sample cannot be read
const ABREAST = 8; // tiles of a host side by side
// What tiles can be sorted by: name, metric, whose it is, whether the lowest comes first.
const SORTS = new Map([
  ["odd", ["the odd one out"]], ["rank", ["rank"]], ["computes", ["computes", "compute_percent", "source"]],
  ["waits", ["waits", "wait_percent", "source"]], ["away", ["away", "outside_percent", "source"]],
  ["clock", ["clock, lowest", "sm_clock_mhz", "gpu", true]], ["power", ["power", "power_w", "gpu"]],
  ["memory", ["memory", "memory_used_bytes", "gpu"]], ["resident", ["memory", "rss_bytes", "source"]],
  ["chip", ["chip temperature", "temperature_c", "gpu"]],
]);

export class Tiles {
  // chosen: told of the rank that a reader points out, null for none.
  constructor(chosen) {
    this.chosen = null;
    this.onChosen = chosen;
    this.tiles = new Map();
    this.odd = el("span", { class: "odd-one" });
    this.sort = el("select", { "aria-label": "Order", onchange: () => this.arrange() });
    this.hosts = el("button", { type: "button", "aria-pressed": "true", onclick: () => this.group() }, "By host");
    this.box = el("div", { class: "hosts" });
    this.node = el("section", { class: "panel tiles", "aria-label": "Ranks" },
      el("div", { class: "head" }, el("h2", {}, "Ranks"), this.odd,
        el("span", { class: "tools" }, el("label", {}, "first: ", this.sort), this.hosts)), this.box);
    this.arrangedAt = -Infinity;
    this.shown = "";
  }

  group() {
    this.hosts.setAttribute("aria-pressed", String(this.hosts.getAttribute("aria-pressed") !== "true"));
    this.arrange();
  }

  update(present) {
    this.ranks = present.ranks;
    this.found = outliers(present.ranks);
    this.offer();
    for (const rank of present.ranks) {
      let tile = this.tiles.get(rank.rank);
      if (!tile) this.tiles.set(rank.rank, tile = new Tile(rank.rank, () => this.choose(rank.rank)));
      tile.update(rank, present, this.valueToShow(rank), this.found.get(rank.rank));
    }
    // Nothing moves away from under a pointer, and a rank that is lost does not wait.
    const key = present.ranks.map((rank) => `${rank.rank} ${rank.status}`).join();
    const held = this.box.matches(":hover") || this.box.contains(document.activeElement);
    if (key !== this.key || (!held && performance.now() - this.arrangedAt > SETTLE_MS)) this.arrange();
    this.key = key;
  }

  // The orders that what is measured allows.
  offer() {
    const measured = ([, metric, whose]) => !metric || this.ranks.some((rank) => valueOf(rank, whose, metric) != null);
    const known = [...SORTS].filter(([, sort]) => measured(sort)).map(([name]) => name);
    if (known.join() === this.offered) return;
    this.offered = known.join();
    const before = this.sort.value;
    this.sort.replaceChildren(...known.map((name) => el("option", { value: name }, SORTS.get(name)[0])));
    this.sort.value = known.includes(before) ? before : "odd";
  }

  // What tiles are sorted by, in words.
  valueToShow(rank) {
    const [, metric, whose] = SORTS.get(this.sort.value);
    return metric ? measure(valueOf(rank, whose, metric), job.metrics[metric]?.[0] ?? "") : "";
  }

  // Lower comes first.
  place(rank) {
    const [, metric, whose, lowest] = SORTS.get(this.sort.value);
    if (this.sort.value === "rank") return rank.rank;
    if (!metric) return this.found.get(rank.rank).score >= ODD ? -this.found.get(rank.rank).score : 0;
    const value = valueOf(rank, whose, metric);
    return value == null ? Infinity : lowest ? value : -value;
  }

  arrange() {
    this.arrangedAt = performance.now();
    const ranks = this.ranks.map((rank) => [this.place(rank), rank]);
    ranks.sort(([a, one], [b, other]) => (a === b ? 0 : a - b) || one.rank - other.rank);
    const groups = new Map();
    for (const [, rank] of ranks) {
      const host = this.hosts.getAttribute("aria-pressed") === "true" ? rank.host : "";
      if (!groups.has(host)) groups.set(host, []);
      groups.get(host).push(rank.rank);
    }
    const shown = [...groups].map(([host, numbers]) => `${host} ${numbers}`).join();
    if (shown !== this.shown) {
      this.shown = shown;
      this.box.replaceChildren(...[...groups].map(([host, numbers]) => {
        const node = el("div", { class: "host" }, ...(host ? [el("h3", {}, host)] : []),
          el("div", { class: "row" }, ...numbers.map((number) => this.tiles.get(number).node)));
        node.style.setProperty("--wide", host ? Math.min(ABREAST, numbers.length) : ABREAST);
        return node;
      }));
    }
    this.tell();
  }

  // The odd one out, in words, and its card beside the tiles unless the reader has chosen another.
  tell() {
    const [[odd, { score, words }]] = [...this.found].sort(([, a], [, b]) => b.score - a.score);
    text(this.odd, score >= ODD ? `rank ${odd} is the odd one out: ${words}` : "no rank is far from the others");
    attribute(this.odd, "class", score >= ODD ? "odd-one silent" : "odd-one muted");
    // An earlier moment of a record may lack the rank.
    const chosen = this.found.has(this.chosen) ? this.chosen : null;
    this.show(chosen ?? (score >= ODD ? odd : this.ranks[0].rank));
  }

  choose(rank) {
    this.chosen = this.chosen === rank ? null : rank;
    this.tell();
  }

  show(rank) {
    for (const [number, tile] of this.tiles) attribute(tile.node, "aria-pressed", number === rank);
    this.onChosen(rank);
  }
}

class Tile {
  constructor(rank, chosen) {
    this.name = el("b", {}, String(rank));
    this.state = el("span", { class: "state" });
    this.split = new Split();
    this.figures = [el("span"), el("span")]; // the second where it has room
    this.memory = el("i");
    this.rail = el("span", { class: "rail", hidden: true, title: "memory in use" }, this.memory);
    this.node = el("button", { type: "button", class: "tile", "data-rank": rank, onclick: chosen },
      el("span", { class: "top" }, this.name, this.state), this.split.node, this.rail, el("span", { class: "line num" }, ...this.figures));
  }

  update(rank, present, value, { score, words, name }) {
    const look = looks(rank);
    const odd = look === "live" && score >= ODD;
    attribute(this.node, "class", `tile ${look}${odd ? " odd" : ""}`);
    attribute(this.state, "class", `state num ${look === "live" ? odd ? "silent" : "muted" : look}`);
    const status = look === "live" ? value || (odd ? `▲ ${name}` : "") : `${SIGNS[look]} ${state(rank, present, true)}`;
    text(this.state, status);
    const own = job.sources.get(rank.source)?.values ?? {};
    const gpu = job.sources.get(rank.gpu);
    const [compute, wait] = this.split.update(rank, own);
    const memory = gpu && [...meters(gpu)].find(([what]) => what === "mem");
    this.rail.hidden = !memory;
    if (memory) fill(this.memory, memory[1]);
    const figures = gpu ? [measure(gpu.values.sm_clock_mhz, "MHz"), measure(gpu.values.power_w, "W")]
      : [measure(own.process_percent, "%"), own.rss_bytes == null ? "" : bytes(own.rss_bytes)];
    this.figures.forEach((node, i) => text(node, figures[i]));
    const shares = `computes ${measure(compute, "%")}, waits ${measure(wait, "%")}`;
    attribute(this.node, "title", `rank ${rank.rank} on ${rank.host}: ${shares}${odd ? `; ${words}` : ""}`);
    attribute(this.node, "aria-label", `rank ${rank.rank}, ${look}${odd ? `, odd: ${words}` : ""}, ${shares}`);
  }
}
