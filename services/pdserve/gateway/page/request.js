// The request that is open, followed while it runs; and the list of recent ones.

import { ApiError, getJson } from "./api.js";
import { byId, h, keyed, set, setText } from "./dom.js";
import { clock, count, duration, UNKNOWN } from "./format.js";
import { summaryOf } from "./trace.js";
import { drawWaterfall } from "./waterfall.js";

const FOLLOW = 400; // ms between looks at a request that runs
const LATE = 12; // looks at a trace whose last spans are still on their way

let open = "";
let trace = null;

/** Make the controls work. */
export function startRequests() {
  byId("zoom").addEventListener("change", redraw);
  redraw();
}

/** Ask for the list of recent requests, and show it. Throws ApiError. */
export async function lookAtRecent() {
  const { requests } = await getJson("pdserve/v1/traces");
  showRecent(requests);
  return requests;
}

/** Open a request that was sent just now: as soon as a router knows it. Otherwise as `openRequest`. */
export async function openNewRequest(id, tell) {
  open = id;
  trace = null;
  redraw(`Waiting for ${id}`);
  while (open === id) {
    const requests = await lookAtRecent().catch(() => []);
    if (requests.some((request) => request.request_id === id)) return openRequest(id, tell);
    await pause();
  }
}

/** Open a request by its id, and follow it while it runs. `tell(trace)` hears of each look. */
export async function openRequest(id, tell = () => {}) {
  open = id;
  trace = null;
  markCurrent();
  redraw(`Looking for ${id}`);
  for (let left = LATE; open === id && left > 0;) {
    try {
      const seen = await getJson(`pdserve/v1/trace/${encodeURIComponent(id)}`);
      tell(seen);
      if (open !== id) return;
      trace = seen;
      redraw();
      if (seen.complete && LATE - left > 1) return; // the workers' last spans may come a moment after the router's
      if (seen.request.state !== "running") left--;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (open === id) redraw(error.message);
      if (error.status === 404) return;
      left--;
    }
    await pause();
  }
}

/** Wait no longer for a request that no router will hear of. */
export function giveUpOn(id) {
  if (open !== id || trace) return;
  open = "";
  redraw();
}

function showRecent(requests) {
  byId("recent-empty").hidden = requests.length > 0;
  byId("recent").hidden = !requests.length;
  keyed(byId("recent-rows"), requests, (request) => request.request_id, makeRecent, updateRecent);
  markCurrent();
}

function pause() {
  return new Promise((resolve) => setTimeout(resolve, FOLLOW));
}

function redraw(words) {
  const place = byId("waterfall");
  place.hidden = !trace;
  byId("request-empty").hidden = Boolean(trace);
  byId("zoom").disabled = !trace;
  if (trace) drawWaterfall(place, trace, byId("zoom").querySelector(":checked").value);
  const workers = trace ? summaryOf(trace).workers.join(" → ") : "";
  const missing = trace?.missing?.length ? ` · without ${trace.missing.join(", ")}` : "";
  setText(
    byId("request-line"),
    trace
      ? `${trace.request.request_id}${workers ? ` · ${workers}` : ""}${missing}`
      : typeof words === "string"
        ? words
        : "",
  );
}

function makeRecent(request) {
  const opens = h("button", { type: "button", onclick: () => openRequest(request.request_id) }, request.request_id);
  const cells = [
    h("td"),
    h("td", {}, opens),
    h("td"),
    ...Array.from({ length: 3 }, () => h("td", { class: "number" })),
    h("td"),
  ];
  return h("tr", {}, cells);
}

function updateRecent(row, request) {
  set(row, { "data-id": request.request_id });
  const [when, , workers, tokens, ttft, itl, end] = row.children;
  const { usage, itl: gaps } = request;
  setText(when, clock(request.arrived_ms));
  setText(workers, [...new Set(request.workers)].join(" → ") || UNKNOWN);
  setText(tokens, usage.prompt_tokens ? `${count(usage.prompt_tokens)} → ${count(usage.completion_tokens)}` : UNKNOWN);
  setText(ttft, duration(request.ttft_ms));
  setText(itl, gaps.count ? duration(gaps.p99_ms) : UNKNOWN);
  set(end, { "data-state": { failed: "bad", running: "good" }[request.state] ?? null, title: request.error || null });
  setText(end, request.finish_reason ?? (request.code || request.state));
}

function markCurrent() {
  for (const row of byId("recent-rows").children) set(row, { "aria-current": row.dataset.id === open ? "true" : null });
}
