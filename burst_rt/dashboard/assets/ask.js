// What tabs ask: of the dashboard while it runs, then of what it handed over before it went (dashboard/last.py). A tab that is opened only
// after the job's end has the same as one that was open.

// The moment of a record that is shown, in seconds; null: its end, or a running job's present.
export const shown = { at: null };

let kept = null;

// Nothing more comes. last: null where the dashboard went without a word.
export function keep(last) {
  kept = last ?? {};
  shown.at = null; // that is its end
}

const ANSWERS = {
  plans: ({ rank }) => kept.plans?.filter((plan) => rank == null || plan.rank === rank),

  timeline({ rank, since }) {
    const view = kept.timeline;
    if (!view) return null;
    const from = view.now_s + since;
    const ended = ({ started_s: start, spans }) => start + Math.max(...spans.map((span) => span[6])) / view.units_per_s;
    const calls = view.calls.filter((call) => (rank == null || call.rank === rank) && ended(call) >= from);
    const ticks = (from - view.since_s) * view.units_per_s;
    const waits = view.waits.filter((wait) => wait[4] >= ticks);
    const flows = view.flows.filter((flow) => flow[6] >= ticks);
    const phases = view.phases.filter((phase) => (rank == null || phase[0] === rank) && phase[5] >= from);
    return { ...view, calls, waits, flows, phases };
  },

  series({ source, since }) {
    if (!kept.timeline) return null;
    const from = kept.timeline.now_s + since;
    const names = new Set([source].flat());
    return kept.series.filter((view) => names.has(view.source)).map((view) => {
      const first = view.times.findIndex((at) => at >= from);
      const part = (column) => (first < 0 ? [] : column.slice(first));
      const values = Object.fromEntries(Object.entries(view.values).map(([name, column]) => [name, part(column)]));
      return { source: view.source, times: part(view.times), values, marks: view.marks.filter((mark) => mark.at_s >= from) };
    });
  },
};

function recall(path, query) {
  const answer = ANSWERS[path]?.(query);
  if (!answer) throw new Error(`${path}: the dashboard is gone`);
  return answer;
}

// Times in a query are seconds before now, below 0.
export async function ask(path, query = {}) {
  if (kept) return recall(path, query);
  const words = new URLSearchParams(shown.at == null || "at" in query ? {} : { at: shown.at });
  for (const [name, value] of Object.entries(query)) for (const word of [value].flat()) if (word != null) words.append(name, word);
  try {
    const answer = await fetch(`/api/${path}?${words}`, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return await answer.json();
  } catch (error) {
    if (kept) return recall(path, query); // it went meanwhile
    throw error;
  }
}
