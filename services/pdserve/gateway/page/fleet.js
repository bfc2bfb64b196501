// The picture of the fleet: pools as columns, workers as cards, and a table of the links that join them.

import { byId, h, keyed, set, setText } from "./dom.js";
import { bytes, bytesRate, count, duration, percent, plural, rate, UNKNOWN } from "./format.js";
import { blocksOf, linksOf, nameOf, poolsOf, stateOf } from "./view.js";
import { drawWires } from "./wires.js";

const WORDS = { running: "running", idle: "idle", draining: "draining", gone: "gone", unseen: "not reached" };
const MANY = 5; // larger pools have smaller cards
const GUTTER = { plain: 28, wired: 150 }; // px between pools; a wire's tag needs room

let links = [];
let told = 0; // when, in ms

/** Show the workers that /pdserve/v1/fleet told at `now` (ms). */
export function showFleet(workers, now) {
  links = linksOf(workers, links, told ? (now - told) / 1000 : 0);
  told = now;
  const pools = poolsOf(workers);
  const several = new Set(workers.map((worker) => worker.model).filter(Boolean)).size > 1;
  showEmpty(workers);
  layOut(pools);
  keyed(
    byId("pools"),
    pools,
    (pool) => pool.pool,
    makePool,
    (section, pool) => updatePool(section, pool, several),
  );
  byId("links").hidden = !links.length;
  keyed(byId("link-rows"), links, (link) => link.key, makeLink, updateLink);
  setText(byId("fleet-line"), summary(workers));
  redrawFleet();
}

/** The same on another screen. */
export function redrawFleet() {
  drawWires(byId("wires"), byId("pools"), links);
}

/** Pools take equal columns; those that links join stand further apart. */
function layOut(pools) {
  const wired = (index) => pools[index]?.pool === "prefill" && pools[index + 1]?.pool === "decode" && links.length;
  const columns = pools.map((_, index) => {
    const gutter = index === pools.length - 1 ? "" : ` ${wired(index) ? GUTTER.wired : GUTTER.plain}px`;
    return `minmax(0, 1fr)${gutter}`;
  });
  set(byId("pools"), { "--columns": columns.join(" ") });
  pools.forEach((pool, index) => (pool.column = 2 * index + 1));
}

function summary(workers) {
  const gone = workers.filter((worker) => !worker.connected).length;
  const here = workers.length - gone;
  if (!workers.length) return "";
  return plural(here, "worker") + (gone ? `, ${count(gone)} not there` : "");
}

function makePool() {
  return h("section", { class: "pool" }, h("h3", {}, h("b"), h("span")), h("div", { class: "members" }));
}

function updatePool(section, { pool, title, workers, column }, several) {
  set(section, { "data-pool": pool, "data-many": workers.length > MANY, "--column": column, "aria-label": title });
  const [heading, members] = section.children;
  setText(heading.children[0], title);
  setText(heading.children[1], plural(workers.length, "worker"));
  keyed(
    members,
    workers,
    (worker) => worker.endpoint,
    makeWorker,
    (card, worker) => updateWorker(card, worker, several),
  );
}

function makeWorker() {
  return h(
    "article",
    { class: "worker" },
    h("div", { class: "who" }, h("b"), h("span", { class: "state" })),
    h("div", { class: "serves" }),
    h(
      "div",
      { class: "blocks", role: "img" },
      ["owned", "reserved", "cached"].map((state) => h("i", { "data-state": state })),
    ),
    h("div", { class: "load" }, h("span"), h("span")),
  );
}

function updateWorker(card, worker, several) {
  const name = nameOf(worker);
  const state = stateOf(worker);
  const { used, cached, total, shares } = blocksOf(worker);
  const [who, serves, bar, load] = card.children;
  set(card, { "data-worker": name, "data-state": state === "unseen" ? "gone" : state, title: worker.endpoint });
  setText(who.children[0], name);
  setText(who.children[1], WORDS[state]);
  serves.hidden = !several || !worker.model;
  setText(serves, worker.model);
  bar.hidden = !total;
  shares.forEach(([, share], index) => set(bar.children[index], { "--share": share.toFixed(4) }));
  const held = `${count(used)} of ${count(total)} blocks in use, ${count(cached)} cached`;
  set(bar, { "aria-label": total ? held : "no blocks known", title: held });
  setText(load.children[0], total ? `${count(used)} / ${count(total)}` : plural(cached, "block"));
  setText(load.children[1], doing(worker, cached, total));
}

/** What a worker does now, in a few words. */
function doing(worker, cached, total) {
  if (worker.role === "prefix_cache") return total ? `${percent(cached / total)} full` : "kept";
  const parts = [];
  if (worker.waiting) parts.push(`${count(worker.waiting)} wait`);
  if (worker.running) parts.push(`${count(worker.running)} run`);
  if (!parts.length && worker.prefill_tokens_per_second) parts.push(`${rate(worker.prefill_tokens_per_second)} tok/s`);
  return parts.join(" · ") || (cached ? `${count(cached)} cached` : "");
}

function makeLink() {
  return h("tr", {}, h("td"), h("td"), ...Array.from({ length: 4 }, () => h("td", { class: "number" })));
}

function updateLink(row, link) {
  set(row, { "data-link": link.key });
  const [ends, path, measured, now, moved, trip] = row.children;
  if (!ends.firstChild) ends.append(link.from, h("span", { class: "arrow" }, " → "), link.to);
  setText(path, link.path === link.transport ? link.path : `${link.path} (${link.transport})`);
  set(path, { title: link.degraded || null, class: link.degraded ? "slower" : null });
  if (link.degraded) setText(path, `${link.path}: ${link.degraded}`);
  setText(measured, link.bandwidth ? bytesRate(link.bandwidth) : UNKNOWN);
  setText(now, link.now || link.inFlight ? bytesRate(link.now) : UNKNOWN);
  setText(moved, bytes(link.moved));
  setText(trip, duration(link.roundTrip));
}

function showEmpty(workers) {
  const empty = byId("fleet-empty");
  const known = workers.length > 0;
  byId("picture").hidden = !known;
  empty.hidden = known;
  if (known) return;
  empty.replaceChildren(
    h("p", { class: "lead" }, "The router knows no workers."),
    h("p", {}, "Start a whole suite with ", h("code", {}, "pdserve serve --model MODEL --prefill 1 --decode 1")),
    h("p", {}, "or give the router its workers: ", h("code", {}, "--worker HOST:PORT"), ", once for each."),
  );
}
