// The first page: the job in a row of figures, the ring, a card or a tile a rank, the loss, what happened.

import { Card } from "./card.js";
import { Chart } from "./chart.js";
import { el, panel, text } from "./dom.js";
import { count, measure, percent, rate, seconds, tenths } from "./format.js";
import { curve, firstLost, job } from "./live.js";
import { PostMortem } from "./postmortem.js";
import { Ring } from "./ring.js";
import { spark } from "./spark.js";
import { colours } from "./theme.js";
import { Tiles } from "./tiles.js";

const MANY = 8; // more ranks than this get tiles, and one card
const phone = matchMedia("(max-width: 600px)"); // where cards are small

export class Overview {
  constructor() {
    this.postMortem = new PostMortem();
    this.facts = new Facts();
    this.serving = new Serving();
    this.ring = new Ring();
    this.cards = new Map();
    this.grid = el("div", { class: "cards" });
    this.tiles = new Tiles((rank) => this.single(rank));
    this.one = el("div", { class: "one", hidden: true }); // the card of the chosen tile
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
      el("div", { class: "aside" }, ring.node, this.one, panel("Events", "newest first", this.cause, this.events).node),
      el("div", { class: "ranks" }, this.tiles.node, this.grid, loss.node));
  }

  update(repaint = false) {
    const { present } = job;
    this.postMortem.update(present);
    this.verdict.update(present.job);
    this.facts.update(present);
    this.serving.update(present);
    this.ring.update(present);
    const many = present.ranks.length > MANY;
    this.node.classList.toggle("many", many);
    this.tiles.node.hidden = this.one.hidden = !many;
    this.grid.hidden = many;
    if (many) this.tiles.update(present);
    else this.deal(present);
    for (const rank of present.ranks) this.cards.get(rank.rank)?.update(rank, present, repaint);
    this.lossPanel.hidden = many || !("loss" in present.progress.values); // the row of figures has the curve of many ranks
    if (!this.lossPanel.hidden) {
      const points = [...curve("job", "loss")];
      this.loss.set([{ name: "loss", times: points.map(([at]) => at), values: points.map(([, value]) => value) }]);
      text(this.lossNote, `step ${present.progress.step}`);
    }
    this.tell();
  }

  show() { this.loss.draw(); }

  // A card a rank, in order.
  deal(present) {
    this.grid.classList.toggle("gpus", present.ranks.some((rank) => rank.gpu));
    this.grid.classList.toggle("dense", phone.matches);
    const order = present.ranks.map(({ rank }) => rank);
    if (order.every((rank) => this.cards.has(rank)) && this.cards.size === order.length) return;
    this.cards = new Map(order.map((rank) => [rank, this.cards.get(rank) ?? new Card(rank)]));
    this.grid.replaceChildren(...[...this.cards.values()].map((card) => card.node));
  }

  // The card of one rank alone.
  single(rank) {
    if (rank == null || (this.cards.size === 1 && this.cards.has(rank))) return;
    const card = new Card(rank);
    this.cards = new Map([[rank, card]]);
    this.one.replaceChildren(card.node);
    card.update(job.present.ranks.find((one) => one.rank === rank), job.present, true);
  }

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
    if (verdict.advice === this.advised) return;
    this.advised = verdict.advice;
    // What is between backticks is to be typed.
    const parts = verdict.advice ? sentence(verdict.advice).split("`") : [];
    this.advice.replaceChildren(...parts.map((part, i) => (i % 2 ? el("code", {}, part) : part)));
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
