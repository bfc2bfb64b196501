// The headline figures: a number, what it means, and how it went in the last minutes.

import { byId, s, set, setText } from "./dom.js";
import { count, duration, durationParts, percent, rate, UNKNOWN } from "./format.js";

const KEPT = 120; // points of each line
const FEW = 30; // as many fill its width; fewer leave room at the right
const history = new Map();

/** Show a model's figures (see statsOf) and the blocks of `workers`. Each may be null: not known. */
export function showFigures(stats, workers) {
  latency("ttft", stats?.ttft, stats?.ttft_target_ms);
  latency("itl", stats?.itl, stats?.itl_target_ms);
  const answered = stats ? stats.completed + stats.failed : 0;
  figure("goodput", rate(stats?.goodput), "req/s", stats?.goodput, [
    answered ? `${percent(stats.good / answered)} of ${count(answered)} within targets` : "within both targets",
  ]);
  figure("tokens", rate(stats?.output_tokens_per_second), "tok/s", stats?.output_tokens_per_second, [
    stats ? `${rate(stats.prompt_tokens_per_second)} tok/s of prompts` : "tokens of answers",
  ]);
  const running = stats ? stats.running - stats.waiting : undefined;
  figure("requests", count(running), "running", stats?.running, [
    stats ? `${count(stats.waiting)} waiting` : "waiting",
    stats?.failed ? ` · ${count(stats.failed)} failed` : "",
  ]);
  blocks(workers);
}

function latency(name, values, target) {
  const seen = values?.count > 0;
  const [number, unit] = durationParts(seen ? values.p50_ms : NaN);
  const late = seen && target && values.p99_ms > target;
  figure(name, number, unit ? `${unit} p50` : "", seen ? values.p50_ms : undefined, [
    `p99 ${seen ? duration(values.p99_ms) : UNKNOWN}`,
    target
      ? [seen ? (late ? "bad" : "good") : "", ` · ${late ? "over" : seen ? "within" : "target"} ${duration(target)}`]
      : "",
  ]);
}

function blocks(workers) {
  const pools = (workers ?? []).filter((worker) => worker.connected && worker.role !== "prefix_cache");
  const total = pools.reduce((sum, worker) => sum + worker.total_blocks, 0);
  const used = pools.reduce((sum, worker) => sum + worker.owned_blocks + worker.reserved_blocks, 0);
  const share = total ? used / total : undefined;
  figure("kv", total ? percent(share).replace("%", "") : UNKNOWN, total ? "%" : "", share, [
    total ? `${count(used)} of ${count(total)} blocks` : "blocks",
  ]);
}

/** `note` is made of texts and [state, text]. `value` goes into the line; undefined leaves a gap. */
function figure(name, number, unit, value, note) {
  const place = byId(`figure-${name}`);
  set(place, { "data-unknown": number === UNKNOWN });
  setText(place.querySelector("b"), number);
  setText(place.querySelector(".value span"), number === UNKNOWN ? "" : unit);
  const wanted = note.filter(Boolean).map((part) => (Array.isArray(part) ? part : ["", part]));
  const line = place.querySelector(".note");
  if (line.dataset.said !== JSON.stringify(wanted)) {
    line.dataset.said = JSON.stringify(wanted);
    line.replaceChildren(...wanted.map(([state, text]) => part(state, text)));
  }
  draw(place.querySelector(".spark"), remember(name, value));
}

function part(state, text) {
  const span = document.createElement("span");
  span.textContent = text;
  if (state) span.dataset.state = state;
  return span;
}

function remember(name, value) {
  const points = history.get(name) ?? [];
  points.push(Number.isFinite(value) ? value : null);
  if (points.length > KEPT) points.shift();
  history.set(name, points);
  return points;
}

/** A line over the last points, the oldest at the left; its height is theirs, from zero. */
function draw(svg, points) {
  const top = Math.max(...points, 0) || 1;
  const step = 100 / (Math.max(FEW, points.length) - 1);
  const places = points.map((value, index) => (value === null ? null : [index * step, 23 - (22 * value) / top]));
  const lines = [[]];
  for (const place of places) place ? lines.at(-1).push(place) : lines.push([]);
  const drawn = lines.filter((line) => line.length > 1);
  const line = (runs) => runs.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  if (!svg.firstChild) {
    set(svg, { viewBox: "0 0 100 24", preserveAspectRatio: "none" });
    svg.append(s("path", { class: "under" }), s("path"));
  }
  set(svg.children[0], { d: drawn.map((run) => `M${run[0][0]} 24L${line(run)}V24Z`).join("") || "M0 0" });
  set(svg.children[1], { d: drawn.map((run) => `M${line(run)}`).join("") || "M0 0" });
}
