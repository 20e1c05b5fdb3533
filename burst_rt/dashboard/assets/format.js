// Numbers for people: three digits that matter, and a unit.

const DECIMAL = ["", "k", "M", "G", "T", "P"];

function scaled(value, step, names) {
  let i = 0;
  let size = Math.abs(value);
  while (size >= step * 0.9995 && i < names.length - 1) { size /= step; i += 1; }
  return [Math.sign(value) * size, names[i]];
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

export function count(value, unit = "") {
  const [size, prefix] = scaled(value, 1000, DECIMAL);
  const number = prefix === "" && Number.isInteger(value) ? String(value) : digits(size);
  return `${number} ${prefix}${unit}`.trim();
}

// For axes: 20 kB/s, not 20.0 kB/s.
export const short = (words) => words.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

export function bytes(value) {
  const [size, unit] = scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
  return `${unit === "B" && (size >= 10 || Number.isInteger(size)) ? Math.round(size) : digits(size)} ${unit}`;
}

// A part and its whole, in the unit of the whole: 63.1/85.5 GB.
export function bytesOf(part, whole) {
  const [size, unit] = bytes(whole).split(" ");
  return `${digits((part / whole) * Number(size))}/${size} ${unit}`;
}

// The same of another unit: 1.13/1.98 GHz.
export function measureOf(part, whole, unit) {
  const words = measure(whole, unit);
  const [size] = words.split(" ");
  return `${digits((part / whole) * Number(size))}/${words}`;
}

export const rate = (value) => `${bytes(value)}/s`;
export const percent = (value) => `${value < 9.95 && value > 0 ? value.toFixed(1) : Math.round(value)} %`;

export function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  return size < 100 ? `${digits(value)} s` : clock(value);
}

export function clock(value) {
  const whole = Math.max(0, Math.floor(value));
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return `${hours ? `${hours}:` : ""}${hours ? two(Math.floor(whole / 60) % 60) : Math.floor(whole / 60)}:${two(whole % 60)}`;
}

// To a tenth of a second: 1:02.3. Ranks end within a second of each other.
export function tenths(value) {
  const whole = Math.floor(Math.max(0, value) * 10 + 1e-6);
  return `${clock(whole / 10)}.${whole % 10}`;
}

// The sign of a rank's state, which its colour alone must not carry; one that left with an error is as bad as one lost. Those that ended
// after it are not.
export const SIGNS = { live: "●", silent: "▲", lost: "✕", ended: "◌", stopped: "○", left: "○" };
export const ending = (rank) => (rank.status === "lost" ? "was lost" : `failed with code ${rank.exit_code}`);
export const looks = (rank) => (rank.status === "left" && rank.exit_code ? "lost" : rank.status);

// Why clocks are held back (telemetry/metrics.py), once the page has been told: words by bit.
export const REASONS = {};

export function reasons(bits) {
  if (!Number.isInteger(bits)) return "changing"; // a mean over time
  const words = Object.entries(REASONS).filter(([bit]) => bits & Number(bit)).map(([, reason]) => reason);
  return words.join(", ") || (bits ? `reason ${bits}` : "none");
}

// Whether clocks are held back for a chip's own safety: hardware slowdown, heat, a power brake. A healthy chip shows other reasons.
export const slowed = (bits) => (bits & (0x8 | 0x20 | 0x40 | 0x80)) !== 0;

// A metric's name for people, without its unit, which its values have; the same as on cards and in `burst-rt top`.
const TITLES = { compute_percent: "computes", wait_percent: "waits", outside_percent: "away", sm_percent: "GPU", process_percent: "core",
  throttle_bits: "why clocks are held back", heldout_loss: "held-out loss", tokens_per_s: "tokens/s", output_tokens_per_s: "output tokens/s",
  calls_per_s: "calls/s", flops_per_s: "flop/s", step_s: "step time", grad_norm: "gradient norm", time_per_token_s: "time per token",
  time_to_first_token_s: "time to first token", mean_time_per_token_s: "mean time per token", rss_bytes: "resident memory" };
const WORDS = { gpm: "GPM", sm: "SM", pcie: "PCIe", nvlink: "NVLink", tx: "sent", rx: "received", ecc: "ECC", xid: "XID", cpu: "CPU",
  num: "", max: "highest", net: "network" };
const UNIT = /_(percent|bytes_per_s|bytes|per_s|w|j|c|mhz|s)$/;

export function title(metric, known) {
  if (TITLES[metric]) return TITLES[metric];
  // What a job reports itself keeps its name.
  if (!known) return metric.replaceAll("_", " ");
  return metric.replace(UNIT, "").split("_").map((word) => WORDS[word] ?? word).filter(Boolean).join(" ");
}

// By the unit of a metric (telemetry/metrics.py).
export function measure(value, unit) {
  if (value == null || Number.isNaN(value)) return "";
  switch (unit) {
    case "%": return percent(value);
    case "B": return bytes(value);
    case "B/s": return rate(value);
    case "s": return seconds(value);
    case "W": return `${digits(value)} W`;
    case "C": return `${Math.round(value)} °C`;
    case "MHz": return count(value * 1e6, "Hz");
    case "bits": return reasons(value);
    case "flop/s": return count(value, "flop/s");
    case "1": case "1/s": return Math.abs(value) < 100 && !Number.isInteger(value) ? Number(value.toPrecision(4)).toString() : count(value);
    default: return count(value, unit);
  }
}
