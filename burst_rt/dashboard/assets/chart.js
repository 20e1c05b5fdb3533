// Lines over time, or over a job's steps, on a canvas, with axes, marks, and the values under the pointer.

import { el } from "./dom.js";
import { clock, measure, short } from "./format.js";
import { fit } from "./spark.js";
import { colours, series as palette } from "./theme.js";

const LEFT = 68;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 10;
const LISTED = 10; // lines named under the pointer
const NEAR = 6; // pixels between a pointer and a mark that it is at
// What happened to a job (telemetry/model/marks.py): its sign, its colour, and whether a line goes down from it.
export const MARKS = { checkpoint: ["◆", "compute", false], evaluation: ["○", "receive", false], restart: ["↻", "steps", true],
  "loss spike": ["▲", "lost", true] };

export function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// The colour and the dashes of a line, by its place among all.
function look(place) {
  return [palette[place % palette.length], place >= 2 * palette.length ? [2, 3] : place >= palette.length ? [6, 3] : []];
}

export function swatch(place) {
  const [colour, dashes] = look(place);
  const mark = el("i", { class: "swatch" });
  const [on, off] = dashes;
  mark.style.background = on ? `repeating-linear-gradient(90deg, ${colour} 0 ${on}px, transparent ${on}px ${on + off}px)` : colour;
  return mark;
}

export class Chart {
  constructor(unit) {
    this.unit = unit;
    this.lines = [];
    this.marks = [];
    this.words = clock;
    this.pointer = null;
    this.canvas = el("canvas", { role: "img", tabindex: "0" });
    this.tip = el("div", { class: "tooltip", hidden: true });
    this.node = el("div", { class: "chart" }, this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -12, ArrowRight: 12 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      const box = this.canvas.getBoundingClientRect();
      const x = Math.min(box.width, Math.max(LEFT, (this.pointer ?? box.width) + step));
      this.point(x, { clientX: box.left + x, clientY: box.top + 40 });
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // lines: [{name, place (which gives its colour; else its number here), times, values (null where there is none)}]; since, until: of the
  // axis; marks: [{at, kind, text}]; steps: the axis has steps, not seconds; smooth: over so many points, 0 for none; lines with
  // dots have too few.
  set(lines, since, until, { marks = [], steps = false, smooth = 0 } = {}) {
    this.lines = lines.map((line) => ({ ...line, smooth: smooth && !line.dots ? smoothed(line.values, smooth) : null }));
    this.marks = marks;
    this.words = steps ? (at) => (Number.isInteger(at) ? String(at) : "") : clock;
    this.steps = steps;
    this.since = since ?? Math.min(...lines.map((line) => line.times[0] ?? Infinity));
    this.until = until ?? Math.max(...lines.map((line) => line.times.at(-1) ?? -Infinity));
    this.draw();
  }

  scale() {
    const values = this.lines.flatMap((line) => line.values.filter((value) => value != null));
    let low = values.reduce((least, value) => Math.min(least, value), Infinity);
    const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
    if (this.unit === "%") return [0, Math.max(100, high)];
    if (!(high >= low)) return [0, 1];
    if (low > 0 && (this.unit !== "1" || low < 0.4 * high)) low = 0;
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low === 0 ? 0 : low - pad, high + pad];
  }

  draw() {
    const [context, width, height] = fit(this.canvas);
    if (!width) return;
    context.clearRect(0, 0, width, height);
    const [low, high] = this.scale();
    const span = Math.max(1e-6, this.until - this.since) || 1;
    const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - this.since)) / span;
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - (value - low) / (high - low));
    this.frame(context, width, height, low, high, x, y);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height);
    context.clip();
    context.lineWidth = this.lines.length > 16 ? 1 : 1.6;
    context.lineJoin = "round";
    this.lines.forEach((line, i) => {
      const [colour, dashes] = look(line.place ?? i);
      context.strokeStyle = context.fillStyle = colour;
      context.setLineDash(dashes);
      if (line.smooth) context.globalAlpha = 0.25;
      stroke(context, line.times, line.values, x, y, line.dots);
      context.globalAlpha = 1;
      if (line.smooth) stroke(context, line.times, line.smooth, x, y);
    });
    context.restore();
    context.setLineDash([]);
    const said = this.lines.slice(0, 8).map((line) => `${line.name} ${measure(line.values.findLast((v) => v != null), this.unit)}`);
    this.mark(context, height, x);
    this.canvas.setAttribute("aria-label", said.join(", ") || "no values yet");
    if (this.pointer != null && this.lines.length) {
      context.fillStyle = colours.faint;
      context.fillRect(Math.round(this.pointer), TOP, 1, height - TOP - BOTTOM);
    }
  }

  // Signs above the lines, and lines down where something went wrong.
  mark(context, height, x) {
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const { at, kind } of this.marks) {
      if (!(at >= this.since && at <= this.until) || !MARKS[kind]) continue;
      const [sign, colour, down] = MARKS[kind];
      context.fillStyle = colours[colour];
      context.fillText(sign, x(at), 0);
      context.globalAlpha = 0.5;
      if (down) context.fillRect(Math.round(x(at)), TOP + 4, 1, height - TOP - BOTTOM - 4);
      context.globalAlpha = 1;
    }
  }

  frame(context, width, height, low, high, x, y) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const at of ticks(low, high, Math.max(2, height / 46))) {
      context.fillStyle = colours.grid;
      context.fillRect(LEFT, Math.round(y(at)), width - LEFT - RIGHT, 1);
      context.fillStyle = colours.muted;
      // Reasons are words, and between two of them is nothing.
      if (this.unit !== "bits") context.fillText(short(measure(Number(at.toPrecision(6)), this.unit)), LEFT - 7, y(at));
    }
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    for (const at of ticks(this.since, this.until, Math.max(2, width / 110))) {
      const place = x(at);
      if (place > LEFT + 10 && place < width - 20) context.fillText(this.words(at), place, height - 4);
    }
  }

  point(x, event) {
    this.pointer = x;
    this.draw();
    this.tip.hidden = x == null || x < LEFT || !this.lines.length;
    if (this.tip.hidden) return;
    const at = this.since + ((x - LEFT) / (this.canvas.clientWidth - LEFT - RIGHT)) * (this.until - this.since);
    const near = (NEAR / (this.canvas.clientWidth - LEFT - RIGHT)) * (this.until - this.since);
    const marks = this.marks.filter((mark) => Math.abs(mark.at - at) <= near).slice(-3);
    const found = this.lines.map((line, i) => [line.name, nearest(line, at), line.place ?? i]).filter(([, value]) => value != null);
    if (found.length > LISTED) found.sort((a, b) => b[1] - a[1]);
    const rows = found.slice(0, LISTED).flatMap(([name, value, i]) => [el("dt", {}, swatch(i), name), el("dd", {}, measure(value, this.unit))]);
    const more = found.length > LISTED ? [el("span", { class: "muted" }, `the ${LISTED} highest of ${found.length}`)] : [];
    const said = marks.map((mark) => el("div", {}, `${MARKS[mark.kind]?.[0] ?? "·"} ${mark.text}`));
    const where = this.steps ? `step ${Math.round(at)}` : clock(at);
    this.tip.replaceChildren(el("b", {}, where), el("dl", {}, ...rows), ...more, ...said);
    beside(this.tip, event);
  }
}

// The mean over `points` values around each, fewer at the ends, so that a curve that falls is not drawn late.
export function smoothed(values, points) {
  const sums = [0];
  const places = []; // of each value that there is
  values.forEach((value, i) => {
    if (value == null) return;
    places.push(i);
    sums.push(sums.at(-1) + value);
  });
  const means = new Array(values.length).fill(null);
  places.forEach((place, k) => {
    const reach = Math.min(points >> 1, k, places.length - 1 - k);
    means[place] = (sums[k + reach + 1] - sums[k - reach]) / (2 * reach + 1);
  });
  return means;
}

// dots: few values, which a line alone would hide.
function stroke(context, times, values, x, y, dots = false) {
  context.beginPath();
  let down = false;
  for (let k = 0; k < times.length; k += 1) {
    if (values[k] == null || times[k] == null) continue; // counters and samples come at different times
    if (down) context.lineTo(x(times[k]), y(values[k]));
    else context.moveTo(x(times[k]), y(values[k]));
    down = true;
    if (dots) context.fillRect(x(times[k]) - 2.5, y(values[k]) - 2.5, 5, 5);
  }
  context.stroke();
}

function nearest(line, at) {
  let low = 0;
  let high = line.times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.times[middle] < at) low = middle + 1;
    else high = middle;
  }
  for (let step = 0; step < 40; step += 1) {
    for (const i of [low - step, low + step]) if (line.values[i] != null) return line.values[i];
  }
  return null;
}

// Puts a tooltip near the pointer, inside the window.
export function beside(tip, event) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(6, event.clientX + 16 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(6, Math.min(innerHeight - height - 6, event.clientY + 14))}px`;
}
