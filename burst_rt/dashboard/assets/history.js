// Plots over time: one a metric, a line a GPU (or host, process, the job). Asked for every few seconds, at a bounded number of points.

import { Chart, swatch } from "./chart.js";
import { ask } from "./ask.js";
import { el, panel, text } from "./dom.js";
import { title } from "./format.js";
import { job, now } from "./live.js";

const EVERY_MS = 4000;
const POINTS = 300;
const LISTED = 16; // in the legend
const KINDS = [["gpu", "GPUs"], ["process", "Ranks"], ["host", "Hosts"], ["job", "Job"]];
const RANGES = [[60, "1 min"], [600, "10 min"], [3600, "1 h"], [86400, "all"]];

export class History {
  constructor() {
    this.kind = null;
    this.range = 60;
    this.charts = new Map();
    this.kinds = el("select", { "aria-label": "What", onchange: () => this.take(this.kinds.value) });
    this.one = el("select", { "aria-label": "Which", onchange: () => this.load() });
    this.ranges = RANGES.map(([range, name]) => el("button", { type: "button", onclick: () => this.reach(range) }, name));
    this.grid = el("div", { class: "charts" });
    this.legend = el("div", { class: "legend" });
    this.none = el("p", { class: "empty" }, "Nothing measured yet.");
    this.node = el("div", { class: "page" }, el("div", { class: "tools" }, this.kinds, this.one, ...this.ranges, this.legend), this.none, this.grid);
  }

  show() {
    this.visible = true;
    this.load();
  }

  hide() {
    this.visible = false;
    clearTimeout(this.timer);
  }

  update() {
    const there = KINDS.filter(([kind]) => job.present.sources.some((source) => source.kind === kind && source.metrics.length));
    const known = `${there.map(([kind]) => kind)} ${this.sources().map((source) => source.name)} ${job.state === "ended"}`;
    if (known === this.known) return;
    this.known = known;
    this.kind = there.some(([kind]) => kind === this.kind) ? this.kind : there[0]?.[0];
    this.kinds.replaceChildren(...there.map(([kind, name]) => el("option", { value: kind }, name)));
    this.kinds.value = this.kind ?? "";
    this.choose();
    if (this.visible) this.load();
  }

  take(kind) {
    this.kind = kind;
    this.one.value = "";
    this.choose();
    this.load();
  }

  reach(range) {
    this.range = range;
    this.load();
  }

  sources() {
    return job.present.sources.filter((source) => source.kind === this.kind && source.metrics.length).sort(byRank);
  }

  choose() {
    const chosen = this.one.value;
    const sources = this.sources();
    this.places = new Map(sources.map((source, i) => [source.name, i]));
    const options = sources.map((source) => el("option", { value: source.name }, titled(source)));
    this.one.replaceChildren(el("option", { value: "" }, "all"), ...options);
    this.one.value = chosen;
  }

  async load() {
    clearTimeout(this.timer);
    this.ranges.forEach((button, i) => button.setAttribute("aria-pressed", String(RANGES[i][0] === this.range)));
    if (!this.visible) return;
    const over = job.state === "ended"; // the last time: whoever looks away now comes back
    if (job.present && this.kind && (over || !document.hidden)) {
      const sources = this.sources().filter((source) => !this.one.value || source.name === this.one.value);
      try {
        this.draw(sources, await ask("series", { source: sources.map((source) => source.name), since: -this.range, limit: POINTS }));
      } catch { /* the stream says when the job is gone */ }
    }
    if (!over) this.timer = setTimeout(() => this.load(), EVERY_MS);
  }

  draw(sources, views) {
    const measured = (name) => views.some((view) => view.values[name]?.some((value) => value != null));
    const metrics = [...new Set(views.flatMap((view) => Object.keys(view.values)))].filter(measured);
    this.none.hidden = metrics.length > 0;
    const names = new Map(sources.map((source) => [source.name, titled(source)]));
    const place = (name) => this.places.get(name) ?? this.places.size;
    views.sort((a, b) => place(a.source) - place(b.source));
    const shown = sources.slice(0, LISTED).map((source) => el("span", {}, swatch(place(source.name)), titled(source)));
    const more = sources.length > LISTED ? [`and ${sources.length - LISTED} more: point at a curve`] : [];
    this.legend.replaceChildren(...(sources.length > 1 ? [...shown, ...more] : []));
    const until = now();
    const oldest = Math.min(until - 1, ...views.map((view) => view.times[0] ?? Infinity));
    const since = Math.max(oldest, until - this.range);
    for (const [metric, { panel: made }] of this.charts) {
      if (metrics.includes(metric)) continue;
      made.node.remove();
      this.charts.delete(metric);
    }
    for (const metric of metrics) {
      let found = this.charts.get(metric);
      if (!found) {
        const chart = new Chart(job.metrics[metric]?.[0] ?? "");
        found = { chart, panel: panel(title(metric), job.metrics[metric]?.[1] ?? "", chart.node) };
        this.charts.set(metric, found);
        this.grid.append(found.panel.node);
      }
      const own = views.filter((view) => view.values[metric]);
      found.chart.set(own.map((view) => (
        { name: names.get(view.source), place: place(view.source), times: view.times, values: view.values[metric] })), since, until);
    }
  }
}

const first = (source) => Math.min(Infinity, ...source.ranks);

function byRank(a, b) {
  return first(a) === first(b) ? a.name.localeCompare(b.name) : first(a) - first(b);
}

function titled(source) {
  if (source.kind === "process") return source.name.replace(":", " ");
  if (source.kind === "gpu") {
    const ranks = [...source.ranks].sort((a, b) => a - b).join(", ");
    // One that no rank is on has only its own name to tell it from others of its kind.
    return ranks ? `rank ${ranks}: ${source.about.name ?? source.name}` : `${source.about.name ?? "GPU"} ${source.name.slice(-6)}`;
  }
  return source.kind === "job" ? "job" : source.host;
}
