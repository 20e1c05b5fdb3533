// What the job is: where it runs, its plans in words, measured beside predicted.

import { ask, el, panel, table } from "./dom.js";
import { bytes, clock, seconds } from "./format.js";
import { job } from "./live.js";

const EVERY_MS = 5000;

export class JobPage {
  constructor() {
    this.about = panel("Job", "");
    this.machines = panel("Machines", "");
    this.times = panel("Measured and predicted", "one call on a rank, mean of the last half minute; predicted by a simulated run on a machine like this");
    this.plans = panel("Plans", "what rank 0 runs, and why");
    this.node = el("div", { class: "page" }, this.about.node, this.machines.node, this.times.node, this.plans.node);
    this.known = -1;
    this.shownAt = 0;
  }

  show() { this.shownAt = 0; if (job.present) this.update(); }

  update() {
    const { present } = job;
    const now = performance.now();
    if (present.plans === this.known && now - this.shownAt < EVERY_MS) return;
    this.shownAt = now;
    this.tell(present);
    const rank = present.ranks[0]?.rank;
    const newPlans = present.plans !== this.known;
    this.known = present.plans;
    Promise.all([ask("plans", { rank }), ask("timeline", { rank, since: -30, limit: 3000 })]).then(([plans, view]) => {
      if (newPlans) this.explain(plans);
      this.compare(plans, view);
    }, () => { this.known = -1; });
  }

  tell(present) {
    const facts = [["command", present.job.command], ["began", new Date(present.job.began_at_s * 1000).toLocaleString()], ["for", clock(present.job.now_s)],
      ["ranks", String(present.job.world_size)], ["burst_rt", present.job.package], ["record", present.job.record || "none (burst-rt run --record FILE makes one)"],
      ["telemetry dropped", `${present.job.dropped} messages`], ...Object.entries(present.progress.values).map(([name, value]) => [name, String(Number(value.toPrecision(6)))])];
    this.about.box.replaceChildren(el("dl", { class: "about" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
    const rows = present.sources.filter((source) => source.kind === "host" || source.kind === "gpu").map((source) => ({
      cells: [source.kind, source.kind === "gpu" ? source.about.name ?? source.name : source.host, [...source.ranks].sort((a, b) => a - b).join(", "),
        Object.entries(source.about).filter(([name]) => name !== "name").map(([name, value]) => (name.endsWith("_bytes") ? `${name.slice(0, -6)} ${bytes(Number(value))}` : `${name} ${value}`)).join(" · ")] }));
    this.machines.node.hidden = !rows.length;
    this.machines.box.replaceChildren(table([["kind"], ["name"], ["ranks"], ["about"]], rows));
  }

  explain(plans) {
    const shown = plans.map((plan) => el("details", { open: plans.length <= 4 },
      el("summary", {}, `${plan.kind} · group ${plan.group} · ${plan.num_tasks} tasks`), el("pre", {}, plan.explain || "A pipeline of the program's own.")));
    this.plans.box.replaceChildren(...(shown.length ? shown : [el("p", { class: "empty" }, "No call has ended yet.")]));
  }

  compare(plans, view) {
    const rows = plans.map((plan) => {
      const took = view.calls.filter((call) => call.plan === plan.number).map((call) => Math.max(...call.spans.map((span) => span[6])) / view.units_per_s);
      const mean = took.length ? took.reduce((sum, one) => sum + one, 0) / took.length : null;
      return { cells: [plan.kind, plan.group, String(took.length), mean == null ? "" : seconds(mean), plan.predicted_s == null ? "not known here" : seconds(plan.predicted_s),
        mean == null || plan.predicted_s == null ? "" : `${(mean / plan.predicted_s).toFixed(2)}x`] };
    });
    this.times.node.hidden = !rows.length;
    this.times.box.replaceChildren(table([["direction"], ["group"], ["calls", "num"], ["measured", "num"], ["predicted", "num"], ["", "num"]], rows));
  }
}
