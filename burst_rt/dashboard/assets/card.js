// One rank and its GPU: what it does, and what its machine measures. What a chip does not give is not shown.

import { el, text, attribute } from "./dom.js";
import { bytesOf, clock, count, looks, measure, measureOf, percent, rate, reasons, short, SIGNS, slowed, tenths } from "./format.js";
import { curve, firstLost, job } from "./live.js";
import { spark } from "./spark.js";
import { colours } from "./theme.js";

const REPAINT_MS = 480; // curves change no faster than they are told

export class Card {
  constructor(rank) {
    this.name = el("b", {}, `rank ${rank}`);
    this.state = el("span", { class: "state" });
    this.where = el("div", { class: "where" });
    this.canvas = el("canvas", { role: "img", "aria-label": `rank ${rank}: computes, last two minutes` });
    this.split = new Split();
    this.computes = el("b");
    this.waits = el("b");
    this.meters = el("div", { class: "meters" });
    this.bars = new Map();
    this.fields = el("dl");
    this.values = new Map();
    this.doing = el("div", { class: "doing" });
    this.node = el("article", { class: "card", "data-rank": rank, "aria-label": `rank ${rank}` },
      el("div", { class: "top" }, this.name, this.state), this.where, this.canvas, this.split.node,
      el("div", { class: "shares" },
        el("span", {}, "computes ", this.computes), el("span", {}, "waits ", this.waits)),
      this.meters, this.fields, this.doing);
    this.paintedAt = 0;
  }

  update(rank, present, repaint) {
    const own = job.sources.get(rank.source)?.values ?? {};
    const gpu = rank.gpu ? job.sources.get(rank.gpu) : null;
    const look = looks(rank);
    attribute(this.node, "class", `card ${look}`);
    attribute(this.state, "class", `state ${look}`);
    text(this.state, `${SIGNS[look]} ${state(rank, present, this.node.closest(".dense"))}`);
    const where = [rank.host, gpu?.about.name || rank.device, gpu ? rank.device : ""].filter(Boolean).join(" · ");
    text(this.where, where);
    attribute(this.where, "title", where);
    const live = rank.status === "live";
    const [compute, wait] = this.split.update(rank, own);
    text(this.computes, percent(compute));
    text(this.waits, percent(wait));
    this.measureUp(gpu);
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

  // Bars: parts of what there is. Bars appear as their parts are first measured.
  measureUp(gpu) {
    for (const [name, part, words, note] of gpu ? meters(gpu) : []) {
      let bar = this.bars.get(name);
      if (!bar) {
        this.bars.set(name, bar = new Meter(name));
        this.meters.append(bar.node);
      }
      bar.update(part, words, note);
    }
  }

  * figures(rank, own, gpu, present) {
    const v = gpu?.values ?? {};
    if (gpu) {
      yield ["GPU", measure(v.sm_percent, "%")];
      yield ["chip", measure(v.temperature_c, "C")];
      if (!this.bars.has("mem")) yield ["mem", measure(v.memory_used_bytes, "B")];
      if (!this.bars.has("power")) yield ["power", measure(v.power_w, "W")];
      if (!this.bars.has("clock")) yield ["clock", measure(v.sm_clock_mhz, "MHz")];
      for (const [name, wire] of [["NVLink", "nvlink"], ["PCIe", "pcie"]]) {
        const [sent, received] = [v[`${wire}_tx_bytes_per_s`], v[`${wire}_rx_bytes_per_s`]];
        yield [name, sent == null && received == null ? "" : ways(sent, received)];
      }
      yield ["ECC", errors(v)];
      yield ["XID", v.num_xid ? count(v.num_xid) : ""];
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
      this.fields.replaceChildren(...known.map(([name]) => (
        el("div", { class: WIDE.has(name) ? "wide" : "" }, el("dt", {}, name), this.values.get(name)))));
    }
    for (const [name, value] of figures) if (this.values.has(name)) text(this.values.get(name), value || "-");
  }
}

const WIDE = new Set(["NVLink", "PCIe"]); // both ways: too wide for half a card

// How a rank's time divides.
export class Split {
  constructor() {
    this.compute = el("i", { class: "compute" });
    this.wait = el("i", { class: "wait" });
    this.node = el("span", { class: "split", "aria-hidden": "true" }, this.compute, this.wait);
  }

  update(rank, own) {
    const shares = [own.compute_percent, own.wait_percent].map((value) => (rank.status === "live" ? value ?? 0 : 0));
    [this.compute, this.wait].forEach((part, i) => fill(part, shares[i] / 100));
    return shares;
  }
}

class Meter {
  constructor(name) {
    this.bar = el("i");
    this.value = el("span", { class: "num" });
    this.note = el("span", { class: "note", hidden: true });
    const rail = el("span", { class: "rail", "aria-hidden": "true" }, this.bar);
    this.node = el("div", { class: "gauge" }, el("span", { class: "muted" }, name), rail, this.value, this.note);
  }

  update(part, words, note) {
    fill(this.bar, part);
    attribute(this.bar, "class", note?.slowed ? "slowed" : "");
    text(this.value, words);
    this.note.hidden = !note;
    attribute(this.note, "class", note?.slowed ? "note slowed" : "note");
    text(this.note, note?.words ?? "");
  }
}

export function fill(bar, part) {
  const width = `${(100 * Math.min(1, part)).toFixed(1)}%`;
  if (bar.style.width !== width) bar.style.width = width;
}

// A GPU's bars: name, part, words and, for clocks that are held back, why.
export function * meters({ values: v, about }) {
  const total = Number(about.memory_bytes);
  if (v.memory_used_bytes != null && total) yield ["mem", v.memory_used_bytes / total, bytesOf(v.memory_used_bytes, total)];
  if (v.power_w != null && v.power_cap_w) yield ["power", v.power_w / v.power_cap_w, measureOf(v.power_w, v.power_cap_w, "W")];
  if (v.sm_clock_mhz != null && v.sm_clock_max_mhz) {
    const why = v.throttle_bits ? { words: reasons(v.throttle_bits), slowed: slowed(v.throttle_bits) } : null;
    yield ["clock", v.sm_clock_mhz / v.sm_clock_max_mhz, measureOf(v.sm_clock_mhz, v.sm_clock_max_mhz, "MHz"), why];
  }
}

// Out and in, in the unit of the greater.
function ways(sent = 0, received = 0) {
  const [most, unit] = rate(Math.max(sent, received)).split(" ");
  const [up, down] = [sent, received].map((one) => (most > 0 ? short(((one / Math.max(sent, received)) * most).toPrecision(3)) : "0"));
  return `↑${up} ↓${down} ${unit}`;
}

function errors({ ecc_corrected: corrected, ecc_uncorrected: lasting }) {
  if (corrected == null && lasting == null) return "";
  const words = [corrected ? `${count(corrected)} corrected` : "", lasting ? `✕ ${count(lasting)} not` : ""].filter(Boolean).join(", ");
  return words || "no errors";
}

// When a rank ended matters to a tenth of a second, and whether it was the first.
export function state(rank, present, brief) {
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

export function doing(rank, present) {
  if (rank.call < 0) return rank.last_call >= 0 ? `after call ${rank.last_call}` : rank.calls ? "between calls" : "no call yet";
  const long = present.job.now_s - rank.doing_since_s;
  return `call ${rank.call} · ${rank.doing || "between tasks"}${long > 1 ? ` for ${clock(long)}` : ""}`;
}
