// The page: asks the gateway how things are, and hands what it says to the parts that show it.

import { getJson, useKey } from "./api.js";
import { byId, h, set, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { showFleet } from "./fleet.js";
import { plural } from "./format.js";
import { chosenModel, judgeBy, offerModels, startPlayground } from "./play.js";
import { poll } from "./poll.js";
import { lookAtRecent, startRequests } from "./request.js";
import { statsOf } from "./view.js";

const EVERY = 1000; // ms between looks at the fleet; workers tell the router as often
const SELDOM = 5000; // for what changes seldom

let fleet = null;

startTheme();
startPlayground();
startRequests();

const askFleet = poll(() => getJson("pdserve/v1/fleet"), EVERY, (answer, error) => {
  if (answer) {
    fleet = answer;
    showFleet(fleet, performance.now());
  }
  set(byId("fleet"), { "data-stale": Boolean(error) });
  showHealth(error);
});
poll(() => getJson("pdserve/v1/stats"), EVERY, (answer, error) => {
  const stats = answer && statsOf(answer, chosenModel());
  judgeBy(stats?.itl_target_ms ?? null);
  showFigures(stats, error ? null : fleet?.workers);
});
poll(lookAtRecent, 2 * EVERY, () => {});
poll(() => getJson("v1/models"), SELDOM, (answer) => answer && offerModels(answer.data.map((model) => model.id)));
getJson("version").then(({ version }) => setText(byId("version"), version ? `version ${version}` : ""), () => {});
new ResizeObserver(() => fleet && showFleet(fleet, performance.now())).observe(byId("picture"));

function showHealth(error) {
  const place = byId("health");
  if (error) {
    set(place, { "data-state": "bad" });
    setText(place, error.status === 401 ? "Key needed" : error.status ? "Router unreachable" : "Gateway unreachable");
  } else {
    const here = fleet.workers.filter((worker) => worker.connected);
    const gone = fleet.workers.length - here.length;
    set(place, { "data-state": here.length ? (gone ? "warn" : "good") : "warn" });
    setText(place, here.length ? `Live, ${plural(here.length, "worker")}${gone ? `, ${gone} gone` : ""}` : "No workers");
  }
  showBanner(error);
}

/** Say what is wrong and what to do about it. */
function showBanner(error) {
  const banner = byId("banner");
  const kind = error ? (error.status === 401 ? "key" : error.status ? "router" : "gateway") : "";
  if (banner.dataset.kind === kind && kind !== "router") return;
  banner.dataset.kind = kind;
  banner.hidden = !kind;
  if (kind === "key") banner.replaceChildren(h("b", {}, "This gateway wants an API key."), keyForm());
  else if (kind === "router") {
    if (banner.dataset.said === error.message) return;
    banner.dataset.said = error.message;
    banner.replaceChildren(h("b", {}, "The router does not answer."), h("span", {}, error.message, ". Is it running? "),
      h("span", {}, "Start everything with ", h("code", {}, "pdserve serve"), ", or name the router by ", h("code", {}, "--router HOST:PORT"), "."));
  } else if (kind === "gateway") {
    banner.replaceChildren(h("b", {}, "The gateway does not answer."), h("span", {}, "What you see is the last it said. This page tries again each second; start it with "), h("code", {}, "pdserve serve"));
  }
}

function keyForm() {
  const input = h("input", { type: "password", "aria-label": "API key", autocomplete: "off" });
  function use(event) {
    event.preventDefault();
    useKey(input.value);
    askFleet();
  }
  return h("form", { onsubmit: use }, input, h("button", { type: "submit" }, "Use it"));
}

/** System, light, dark, and round again. */
function startTheme() {
  const names = ["system", "light", "dark"];
  const button = byId("theme");
  const root = document.documentElement;
  const tell = () => set(button, { "aria-label": `Theme: ${root.dataset.theme ?? "system"}`, title: `Theme: ${root.dataset.theme ?? "system"}` });
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(root.dataset.theme ?? "system") + 1) % names.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    localStorage.setItem("pdserve.theme", next);
    tell();
  });
  tell();
}
