// The pulse of an answer: a bar for each piece of text, as high as it kept this browser waiting.

import { s, set } from "./dom.js";
import { duration, percentile } from "./format.js";

const HEIGHT = 34;
const WIDTH = 600; // of the drawing; the page scales it
const BAR = 6; // at most this wide, so that short answers look calm
const BARS = 200; // at most this many; longer answers have several gaps in each, the slowest shown

/** An empty pulse. */
export function makePulse() {
  return s(
    "svg",
    { class: "pulse", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    s("line"),
  );
}

/**
 * Draw `gaps` (ms); the dashed line is `target` (ms), or nothing where there is none. A bar above the target is tinted.
 * Heights are linear up to a little above the larger of target and the slowest gap.
 */
export function drawPulse(svg, gaps, target) {
  const slowest = gaps.reduce((most, gap) => Math.max(most, gap), 0);
  const top = Math.max(slowest, (target ?? 0) * 1.1, 1);
  const bars = slowestOf(gaps, Math.ceil(gaps.length / BARS));
  const step = Math.min(BAR + 1.5, WIDTH / Math.max(1, bars.length));
  while (svg.children.length - 1 > bars.length) svg.lastChild.remove();
  bars.forEach((gap, index) => {
    const bar = svg.children[index + 1] ?? svg.appendChild(s("rect", { rx: 1 }));
    const height = Math.max(1.5, (gap / top) * (HEIGHT - 1));
    set(bar, {
      x: (index * step).toFixed(2),
      width: Math.max(0.5, step * 0.78).toFixed(2),
      y: (HEIGHT - height).toFixed(2),
      height: height.toFixed(2),
      class: target && gap > target ? "late" : null,
    });
  });
  const y = target ? HEIGHT - (target / top) * (HEIGHT - 1) : -9;
  set(svg.firstChild, { x1: 0, x2: WIDTH, y1: y, y2: y });
  set(svg, { "aria-label": `Gaps between ${gaps.length + 1} pieces, the slowest ${duration(slowest)}` });
}

function slowestOf(gaps, each) {
  if (each <= 1) return gaps;
  return Array.from({ length: Math.ceil(gaps.length / each) }, (_, bar) =>
    Math.max(...gaps.slice(bar * each, (bar + 1) * each)),
  );
}

/** The usual gap: their median, or their mean where pieces that come together make the median small. */
export function usualOf(gaps) {
  if (!gaps.length) return null;
  const mean = gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length;
  return Math.max(mean, percentile(gaps, 0.5));
}

/** How much slower than usual a gap was, from 0 (no more than a quarter) to 1 (three times as long, or worse). */
export function heatOf(gap, usual) {
  return usual ? Math.min(1, Math.max(0, (gap / usual - 1.25) / 1.75)) : 0;
}
