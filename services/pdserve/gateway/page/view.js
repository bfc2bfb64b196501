// What the page shows, from what the gateway tells. Pure functions.

const POOLS = [
  ["cache", "Prefix cache"],
  ["prefill", "Prefill"],
  ["decode", "Decode"],
  ["colocated", "Prefill and decode"],
  ["unseen", "Not seen yet"],
];

const SUMMED = [
  "running",
  "waiting",
  "completed",
  "good",
  "failed",
  "goodput",
  "output_tokens_per_second",
  "prompt_tokens_per_second",
];

/**
 * Workers by pool, in the order of a request's way: [{pool, title, workers}]. A decode worker of a model that no
 * prefill worker serves does both.
 */
export function poolsOf(workers) {
  const apart = new Set(workers.filter((worker) => worker.role === "prefill").map((worker) => worker.model));
  function poolOf({ role, model }) {
    if (role === "prefix_cache") return "cache";
    if (role === "decode") return apart.has(model) ? "decode" : "colocated";
    return role === "prefill" ? "prefill" : "unseen";
  }
  const pools = POOLS.map(([pool, title]) => {
    const members = workers.filter((worker) => poolOf(worker) === pool);
    return { pool, title, workers: members.sort((one, other) => byName(nameOf(one), nameOf(other))) };
  });
  return pools.filter((pool) => pool.workers.length);
}

/** What a worker is called; before it has said so, by where it is. */
export function nameOf(worker) {
  return worker.worker_id || worker.endpoint;
}

/** "gone", "draining", "running" or "idle". */
export function stateOf(worker) {
  if (!worker.connected) return worker.worker_id ? "gone" : "unseen";
  if (worker.draining) return "draining";
  return worker.running || worker.waiting || worker.reserved_blocks ? "running" : "idle";
}

/**
 * KV links, the two ends of each made one: [{key, from, to, path, transport, degraded, bandwidth, moved, now, inFlight,
 * roundTrip}], bytes and bytes a second, milliseconds; null is not measured. `before` is what this function returned
 * `seconds` ago.
 */
export function linksOf(workers, before = [], seconds = 0) {
  const links = new Map();
  const order = { prefill: 0, decode: 1 };
  const ends = workers
    .filter((worker) => worker.connected)
    .flatMap((worker) => worker.links.map((end) => ({ worker, end })));
  ends.sort((one, other) => (order[one.worker.role] ?? 2) - (order[other.worker.role] ?? 2));
  for (const { worker, end } of ends) {
    const key = [worker.worker_id, end.peer].sort().join(" ");
    const link = links.get(key) ?? {
      key,
      from: worker.worker_id,
      to: end.peer,
      path: end.path,
      transport: end.transport,
      degraded: end.degraded,
      bandwidth: end.bytes_per_second || null,
      roundTrip: end.round_trip_seconds * 1e3 || null,
      moved: 0,
      inFlight: 0,
    };
    // Each end counts what it sent, so that nothing is counted twice.
    link.moved += end.bytes_sent;
    link.inFlight += end.bytes_in_flight;
    link.degraded ||= end.degraded;
    links.set(key, link);
  }
  const known = new Map(before.map((link) => [link.key, link.moved]));
  for (const link of links.values()) {
    const moved = link.moved - (known.get(link.key) ?? link.moved);
    link.now = seconds > 0 ? Math.max(0, moved) / seconds : 0;
  }
  return [...links.values()].sort((one, other) => byName(one.from, other.from) || byName(one.to, other.to));
}

/** A worker's blocks: {used, total, shares: [[state, share]]}; free is what is left. */
export function blocksOf(worker) {
  const counts = [
    ["owned", worker.owned_blocks],
    ["reserved", worker.reserved_blocks],
    ["cached", worker.cached_blocks],
  ];
  const total = worker.total_blocks; // 0: not told, or no fixed number
  const shares = counts.map(([state, count]) => [state, total ? count / total : 0]);
  return { used: worker.owned_blocks + worker.reserved_blocks, cached: worker.cached_blocks, total, shares };
}

/**
 * The figures of one model, of all routers together: counts and rates are sums, latencies the slowest router's, targets
 * the first one's. null where no router told any.
 */
export function statsOf({ routers }, model) {
  const each = routers.flatMap((router) => router.models.filter((stats) => stats.model === model));
  if (!each.length) return null;
  const sums = SUMMED.map((name) => [name, each.reduce((sum, stats) => sum + stats[name], 0)]);
  const slowest = (name) =>
    each.map((stats) => stats[name]).reduce((one, other) => (other.p99_ms > one.p99_ms ? other : one));
  const { ttft_target_ms, itl_target_ms } = routers[0];
  return { ...Object.fromEntries(sums), ttft: slowest("ttft"), itl: slowest("itl"), ttft_target_ms, itl_target_ms };
}

function byName(one, other) {
  return one.localeCompare(other, "en", { numeric: true });
}
