// Every rank's lanes over time: drags, wheels, pinches and keys move the window, the pointer asks what a task was, a poll brings news.

import { ask, shown } from "./ask.js";
import { el, text } from "./dom.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { beside } from "./chart.js";
import { now } from "./live.js";
import { AXIS, MESSAGES, Picture } from "./picture.js";
import { LANES, STEPS } from "./spans.js";

const ASK_MS = 1000;
const OVERLAP_S = 2.5; // calls come late: what may have been under way is asked for again
const FIRST_S = 60;
const MOST = 20_000;
const SHORTEST_S = 2e-6;
const LONGEST_S = 600;
const FRAME_MS = 30;
const TAKE_MS = 4; // what is taken at a time takes so long
const NO_STEP = 0xffffffff; // -1, as a column holds it

export class Timeline extends Picture {
  constructor(job) {
    super(job);
    this.tip = el("div", { class: "tooltip", hidden: true });
    this.status = el("div", { class: "status" });
    this.spoken = el("div", { class: "unseen", "aria-live": "polite" });
    this.follow = el("button", { type: "button", onclick: () => this.setFollow(!this.following), title: "L" }, "Follow");
    this.messages = el("button", { type: "button", onclick: () => this.toggleMessages(), title: "M", "aria-pressed": "false" }, "Messages");
    this.choice = el("select", { "aria-label": "Ranks", onchange: () => this.choose(this.choice.value) });
    const zoom = (factor, sign, key) => el("button", { type: "button", "aria-label": key, onclick: () => this.zoom(factor) }, sign);
    this.node = el("div", { class: "page timeline" },
      el("div", { class: "tools" }, this.follow, zoom(0.5, "+", "zoom in (+)"), zoom(2, "−", "zoom out (−)"),
        el("button", { type: "button", onclick: () => this.all(), title: "F" }, "All"), this.messages, this.choice, legend()),
      this.stage = el("div", { class: "stage panel" }, this.canvas, this.tip), this.status, this.spoken);
    this.visible = false;
    this.asked = null; // the state of the job, and the moment, at the last answer
    this.jumps = 0; // that have been followed
    this.pointers = new Map();
    this.listen();
  }

  // Page.

  show() {
    this.visible = true;
    this.dirty = true;
    this.poll();
    const frame = (at) => {
      if (!this.visible) return;
      requestAnimationFrame(frame);
      const moving = this.following && this.job.state === "live" && !this.job.present?.job.replayed;
      if (!this.dirty && !(moving && at - (this.drawnAt || 0) >= FRAME_MS)) return;
      this.drawnAt = at;
      this.draw();
      this.say();
    };
    requestAnimationFrame(frame);
  }

  hide() {
    this.visible = false;
    this.tip.hidden = true;
    clearTimeout(this.timer);
  }

  update() {
    const ranks = this.job.present.ranks;
    if (this.choice.options.length !== ranks.length + 1) {
      const chosen = this.choice.value;
      const options = ranks.map(({ rank }) => el("option", { value: rank }, `rank ${rank}`));
      this.choice.replaceChildren(el("option", { value: "" }, "all ranks"), ...options);
      this.choice.value = chosen;
    }
    this.follow.setAttribute("aria-pressed", String(this.following));
    this.dirty = true; // states of ranks stand beside their lanes
    if (shown.at != null && this.visible) this.poll();
  }

  choose(rank) {
    this.only = rank === "" ? null : Number(rank);
    this.scroll = 0;
    this.dirty = true;
  }

  async poll() {
    clearTimeout(this.timer);
    if (!this.visible || this.polling) return;
    const { state, present } = this.job;
    const asked = `${state} ${present?.job.replayed ? shown.at ?? "end" : ""}`;
    const over = state !== "live" || present?.job.replayed; // one more answer, and no more come
    if (present && !document.hidden && state !== "away" && !(over && this.asked === asked)) {
      this.polling = true;
      if (this.jumps !== this.job.jumps) {
        this.jumps = this.job.jumps;
        this.spans.clear();
        this.askedUntil = null;
      }
      const gap = this.askedUntil != null ? now() - this.askedUntil : Infinity;
      const since = gap > FIRST_S ? -FIRST_S : -(gap + OVERLAP_S);
      try {
        const view = await ask("timeline", { since, limit: MOST });
        this.asked = asked;
        this.askedUntil = view.now_s;
        await this.take(view);
        await this.predict(present.plans);
        if (present.job.replayed && this.until === 0) this.all();
      } catch { /* the stream says when the job is gone */ }
      this.polling = false;
    }
    this.timer = setTimeout(() => this.poll(), ASK_MS);
  }

  // An answer may hold 20,000 spans: frames are drawn while they are taken.
  async take(view) {
    let begun = performance.now();
    for (const _ of this.spans.taking(view, this.job.present.ranks.length)) {
      if (performance.now() - begun < TAKE_MS) continue;
      await new Promise((done) => { setTimeout(done); });
      begun = performance.now();
    }
    this.complete = view.complete;
    this.leftOut = view.left_out + view.phases_left_out;
    this.spans.ranks.forEach(({ lanes }) => lanes.forEach((lane, i) => { this.lanes[i] ||= lane.count > 0; }));
    this.dirty = true;
  }

  // How long calls should take: said by one rank of a group for all.
  async predict(plans) {
    if (plans === this.plansKnown) return;
    this.plansKnown = plans;
    this.predictions = new Map();
    const said = new Map();
    for (const { rank, number, group, kind, problem, predicted_s: own } of await ask("plans")) {
      const key = `${group} ${kind} ${problem}`;
      if (own != null) said.set(key, own);
      if (said.has(key)) this.predictions.set(`${rank} ${number}`, said.get(key));
    }
  }

  // The window.

  // The window that a link names; until: null for the moment that is shown.
  open(span, until) {
    this.span = Math.min(LONGEST_S, Math.max(SHORTEST_S, span));
    if (until != null) this.until = until;
    this.setFollow(until == null);
  }

  setFollow(on) {
    this.following = on;
    this.follow.setAttribute("aria-pressed", String(on));
    this.dirty = true;
  }

  zoom(factor, x = null) {
    const width = this.canvas.clientWidth - this.labelWidth;
    const part = x == null ? (this.following ? 1 : 0.5) : Math.min(1, Math.max(0, (x - this.labelWidth) / width));
    const at = this.since + part * this.span;
    this.span = Math.min(LONGEST_S, Math.max(SHORTEST_S, this.span * factor));
    if (!this.following) this.until = at + (1 - part) * this.span;
    this.dirty = true;
  }

  pan(seconds_) {
    // The moment that is shown may have changed since the last frame.
    if (this.following && this.job.present) this.until = this.end();
    this.setFollow(false);
    this.until += seconds_;
  }

  all() {
    if (!this.spans.total) return;
    this.setFollow(false);
    const oldest = Math.max(this.spans.oldest, this.spans.newest - FIRST_S * 2);
    this.span = Math.max(SHORTEST_S * 10, (this.spans.newest - oldest) * 1.03);
    this.until = this.spans.newest + this.span * 0.015;
  }

  toggleMessages() {
    this.withMessages = !this.withMessages;
    this.messages.setAttribute("aria-pressed", String(this.withMessages));
    this.dirty = true;
  }

  key(event) {
    const step = this.span * 0.15;
    const actions = {
      ArrowLeft: () => this.pan(-step), ArrowRight: () => this.pan(step), a: () => this.pan(-step), d: () => this.pan(step),
      ArrowUp: () => this.roll(-60), ArrowDown: () => this.roll(60),
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.4), w: () => this.zoom(0.7), s: () => this.zoom(1.4),
      l: () => this.setFollow(!this.following), f: () => this.all(), m: () => this.toggleMessages(),
      n: () => this.step(1), p: () => this.step(-1), Escape: () => { this.selected = null; this.dirty = true; },
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  roll(pixels) {
    this.scroll = Math.max(0, Math.min(this.height_ - (this.canvas.clientHeight - AXIS), this.scroll + pixels));
    this.dirty = true;
  }

  listen() {
    const { canvas, pointers } = this;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const scale = event.deltaMode === 1 ? 16 : 1;
      const [dx, dy] = [event.deltaX * scale, event.deltaY * scale];
      const fits = this.height_ <= canvas.clientHeight - AXIS;
      if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) this.pan(((dx || dy) / canvas.clientWidth) * this.span);
      else if (event.ctrlKey || event.metaKey || fits) this.zoom(Math.exp(Math.max(-80, Math.min(80, dy)) * 0.006), event.offsetX);
      else this.roll(dy);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return this.look(event);
      const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
      if (others.length) {
        const apart = (a) => Math.max(8, Math.hypot(a[0] - others[0][0], a[1] - others[0][1]));
        return this.zoom(apart(before) / apart([event.offsetX, event.offsetY]), (event.offsetX + others[0][0]) / 2);
      }
      const width = canvas.clientWidth - this.labelWidth;
      if (event.offsetX !== before[0]) this.pan(((before[0] - event.offsetX) / width) * this.span);
      this.roll(before[1] - event.offsetY);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (event.pointerType === "touch") this.look(event);
    });
    canvas.addEventListener("pointerleave", () => { this.hover = null; this.tip.hidden = true; this.dirty = true; });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.3, event.offsetX));
  }

  // Words about a window, and about a task.

  say() {
    if (!this.job.present) return;
    const called = this.job.present.ranks.some(({ calls }) => calls);
    if (!this.spans.total) text(this.status, called ? "Waiting for spans." : "No call has ended yet.");
    else if (!this.selected) text(this.status, this.summary());
  }

  summary() {
    const parts = [];
    for (const [rank, [skew, exposed]] of this.exposed) parts.push([rank, skew, exposed]);
    const share = (i) => (parts.length ? parts.reduce((sum, part) => sum + part[i], 0) / (parts.length * this.span) : 0);
    const words = [`${this.reach()} shown`];
    if (this.complete) {
      words.push(`exposed transfers ${percent(100 * share(2))} of it, late peers ${percent(100 * share(1))} (mean of the ranks in view)`);
    }
    if (this.met > MESSAGES) words.push(`only the newest ${count(MESSAGES)} of ${count(this.met)} messages drawn: zoom in`);
    if (this.leftOut) words.push(`${count(this.leftOut)} older spans left out`);
    return words.join(" · ");
  }

  // How much time there is to see; of a record, how much of it.
  reach() {
    const { length_s: length } = this.job.present.job;
    if (length == null) return seconds(this.span);
    const part = Math.max(0, Math.min(this.until, this.spans.newest) - Math.max(this.since, this.spans.oldest));
    return `${Number(part.toPrecision(3))} of ${Number(length.toPrecision(3))} s`;
  }

  look(event) {
    const found = this.under(event.offsetX, event.offsetY);
    const changed = found?.at !== this.hover?.at || found?.kind !== this.hover?.kind || found?.rank !== this.hover?.rank;
    this.hover = found?.kind >= 0 ? found : null;
    if (changed) this.dirty = true;
    this.tip.hidden = !found;
    if (!found) return;
    if (changed || !this.tip.firstChild) this.tip.replaceChildren(...this.describe(found));
    beside(this.tip, event);
  }

  describe({ rank, kind, at }) {
    const held = this.spans.ranks.get(rank);
    const rows = [];
    const add = (name, value) => { if (value !== "") rows.push(el("dt", {}, name), el("dd", {}, value)); };
    if (kind === -1) {
      const { calls } = held;
      const predicted = this.predictions.get(`${rank} ${calls.plan[at]}`);
      add("rank", String(rank));
      add("took", seconds(calls.end[at] - calls.start[at]));
      add("predicted", predicted == null ? "" : seconds(predicted));
      return [el("b", {}, `${this.spans.names[calls.kind[at]]}, call ${calls.call[at]}`), el("dl", {}, ...rows)];
    }
    if (kind === -2) {
      const { waits } = held;
      add("rank", String(rank));
      add("for", `${this.spans.names[waits.name[at]]} with rank ${waits.peer[at]}`);
      add("stood still", seconds(waits.end[at] - waits.start[at]));
      return [el("b", {}, waits.exposed[at] ? "exposed transfer" : "waits for a late peer"), el("dl", {}, ...rows)];
    }
    const lane = held.lanes[kind];
    const took = lane.end[at] - lane.start[at];
    add("rank", `${rank}, ${LANES[kind]}`);
    if (kind === STEPS) add("step", lane.call[at] < NO_STEP ? String(lane.call[at]) : "");
    else add("call", String(lane.call[at]));
    add("hop", lane.hop[at] < 0 ? "" : String(lane.hop[at]));
    add("took", seconds(took));
    add("began", `${lane.start[at].toFixed(6)} s`);
    add("queued", lane.start[at] - lane.issued[at] > 1e-6 ? seconds(lane.start[at] - lane.issued[at]) : "");
    add("bytes", lane.bytes[at] ? bytes(lane.bytes[at]) : "");
    add("", kind > 0 && lane.bytes[at] && took > 0 ? rate(lane.bytes[at] / took) : "");
    add("compute", lane.flops[at] && took > 0 ? count(lane.flops[at] / took, "flop/s") : "");
    const { flows } = this.spans;
    for (const flow of this.spans.flowsOf(rank, lane.group[at], lane.call[at], lane.task[at]).slice(0, 4)) {
      if (kind === 1 && flows.sender[flow] === rank) add("to", `rank ${flows.receiver[flow]}, ${bytes(flows.bytes[flow])}`);
      if (kind === 2 && flows.receiver[flow] === rank) add("from", `rank ${flows.sender[flow]}, ${bytes(flows.bytes[flow])}`);
    }
    const name = this.spans.nameAt(lane, at);
    const said = meaning(name);
    return [el("b", {}, name), ...(said ? [el("span", { class: "muted" }, said)] : []), el("dl", {}, ...rows)];
  }

  // Next or previous task of a lane, for those without a pointer.
  step(by) {
    const start = this.selected ?? this.hover;
    const row = start ?? this.lookedAt ?? this.rows?.find(({ kind }) => kind === 0);
    const lane = row && this.spans.ranks.get(row.rank)?.lanes[Math.max(0, row.kind)];
    if (!lane?.count) return;
    this.setFollow(false);
    let number = start ? lane.search(lane.start[start.at]) + by : lane.search((this.since + this.until) / 2);
    if (start) while (number >= lane.first && number < lane.count && number % lane.size === start.at) number += by;
    number = Math.max(lane.first, Math.min(lane.count - 1, number));
    const at = number % lane.size;
    this.selected = { rank: row.rank, kind: Math.max(0, row.kind), at };
    if (lane.start[at] < this.since || lane.end[at] > this.until) this.until = (lane.start[at] + lane.end[at]) / 2 + this.span / 2;
    const words = (node) => [...node.childNodes].map((part) => part.textContent).join(" ");
    text(this.status, this.describe(this.selected).map(words).join(": "));
    text(this.spoken, this.status.textContent);
    this.dirty = true;
  }
}

// A task's name in words (attention/strategies/ring.py): "hop 2 q1 kv3.0" is a tile.
function meaning(name) {
  const tile = /\bq(\d+)(?:\.(\d+))? kv(\d+)(?:\.(\d+))?$/.exec(name);
  const shard = (rank, block) => `rank ${rank}${block ? `'s block ${block}` : ""}`;
  if (tile) return `a tile: queries of ${shard(tile[1], tile[2])} with keys of ${shard(tile[3], tile[4])}`;
  const sum = /^sum \d+\.(\d+)$/.exec(name);
  if (sum) return `sums of block ${sum[1]} go one rank on`;
  return /^hop \d+$/.test(name) ? "what travels goes one rank on, and the next comes" : "";
}

function legend() {
  const item = (name, paint) => {
    const swatch = el("i", { class: "swatch" });
    paint(swatch.style);
    return el("span", {}, swatch, name);
  };
  const plain = (name) => item(name, (style) => { style.background = `var(--${name})`; });
  const striped = (name, colour) => item(name, (style) => {
    style.background = `repeating-linear-gradient(135deg, var(--${colour}) 0 2px, transparent 2px 5px)`;
  });
  const end = item("predicted end", (style) => { style.width = "2px"; style.background = "var(--text)"; });
  const lanes = ["steps", "compute", "send", "receive", "copy"].map(plain);
  return el("div", { class: "legend" }, ...lanes, striped("exposed transfer", "exposed"), striped("late peer", "skew"), end);
}
