// Why a job failed, in the words of `burst-rt postmortem`, once the job has ended.

import { el, panel, text } from "./dom.js";

export class PostMortem {
  constructor() {
    const { node, hint, box } = panel("Post-mortem", "");
    this.node = node;
    this.job = hint;
    this.first = el("p", { class: "first" });
    this.chain = el("ol");
    this.whole = el("pre");
    this.advice = el("div", { class: "advice" });
    box.append(this.first, this.chain, this.advice, el("details", {}, el("summary", {}, "All of it"), this.whole));
    node.classList.add("post-mortem");
    node.hidden = true;
  }

  update({ job }) {
    const told = job.post_mortem;
    this.node.hidden = !told;
    if (!told || this.whole.textContent === told.whole.join("\n")) return;
    const [first, ...chain] = told.heading;
    text(this.job, told.whole[0]);
    text(this.first, first);
    this.chain.replaceChildren(...chain.map((link) => el("li", {}, link)));
    this.advice.replaceChildren(...told.advice.map((line) => el("p", {}, line)));
    text(this.whole, told.whole.join("\n"));
  }
}
