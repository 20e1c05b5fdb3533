// The timeline's picture on its canvas, and what lies under a point of it. `spans` is what is held, `until` and `span` the window.

import { el } from "./dom.js";
import { looks, seconds } from "./format.js";
import { ticks } from "./chart.js";
import { shown } from "./ask.js";
import { job as page, now } from "./live.js";
import { LANES, Spans, STEPS } from "./spans.js";
import { fit } from "./spark.js";
import { colours, onTheme } from "./theme.js";

export const AXIS = 26; // pixels above the lanes
export const BEHIND_S = 1.6; // calls come late: the picture of a running job is a little behind it, and flows
const LABEL = 84;
const LABEL_NARROW = 46;
const SHORT = ["comp", "send", "recv", "copy", "ctrl", "step"];
const ORDER = [STEPS, 0, 1, 2, 3, 4];
export const MESSAGES = 1500; // drawn at most
const HEAD = 5; // of a message's arrow

export class Picture {
  // job: whose timeline it is; `now` is of the page's own.
  constructor(job = page) {
    this.job = job;
    this.spans = new Spans();
    this.canvas = el("canvas", { tabindex: "0", role: "application",
      "aria-label": "Timeline of all ranks. Arrows pan, plus and minus zoom, N and P step through tasks." });
    this.only = null; // the rank shown alone
    this.lanes = LANES.map(() => false); // those with anything in them
    this.span = 4;
    this.until = 0;
    this.scroll = 0;
    this.following = true;
    this.withMessages = false;
    this.predictions = new Map(); // "rank plan": seconds
    this.selected = null;
    this.hover = null;
    this.dirty = true;
    // What drawing costs, and how many spans a frame looked at, at most; tests/web/load.py reads it.
    this.frames = { count: 0, tookMs: 0, worstMs: 0, mostSpans: 0 };
    new ResizeObserver(() => { this.dirty = true; }).observe(this.canvas);
    onTheme(() => { this.hatches = null; this.dirty = true; });
  }

  get since() { return this.until - this.span; }

  // What Follow keeps at the right edge: a running job as far as it is known, a record's chosen moment, or else the last of what is held.
  end() {
    if (this.job.present.job.replayed) return shown.at ?? this.spans.newest;
    return this.job.state === "ended" ? this.spans.newest : now() - BEHIND_S;
  }

  // Rows of the shown ranks: y, height, rank and lane, in canvas pixels without the scroll.
  layout() {
    const ranks = this.job.present.ranks.map(({ rank }) => rank).filter((rank) => this.only == null || rank === this.only);
    const lanes = ORDER.filter((i) => this.lanes[i] || i < 3);
    const room = this.canvas.clientHeight - AXIS;
    // Beside its lanes a rank has a row of calls and a gap, 21 pixels, and there is a gap above them all.
    const each = (room - 8) / Math.max(1, ranks.length);
    const lane = Math.max(8, Math.min(ranks.length > 1 ? 38 : 60, Math.floor((each - 21) / lanes.length)));
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
    if (!this.job.present || !width) return;
    this.layout();
    if (this.following) this.until = this.end();
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
    this.looked = 0;
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
    if (shown.at != null && this.job === page) this.drawMoment(context, height);
    this.labels(context, width, height);
    context.restore();
    const took = performance.now() - begun;
    this.frames.count += 1;
    this.frames.tookMs += took;
    this.frames.worstMs = Math.max(this.frames.worstMs, took);
    this.frames.mostSpans = Math.max(this.frames.mostSpans, this.looked);
  }

  // The moment of a record that is shown.
  drawMoment(context, height) {
    context.fillStyle = colours.accent;
    context.fillRect(Math.round(this.x(shown.at)) - 1, AXIS, 2, height);
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
    let beside = null; // the row of a rank's name that reaches into the next row
    const states = new Map(this.job.present.ranks.map((rank) => [rank.rank, looks(rank)]));
    for (const row of this.rows) {
      const y = AXIS + row.y - this.scroll + row.height / 2;
      if (y < AXIS - 10 || y > height + 10) continue;
      if (row.kind < 0) {
        context.fillStyle = colours.line;
        context.fillRect(0, Math.round(y - row.height / 2 - 3), width, 1);
        const status = states.get(row.rank);
        context.fillStyle = status === "live" ? colours.text : colours[status] || colours.left;
        context.font = "600 11.5px system-ui, sans-serif";
        const sign = { lost: " ✕", silent: " ▲" }[status] || "";
        context.fillText(narrow ? `${row.rank}${sign}` : `rank ${row.rank}${sign}`, 9, y + (row.height < 10 ? 4 : 2));
        beside = row.height < 10 ? row : null;
      } else if (row.height >= 10 && !(beside && row.y < beside.y + 10)) {
        context.font = "10.5px system-ui, sans-serif";
        context.fillStyle = colours.muted;
        context.fillText(narrow ? SHORT[row.kind] : LANES[row.kind], narrow ? 9 : 18, y);
      }
    }
  }

  drawLane(context, lane, row, y, width) {
    if (!lane) return;
    const [from, to] = lane.window(this.since, this.until);
    this.looked += to - from;
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
      const name = this.spans.nameAt(lane, texts[i]);
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
      const predicted = this.predictions.get(`${row.rank} ${calls.plan[at]}`);
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
      // A message that takes no room has none for an arrow either.
      if (!strong && b - a < 2 * HEAD) return;
      context.moveTo(b - HEAD, to - 3);
      context.lineTo(b, to);
      context.lineTo(b - HEAD, to + 3);
    };
    context.lineWidth = 1;
    this.met = 0;
    if (this.withMessages) {
      context.beginPath();
      for (let i = flows.count - 1; i >= flows.first; i -= 1) {
        const at = i % flows.size;
        if (flows.received[at] < this.since || flows.sent[at] > this.until) continue;
        this.met += 1;
        if (this.met <= MESSAGES) line(at, false);
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
      const wide = this.x(lane.end[found.at]) - this.x(lane.start[found.at]);
      context.strokeRect(this.x(lane.start[found.at]), top, Math.max(1.5, wide), tall);
    }
    context.beginPath();
    for (const at of this.spans.flowsOf(found.rank, lane.group[found.at], lane.call[found.at], lane.task[found.at])) line(at, true);
    context.strokeStyle = colours.text;
    context.stroke();
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
