// Every rank's lanes over time. Draws on one canvas; drags, wheels, pinches and keys move the window; the pointer asks what a task was.

import { ask, el, text } from "./dom.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { beside, ticks } from "./chart.js";
import { job, now } from "./live.js";
import { LANES, Spans } from "./spans.js";
import { fit } from "./spark.js";
import { colours, onTheme } from "./theme.js";

const AXIS = 26;
const LABEL = 84;
const LABEL_NARROW = 46;
const SHORT = ["comp", "send", "recv", "copy", "ctrl"];
const ASK_MS = 1000;
const OVERLAP_S = 2.5; // calls come late: what may have been under way is asked for again
const BEHIND_S = 1.6; // and so the picture of a running job is a little behind it, and flows
const FIRST_S = 60;
const MOST = 20_000;
const SHORTEST_S = 2e-6;
const LONGEST_S = 600;
const FRAME_MS = 30;
const MESSAGES = 1500;

export class Timeline {
  constructor() {
    this.spans = new Spans();
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": "Timeline of all ranks. Arrows pan, plus and minus zoom, N and P step through tasks." });
    this.tip = el("div", { class: "tooltip", hidden: true });
    this.status = el("div", { class: "status", "aria-live": "polite" });
    this.follow = el("button", { type: "button", onclick: () => this.setFollow(!this.following), title: "L" }, "Follow");
    this.messages = el("button", { type: "button", onclick: () => this.toggleMessages(), title: "M", "aria-pressed": "false" }, "Messages");
    this.only = el("select", { "aria-label": "Ranks", onchange: () => { this.scroll = 0; this.dirty = true; } }, el("option", { value: "" }, "all ranks"));
    this.lanes = LANES.map(() => false);
    const zoom = (factor, sign, key) => el("button", { type: "button", title: key, "aria-label": key, onclick: () => this.zoom(factor) }, sign);
    this.legend = el("div", { class: "legend" });
    this.node = el("div", { class: "page timeline" },
      el("div", { class: "tools" }, this.follow, zoom(0.5, "+", "zoom in (+)"), zoom(2, "−", "zoom out (−)"),
        el("button", { type: "button", onclick: () => this.all(), title: "F" }, "All"), this.messages, this.only, this.legend),
      el("div", { class: "stage panel" }, this.canvas, this.tip), this.status);
    this.span = 4;
    this.until = 0;
    this.scroll = 0;
    this.following = true;
    this.withMessages = false;
    this.selected = null;
    this.hover = null;
    this.dirty = true;
    this.visible = false;
    this.frames = { count: 0, tookMs: 0, worstMs: 0 }; // what drawing costs; tests/web/load.py reads it
    this.asked = false;
    this.pointers = new Map();
    this.listen();
    new ResizeObserver(() => { this.dirty = true; }).observe(this.canvas);
    onTheme(() => { this.hatches = null; this.dirty = true; this.explain(); });
  }

  // Page.

  show() {
    this.visible = true;
    this.dirty = true;
    this.explain();
    this.poll();
    const frame = (at) => {
      if (!this.visible) return;
      requestAnimationFrame(frame);
      const moving = this.following && job.state === "live" && !job.present?.job.replayed;
      if (!this.dirty && !(moving && at - (this.drawnAt || 0) >= FRAME_MS)) return;
      this.drawnAt = at;
      this.draw();
    };
    requestAnimationFrame(frame);
  }

  hide() {
    this.visible = false;
    this.tip.hidden = true;
    clearTimeout(this.timer);
  }

  update() {
    const ranks = job.present.ranks;
    if (this.only.options.length !== ranks.length + 1) {
      const chosen = this.only.value;
      this.only.replaceChildren(el("option", { value: "" }, "all ranks"), ...ranks.map(({ rank }) => el("option", { value: rank }, `rank ${rank}`)));
      this.only.value = chosen;
    }
    this.follow.setAttribute("aria-pressed", String(this.following));
  }

  async poll() {
    clearTimeout(this.timer);
    if (!this.visible) return;
    if (job.present && !document.hidden && !(this.asked && (job.state !== "live" || job.present.job.replayed))) {
      const gap = this.asked ? now() - this.askedUntil : Infinity;
      const since = gap > FIRST_S ? -FIRST_S : -(gap + OVERLAP_S);
      try {
        const view = await ask("timeline", { since, limit: MOST });
        this.asked = true;
        this.askedUntil = view.now_s;
        this.spans.take(view, job.present.ranks.length);
        this.complete = view.complete;
        this.leftOut = view.left_out;
        this.spans.ranks.forEach(({ lanes }) => lanes.forEach((lane, i) => { this.lanes[i] ||= lane.count > 0; }));
        this.dirty = true;
        await this.predict(job.present.plans);
        if (job.present.job.replayed && this.until === 0) this.all();
      } catch { /* the stream says when the job is gone */ }
    }
    this.timer = setTimeout(() => this.poll(), ASK_MS);
  }

  // How long calls should take: said by one rank of a group for all.
  async predict(plans) {
    if (plans === this.plansKnown) return;
    this.plansKnown = plans;
    this.predictions = new Map();
    const said = new Map();
    for (const { rank, number, group, kind, explain, predicted_s: own } of await ask("plans")) {
      const key = `${group} ${kind} ${explain.split("\n").at(-1)}`;
      if (own != null) said.set(key, own);
      if (said.has(key)) this.predictions.set(`${rank} ${number}`, said.get(key));
    }
  }

  explain() {
    const item = (name, paint) => {
      const swatch = el("i", { class: "swatch" });
      paint(swatch.style);
      return el("span", {}, swatch, name);
    };
    const plain = (name) => item(name, (style) => { style.background = `var(--${name})`; });
    const striped = (name, colour) => item(name, (style) => { style.background = `repeating-linear-gradient(135deg, var(--${colour}) 0 2px, transparent 2px 5px)`; });
    this.legend.replaceChildren(...["compute", "send", "receive", "copy"].map(plain), striped("exposed transfer", "exposed"), striped("late peer", "skew"),
      item("predicted end", (style) => { style.width = "2px"; style.background = "var(--text)"; }));
  }

  // The window.

  get since() { return this.until - this.span; }

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
      ArrowUp: () => this.roll(-60), ArrowDown: () => this.roll(60), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.4),
      w: () => this.zoom(0.7), s: () => this.zoom(1.4), l: () => this.setFollow(!this.following), f: () => this.all(), m: () => this.toggleMessages(),
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

  // The picture.

  // Rows of the shown ranks: y, height, rank and lane, in canvas pixels without the scroll.
  layout() {
    const wanted = this.only.value === "" ? null : Number(this.only.value);
    const ranks = job.present.ranks.map(({ rank }) => rank).filter((rank) => wanted == null || rank === wanted);
    const lanes = LANES.map((name, i) => i).filter((i) => this.lanes[i] || i < 3);
    const room = this.canvas.clientHeight - AXIS;
    const each = room / Math.max(1, ranks.length);
    const lane = Math.max(8, Math.min(ranks.length > 1 ? 38 : 60, Math.floor((each - 18) / lanes.length)));
    const call = lane > 14 ? 12 : 6;
    const gap = lane > 14 ? 8 : 4;
    this.rows = [];
    let y = gap;
    for (const rank of ranks) {
      this.rows.push({ rank, kind: -1, y, height: call });
      y += call + 1;
      for (const kind of lanes) {
        this.rows.push({ rank, kind, y, height: lane - 1 });
        y += lane;
      }
      y += gap;
    }
    this.height_ = y;
    this.scroll = Math.max(0, Math.min(this.scroll, this.height_ - room));
    this.labelWidth = this.canvas.clientWidth < 600 ? LABEL_NARROW : LABEL;
  }

  draw() {
    const begun = performance.now();
    this.dirty = false;
    const [context, width, height] = fit(this.canvas);
    if (!job.present || !width) return;
    this.layout();
    if (this.following) this.until = job.present.job.replayed || job.state === "ended" ? this.spans.newest : now() - BEHIND_S;
    context.fillStyle = colours.surface;
    context.fillRect(0, 0, width, height);
    const scale = (width - this.labelWidth) / this.span;
    this.x = (at) => this.labelWidth + (at - this.since) * scale;
    this.axis(context, width, height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    this.exposed = new Map();
    for (const row of this.rows) {
      const y = AXIS + row.y - this.scroll;
      if (y + row.height < AXIS || y > height) continue;
      const held = this.spans.ranks.get(row.rank);
      if (row.kind < 0) this.drawCalls(context, held, row, y, width);
      else {
        this.drawLane(context, held?.lanes[row.kind], row, y, width);
        if (row.kind === 0) this.drawWaits(context, held?.waits, row, y, width);
      }
    }
    this.drawMessages(context, height);
    this.labels(context, width, height);
    context.restore();
    const took = performance.now() - begun;
    this.frames.count += 1;
    this.frames.tookMs += took;
    this.frames.worstMs = Math.max(this.frames.worstMs, took);
    if (!this.spans.total) text(this.status, job.present.ranks.some(({ calls }) => calls) ? "Waiting for spans." : "No call has ended yet.");
    else if (!this.selected) text(this.status, this.summary());
  }

  axis(context, width, height) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    const places = ticks(this.since, this.until, Math.max(2, (width - this.labelWidth) / 110));
    const step = places.length > 1 ? places[1] - places[0] : this.span;
    const decimals = Math.max(0, Math.min(7, -Math.floor(Math.log10(step) + 1e-9)));
    for (const at of places) {
      const x = Math.round(this.x(at));
      if (x < this.labelWidth) continue;
      context.fillStyle = colours.grid;
      context.fillRect(x, AXIS, 1, height);
      context.fillStyle = colours.muted;
      if (x < width - 24 && x > this.labelWidth + 20) context.fillText(`${at.toFixed(decimals)} s`, x, AXIS / 2);
    }
    context.fillStyle = colours.line;
    context.fillRect(0, AXIS - 1, width, 1);
  }

  labels(context, width, height) {
    context.fillStyle = colours.surface;
    context.fillRect(0, AXIS, this.labelWidth, height);
    context.fillStyle = colours.line;
    context.fillRect(this.labelWidth - 1, AXIS, 1, height);
    context.textAlign = "left";
    context.textBaseline = "middle";
    const narrow = this.labelWidth === LABEL_NARROW;
    const states = new Map(job.present.ranks.map((rank) => [rank.rank, rank.status]));
    for (const row of this.rows) {
      const y = AXIS + row.y - this.scroll + row.height / 2;
      if (y < AXIS - 10 || y > height + 10) continue;
      if (row.kind < 0) {
        context.fillStyle = colours.line;
        context.fillRect(0, Math.round(y - row.height / 2 - 3), width, 1);
        const status = states.get(row.rank);
        context.fillStyle = status === "live" ? colours.text : colours[status];
        context.font = "600 11.5px system-ui, sans-serif";
        const sign = { lost: " ✕", silent: " ▲" }[status] || "";
        context.fillText(narrow ? `${row.rank}${sign}` : `rank ${row.rank}${sign}`, 9, y + (row.height < 10 ? 4 : 2));
      } else if (row.height >= 10) {
        context.font = "10.5px system-ui, sans-serif";
        context.fillStyle = colours.muted;
        context.fillText(narrow ? SHORT[row.kind] : LANES[row.kind], narrow ? 9 : 18, y);
      }
    }
  }

  drawLane(context, lane, row, y, width) {
    if (!lane) return;
    const [from, to] = lane.window(this.since, this.until);
    const colour = colours[LANES[row.kind]];
    const left = this.labelWidth;
    const texts = [];
    let deepest = 0;
    context.fillStyle = colour;
    // What is closer than a pixel becomes one rectangle, so that a picture costs what its width does and not what the run did.
    for (let level = 0; level < lane.levels; level += 1) {
      const [top, deep] = part(y, row.height, level);
      let open = NaN;
      let shut = NaN;
      for (let i = from; i < to; i += 1) {
        const at = i % lane.size;
        if (lane.level[at] !== level) continue;
        const end = this.x(lane.end[at]);
        if (end < left) continue;
        const start = Math.max(left, this.x(lane.start[at]));
        if (end - start < 3) {
          if (start - shut < 0.8) { shut = Math.max(shut, end); continue; }
          if (shut >= open) context.fillRect(open, top, Math.max(0.7, shut - open), deep);
          open = start;
          shut = end;
          continue;
        }
        const shade = row.kind < 3 && lane.hop[at] > 0 ? 1 - 0.14 * (lane.hop[at] % 4) : 1;
        if (level) {
          deepest = level;
          context.fillStyle = colours.surface;
          context.fillRect(start - 1, top - 1, Math.min(width, end) - start + 2, deep + 1);
          context.fillStyle = colour;
        }
        context.globalAlpha = shade;
        context.fillRect(start, top, Math.min(width, end) - start - (end - start > 4 ? 0.8 : 0), deep);
        context.globalAlpha = 1;
        if (deep >= 10 && end - start > 34) texts.push(at, start, Math.min(width, end), level);
      }
      if (shut >= open) context.fillRect(open, top, Math.max(0.7, shut - open), deep);
    }
    if (!texts.length) return;
    context.fillStyle = colours["on-span"];
    context.font = "10.5px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (let i = 0; i < texts.length; i += 4) {
      const room = Math.floor((texts[i + 2] - texts[i + 1] - 8) / 5.6);
      const name = this.spans.names[lane.name[texts[i]]];
      if (room < 4) continue;
      // Above what covers it.
      const [top, deep] = part(y, row.height, texts[i + 3]);
      const middle = texts[i + 3] < deepest ? top + deep / 4 : top + deep / 2;
      context.fillText(name.length > room ? `${name.slice(0, room - 1)}…` : name, texts[i + 1] + 4, middle + 0.5);
    }
  }

  drawCalls(context, held, row, y, width) {
    if (!held) return;
    const { calls } = held;
    const plans = this.predictions ?? new Map();
    context.font = "9.5px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (let i = calls.count - 1; i >= calls.first; i -= 1) {
      const at = i % calls.size;
      const [start, end] = [this.x(calls.start[at]), this.x(calls.end[at])];
      if (end < this.labelWidth) break;
      if (start > width) continue;
      const left = Math.max(this.labelWidth, start);
      context.fillStyle = colours.line;
      context.fillRect(left, y, Math.max(0.7, end - left - 1), row.height);
      if (row.height >= 10 && end - left > 62) {
        context.fillStyle = colours.muted;
        const words = `${this.spans.names[calls.kind[at]]} ${calls.call[at]} · ${seconds(calls.end[at] - calls.start[at])}`;
        if (end - left > words.length * 5.2) context.fillText(words, left + 4, y + row.height / 2 + 0.5);
      }
      const predicted = plans.get(`${row.rank} ${calls.plan[at]}`);
      if (predicted != null && end - start > 4) {
        const x = this.x(calls.start[at] + predicted);
        if (x >= this.labelWidth && x < width) {
          context.fillStyle = colours.text;
          context.fillRect(x - 1, y - 1, 2, row.height + 2);
        }
      }
    }
  }

  drawWaits(context, waits, row, y, width) {
    if (!waits) return;
    this.hatches ??= [hatch(context, colours.skew), hatch(context, colours.exposed)];
    const sums = [0, 0];
    for (let i = waits.count - 1; i >= waits.first; i -= 1) {
      const at = i % waits.size;
      if (waits.end[at] < this.since - 30) break;
      const [start, end] = [Math.max(waits.start[at], this.since), Math.min(waits.end[at], this.until)];
      if (end <= start) continue;
      sums[waits.exposed[at]] += end - start;
      const x = this.x(start);
      const wide = this.x(end) - x;
      if (wide < 0.6 || x > width) continue;
      context.fillStyle = this.hatches[waits.exposed[at]];
      context.fillRect(x, y, wide, row.height);
    }
    this.exposed.set(row.rank, sums);
  }

  drawMessages(context, height) {
    const { flows } = this.spans;
    const y = new Map(this.rows.map((row) => [`${row.rank} ${row.kind}`, AXIS + row.y - this.scroll + row.height / 2]));
    const line = (at, strong) => {
      const [from, to] = [y.get(`${flows.sender[at]} 1`), y.get(`${flows.receiver[at]} 2`)];
      if (from === undefined || to === undefined) return;
      const [a, b] = [this.x(flows.sent[at]), this.x(flows.received[at])];
      context.moveTo(a, from);
      context.bezierCurveTo(a + (b - a) * 0.4, from, b - (b - a) * 0.4, to, b, to);
      if (strong) { context.moveTo(b - 5, to - 3); context.lineTo(b, to); context.lineTo(b - 5, to + 3); }
    };
    context.lineWidth = 1;
    if (this.withMessages) {
      context.beginPath();
      let drawn = 0;
      for (let i = flows.count - 1; i >= flows.first && drawn < MESSAGES; i -= 1) {
        const at = i % flows.size;
        if (flows.received[at] < this.since || flows.sent[at] > this.until) continue;
        line(at, false);
        drawn += 1;
      }
      context.globalAlpha = 0.45;
      context.strokeStyle = colours.muted;
      context.stroke();
      context.globalAlpha = 1;
    }
    const found = this.selected ?? this.hover;
    if (!found) return;
    const lane = this.spans.ranks.get(found.rank)?.lanes[found.kind];
    if (!lane) return;
    const row = this.rows.find(({ rank, kind }) => rank === found.rank && kind === found.kind);
    if (row) {
      const [top, tall] = part(AXIS + row.y - this.scroll, row.height, lane.level[found.at]);
      context.strokeStyle = colours.text;
      context.lineWidth = 1.5;
      context.strokeRect(this.x(lane.start[found.at]), top, Math.max(1.5, (lane.end[found.at] - lane.start[found.at]) * ((this.canvas.clientWidth - this.labelWidth) / this.span)), tall);
    }
    context.beginPath();
    for (const at of this.spans.flowsOf(found.rank, lane.call[found.at], lane.task[found.at])) line(at, true);
    context.strokeStyle = colours.text;
    context.stroke();
  }

  // Words about a window, and about a task.

  summary() {
    const parts = [];
    for (const [rank, [skew, exposed]] of this.exposed) parts.push([rank, skew, exposed]);
    const share = (i) => (parts.length ? parts.reduce((sum, part) => sum + part[i], 0) / (parts.length * this.span) : 0);
    const words = [`${seconds(this.span)} shown`];
    if (this.complete) words.push(`exposed transfers ${percent(100 * share(2))} of it, late peers ${percent(100 * share(1))} (mean of the ranks in view)`);
    if (this.leftOut) words.push(`${count(this.leftOut)} older spans left out`);
    return words.join(" · ");
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

  under(x, y) {
    if (!this.rows || x < this.labelWidth || y < AXIS) return null;
    const row = this.rows.find((one) => y - AXIS + this.scroll >= one.y && y - AXIS + this.scroll < one.y + one.height + 1);
    if (!row) return null;
    this.lookedAt = row;
    const held = this.spans.ranks.get(row.rank);
    if (!held) return null;
    const at = this.since + ((x - this.labelWidth) / (this.canvas.clientWidth - this.labelWidth)) * this.span;
    const slack = (2.5 * this.span) / this.canvas.clientWidth;
    if (row.kind < 0) {
      const { calls } = held;
      for (let i = calls.count - 1; i >= calls.first; i -= 1) {
        const place = i % calls.size;
        if (calls.start[place] <= at && calls.end[place] >= at) return { rank: row.rank, kind: -1, at: place };
      }
      return null;
    }
    const lane = held.lanes[row.kind];
    const depth = (y - AXIS + this.scroll - row.y) / row.height;
    const level = depth < 0.5 ? 0 : depth < 0.75 ? 1 : 2;
    const [from, to] = lane.window(at - slack, at + slack);
    let best = null;
    let nearest = slack;
    for (let i = from; i < to; i += 1) {
      const place = i % lane.size;
      const far = Math.max(0, lane.start[place] - at, at - lane.end[place]) + (lane.level[place] === level ? 0 : slack * 0.5);
      if (far < nearest || (far === nearest && best == null)) { best = place; nearest = far; }
    }
    if (best != null) return { rank: row.rank, kind: row.kind, at: best };
    return row.kind === 0 ? this.waitUnder(held.waits, at, row) : null;
  }

  waitUnder(waits, at, row) {
    for (let i = waits.count - 1; i >= waits.first; i -= 1) {
      const place = i % waits.size;
      if (waits.start[place] <= at && waits.end[place] >= at) return { rank: row.rank, kind: -2, at: place };
    }
    return null;
  }

  describe({ rank, kind, at }) {
    const held = this.spans.ranks.get(rank);
    const rows = [];
    const add = (name, value) => { if (value !== "") rows.push(el("dt", {}, name), el("dd", {}, value)); };
    if (kind === -1) {
      const { calls } = held;
      const predicted = this.predictions?.get(`${rank} ${calls.plan[at]}`);
      add("rank", String(rank));
      add("took", seconds(calls.end[at] - calls.start[at]));
      add("predicted", predicted == null ? "" : seconds(predicted));
      return [el("b", {}, `${this.spans.names[calls.kind[at]]}, call ${calls.call[at]}`), el("dl", {}, ...rows)];
    }
    if (kind === -2) {
      const { waits } = held;
      add("rank", String(rank));
      add("for", `${this.spans.names[waits.name[at]]} from rank ${waits.peer[at]}`);
      add("stood still", seconds(waits.end[at] - waits.start[at]));
      return [el("b", {}, waits.exposed[at] ? "exposed transfer" : "waits for a late peer"), el("dl", {}, ...rows)];
    }
    const lane = held.lanes[kind];
    const took = lane.end[at] - lane.start[at];
    add("rank", `${rank}, ${LANES[kind]}`);
    add("call", String(lane.call[at]));
    add("hop", lane.hop[at] < 0 ? "" : String(lane.hop[at]));
    add("took", seconds(took));
    add("began", `${lane.start[at].toFixed(6)} s`);
    add("queued", lane.start[at] - lane.issued[at] > 1e-6 ? seconds(lane.start[at] - lane.issued[at]) : "");
    add("bytes", lane.bytes[at] ? bytes(lane.bytes[at]) : "");
    add("", kind > 0 && lane.bytes[at] && took > 0 ? rate(lane.bytes[at] / took) : "");
    add("compute", lane.flops[at] && took > 0 ? count(lane.flops[at] / took, "flop/s") : "");
    const { flows } = this.spans;
    for (const flow of this.spans.flowsOf(rank, lane.call[at], lane.task[at]).slice(0, 4)) {
      if (kind === 1 && flows.sender[flow] === rank) add("to", `rank ${flows.receiver[flow]}, ${bytes(flows.bytes[flow])}`);
      if (kind === 2 && flows.receiver[flow] === rank) add("from", `rank ${flows.sender[flow]}, ${bytes(flows.bytes[flow])}`);
    }
    return [el("b", {}, this.spans.names[lane.name[at]]), el("dl", {}, ...rows)];
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
    text(this.status, this.describe(this.selected).map((node) => [...node.childNodes].map((part) => part.textContent).join(" ")).join(": "));
    this.dirty = true;
  }
}

// Where a lane's level lies: what overlaps covers the lower half of what began before it, and then its lower quarter.
function part(y, height, level) {
  const top = level ? Math.round(height * (1 - 0.5 ** level)) : 0;
  return [y + top, Math.max(1, height - top)];
}

function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.strokeStyle = colour;
  brush.lineWidth = 2;
  brush.beginPath();
  for (const shift of [-8, 0, 8]) { brush.moveTo(shift - 2, 10); brush.lineTo(shift + 10, -2); }
  brush.stroke();
  return context.createPattern(tile, "repeat");
}
