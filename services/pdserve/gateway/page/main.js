// The page: asks the gateway how things are, and hands what it says to the parts that show it.

import { getJson } from "./api.js";
import { byId, set, setText } from "./dom.js";
import { showFigures } from "./figures.js";
import { redrawFleet, showFleet } from "./fleet.js";
import { showHealth } from "./health.js";
import { keep } from "./keep.js";
import { chosenModel, judgeBy, offerModels, startPlayground } from "./play.js";
import { poll } from "./poll.js";
import { lookAtRecent, startRequests } from "./request.js";
import { statsOf } from "./view.js";

const EVERY = 1000; // ms between looks at the fleet; workers tell the router as often
const SELDOM = 5000; // for what changes seldom

let workers = null;

startTheme();
startPlayground();
startRequests();

const askFleet = poll(() => getJson("pdserve/v1/fleet"), EVERY, tellFleet);
poll(() => getJson("pdserve/v1/stats"), EVERY, tellStats);
poll(lookAtRecent, 2 * EVERY, () => {});
poll(() => getJson("v1/models"), SELDOM, tellModels);
getJson("version").then(tellVersion, () => {});
new ResizeObserver(redrawFleet).observe(byId("picture"));

function tellFleet(answer, error) {
  if (answer) {
    workers = answer.workers;
    showFleet(workers, performance.now());
  }
  set(byId("fleet"), { "data-stale": Boolean(error) });
  showHealth(workers, error, askFleet);
}

function tellStats(answer, error) {
  const stats = answer && statsOf(answer, chosenModel());
  judgeBy(stats?.itl_target_ms ?? null);
  showFigures(stats, error ? null : workers);
}

function tellModels(answer) {
  if (answer) offerModels(answer.data.map((model) => model.id));
}

function tellVersion({ version }) {
  setText(byId("version"), version ? `version ${version}` : "");
}

/** System, light, dark, and round again. */
function startTheme() {
  const names = ["system", "light", "dark"];
  const root = document.documentElement;
  const now = () => root.dataset.theme ?? "system";
  const tell = () => set(byId("theme"), { "aria-label": `Theme: ${now()}`, title: `Theme: ${now()}` });
  byId("theme").addEventListener("click", () => {
    const next = names[(names.indexOf(now()) + 1) % names.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    keep("pdserve.theme", next);
    tell();
  });
  tell();
}
