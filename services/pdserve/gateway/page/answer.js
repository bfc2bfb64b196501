// One answer in the conversation: its text as it arrives, its pulse, its figures, and the way it took.

import { h, keyed, set, setText } from "./dom.js";
import { bytes, count, duration, percentile, rate } from "./format.js";
import { drawPulse, heatOf, makePulse, usualOf } from "./pulse.js";
import { stagesOf, summaryOf } from "./trace.js";

const ENDS = { stop: "stopped by itself", length: "reached max tokens", cancelled: "stopped by you", failed: "failed" };

export class Answer {
  /**
   * `id` is the request's; `given` is text that the answer continues (text completion); `open` shows the request, and
   * `drawn` hears whenever the answer has grown.
   */
  constructor(id, given, open, drawn) {
    this.id = id;
    this.drawn = drawn;
    this.gaps = [];
    this.text = "";
    this.started = performance.now();
    this.ttft = null;
    this.last = 0;
    this.usual = null; // gap, as of the last frame
    this.frame = 0;
    this.usage = null;
    this.body = h("div", { class: "text" }, given ? h("span", { class: "given" }, given) : null);
    this.pulse = makePulse();
    this.facts = h("dl", { class: "facts" });
    this.route = h("div", { class: "route" }, h("span"), h("span"));
    this.stages = h("div", { class: "stagebar" });
    this.path = h("button", { class: "path", type: "button", onclick: open }, this.route, this.stages);
    setText(this.route.firstChild, "Waiting for a worker");
    this.element = h(
      "article",
      { class: "answer", "aria-busy": "true", "aria-label": "Answer", "data-request": id },
      this.body,
      this.pulse,
      this.facts,
      this.path,
    );
  }

  /** A piece of text arrived at `now` (ms). */
  piece(text, now, target) {
    const gap = this.ttft === null ? 0 : now - this.last;
    if (this.ttft === null) this.ttft = now - this.started;
    else this.gaps.push(gap);
    this.last = now;
    this.text += text;
    const heat = heatOf(gap, this.usual);
    const title = this.gaps.length ? `${duration(gap)} after the one before` : `first, after ${duration(this.ttft)}`;
    this.body.append(h("span", { class: "token", "--heat": heat.toFixed(2), title }, text));
    this.target = target;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  /** It is over: `end` is a finish reason, "cancelled" or "failed"; `message` says why it failed. */
  finish(end, message = "") {
    set(this.element, { "aria-busy": null, "data-end": end });
    this.end = end;
    if (message) this.body.after(h("p", { class: "failed" }, message));
    cancelAnimationFrame(this.frame);
    if (!this.stages.firstChild) setText(this.route.firstChild, "Open the waterfall");
    if (!this.gaps.length) this.pulse.remove();
    if (end === "failed" && !this.text) this.path.remove();
    this.draw();
  }

  /** Show the way it took, from its trace. */
  traced(trace) {
    const { workers, moved, link } = summaryOf(trace);
    const names = workers.length ? workers : ["router"];
    const children = names.flatMap((name, index) => [
      index ? h("span", { class: "arrow" }, " → ") : "",
      h("b", {}, name),
    ]);
    this.route.firstChild.replaceChildren(...children);
    const over = link ? ` over ${link}` : "";
    setText(this.route.lastChild, moved ? `${bytes(moved)} of KV${over}` : "Open the waterfall");
    keyed(
      this.stages,
      stagesOf(trace),
      (stage) => stage.title,
      () => h("i"),
      (bar, stage) => {
        set(bar, { "data-kind": stage.kind, "--share": stage.share, title: `${stage.title}: ${duration(stage.ms)}` });
      },
    );
  }

  /** Bring pulse and figures up to date: once a frame, however fast pieces come. */
  draw() {
    this.frame = 0;
    this.usual = usualOf(this.gaps);
    drawPulse(this.pulse, this.gaps, this.target);
    const pieces = this.gaps.length + (this.ttft === null ? 0 : 1);
    const tokens = this.usage?.completion_tokens;
    const seconds = (this.last - this.started - (this.ttft ?? 0)) / 1000;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const facts = [
      ["TTFT", this.ttft === null ? null : duration(this.ttft)],
      [
        "ITL",
        this.gaps.length
          ? `${duration(percentile(this.gaps, 0.5))} p50, ${duration(percentile(this.gaps, 0.99))} p99`
          : null,
      ],
      ["Rate", seconds > 0 ? `${rate(((tokens ?? pieces) - 1) / seconds)} tok/s` : null],
      ["Answer", tokens === undefined ? (pieces ? `${count(pieces)} pieces` : null) : `${count(tokens)} tokens`],
      [
        "Prompt",
        this.usage ? `${count(this.usage.prompt_tokens)} tokens${cached ? `, ${count(cached)} cached` : ""}` : null,
      ],
      ["End", this.end ? (ENDS[this.end] ?? this.end) : null],
    ];
    keyed(
      this.facts,
      facts.filter(([, value]) => value !== null),
      ([name]) => name,
      ([name]) => h("div", { "data-fact": name }, h("dt", {}, name), h("dd")),
      (place, [, value]) => setText(place.lastChild, value),
    );
    this.drawn();
  }
}
