// Lines over time on a canvas, with axes, and the values under the pointer.

import { el } from "./dom.js";
import { clock, measure, short } from "./format.js";
import { fit } from "./spark.js";
import { colours, series as palette } from "./theme.js";

const LEFT = 68;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 10;
const LISTED = 10; // lines named under the pointer

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
  // axis.
  set(lines, since, until) {
    this.lines = lines;
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
      context.strokeStyle = colour;
      context.setLineDash(dashes);
      context.beginPath();
      let down = false;
      for (let k = 0; k < line.times.length; k += 1) {
        if (line.values[k] == null) continue; // counters and samples come at different times
        if (down) context.lineTo(x(line.times[k]), y(line.values[k]));
        else context.moveTo(x(line.times[k]), y(line.values[k]));
        down = true;
      }
      context.stroke();
    });
    context.restore();
    context.setLineDash([]);
    const said = this.lines.slice(0, 8).map((line) => `${line.name} ${measure(line.values.findLast((v) => v != null), this.unit)}`);
    this.canvas.setAttribute("aria-label", said.join(", ") || "no values yet");
    if (this.pointer != null && this.lines.length) {
      context.fillStyle = colours.faint;
      context.fillRect(Math.round(this.pointer), TOP, 1, height - TOP - BOTTOM);
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
      if (place > LEFT + 10 && place < width - 20) context.fillText(clock(at), place, height - 4);
    }
  }

  point(x, event) {
    this.pointer = x;
    this.draw();
    this.tip.hidden = x == null || x < LEFT || !this.lines.length;
    if (this.tip.hidden) return;
    const at = this.since + ((x - LEFT) / (this.canvas.clientWidth - LEFT - RIGHT)) * (this.until - this.since);
    const found = this.lines.map((line, i) => [line.name, nearest(line, at), line.place ?? i]).filter(([, value]) => value != null);
    if (found.length > LISTED) found.sort((a, b) => b[1] - a[1]);
    const rows = found.slice(0, LISTED).flatMap(([name, value, i]) => [el("dt", {}, swatch(i), name), el("dd", {}, measure(value, this.unit))]);
    const more = found.length > LISTED ? [el("span", { class: "muted" }, `the ${LISTED} highest of ${found.length}`)] : [];
    this.tip.replaceChildren(el("b", {}, clock(at)), el("dl", {}, ...rows), ...more);
    beside(this.tip, event);
  }
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
