// What a trace says, for people. Pure functions over what /pdserve/v1/trace tells.

import { bytes, count, duration, plural } from "./format.js";

/** Spans by name: the kind that gives them their colour, and what they are called. */
const KINDS = {
  "pdserve.queue": ["queue", "queue"],
  "pdserve.reserve": ["reserve", "reserve pages"],
  "pdserve.prefill": ["prefill", "prefill"],
  "pdserve.prefill.queue": ["queue", "wait for a batch"],
  "pdserve.prefill.chunk": ["prefill", "chunk"],
  "pdserve.prefix.fetch": ["cache", "fetch prefix"],
  "pdserve.prefix.lookup": ["cache", "look up prefix"],
  "pdserve.prefix.read": ["cache", "read prefix"],
  "pdserve.transfer": ["transfer", "KV transfer"],
  "pdserve.receive": ["transfer", "receive KV"],
  "pdserve.hand_off": ["transfer", "hand off"],
  "pdserve.decode_wait": ["wait", "wait for a step"],
  "pdserve.first_step": ["decode", "first step"],
  "pdserve.decode": ["decode", "decode"],
};

/** The stages that a router measures of each request, none of which overlap. */
const STAGES = [
  ["queue_ms", "queue", "queue"],
  ["reserve_ms", "reserve", "reserve pages"],
  ["prefill_ms", "prefill", "prefill"],
  ["transfer_exposed_ms", "transfer", "KV transfer that computing did not hide"],
  ["decode_wait_ms", "wait", "wait for a step"],
  ["first_step_ms", "decode", "first step"],
];

/** The kind of a span: "queue", "reserve", "prefill", "transfer", "wait", "decode", "cache" or "request". */
export function kindOf({ name, service }) {
  return KINDS[name]?.[0] ?? (service === "prefix_cache" ? "cache" : "request");
}

/** What a span is called. */
export function titleOf({ name, count: folded }) {
  const title = KINDS[name]?.[1] ?? name.replace(/^pdserve\./, "").replaceAll(/[._]/g, " ");
  return folded > 1 ? `${count(folded)} × ${title}` : title;
}

/** Who did it. */
export function whoOf({ service, worker }) {
  return worker || service;
}

/** What else there is to say of a span, in one line. */
export function detailOf({ attributes: at, error, failed }) {
  const parts = [];
  if (at["pdserve.kv_bytes"]) {
    const path = at["pdserve.kv_link.path"];
    parts.push(bytes(at["pdserve.kv_bytes"]) + (path ? ` over ${path}` : ""));
  }
  if (at["pdserve.kv_transfer.exposed_seconds"] !== undefined) {
    parts.push(`${duration(at["pdserve.kv_transfer.exposed_seconds"] * 1e3)} exposed`);
  }
  if (at["pdserve.tokens"]) parts.push(plural(at["pdserve.tokens"], "token"));
  if (at["pdserve.cached_tokens"]) parts.push(`${count(at["pdserve.cached_tokens"])} cached`);
  if (at["pdserve.routing.reason"]) parts.push(at["pdserve.routing.reason"]);
  if (at["pdserve.attempt"] > 1) parts.push(`attempt ${at["pdserve.attempt"]}`);
  if (failed) parts.push(error || "failed");
  return parts.join(" · ");
}

/** Where everything ends, in ms; for a request that runs: now. */
export function endOf({ rows, request, arrived_at_ms: arrived }) {
  return rows.reduce((end, row) => Math.max(end, row.end_ms ?? row.start_ms), arrived + request.duration_ms);
}

/** When the first token was there, in ms; null where it is not yet. */
export function firstTokenOf({ request, arrived_at_ms: arrived }) {
  return request.ttft_ms === null ? null : arrived + request.ttft_ms;
}

/** Who had a part in the answer, in order, and what moved between them: {workers, moved, link}. */
export function summaryOf({ rows, request }) {
  const transfers = rows.filter((row) => row.name === "pdserve.transfer" && row.attributes["pdserve.kv_bytes"]);
  return {
    workers: [...new Set(request.workers)],
    moved: transfers.reduce((sum, row) => sum + row.attributes["pdserve.kv_bytes"], 0),
    link: transfers.map((row) => row.attributes["pdserve.kv_link.path"]).find(Boolean) ?? "",
  };
}

/** Where the time went, one stage after another: [{kind, title, ms, share}]. What is not known yet is left out. */
export function stagesOf({ request }) {
  const { stages } = request.usage;
  const known = STAGES.map(([name, kind, title]) => ({ kind, title, ms: stages[name] }));
  const rest = request.duration_ms - known.reduce((sum, stage) => sum + stage.ms, 0);
  const all = request.ttft_ms === null ? known : [...known, { kind: "decode", title: "decode", ms: Math.max(0, rest) }];
  const total = all.reduce((sum, stage) => sum + stage.ms, 0);
  return all.filter((stage) => stage.ms > 0).map((stage) => ({ ...stage, share: stage.ms / total }));
}
