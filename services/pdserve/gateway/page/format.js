// Numbers as people read them. Pure functions; a dash is what is not known.

export const UNKNOWN = "–";

/** 0.42 ms, 4.2 ms, 42 ms, 4.20 s, 1 min 5 s. */
export function duration(ms) {
  const [number, unit] = durationParts(ms);
  return unit ? `${number} ${unit}` : number;
}

/** The same as [number, unit], for big figures. */
export function durationParts(ms) {
  if (!known(ms)) return [UNKNOWN, ""];
  if (ms < 1) return [ms === 0 ? "0" : ms.toFixed(2), "ms"];
  if (ms < 10) return [ms.toFixed(1), "ms"];
  if (ms < 1000) return [String(Math.round(ms)), "ms"];
  if (ms < 60_000) return [(ms / 1000).toFixed(ms < 10_000 ? 2 : 1), "s"];
  const seconds = Math.round(ms / 1000);
  return [`${Math.floor(seconds / 60)} min ${seconds % 60}`, "s"];
}

/** Bytes in powers of ten, as networks count: 0 B, 812 B, 1.2 kB, 34 MB. */
export function bytes(count) {
  return scaled(count, ["B", "kB", "MB", "GB", "TB"], 0);
}

/** Bytes a second: 0 B/s, 1.42 GB/s. */
export function bytesRate(rate) {
  return known(rate) ? `${scaled(rate, ["B", "kB", "MB", "GB", "TB"], 0)}/s` : UNKNOWN;
}

/** A rate or a mean: 0, 0.02, 0.4, 14.2, 1,204. */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  if (value < 0.095) return value.toFixed(2);
  return value < 100 ? value.toFixed(1) : count(Math.round(value));
}

/** 1,204 */
export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

/** 1 token, 2 tokens */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A share of 1 as whole percent; what is neither none nor all is neither 0% nor 100%. */
export function percent(share) {
  if (!known(share)) return UNKNOWN;
  const whole = Math.round(share * 100);
  return `${share > 0 && share < 1 ? Math.min(99, Math.max(1, whole)) : whole}%`;
}

/** 14:03:59, by the reader's own clock and custom. */
export function clock(unixMs) {
  return known(unixMs) && unixMs > 0 ? new Date(unixMs).toLocaleTimeString([], { hour12: false }) : UNKNOWN;
}

/** The value that `share` of all values do not exceed (nearest rank); null without values. */
export function percentile(values, share) {
  if (!values.length) return null;
  const ordered = [...values].sort((one, other) => one - other);
  return ordered[Math.min(ordered.length - 1, Math.max(0, Math.ceil(share * ordered.length) - 1))];
}

/** Steps of 1, 2 or 5 times a power of ten, so that about `wanted` of them reach `end`. */
export function ticks(end, wanted) {
  const raw = end / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let index = 0; index * step <= end * 1.0001; index++) found.push(index * step);
  return found;
}

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function scaled(value, units, index) {
  if (!known(value)) return UNKNOWN;
  while (value >= 999.5 && index < units.length - 1) [value, index] = [value / 1000, index + 1];
  const digits = index === 0 || value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[index]}`;
}
