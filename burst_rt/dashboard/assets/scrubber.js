// A record from its start to its end: a bar to drag, play, and how fast.

import { shown } from "./ask.js";
import { el, text } from "./dom.js";
import { clock, tenths } from "./format.js";
import { job, seek } from "./live.js";

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 16];
const TICK_MS = 200;

export class Scrubber {
  // changed: told when another moment is shown.
  constructor(changed) {
    this.changed = changed;
    this.play = el("button", { type: "button", "aria-label": "Play", title: "Space", onclick: () => this.toggle() }, "▶");
    this.speed = el("select", { "aria-label": "Speed" }, ...SPEEDS.map((speed) => el("option", { value: speed }, `${speed}×`)));
    this.speed.value = "1";
    this.bar = el("input", { type: "range", min: 0, step: "any", "aria-label": "Time of the record", oninput: () => this.drag() });
    this.said = el("output", { class: "num" });
    this.node = el("div", { class: "scrubber", hidden: true }, this.play, this.speed, this.bar, this.said);
  }

  get playing() { return this.timer !== undefined; }

  update() {
    const { length } = job;
    this.node.hidden = length == null || job.state !== "live";
    if (this.node.hidden) return this.pause();
    const at = shown.at ?? length;
    if (this.bar.max !== String(length)) this.bar.max = length;
    if (document.activeElement !== this.bar || this.playing) this.bar.value = at;
    this.bar.setAttribute("aria-valuetext", `${clock(at)} of ${clock(length)}`);
    text(this.said, `${tenths(at)} of ${tenths(length)}`);
  }

  drag() { this.go(Number(this.bar.value)); }

  go(at) {
    text(this.said, `${tenths(at)} of ${tenths(job.length)}`);
    seek(at, this.changed);
  }

  toggle() { return this.playing ? this.pause() : this.start(); }

  // From the end it begins again.
  start() {
    let at = shown.at == null || shown.at >= job.length ? 0 : shown.at;
    let before = performance.now();
    this.timer = setInterval(() => {
      const now = performance.now();
      at += ((now - before) / 1000) * Number(this.speed.value);
      // A moment that takes long to find is waited for.
      if (shown.at != null && at > shown.at + 4 * Number(this.speed.value)) at = shown.at + Number(this.speed.value);
      before = now;
      if (at >= job.length) this.pause();
      this.go(Math.min(at, job.length));
    }, TICK_MS);
    this.sign();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = undefined;
    this.sign();
  }

  sign() {
    text(this.play, this.playing ? "❚❚" : "▶");
    this.play.setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }
}
