// Light or dark: the system's wish until the reader chooses. Canvases read their colours here, once a change.

const NAMES = ["surface", "line", "text", "muted", "faint", "accent", "compute", "send", "receive", "copy", "control", "steps", "exposed", "skew",
  "live", "silent", "lost", "left", "on-span", "grid"];
const watchers = new Set();
const system = matchMedia("(prefers-color-scheme: dark)");

export const colours = {};
// Okabe and Ito's, for lines; from the ninth on again, dashed.
export const series = [];

function stored() {
  try { return localStorage.getItem("burst_rt theme"); } catch { return null; }
}

function apply() {
  const dark = (stored() || (system.matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) colours[name] = style.getPropertyValue(`--${name}`).trim();
  series.splice(0, series.length, ...(dark
    ? ["#56b4e9", "#e69f00", "#2bbd92", "#d98bb6", "#f0e442", "#f07a2d", "#9aa5b2", "#7f9cff"]
    : ["#0072b2", "#d98f00", "#009e73", "#b8568c", "#8a7a00", "#d55e00", "#5b6571", "#4a55c8"]));
  for (const watcher of watchers) watcher();
}

export function onTheme(watcher) { watchers.add(watcher); }

export function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("burst_rt theme", next); } catch { document.documentElement.dataset.theme = next; }
  apply();
}

system.addEventListener("change", apply);
apply();
