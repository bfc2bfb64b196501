// How things are, in a word at the top; and what to do about it where they are bad.

import { useKey } from "./api.js";
import { byId, h, set, setText } from "./dom.js";
import { plural } from "./format.js";

const WORDS = { key: "Key needed", router: "Router unreachable", gateway: "Gateway unreachable" };

/** Show what a look at the fleet came to: its `workers`, or an ApiError. `again()` looks once more. */
export function showHealth(workers, error, again) {
  const kind = error ? kindOf(error) : "";
  const [state, words] = error ? ["bad", WORDS[kind]] : describe(workers);
  set(byId("health"), { "data-state": state });
  setText(byId("health"), words);
  showBanner(kind, error?.message ?? "", again);
}

function kindOf({ status }) {
  if (status === 401) return "key";
  return status ? "router" : "gateway";
}

function describe(workers) {
  const here = workers.filter((worker) => worker.connected).length;
  const gone = workers.length - here;
  if (!here) return ["warn", "No workers"];
  return gone ? ["warn", `Live, ${plural(here, "worker")}, ${gone} gone`] : ["good", `Live, ${plural(here, "worker")}`];
}

function showBanner(kind, message, again) {
  const banner = byId("banner");
  banner.hidden = !kind;
  if (banner.dataset.said === kind + message) return;
  banner.dataset.said = kind + message;
  if (kind === "key") banner.replaceChildren(h("b", {}, "This gateway wants an API key."), keyForm(again));
  if (kind === "router") banner.replaceChildren(...routerGone(message));
  if (kind === "gateway") banner.replaceChildren(...gatewayGone());
}

function routerGone(message) {
  const suite = h("code", {}, "pdserve serve");
  const option = h("code", {}, "--router HOST:PORT");
  return [
    h("b", {}, "The router does not answer."),
    h("span", {}, `${message}.`),
    h("span", {}, "Start everything with ", suite, ", or tell the gateway where it is: ", option),
  ];
}

function gatewayGone() {
  return [
    h("b", {}, "The gateway does not answer."),
    h(
      "span",
      {},
      "What you see is the last it said. Start it with ",
      h("code", {}, "pdserve serve"),
      "; this page comes back by itself.",
    ),
  ];
}

function keyForm(again) {
  const input = h("input", { type: "password", "aria-label": "API key", autocomplete: "off" });
  function use(event) {
    event.preventDefault();
    useKey(input.value);
    again();
  }
  return h("form", { onsubmit: use }, input, h("button", { type: "submit" }, "Use it"));
}
