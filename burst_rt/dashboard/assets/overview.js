// The first page: the job in a row of figures, the ring, a card a rank, the loss, what happened.

import { Chart } from "./chart.js";
import { el, panel, text, attribute } from "./dom.js";
import { bytes, bytesOf, clock, count, looks, measure, percent, rate, seconds, SIGNS, tenths } from "./format.js";
import { curve, firstLost, job } from "./live.js";
import { PostMortem } from "./postmortem.js";
import { Ring } from "./ring.js";
import { spark } from "./spark.js";
import { colours } from "./theme.js";

const DENSE = 16; // more ranks than this get small cards; on phones all do
const phone = matchMedia("(max-width: 600px)");
const REPAINT_MS = 480; // curves change no faster than they are told

export class Overview {
  constructor() {
    this.postMortem = new PostMortem();
    this.facts = new Facts();
    this.serving = new Serving();
    this.ring = new Ring();
    this.cards = new Map();
    this.grid = el("div", { class: "cards" });
    this.loss = new Chart("1");
    this.events = el("ol", { class: "events" });
    this.cause = el("ol", { class: "cause", hidden: true, "aria-label": "what was lost first" });
    this.told = "";
    const ring = panel("Ring", "", this.ring.node, this.ring.legend);
    this.ringNote = ring.hint;
    ring.node.classList.add("ring");
    const loss = panel("Loss", "", this.loss.node);
    this.lossPanel = loss.node;
    this.lossNote = loss.hint;
    this.verdict = new VerdictLine();
    this.node = el("div", { class: "page overview" }, this.postMortem.node, this.verdict.node, this.facts.node, this.serving.node,
      el("div", { class: "aside" }, ring.node, panel("Events", "newest first", this.cause, this.events).node),
      el("div", { class: "ranks" }, this.grid, loss.node));
  }

  update(repaint = false) {
    const { present } = job;
    this.postMortem.update(present);
    this.verdict.update(present.job);
    this.facts.update(present);
    this.serving.update(present);
    this.ring.update(present);
    this.grid.classList.toggle("gpus", present.ranks.some((rank) => rank.gpu));
    this.grid.classList.toggle("dense", phone.matches || present.ranks.length > DENSE);
    for (const rank of present.ranks) {
      let card = this.cards.get(rank.rank);
      if (!card) {
        this.cards.set(rank.rank, card = new Card(rank.rank));
        const after = [...this.cards.keys()].filter((other) => other < rank.rank).sort((a, b) => b - a)[0];
        if (after === undefined) this.grid.prepend(card.node);
        else this.cards.get(after).node.after(card.node);
      }
      card.update(rank, present, repaint);
    }
    this.lossPanel.hidden = !("loss" in present.progress.values);
    if (!this.lossPanel.hidden) {
      const points = [...curve("job", "loss")];
      this.loss.set([{ name: "loss", times: points.map(([at]) => at), values: points.map(([, value]) => value) }]);
      text(this.lossNote, `step ${present.progress.step}`);
    }
    this.tell();
  }

  show() { this.loss.draw(); }

  tell() {
    const cause = firstLost(job.present);
    const told = `${job.events.at(-1)?.number} ${cause?.rank}`;
    if (told === this.told) return;
    this.told = told;
    // What was lost first stays in sight, however much happens after it.
    this.cause.hidden = !cause;
    const pinned = cause && { at_s: cause.status_since_s, rank: cause.rank, severity: "error", kind: cause.status, text: cause.ending };
    if (pinned) this.cause.replaceChildren(line(pinned, "first: "));
    const others = job.events.filter((event) => !pinned || event.rank !== pinned.rank || event.kind !== pinned.kind);
    this.events.replaceChildren(...others.slice(-60).reverse().map((event) => line(event)));
  }
}

function line(event, before = "") {
  const [sign, look] = { error: ["✕", "lost"], warning: ["▲", "silent"], info: ["·", "muted"] }[event.severity];
  const who = `${before}${event.rank < 0 ? "job" : `rank ${event.rank}`} ${event.kind} `;
  return el("li", {}, el("time", {}, tenths(event.at_s)), el("b", { class: look, title: event.severity }, sign),
    el("span", {}, el("span", { class: "who" }, who), event.text));
}

// What limits the job, since when, and what to do.
class VerdictLine {
  constructor() {
    this.what = el("b");
    this.since = el("span", { class: "muted" });
    this.advice = el("span", { class: "advice" });
    this.node = el("p", { class: "panel verdict", hidden: true, role: "status" }, this.what, this.since, this.advice);
  }

  update({ verdict, now_s }) {
    this.node.hidden = !verdict;
    if (!verdict) return;
    this.node.dataset.kind = verdict.kind;
    text(this.what, sentence(verdict.text));
    text(this.since, ` For ${seconds(now_s - verdict.since_s)}.`);
    text(this.advice, verdict.advice && sentence(verdict.advice));
  }
}

function sentence(words) { return `${words[0].toUpperCase()}${words.slice(1)}.`; }

function mean(values) {
  const known = values.filter((value) => value != null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// The row of figures: those that this job has.
class Facts {
  constructor() {
    this.node = el("dl", { class: "panel facts" });
    this.cells = new Map();
    this.order = "";
  }

  update(present) {
    const values = present.progress.values;
    // The step of a job that serves is its number of tokens.
    const step = present.progress.at_s != null && !serves(values);
    const of = (metric) => present.ranks.map((rank) => (rank.status === "live" ? job.sources.get(rank.source)?.values[metric] : null));
    const sum = (metric) => of(metric).reduce((total, value) => total + (value || 0), 0);
    const facts = [];
    if (step) facts.push(["Step", String(present.progress.step)]);
    if ("loss" in values) facts.push(["Loss", values.loss.toFixed(3), curve("job", "loss")]);
    if ("tokens_per_s" in values) facts.push(["Tokens/s", count(values.tokens_per_s), curve("job", "tokens_per_s")]);
    const compute = mean(of("compute_percent"));
    if (compute != null) facts.push(["Computes", percent(compute)]);
    const wait = mean(of("wait_percent"));
    if (wait != null) facts.push(["Waits for transfers", percent(wait)]);
    const overlap = mean(present.ranks.map((rank) => rank.overlap));
    if (overlap != null) facts.push(["Transfers hidden", percent(100 * overlap)]);
    if (present.job.step_share != null) facts.push(["Attention in steps", percent(100 * present.job.step_share)]);
    facts.push(["Sent, all ranks", rate(sum("sent_bytes_per_s"))]);
    const flops = sum("flops_per_s");
    if (flops) facts.push(["Compute", measure(flops, "flop/s")]);
    this.show(facts);
  }

  // Each is its name, its value in words and, where it has one, its curve.
  show(facts) {
    const order = facts.map(([name]) => name).join();
    if (order !== this.order) {
      this.order = order;
      this.cells = new Map(facts.map(([name, , line]) => {
        const cell = { value: el("dd"), line: line ? el("canvas", { "aria-hidden": "true" }) : null };
        cell.node = el("div", { class: "fact" }, el("dt", {}, name), cell.value, ...(cell.line ? [cell.line] : []));
        return [name, cell];
      }));
      this.node.replaceChildren(...[...this.cells.values()].map((cell) => cell.node));
    }
    for (const [name, value, line] of facts) {
      const cell = this.cells.get(name);
      text(cell.value, value);
      if (line) spark(cell.line, line, { colour: colours.accent });
    }
  }
}

const serves = (values) => "time_to_first_token_s" in values;

// What a job reports of tokens and of their cache (telemetry/tokens.py).
class Serving {
  constructor() {
    this.facts = new Facts();
    this.facts.node.classList.remove("panel");
    this.node = panel("Serving", "", this.facts.node).node;
    this.node.classList.add("serving");
    this.node.hidden = true;
  }

  update(present) {
    const values = present.progress.values;
    this.node.hidden = !serves(values);
    if (this.node.hidden) return;
    const facts = [["Time to first token", seconds(values.time_to_first_token_s), curve("job", "time_to_first_token_s")]];
    const told = (name, value, metric) => { if (metric in values) facts.push([name, value(values[metric]), curve("job", metric)]); };
    told("Time per token, last", seconds, "time_per_token_s");
    if ("mean_time_per_token_s" in values) facts.push(["Time per token, mean", seconds(values.mean_time_per_token_s)]);
    told("Output tokens/s", count, "output_tokens_per_s");
    told("Tokens cached", whole, "cached_tokens");
    const room = values.cache_capacity_tokens;
    if (room) facts.push(["Cache", `${percent((100 * values.cached_tokens) / room)} of ${whole(room)}`]);
    this.facts.show(facts);
  }
}

const whole = (value) => value.toLocaleString("en-US");

// One rank. Fields that its machine does not have are left out.
class Card {
  constructor(rank) {
    this.name = el("b", {}, `rank ${rank}`);
    this.doingAt = el("span", { class: "muted num" });
    this.state = el("span", { class: "state" });
    this.where = el("div", { class: "where" });
    this.canvas = el("canvas", { role: "img", "aria-label": `rank ${rank}: computes, last two minutes` });
    this.compute = el("i", { class: "compute" });
    this.wait = el("i", { class: "wait" });
    this.computes = el("b");
    this.waits = el("b");
    this.fields = el("dl");
    this.values = new Map();
    this.doing = el("div", { class: "doing" });
    this.node = el("article", { class: "card", "data-rank": rank, "aria-label": `rank ${rank}` },
      el("div", { class: "top" }, this.name, this.doingAt, this.state), this.where, this.canvas,
      el("div", { class: "split", "aria-hidden": "true" }, this.compute, this.wait),
      el("div", { class: "shares" },
        el("span", {}, "computes ", this.computes), el("span", {}, "waits ", this.waits)),
      this.fields, this.doing);
    this.paintedAt = 0;
  }

  update(rank, present, repaint) {
    const own = job.sources.get(rank.source)?.values ?? {};
    const gpu = rank.gpu ? job.sources.get(rank.gpu) : null;
    const look = looks(rank);
    attribute(this.node, "class", `card ${look}`);
    attribute(this.state, "class", `state ${look}`);
    text(this.state, `${SIGNS[look]} ${state(rank, present, this.node.parentNode.classList.contains("dense"))}`);
    text(this.where, [rank.host, gpu?.about.name || rank.device, gpu ? rank.device : ""].filter(Boolean).join(" · "));
    const live = rank.status === "live";
    const compute = live ? own.compute_percent ?? 0 : 0;
    const wait = live ? own.wait_percent ?? 0 : 0;
    this.compute.style.width = `${compute}%`;
    this.wait.style.width = `${wait}%`;
    text(this.computes, percent(compute));
    text(this.waits, percent(wait));
    this.fill([...this.figures(rank, own, gpu, present)]);
    text(this.doing, live ? doing(rank, present) : rank.ending);
    attribute(this.doing, "title", live ? "" : rank.ending);
    const now = performance.now();
    if (repaint || look !== this.look || now - this.paintedAt > REPAINT_MS) {
      this.paintedAt = now;
      this.look = look;
      const line = curve(gpu ? rank.gpu : rank.source, gpu ? "sm_percent" : "compute_percent");
      spark(this.canvas, line, { colour: live ? colours.compute : colours.left, low: 0, high: 100, fill: true, seconds: [20, 120] });
    }
  }

  * figures(rank, own, gpu, present) {
    const v = gpu?.values ?? {};
    if (gpu) {
      yield ["GPU", measure(v.sm_percent, "%")];
      const total = Number(gpu.about.memory_bytes);
      yield ["mem", v.memory_used_bytes == null ? "" : total ? bytesOf(v.memory_used_bytes, total) : bytes(v.memory_used_bytes)];
      yield ["power", measure(v.power_w, "W")];
      yield ["chip", measure(v.temperature_c, "C")];
    } else {
      yield ["core", measure(own.process_percent, "%")];
      yield ["mem", measure(own.rss_bytes, "B")];
    }
    yield ["flop/s", own.flops_per_s == null ? "" : count(own.flops_per_s)];
    yield ["sends", measure(own.sent_bytes_per_s, "B/s")];
    const tokens = present.progress.values.tokens_per_s;
    // The job's, divided evenly: ranks share every sequence.
    yield ["tokens/s", tokens == null ? "" : count(Math.round(tokens / Math.max(1, present.job.world_size)))];
    // The number of a call counts agreements and reductions too.
    yield ["graph calls", count(rank.calls)];
  }

  // Values appear as they are first measured, always in the same order.
  fill(figures) {
    const fresh = figures.filter(([name, value]) => value && !this.values.has(name));
    for (const [name] of fresh) this.values.set(name, el("dd"));
    if (fresh.length) {
      const known = figures.filter(([name]) => this.values.has(name));
      this.fields.replaceChildren(...known.map(([name]) => el("div", {}, el("dt", {}, name), this.values.get(name))));
    }
    for (const [name, value] of figures) if (this.values.has(name)) text(this.values.get(name), value || "-");
  }
}

// When a rank ended matters to a tenth of a second, and whether it was the first.
function state(rank, present, brief) {
  const { status } = rank;
  const cause = firstLost(present);
  if (status === "live") return status;
  if (status === "silent") return `silent ${tenths(present.job.now_s - rank.status_since_s)}`;
  if (status === "ended" && cause) {
    const after = `${(rank.status_since_s - cause.status_since_s).toFixed(1)} s`;
    return brief ? `+${after}` : `ended ${after} after`;
  }
  const code = status === "left" && rank.exit_code ? ` with ${rank.exit_code}` : "";
  return `${status}${code}${cause === rank ? " first" : ""}${brief ? "" : ` ${tenths(rank.status_since_s)}`}`;
}

function doing(rank, present) {
  if (rank.call < 0) return rank.last_call >= 0 ? `after call ${rank.last_call}` : rank.calls ? "between calls" : "no call yet";
  const long = present.job.now_s - rank.doing_since_s;
  return `call ${rank.call} · ${rank.doing || "between tasks"}${long > 1 ? ` for ${clock(long)}` : ""}`;
}
