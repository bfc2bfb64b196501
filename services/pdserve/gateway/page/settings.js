// The sampling settings: what is set goes into the request, what is empty is left to the model.

import { byId, setText } from "./dom.js";
import { keep, recall } from "./keep.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty"];
const WORDS = {
  temperature: "temperature",
  top_p: "top p",
  top_k: "top k",
  max_tokens: "max",
  seed: "seed",
  frequency_penalty: "penalty",
};
const KEPT = "pdserve.settings";

/** Restore what was set last time in this browser, and keep what changes. */
export function startSettings() {
  const kept = recall(KEPT) ?? {};
  for (const field of fields()) if (typeof kept[field.id] === "string") field.value = kept[field.id];
  byId("settings").addEventListener("input", () => {
    keep(KEPT, Object.fromEntries(fields().map((field) => [field.id, field.value])));
    describe();
  });
  describe();
}

/** What of a request they make; null where a field holds something else than it may, which is then shown. */
export function samplingSettings() {
  const wrong = fields().find((field) => !field.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.reportValidity();
    return null;
  }
  const set = NUMBERS.filter((name) => byId(name).value !== "").map((name) => [name, byId(name).valueAsNumber]);
  return { ...Object.fromEntries(set), ...(byId("stop").value ? { stop: [byId("stop").value] } : {}) };
}

/** The system message, or "". */
export function systemMessage() {
  return byId("system").value.trim();
}

function fields() {
  return [...byId("settings").querySelectorAll("input, textarea")];
}

function describe() {
  const set = NUMBERS.filter((name) => byId(name).value !== "");
  const words = set.map((name) => `${WORDS[name]} ${byId(name).value}`);
  if (byId("stop").value) words.push(`stop at ${JSON.stringify(byId("stop").value)}`);
  if (systemMessage()) words.push("system message");
  setText(byId("settings-line"), words.join(" · "));
}
