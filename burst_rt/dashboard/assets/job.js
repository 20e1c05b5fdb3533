// What the job is: where it runs, its plans in words, measured beside predicted.

import { ask } from "./ask.js";
import { el, panel, table } from "./dom.js";
import { bytes, clock, seconds } from "./format.js";
import { job } from "./live.js";

const EVERY_MS = 5000;

export class JobPage {
  constructor() {
    this.about = panel("Job", "");
    this.machines = panel("Machines", "");
    this.times = panel("Measured and predicted", "a call, mean of the last half minute, beside a simulated run on a machine like this");
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
    const facts = {
      command: present.job.command,
      began: new Date(present.job.began_at_s * 1000).toLocaleString(),
      for: clock(present.job.now_s),
      ranks: String(present.job.world_size),
      burst_rt: present.job.package,
      record: present.job.record || "none (burst-rt run --record FILE makes one)",
      "telemetry dropped": `${present.job.dropped} messages`,
    };
    for (const [name, value] of Object.entries(present.progress.values)) facts[name] = String(Number(value.toPrecision(6)));
    const words = Object.entries(facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    this.about.box.replaceChildren(el("dl", { class: "about" }, ...words));
    const machines = present.sources.filter((source) => source.kind === "host" || source.kind === "gpu");
    this.machines.node.hidden = !machines.length;
    this.machines.box.replaceChildren(table([["kind"], ["name"], ["ranks"], ["about"]], machines.map((source) => ({
      cells: [source.kind, source.about.name ?? source.host, [...source.ranks].sort((a, b) => a - b).join(", "), about(source)],
    }))));
  }

  explain(plans) {
    const shown = plans.map((plan) => el("details", { open: plans.length <= 4 },
      el("summary", {}, `${plan.kind} · group ${plan.group} · ${plan.num_tasks} tasks`),
      el("pre", {}, [plan.explain, plan.problem].filter(Boolean).join("\n  "))));
    this.plans.box.replaceChildren(...(shown.length ? shown : [el("p", { class: "empty" }, "No call has ended yet.")]));
  }

  compare(plans, view) {
    const rows = plans.map(({ number, kind, group, predicted_s: predicted }) => {
      const calls = view.calls.filter((call) => call.plan === number);
      const took = calls.map((call) => Math.max(...call.spans.map((span) => span[6])) / view.units_per_s);
      const mean = took.length ? took.reduce((sum, one) => sum + one, 0) / took.length : null;
      const [measured, expected] = [mean, predicted].map((value) => (value == null ? "" : seconds(value)));
      const against = measured && expected ? `${(mean / predicted).toFixed(2)}x` : "";
      return { cells: [kind, group, String(took.length), measured, expected || "not known here", against] };
    });
    this.times.node.hidden = !rows.length;
    const columns = [["direction"], ["group"], ["calls", "num"], ["measured", "num"], ["predicted", "num"], ["", "num"]];
    this.times.box.replaceChildren(table(columns, rows));
  }
}

// What a source says of itself, in words.
function about(source) {
  const words = Object.entries(source.about).filter(([name]) => name !== "name");
  const word = ([name, value]) => (name.endsWith("_bytes") ? `${name.slice(0, -6)} ${bytes(Number(value))}` : `${name} ${value}`);
  return words.map(word).join(" · ");
}
