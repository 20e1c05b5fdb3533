// The frame around the pages: which one is shown, the job's health, the theme, the keys.

import { el, text, attribute } from "./dom.js";
import { clock, ending, looks, SIGNS, tenths } from "./format.js";
import { shown as moment } from "./ask.js";
import { Compare } from "./compare.js";
import { connect, firstLost, job, now, seek } from "./live.js";
import { onTheme, toggleTheme } from "./theme.js";
import { History } from "./history.js";
import { JobPage } from "./job.js";
import { Overview } from "./overview.js";
import { Scrubber } from "./scrubber.js";
import { Timeline } from "./timeline.js";
import { Traffic } from "./traffic.js";

const PAGES = [["overview", "Overview", Overview], ["timeline", "Timeline", Timeline], ["history", "History", History],
  ["traffic", "Traffic", Traffic], ["job", "Job", JobPage], ["compare", "Compare", Compare]];
const main = document.getElementById("main");
export const made = new Map(); // pages by name, once they have been shown
let shown = null;

const tabs = PAGES.map(([name, title]) => el("a", { href: `#${name}` }, title));
document.getElementById("tabs").append(...tabs);
const compared = tabs[PAGES.findIndex(([name]) => name === "compare")]; // only where there are two records
compared.hidden = true;
const scrubber = new Scrubber((repaint) => changed(repaint));
document.querySelector("header").append(scrubber.node);

function route() {
  const [wanted] = location.hash.slice(1).split("?");
  const at = Math.max(0, PAGES.findIndex(([name]) => name === wanted));
  const [name, title, Page] = PAGES[at];
  tabs.forEach((tab, i) => (i === at ? tab.setAttribute("aria-current", "page") : tab.removeAttribute("aria-current")));
  document.title = `${title} · burst_rt`;
  if (!made.has(name)) made.set(name, new Page());
  const page = made.get(name);
  if (page === shown) return;
  shown?.hide?.();
  shown = page;
  main.replaceChildren(page.node);
  if (job.present) page.update();
  page.show?.();
}

// A link to a record has the moment, and the timeline's window.

const REMEMBER_MS = 300;

function recall() {
  const words = new URLSearchParams(location.hash.split("?")[1]);
  const number = (name) => (words.has(name) && Number.isFinite(Number(words.get(name))) ? Number(words.get(name)) : null);
  const [at, span, until] = ["at", "span", "until"].map(number);
  if (job.length == null) return;
  if (span > 0) {
    if (!made.has("timeline")) made.set("timeline", new Timeline());
    made.get("timeline").open(span, until);
  }
  if (at != null && at !== moment.at) seek(at, changed);
}

function remember() {
  if (job.length == null || job.state !== "live") return;
  const number = (value) => String(Number(value.toPrecision(9)));
  const words = new URLSearchParams();
  if (moment.at != null) words.set("at", number(moment.at));
  const timeline = made.get("timeline");
  if (timeline) {
    words.set("span", number(timeline.span));
    if (!timeline.following) words.set("until", number(timeline.until));
  }
  const name = PAGES[tabs.findIndex((tab) => tab.hasAttribute("aria-current"))][0];
  const hash = `#${name}${words.size ? `?${words}` : ""}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

function health() {
  const { ranks } = job.present;
  const counts = { lost: 0, silent: 0, ended: 0, stopped: 0, left: 0, live: 0 };
  for (const rank of ranks) counts[looks(rank)] += 1;
  if (!ranks.length) return ["left", `${SIGNS.left} waiting for ranks`];
  const cause = firstLost(job.present);
  if (cause) return ["lost", `${SIGNS.lost} rank ${cause.rank} ${ending(cause)} first${counts.ended ? `, ${counts.ended} ended after it` : ""}`];
  const worst = ["lost", "silent", "live", "stopped", "ended", "left"].find((status) => counts[status]);
  const all = ranks.length === 1 ? "1 rank" : `${ranks.length} ranks`;
  const words = counts[worst] === ranks.length ? `${all} ${worst}` : `${counts[worst]} of ${all} ${worst}`;
  return [worst, `${SIGNS[worst]} ${words}${worst === "live" && counts.left ? `, ${counts.left} left` : ""}`];
}

// The program without its folders; the page of the job has the whole command.
function brief(command) {
  const [program, ...rest] = command.split(" ");
  return [program.replace(/\/__main__\.py$/, "").replace(/.*\//, ""), ...rest].join(" ");
}

// Who was lost first, for the banner. The post-mortem knows more of how than the last message of the rank.
function blame(present) {
  const cause = firstLost(present);
  const how = present.job.post_mortem ? "" : `: ${cause?.ending}`;
  return cause ? ` Rank ${cause.rank} ${ending(cause)} first, at ${tenths(cause.status_since_s)}${how}.` : "";
}

function header() {
  const { present } = job;
  text(document.getElementById("command"), brief(present.job.command));
  const [status, words] = health();
  const pill = document.getElementById("health");
  text(pill, words);
  attribute(pill, "class", `pill ${status}`);
  text(document.getElementById("clock"), clock(now()));
  const banner = document.getElementById("banner");
  const record = present.job.record;
  const bare = job.bare ? " Its hub was lost without a word: tabs that were not open have nothing." : "";
  const again = record ? ` Look at it again with burst-rt dashboard --replay ${record}` : "";
  const what = present.job.replayed ? "record" : job.state === "ended" ? "left" : job.state === "away" ? "lost" : "";
  const said = { record: `A record (${record}), as it was ${clock(present.job.now_s)} after the start.${blame(present)}`,
    left: `The job has ended; this is the last that was seen of it.${blame(present)}${bare}${again}`, lost: "The connection is lost; trying again.", "": "" }[what];
  banner.hidden = !said;
  text(banner, said);
  attribute(banner, "class", what);
}

function refused() {
  const banner = document.getElementById("banner");
  banner.hidden = false;
  banner.className = "lost";
  banner.textContent = "The dashboard does not answer, or has all the viewers it takes. Open the link that the run printed, or try again later.";
}

function changed(repaint = false) {
  if (!job.present) {
    if (job.state === "ended" || job.state === "away") refused();
    return;
  }
  header();
  compared.hidden = !job.present.beside;
  scrubber.update();
  shown?.update(repaint);
}

document.getElementById("theme").textContent = "◐";
document.getElementById("theme").addEventListener("click", toggleTheme);
const keys = document.getElementById("keys");
document.getElementById("help").addEventListener("click", () => keys.showModal());
onTheme(() => { if (job.present) shown?.update(true); });
addEventListener("hashchange", () => { route(); recall(); });
setInterval(remember, REMEMBER_MS);
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return; // its own keys are the browser's, Escape among them
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const at = Number(event.key) - 1;
  if (PAGES[at] && !tabs[at].hidden) location.hash = PAGES[at][0];
  else if (event.key === " " && !scrubber.node.hidden && !event.target.matches("button")) {
    event.preventDefault();
    scrubber.toggle();
  }
  else if (event.key === "?") keys.showModal();
  else shown?.key?.(event);
});
setInterval(() => { if (job.present) text(document.getElementById("clock"), clock(now())); }, 1000);

route();
connect(changed, recall).catch(refused);
