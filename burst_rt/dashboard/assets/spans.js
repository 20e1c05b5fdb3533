// What the timeline holds: spans by rank and lane in typed arrays, waits, messages and calls. All of bounded size: the oldest give way.

const TOTAL = 1 << 18; // spans of all lanes together
const LEAST = 1 << 10; // of a lane
const NAMES = 50_000;
const LEVELS = 3;
const SLACK_S = 5e-5; // what a clock may be off by
const PORTION = 400; // spans, or messages, that are taken at a time
const FORGET_CALLS_S = 30; // a call is told apart for at least so long

const WAIT = { start: Float64Array, end: Float64Array, exposed: Uint8Array, peer: Uint32Array, name: Uint32Array };
const CALL = { start: Float64Array, end: Float64Array, call: Uint32Array, kind: Uint32Array, plan: Uint32Array };

export const LANES = ["compute", "send", "receive", "copy", "control", "steps"];
export const STEPS = 5; // the lane of the job's own steps and spans
const NO_GROUP = 0xffffffff; // a step belongs to no group of ranks, so no message is its own

// Columns that grow to `capacity` rows and then go round.
class Rows {
  constructor(capacity, columns) {
    this.capacity = capacity;
    this.columns = columns;
    this.count = 0; // ever
    this.allocate(Math.min(256, capacity));
  }

  allocate(size) {
    for (const [name, Type] of Object.entries(this.columns)) {
      const wider = new Type(size);
      if (this[name]) wider.set(this[name]);
      this[name] = wider;
    }
    this.size = size;
  }

  // The place for the next row.
  next() {
    if (this.count === this.size && this.size < this.capacity) this.allocate(Math.min(this.capacity, this.size * 2));
    const at = this.count % this.size;
    this.count += 1;
    return at;
  }

  get first() { return Math.max(0, this.count - this.size); }

  // Moves the last row to where its start belongs: calls of several contexts do not come in order.
  settle() {
    for (let i = this.count - 1; i > this.first; i -= 1) {
      const [here, before] = [i % this.size, (i - 1) % this.size];
      if (this.start[before] <= this.start[here]) return;
      for (const name of Object.keys(this.columns)) {
        const column = this[name];
        [column[here], column[before]] = [column[before], column[here]];
      }
    }
  }
}

class Lane extends Rows {
  constructor(capacity, levels) {
    super(capacity, {
      issued: Float64Array, start: Float64Array, end: Float64Array, bytes: Float64Array, flops: Float64Array, name: Uint32Array,
      task: Uint32Array, call: Uint32Array, hop: Int16Array, level: Uint8Array, group: Uint32Array,
    });
    this.longest = 0;
    this.ends = [];
    this.levels = 1;
    this.most = levels;
  }

  // depth: the level, where it is known.
  add(name, hop, issued, start, end, bytes, flops, task, call, group, depth = null) {
    const at = this.next();
    this.group[at] = group;
    this.name[at] = name;
    this.hop[at] = hop;
    this.issued[at] = issued;
    this.start[at] = start;
    this.end[at] = end;
    this.bytes[at] = bytes;
    this.flops[at] = flops;
    this.task[at] = task;
    this.call[at] = call;
    this.longest = Math.max(this.longest, end - start);
    // What overlaps goes below.
    const slack = Math.min(SLACK_S, 0.1 * (end - start));
    let level = depth ?? this.ends.findIndex((until) => until <= start + slack);
    if (level < 0) level = this.ends.length;
    level = Math.min(level, this.most - 1);
    this.ends[level] = end;
    this.level[at] = level;
    this.levels = Math.max(this.levels, level + 1);
    this.settle();
  }

  // Numbers (not places) of the spans that may have a part in the window: [from, to).
  window(since, until) {
    return [this.search(since - this.longest), this.search(until)];
  }

  search(time) {
    let low = this.first;
    let high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle % this.size] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

export class Spans {
  constructor() { this.clear(); }

  clear() {
    this.ranks = new Map(); // rank: {lanes, waits, calls}
    this.names = [];
    this.numbers = new Map();
    this.seen = new Set();
    this.seenBefore = new Set();
    this.turnedAt = 0;
    this.flows = new Rows(1 << 15, {
      group: Uint32Array, call: Uint32Array, sender: Uint32Array, sent: Float64Array, sendTask: Uint32Array, receiver: Uint32Array,
      received: Float64Array, receiveTask: Uint32Array, bytes: Float64Array,
    });
    this.newest = 0;
    this.oldest = Infinity;
    this.total = 0;
  }

  rank(number, numRanks) {
    let found = this.ranks.get(number);
    if (!found) {
      const capacity = Math.max(LEAST, Math.floor(TOTAL / (3 * Math.max(1, numRanks))));
      found = { last: new Map(), lanes: LANES.map((name) => new Lane(capacity, name === "compute" ? 1 : LEVELS)), capacity,
        waits: new Rows(Math.max(LEAST, capacity >> 2), WAIT), calls: new Rows(Math.max(LEAST, capacity >> 4), CALL) };
      this.ranks.set(number, found);
    }
    return found;
  }

  named(word) {
    let number = this.numbers.get(word);
    if (number === undefined) {
      this.numbers.set(word, number = this.names.length);
      this.names.push(word);
    }
    return number;
  }

  isNew(key) {
    if (this.seen.has(key) || this.seenBefore.has(key)) return false;
    this.seen.add(key);
    return true;
  }

  // Takes an answer of /api/timeline; what was here already is left out.
  take(view, numRanks) { for (const _ of this.taking(view, numRanks)); }

  // The same in portions, each of which takes some tenths of a millisecond: whoever draws meanwhile may rest in between.
  * taking(view, numRanks) {
    if (this.names.length > NAMES) this.clear();
    if (view.now_s - this.turnedAt > FORGET_CALLS_S) {
      this.turnedAt = view.now_s;
      this.seenBefore = this.seen;
      this.seen = new Set();
    }
    const numbers = view.names.map((word) => this.named(word));
    const lanes = view.names.map(laneOf);
    let portion = 0;
    for (const call of view.calls.sort((a, b) => a.started_s - b.started_s)) {
      if (!this.isNew(`${call.rank} ${call.group} ${call.call}`)) continue;
      this.takeCall(call, numbers, lanes, view.units_per_s, numRanks);
      portion += call.spans.length;
      if (portion >= PORTION) yield (portion = 0);
    }
    for (const [rank, name, step, depth, start, end] of view.phases) {
      if (!this.isNew(`p${rank} ${depth} ${start} ${end}`)) continue;
      this.rank(rank, numRanks).lanes[STEPS].add(this.named(name), -1, start, start, end, 0, 0, 0, step, NO_GROUP, depth);
      this.cover(start, end);
      this.total += 1;
    }
    yield;
    // The waits and messages of a call come together, so that one word for all of them says whether they are new. Newest last, as they are
    // kept: views begin with the newest.
    const isNew = this.whole();
    const waits = view.waits.filter(([, call, , , , , , group]) => isNew(numbers[group], call));
    const flows = view.flows.filter(([call, , , , , , , , group]) => isNew(numbers[group], call));
    const at = (ticks) => view.since_s + ticks / view.units_per_s;
    const exposed = view.names.indexOf("exposed");
    for (const wait of waits.sort((a, b) => a[3] - b[3])) {
      this.takeWait(wait, numbers, exposed, at, numRanks);
      if ((portion += 1) >= PORTION) yield (portion = 0);
    }
    for (const flow of flows.sort((a, b) => a[6] - b[6])) {
      this.takeFlow(flow, numbers, at);
      if ((portion += 1) >= PORTION) yield (portion = 0);
    }
  }

  // Whether the waits and messages of a call are new in this answer.
  whole() {
    const asked = new Map(); // by group, then by call
    return (group, call) => {
      let calls = asked.get(group);
      if (!calls) asked.set(group, calls = new Map());
      let found = calls.get(call);
      if (found === undefined) calls.set(call, found = this.isNew(`j${group} ${call}`));
      return found;
    };
  }

  takeWait([rank, , cause, start, end, peer, task], numbers, exposed, seconds, numRanks) {
    const { waits } = this.rank(rank, numRanks);
    const at = waits.next();
    waits.start[at] = seconds(start);
    waits.end[at] = seconds(end);
    waits.exposed[at] = cause === exposed ? 1 : 0;
    waits.peer[at] = peer;
    waits.name[at] = numbers[task];
    waits.settle();
  }

  takeFlow([call, sender, sendTask, sent, receiver, receiveTask, received, size, group], numbers, seconds) {
    const { flows } = this;
    const at = flows.next();
    flows.group[at] = numbers[group];
    flows.call[at] = call;
    flows.sender[at] = sender;
    flows.sent[at] = seconds(sent);
    flows.sendTask[at] = sendTask;
    flows.receiver[at] = receiver;
    flows.received[at] = seconds(received);
    flows.receiveTask[at] = receiveTask;
    flows.bytes[at] = size;
  }

  takeCall(call, numbers, lanes, units, numRanks) {
    const rank = this.rank(call.rank, numRanks);
    if (call.started_s < (rank.last.get(call.group) || 0)) return; // left out before, and too late now
    rank.last.set(call.group, call.started_s);
    const group = this.named(call.group);
    let until = call.started_s;
    call.spans.sort((a, b) => a[5] - b[5]);
    for (const [name, lane, hop, bits, issued, started, ended, bytes, flops, task] of call.spans) {
      const [at, start, end] = [issued, started, ended].map((ticks) => call.started_s + ticks / units);
      const kinds = bits ? [bits & 1 ? 1 : -1, bits & 2 ? 2 : -1] : [lanes[lane]];
      for (const kind of kinds) if (kind >= 0) rank.lanes[kind].add(numbers[name], hop, at, start, end, bytes, flops, task, call.call, group);
      until = Math.max(until, end);
      this.total += 1;
    }
    const at = rank.calls.next();
    rank.calls.start[at] = call.started_s;
    rank.calls.end[at] = until;
    rank.calls.call[at] = call.call;
    rank.calls.kind[at] = this.named(call.kind);
    rank.calls.plan[at] = call.plan;
    rank.calls.settle();
    this.cover(call.started_s, until);
  }

  // The name of what a lane has at a place; steps have numbers instead, of which there is no end.
  nameAt(lane, at) { return this.names[lane.name[at]] || `step ${lane.call[at]}`; }

  // What is held reaches from `start` to `end`, too.
  cover(start, end) {
    this.newest = Math.max(this.newest, end);
    this.oldest = Math.min(this.oldest, start);
  }

  // The messages that a task sent or received.
  flowsOf(rank, group, call, task) {
    const found = [];
    const { flows } = this;
    for (let i = flows.count - 1; i >= flows.first && found.length < 64; i -= 1) {
      const at = i % flows.size;
      if (flows.call[at] !== call || flows.group[at] !== group) continue;
      const sent = flows.sender[at] === rank && flows.sendTask[at] === task;
      if (sent || (flows.receiver[at] === rank && flows.receiveTask[at] === task)) found.push(at);
    }
    return found;
  }
}

// What neither sends nor receives lies where its lane says.
function laneOf(lane) {
  if (lane === "compute") return 0;
  if (lane === "control") return 4;
  return /d2h|h2d|copy/.test(lane) ? 3 : lane === "network" ? 1 : 0;
}
