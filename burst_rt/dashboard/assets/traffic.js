// Bytes: what each strategy would send, what each link carries, what each rank has done so far.

import { ask } from "./ask.js";
import { el, panel, table } from "./dom.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { job } from "./live.js";

const COUNTED = ["graph calls", "sent", "exchanges", "copied", "computed", "computes", "waits", "transfers hidden"];

export class Traffic {
  constructor() {
    const how = "bytes all ranks together send in one call; auto takes the shortest forecast, where there is none the fewest bytes";
    this.strategies = panel("Strategies", how);
    this.links = panel("Links", "now; speed is while a message is on the wire");
    this.ranks = panel("Ranks", "since the start");
    this.node = el("div", { class: "page" }, this.strategies.node, this.links.node, this.ranks.node);
    this.plans = -1;
  }

  update() {
    const { present } = job;
    if (present.plans !== this.plans) {
      this.plans = present.plans;
      ask("plans", { rank: present.ranks[0]?.rank }).then((plans) => this.showPlans(plans), () => { this.plans = -1; });
    }
    this.links.box.replaceChildren(present.links.length ? table(
      [["from"], ["to"], ["now", "num"], ["speed", "num"], ["state"]],
      present.links.map((link) => ({ cells: [`rank ${link.sender}`, `rank ${link.receiver}`, rate(link.bytes_per_s),
        link.moving_bytes_per_s == null ? "" : rate(link.moving_bytes_per_s), state(link)] })),
    ) : el("p", { class: "empty" }, "Nothing has been sent yet."));
    this.ranks.box.replaceChildren(table(
      [["rank"], ...COUNTED.map((name) => [name, "num"])],
      present.ranks.map((rank) => {
        // Tasks, bytes, flops.
        const lane = (name) => rank.lanes[name] ?? [0, 0, 0];
        const copies = Object.entries(rank.lanes).filter(([name]) => /d2h|h2d|copy/.test(name));
        const copied = copies.reduce((sum, [, one]) => sum + one[1], 0);
        return { cells: [String(rank.rank), count(rank.calls), bytes(lane("network")[1]), count(lane("network")[0]),
          copied ? bytes(copied) : "", count(lane("compute")[2], "flop"), seconds(rank.compute_s), seconds(rank.wait_s),
          rank.overlap == null ? "" : percent(100 * rank.overlap)] };
      }),
    ));
  }

  showPlans(plans) {
    const rows = [];
    const seen = new Set();
    // One scale for all: bars of two directions are compared.
    const most = Math.max(1, ...plans.flatMap(({ candidates }) => candidates.map(([, size]) => size)));
    for (const plan of plans) {
      const { kind, problem, strategy, candidates } = plan;
      const key = `${kind} ${strategy} ${problem}`;
      if (seen.has(key)) continue;
      seen.add(key);
      const taken = candidates.find(([name]) => name === strategy)?.[1];
      for (const [name, size, predicted] of candidates) {
        const meter = el("i", { class: "meter" });
        meter.style.width = `${Math.round((140 * size) / most)}px`;
        const against = name === strategy ? "✓ runs" : taken ? `${(size / taken).toFixed(2)}x` : "";
        const forecast = predicted == null ? "" : seconds(predicted);
        rows.push({ chosen: name === strategy, cells: [kind, name, bytes(size), meter, against, forecast] });
      }
    }
    const columns = [["direction"], ["strategy"], ["bytes a call", "num"], [""], ["to what runs"], ["forecast", "num"]];
    this.strategies.box.replaceChildren(rows.length ? table(columns, rows)
      : el("p", { class: "empty" }, "No plan of an attention call has come yet."));
  }
}

function state(link) {
  const [look, sign] = { ok: ["live", "●"], slow: ["silent", "▲"], silent: ["lost", "✕"] }[link.state];
  return el("span", { class: look }, `${sign} ${link.state}`);
}
