// One request's waterfall: a row for each span, on one clock.

import { h, keyed, set, setText } from "./dom.js";
import { duration, ticks } from "./format.js";
import { detailOf, endOf, firstTokenOf, kindOf, titleOf, whoOf } from "./trace.js";

const TICKS = 5;
const AFTER_FIRST = 1.35; // how far past the first token the closer view goes

/** Draw `trace` into `place`. `zoom` is "whole", or "start" for the time up to the first tokens. */
export function drawWaterfall(place, trace, zoom) {
  if (!place.firstChild)
    place.append(
      h("div", { class: "grid", "aria-hidden": "true" }),
      h("div", { class: "scale", "aria-hidden": "true" }),
      h("div", { role: "list" }),
      h("div", { class: "foot" }, h("span")),
    );
  const [grid, scale, list, foot] = place.children;
  const first = firstTokenOf(trace);
  const whole = Math.max(endOf(trace), 0.001);
  const end = zoom === "start" && first ? Math.min(whole, first * AFTER_FIRST) : whole;
  const marks = ticks(end, TICKS).filter((at) => at / end < 0.97);
  keyed(
    scale,
    marks,
    String,
    () => h("span"),
    (mark, at) => {
      set(mark, { "--at": (at / end).toFixed(5) });
      setText(mark, duration(at));
    },
  );
  const lines = marks
    .map((at) => ({ at, kind: "line" }))
    .concat(first && first <= end ? [{ at: first, kind: "mark" }] : []);
  keyed(
    grid,
    lines,
    ({ at, kind }) => `${kind} ${at}`,
    ({ kind }) => h("i", { class: kind }),
    (line, { at }) => {
      set(line, { "--at": (at / end).toFixed(5) });
    },
  );
  foot.hidden = first === null || first > end;
  set(foot.firstChild, { "--at": ((first ?? 0) / end).toFixed(5) });
  setText(foot.firstChild, `first token after ${duration(first)}`);
  keyed(
    list,
    trace.rows,
    (row) => row.id,
    makeRow,
    (element, row) => updateRow(element, row, end, whole),
  );
}

function makeRow() {
  return h(
    "div",
    { class: "row", role: "listitem" },
    h("div", { class: "name" }, h("b"), h("span")),
    h("div", { class: "track" }, h("div", { class: "bar" }), h("div", { class: "said" })),
  );
}

function updateRow(element, row, end, whole) {
  const [name, track] = element.children;
  const [bar, said] = track.children;
  const open = row.end_ms === null;
  const until = open ? whole : row.end_ms;
  const later = row.start_ms > end;
  const from = Math.min(1, row.start_ms / end);
  const width = Math.min(1, until / end) - from;
  const kind = kindOf(row);
  const time = `${later ? "later, " : ""}${duration(until - row.start_ms)}${open ? " so far" : ""}`;
  const detail = detailOf(row);
  set(element, {
    "data-depth": Math.min(2, row.depth),
    "data-kind": kind,
    "data-open": open,
    "data-span": row.name,
    "data-who": whoOf(row),
  });
  set(element, {
    title: `${whoOf(row)}: ${titleOf(row)}, ${time}, from ${duration(row.start_ms)}${detail ? `. ${detail}` : ""}`,
  });
  setText(name.children[0], whoOf(row));
  setText(name.children[1], titleOf(row));
  bar.hidden = later;
  set(bar, { "data-kind": kind, "--from": from.toFixed(5), "--width": width.toFixed(5) });
  set(said, {
    "data-side": sideOf(from, from + width),
    "--from": from.toFixed(5),
    "--until": (from + width).toFixed(5),
  });
  if (said.dataset.said !== time + detail) {
    said.dataset.said = time + detail;
    said.replaceChildren(time, detail ? h("span", {}, detail) : "");
  }
}

/** Where a bar's words have room: behind it, before it, or on it. */
function sideOf(from, until) {
  if (until < 0.55) return "right";
  return from > 0.45 ? "left" : "inside";
}
