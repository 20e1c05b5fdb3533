// Two records: what has changed, and the same step or call of both, one above the other.

import { ask } from "./ask.js";
import { el, panel, table, text } from "./dom.js";
import { measure, seconds } from "./format.js";
import { Timeline } from "./timeline.js";

const LATE_S = 2; // what ends is told so much later, at most
const AROUND = 0.15; // shown before and after, as a part of what is shown
const MOST = 20_000;
const [A_RANK, TALLEST] = [104, 470]; // pixels

export class Compare {
  constructor() {
    this.table = panel("What has changed", "", el("p", { class: "empty" }, "Reading both records."));
    this.changed = panel("Changed most", "of the steps and calls that both have; choose one to see it in both");
    this.sides = [0, 1].map((record) => new Excerpt(record));
    this.titles = this.sides.map(() => el("h2"));
    const stages = this.sides.map((side, i) => (
      el("section", { class: "panel side" }, el("div", { class: "head" }, this.titles[i], side.said), side.stage)));
    this.node = el("div", { class: "page compare" }, this.table.node, this.changed.node, ...stages);
  }

  update() { for (const side of this.sides) side.dirty = true; }

  show() {
    this.visible = true;
    for (const side of this.sides) side.show();
    this.follow();
    if (!this.asked) {
      this.asked = true;
      ask("compare").then((found) => this.tell(found), () => { this.asked = false; });
    }
  }

  hide() {
    this.visible = false;
    for (const side of this.sides) side.hide();
  }

  key(event) { this.sides[0].key(event); }

  tell(found) {
    const none = "There is no second record: burst-rt dashboard --replay A --beside B.";
    if (found) this.lay(found);
    else this.table.box.replaceChildren(el("p", { class: "empty" }, none));
  }

  lay({ names, differences, calls, steps, num_calls: numCalls, num_steps: numSteps }) {
    const short = briefly(names);
    text(this.table.hint, `from ${short[0]} to ${short[1]}: medians of ${numSteps} steps and ${numCalls} calls that both have`);
    const value = (of, unit) => (of == null ? "" : typeof of === "string" ? of : whole(measure(of, unit)));
    this.table.box.replaceChildren(table([[""], ["before", "num"], ["after", "num"], ["change", "num"]], differences.map((one) => (
      { cells: [one.name, value(one.before, one.unit), value(one.after, one.unit), whole(one.change)] }))));
    const rows = [...steps.map((step) => [`step ${step.step}`, step]), ...calls.map((call) => [`${call.kind} call ${call.number}`, call])];
    const choices = rows.map(([name, same]) => {
      const button = el("button", { type: "button", "aria-pressed": "false", onclick: () => this.choose(name, same, short) }, name);
      return { name, same, button };
    });
    this.choices = choices;
    this.changed.box.replaceChildren(rows.length ? table([[""], ["before", "num"], ["after", "num"], ["what changed most"]],
      choices.map(({ same, button }) => ({ cells: [button, ...same.took_s.map((took) => whole(seconds(took))), same.change] })))
      : el("p", { class: "empty" }, "The records have no step and no call in common."));
    if (rows.length) this.choose(...rows[0], short);
  }

  choose(name, same, names) {
    for (const choice of this.choices) choice.button.setAttribute("aria-pressed", String(choice.name === name));
    const long = Math.max(...same.took_s);
    this.sides.forEach((side, i) => {
      text(this.titles[i], `${names[i]}: ${name}`);
      side.open(same.started_s[i], same.took_s[i], long).then(() => this.update(), () => text(side.said, "It cannot be read."));
    });
  }

  // One window for both: what one shows since its start, the other shows, too.
  follow() {
    const seen = (side) => `${side.span} ${side.until - side.start}`;
    const frame = () => {
      if (!this.visible) return;
      requestAnimationFrame(frame);
      const moved = this.sides.find((side) => side.start != null && seen(side) !== this.seen);
      if (!moved) return;
      this.seen = seen(moved);
      for (const side of this.sides) {
        if (side === moved || side.start == null) continue;
        [side.span, side.until, side.dirty] = [moved.span, side.start + moved.until - moved.start, true];
        this.seen = seen(side) === this.seen ? this.seen : seen(side); // a rounding is no move
      }
    };
    requestAnimationFrame(frame);
  }
}

// Files by as much of their paths as tells them apart.
function briefly(names) {
  const parts = names.map((name) => name.split("/"));
  const brief = (many) => parts.map((part) => part.slice(-many).join("/"));
  let many = 1;
  while (brief(many)[0] === brief(many)[1] && many < Math.max(...parts.map((part) => part.length))) many += 1;
  return brief(many);
}

// Numbers are not parted from their units.
const whole = (words) => words.replaceAll(" ", "\u00a0");

// The timeline of a step or a call of one record.
class Excerpt extends Timeline {
  constructor(record) {
    super({ present: null, state: "live" });
    this.record = record;
    this.start = null;
    this.opened = null; // what was asked for last
    this.said = el("span", { class: "muted" });
    this.setFollow(false);
  }

  poll() { /* a record does not change */ }

  async open(start, took, long) {
    const at = start + took + LATE_S;
    const where = { record: this.record, at };
    this.opened = where;
    const [present, view] = [await ask("present", where), await ask("timeline", { ...where, since: -(took + LATE_S + long), limit: MOST })];
    if (this.opened !== where) return; // another was chosen meanwhile
    this.job.present = present;
    this.stage.style.height = `${Math.min(TALLEST, 44 + A_RANK * present.ranks.length)}px`;
    this.spans.clear();
    await this.take(view);
    this.start = start;
    this.span = long * (1 + 2 * AROUND);
    this.until = start + long * (1 + AROUND);
    text(this.said, `${seconds(took)}, ${start.toFixed(3)} s after the start`);
    this.update();
  }
}
