// Which ranks differ from the others, in what, and by how much.

import { measure } from "./format.js";
import { job } from "./live.js";

// What ranks of one job have alike: metric, its name, whose it is, the least difference that is worth a word (a part of the median where
// it is below 1).
const COMPARED = [
  ["sm_clock_mhz", "clock", "gpu", 0.05], ["temperature_c", "chip", "gpu", 10], ["compute_percent", "computes", "source", 5],
  ["outside_percent", "away", "source", 5],
];
const FEW = 3; // two ranks differ from each other, and neither is the odd one
const USUAL = 1.4826; // median distances from the median in a standard deviation, where values are normal

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export const valueOf = (rank, whose, metric) => job.sources.get(rank[whose])?.values[metric];

// By rank: {score, words}. A score of 3 or more is odd: at least three usual distances from the median, and at least what is worth a word.
// Ranks that have ended by accident come before all.
export function outliers(ranks) {
  const found = new Map(ranks.map((rank) => [rank.rank, { score: { lost: 2e6, silent: 1e6 }[rank.status] ?? 0, words: rank.status }]));
  const live = ranks.filter((rank) => rank.status === "live");
  for (const [metric, name, whose, least] of COMPARED) {
    const measured = live.map((rank) => [rank.rank, valueOf(rank, whose, metric)]).filter(([, value]) => value != null);
    if (measured.length < FEW) continue;
    const middle = median(measured.map(([, value]) => value));
    const usual = USUAL * median(measured.map(([, value]) => Math.abs(value - middle)));
    const unit = Math.max(usual, (least < 1 ? least * Math.abs(middle) : least) / 3, 1e-9);
    for (const [rank, value] of measured) {
      const score = Math.abs(value - middle) / unit;
      if (score <= found.get(rank).score) continue;
      const [here, there] = [value, middle].map((one) => measure(one, job.metrics[metric]?.[0] ?? ""));
      found.set(rank, { score, words: `${name} ${here}, median ${there}`, name });
    }
  }
  return found;
}

export const ODD = 3;
