// KV links as wires between the cards of their two workers; they flow while bytes move.

import { keyed, s, set, setText } from "./dom.js";
import { bytes, bytesRate } from "./format.js";

const MANY = 12; // more wires than this are drawn lightly
const TAG = { width: 92, height: 32 };

/** Draw `links` into `svg`, which lies over `pools`; call it again whenever either has changed. */
export function drawWires(svg, pools, links) {
  const origin = svg.getBoundingClientRect();
  const drawn = links.flatMap((link, index) => {
    const [from, to] = [cardOf(pools, link.from), cardOf(pools, link.to)];
    if (!from || !to) return [];
    return [
      { ...link, ...(sideways(from, to, origin) ?? downwards(from, to, origin, (index + 1) / (links.length + 1))) },
    ];
  });
  const tagged = withTags(drawn);
  set(svg, { "data-many": drawn.length > MANY });
  keyed(
    svg,
    drawn,
    (wire) => wire.key,
    makeWire,
    (group, wire) => updateWire(group, wire, tagged.has(wire)),
  );
}

function makeWire() {
  return s(
    "g",
    {},
    s("path", { class: "wire" }),
    s("path", { class: "flow" }),
    s(
      "g",
      { class: "tag" },
      s("rect", { ...TAG, rx: 8, x: -TAG.width / 2, y: -TAG.height / 2 }),
      s("text", { y: -3 }),
      s("text", { y: 11 }),
    ),
  );
}

function updateWire(group, wire, tagged) {
  const [line, flow, tag] = group.children;
  const moving = isBusy(wire);
  set(line, { d: wire.curve, "data-degraded": Boolean(wire.degraded) });
  set(flow, { d: wire.curve, "data-moving": moving });
  set(tag, { transform: `translate(${wire.middle.join(" ")})`, display: tagged ? null : "none" });
  setText(tag.children[1], wire.path || wire.transport);
  setText(
    tag.children[2],
    moving && wire.now
      ? `${bytesRate(wire.now)} now`
      : wire.bandwidth
        ? bytesRate(wire.bandwidth)
        : `${bytes(wire.moved)} moved`,
  );
}

/** The wires that get tags: those with room for one; of many, the busy ones. The table below has what finds none. */
function withTags(wires) {
  const placed = [];
  const wanted = wires.length > 2 ? wires.filter(isBusy) : wires;
  for (const wire of wanted.toSorted((one, other) => other.now - one.now)) {
    const [x, y] = wire.middle;
    const free = placed.every(
      ({ middle: [left, top] }) => Math.abs(x - left) > TAG.width || Math.abs(y - top) > TAG.height,
    );
    if (free) placed.push(wire);
  }
  return new Set(placed);
}

function isBusy({ now, inFlight }) {
  return now > 0 || inFlight > 0;
}

/** A curve from one card to another beside it; null where there is none beside it. */
function sideways(fromCard, toCard, origin) {
  const [from, to] = [box(fromCard, origin), box(toCard, origin)];
  if (to.left < from.right) return null;
  const [y1, y2] = [from, to].map(({ top, bottom }) => (top + bottom) / 2);
  const middle = (from.right + to.left) / 2;
  return {
    curve: `M${from.right} ${y1}C${middle} ${y1} ${middle} ${y2} ${to.left} ${y2}`,
    middle: [middle, (y1 + y2) / 2],
  };
}

/** A line from the pool of one card down to the pool of the other, at this share of their width. */
function downwards(fromCard, toCard, origin, share) {
  const [from, to] = [fromCard, toCard].map((card) => box(card.closest(".pool"), origin));
  const x = from.left + (from.right - from.left) * share;
  return { curve: `M${x} ${from.bottom}V${to.top}`, middle: [x, (from.bottom + to.top) / 2] };
}

function box(card, origin) {
  const { left, right, top, bottom } = card.getBoundingClientRect();
  return { left: left - origin.left, right: right - origin.left, top: top - origin.top, bottom: bottom - origin.top };
}

function cardOf(pools, name) {
  return pools.querySelector(`[data-worker="${CSS.escape(name)}"]`);
}
