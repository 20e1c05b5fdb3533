// Plots over time or over the job's steps: one a metric, a line a GPU (or host, process, the job). Asked for every few seconds, at a bounded
// number of points.

import { Chart, MARKS, swatch } from "./chart.js";
import { ask, shown as moment } from "./ask.js";
import { el, panel } from "./dom.js";
import { title } from "./format.js";
import { job, now } from "./live.js";
import { colours } from "./theme.js";

const EVERY_MS = 4000;
const POINTS = 300;
const LISTED = 16; // in the legend
const LINES = 200; // drawn at most: more would be a carpet, and keep the hub busy
const DOTTED = 60; // lines of fewer values than this, of rows that mostly lack them, have dots
const KINDS = [["job", "Job"], ["gpu", "GPUs"], ["process", "Ranks"], ["host", "Hosts"]];
const RANGES = [[60, "1 min"], [600, "10 min"], [3600, "1 h"], [86400, "all"]];
const SMOOTH = [[0, "not smoothed"], [5, "smooth: 5 points"], [20, "smooth: 20 points"], [80, "smooth: 80 points"]];
const WORDLESS = new Set(["1", "1/s", "bits"]); // units that say nothing
// Metrics that lie on the chart of another.
const BESIDE = { heldout_loss: "loss" };

export class History {
  constructor() {
    this.kind = null;
    this.range = 60;
    this.bySteps = true;
    this.charts = new Map();
    this.kinds = el("select", { "aria-label": "What", onchange: () => this.take(this.kinds.value) });
    this.one = el("select", { "aria-label": "Which", onchange: () => this.load() });
    this.ranges = RANGES.map(([range, name]) => el("button", { type: "button", onclick: () => this.reach(range) }, name));
    this.steps = el("button", { type: "button", onclick: () => this.turn() }, "By step");
    const choices = SMOOTH.map(([points, name]) => el("option", { value: points }, name));
    this.smooth = el("select", { "aria-label": "Smoothing", onchange: () => this.load() }, ...choices);
    this.grid = el("div", { class: "charts" });
    this.legend = el("div", { class: "legend" });
    this.none = el("p", { class: "empty" }, "Nothing measured yet.");
    const tools = [this.kinds, this.one, ...this.ranges, this.steps, this.smooth, this.legend];
    this.node = el("div", { class: "page" }, el("div", { class: "tools" }, ...tools), this.none, this.grid);
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
    if (known === this.known) {
      if (moment.at !== this.at && this.visible && !this.loading) this.load();
      return;
    }
    this.known = known;
    this.kind = there.some(([kind]) => kind === this.kind) ? this.kind : there[0]?.[0];
    this.kinds.replaceChildren(...there.map(([kind, name]) => el("option", { value: kind }, name)));
    this.kinds.value = this.kind ?? "";
    this.steps.hidden = !there.some(([kind]) => kind === "job");
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

  turn() {
    this.bySteps = !this.bySteps;
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
    this.one.hidden = sources.length < 2;
  }

  async load() {
    clearTimeout(this.timer);
    this.ranges.forEach((button, i) => button.setAttribute("aria-pressed", String(RANGES[i][0] === this.range)));
    this.steps.setAttribute("aria-pressed", String(this.bySteps));
    if (!this.visible) return;
    const over = job.state === "ended"; // the last time: whoever looks away now comes back
    if (job.present && this.kind && (over || !document.hidden)) {
      const chosen = this.sources().filter((source) => !this.one.value || source.name === this.one.value);
      const sources = chosen.slice(0, LINES);
      this.undrawn = chosen.length - sources.length;
      // The job's own rows say which step it was when.
      const asked = this.asked = {};
      this.at = moment.at;
      this.loading = true;
      const names = new Set([...sources.map((source) => source.name), ...(this.steps.hidden ? [] : ["job"])]);
      try {
        const views = await ask("series", { source: [...names], since: -this.range, limit: POINTS });
        if (asked !== this.asked) return; // the reader has asked for something else meanwhile
        this.draw(sources, views.filter((view) => this.places.has(view.source)), views.find((view) => view.source === "job"));
      } catch { /* the stream says when the job is gone */ }
      this.loading = false;
    }
    if (!over) this.timer = setTimeout(() => this.load(), EVERY_MS);
  }

  draw(sources, views, own) {
    const measured = (name) => name !== "step" && views.some((view) => view.values[name]?.some((value) => value != null));
    const order = Object.keys(job.metrics); // the useful first
    const place = (list, name) => (list.includes(name) ? list.indexOf(name) : list.length);
    const metrics = [...new Set(views.flatMap((view) => Object.keys(view.values)))].filter(measured);
    metrics.sort((a, b) => place(order, a) - place(order, b));
    this.none.hidden = metrics.length > 0;
    const at = (name) => this.places.get(name) ?? this.places.size;
    views.sort((a, b) => at(a.source) - at(b.source));
    const until = now();
    const oldest = Math.min(until - 1, ...views.map((view) => view.times[0] ?? Infinity));
    const since = Math.max(oldest, until - this.range);
    const steps = this.bySteps && own ? new Steps(own) : null;
    const axis = steps ? [steps.at(since), Math.max(steps.at(until), steps.at(since) + 1)] : [since, until];
    const marks = (own?.marks ?? []).map(({ at_s: s, step, kind, text }) => (
      { at: steps ? Math.max(step, 0) : s, kind, text: `${text} (step ${step})` }));
    this.explain(sources, marks);
    const shown = metrics.filter((metric) => !metrics.includes(BESIDE[metric]));
    for (const [metric, { panel: made }] of this.charts) {
      if (shown.includes(metric)) continue;
      made.node.remove();
      this.charts.delete(metric);
    }
    for (const metric of shown) {
      const chart = this.chart(metric);
      const together = [metric, ...metrics.filter((other) => BESIDE[other] === metric)];
      const lines = together.flatMap((name, i) => (
        views.filter((view) => view.values[name]).map((view) => this.line(view, name, i, steps, sources))));
      chart.set(lines, ...axis, { marks, steps: steps !== null, smooth: Number(this.smooth.value) });
    }
    // The useful first, also where it came later.
    const nodes = shown.map((metric) => this.charts.get(metric).panel.node);
    if (nodes.some((node, i) => this.grid.children[i] !== node)) this.grid.replaceChildren(...nodes);
  }

  chart(metric) {
    let found = this.charts.get(metric);
    if (!found) {
      const [unit, label] = job.metrics[metric] ?? [];
      const chart = new Chart(unit ?? "");
      const hint = [label, WORDLESS.has(unit) ? "" : unit].filter(Boolean).join(", ");
      found = { chart, panel: panel(title(metric, unit !== undefined), hint, chart.node) };
      this.charts.set(metric, found);
    }
    return found.chart;
  }

  // A line of a chart. beside: its number among the metrics of one chart.
  line(view, metric, beside, steps, sources) {
    const name = beside || sources.length < 2 ? title(metric, true) : titled(sources.find((source) => source.name === view.source));
    const values = view.values[metric];
    const found = values.filter((value) => value != null).length;
    const times = steps ? view.times.map((at) => steps.at(at)) : view.times;
    const place = (this.places.get(view.source) ?? this.places.size) + beside;
    return { name, place, values, times, dots: found < DOTTED && 2 * found < values.length };
  }

  explain(sources, marks) {
    const shown = sources.slice(0, LISTED).map((source) => el("span", {}, swatch(this.places.get(source.name) ?? 0), titled(source)));
    const more = sources.length > LISTED ? [`and ${sources.length - LISTED} more: point at a curve`] : [];
    if (this.undrawn) more.push(`; ${this.undrawn} are not drawn: choose one`);
    const kinds = [...new Set(marks.map(({ kind }) => kind))].filter((kind) => MARKS[kind]).map((kind) => {
      const [sign, colour] = MARKS[kind];
      const mark = el("b", {}, sign);
      mark.style.color = colours[colour];
      return el("span", { class: "mark" }, mark, kind);
    });
    this.legend.replaceChildren(...(sources.length > 1 ? [...shown, ...more] : []), ...kinds);
  }
}

// The step that a job was at, by time: between two reports in proportion.
class Steps {
  constructor({ times, values: { step = [] } }) {
    this.points = times.map((at, i) => [at, step[i]]).filter(([, value]) => value != null);
  }

  at(time) {
    const { points } = this;
    if (!points.length) return 0;
    let [low, high] = [0, points.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < time) low = middle + 1;
      else high = middle;
    }
    const [before, after] = [points[Math.max(0, low - 1)], points[Math.min(low, points.length - 1)]];
    if (after[0] <= before[0]) return after[1];
    return before[1] + Math.min(1, Math.max(0, (time - before[0]) / (after[0] - before[0]))) * (after[1] - before[1]);
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
