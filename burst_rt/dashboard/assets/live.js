// The job as the page knows it: the last present, short histories for small curves, events. Bounded, whatever the job does.

import { ask, keep, shown } from "./ask.js";
import { REASONS } from "./format.js";

const POINTS = 240; // of a small curve: two minutes
const EVENTS = 300;

export class Curve {
  constructor(size = POINTS) {
    this.times = new Float64Array(size);
    this.values = new Float32Array(size);
    this.count = 0;
  }

  add(at, value) {
    if (this.count && at <= this.times[(this.count - 1) % this.times.length]) return;
    this.times[this.count % this.times.length] = at;
    this.values[this.count % this.values.length] = value;
    this.count += 1;
  }

  * [Symbol.iterator]() {
    const size = this.times.length;
    for (let i = Math.max(0, this.count - size); i < this.count; i += 1) yield [this.times[i % size], this.values[i % size]];
  }
}

export const job = {
  present: null, // what the stream last said
  state: "waiting", // "live", "ended", "away"
  bare: false, // it has ended, and nothing was handed over
  events: [],
  sources: new Map(),
  metrics: {},
  curves: new Map(), // "source metric"
  readAt: 0,
  length: null, // of a record, in seconds
  jumps: 0, // how often another moment of a record was chosen that does not follow from the one before
};

export function curve(source, metric) {
  const key = `${source} ${metric}`;
  let found = job.curves.get(key);
  if (!found) job.curves.set(key, found = new Curve());
  return found;
}

// The rank that was lost, or failed, before all others.
export const firstLost = (present) => present.ranks.find((rank) => rank.rank === present.job.first_lost);

// Seconds since the hub began, now.
export function now() {
  if (!job.present) return 0;
  const told = job.present.job.now_s;
  return job.state === "live" && !job.present.job.replayed ? told + (performance.now() - job.readAt) / 1000 : told;
}

const CURVED = {
  process: ["compute_percent", "sent_bytes_per_s", "process_percent"],
  gpu: ["sm_percent"],
  job: ["loss", "tokens_per_s", "time_to_first_token_s", "time_per_token_s", "output_tokens_per_s", "cached_tokens"],
};

function take(present) {
  job.present = present;
  job.readAt = performance.now();
  job.state = "live";
  job.events.push(...present.events);
  if (job.events.length > EVENTS) job.events.splice(0, job.events.length - EVENTS);
  job.sources = new Map(present.sources.map((source) => [source.name, source]));
  for (const source of present.sources) {
    for (const metric of CURVED[source.kind] || []) {
      if (metric in source.values) curve(source.name, metric).add(source.at_s, source.values[metric]);
    }
  }
}

// What was before the page was opened.
async function before() {
  for (const [kind, names] of Object.entries(CURVED)) {
    const sources = job.present.sources.filter((source) => source.kind === kind).map((source) => source.name);
    if (!sources.length) continue;
    for (const view of await ask("series", { source: sources, metric: names, since: kind === "job" ? -1e9 : -120, limit: POINTS })) {
      for (const name of names) {
        const filled = new Curve();
        view.times.forEach((at, i) => { if (view.values[name]?.[i] != null) filled.add(at, view.values[name][i]); });
        for (const [at, value] of curve(view.source, name)) filled.add(at, value);
        job.curves.set(`${view.source} ${name}`, filled);
      }
    }
  }
}

// Moments of a record. One question is under way at a time; the last moment that was wanted meanwhile comes next.
let wanted = null;
let winding = null;
const ONWARD_S = 20; // further on, or back, is a jump: curves and spans begin anew

export function seek(at, changed) {
  wanted = at;
  return winding ??= wind(changed).catch(() => { /* the stream says when the record is gone */ }).finally(() => { winding = null; });
}

async function wind(changed) {
  while (wanted != null) {
    const at = Math.max(0, Math.min(wanted, job.length));
    wanted = null;
    const by = at - (shown.at ?? job.length);
    shown.at = at;
    const present = await ask("present");
    if (by < 0 || by > ONWARD_S) {
      job.jumps += 1;
      job.curves.clear();
    }
    job.events.length = 0; // a moment brings all of its events
    take(present);
    changed();
    if (by < 0 || by > ONWARD_S) await before();
    changed(true);
  }
}

// opened: called once, when the job is known.
export async function connect(changed, opened) {
  job.metrics = await ask("metrics");
  Object.assign(REASONS, job.metrics.throttle_bits?.[2]);
  let first = true;
  let last = null; // what the stream said, whatever is shown
  const source = new EventSource("/api/events");
  source.onmessage = (message) => {
    const present = JSON.parse(message.data);
    last = present;
    if (shown.at != null) { // another moment than the end is shown
      if (job.state !== "away") return;
      job.state = "live";
      return changed();
    }
    job.length = present.job.length_s;
    if (job.state === "away") job.events.length = 0; // a new stream tells all again
    take(present);
    if (first) {
      first = false;
      before().then(() => changed(true), () => {});
      changed();
      opened();
      return;
    }
    changed();
  };
  const end = (answers) => {
    if (shown.at != null) take(last);
    job.state = "ended";
    job.bare = !answers;
    source.close();
    keep(answers);
    changed();
  };
  source.addEventListener("end", (message) => end(JSON.parse(message.data)));
  source.onerror = () => {
    // The browser tries again by itself, unless it was refused.
    const over = job.present && job.present.ranks.every((rank) => rank.status !== "live");
    if (over || source.readyState === EventSource.CLOSED) return end(null);
    job.state = "away";
    changed();
  };
}
