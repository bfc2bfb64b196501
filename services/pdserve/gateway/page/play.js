// The playground: sends prompts, shows answers as they arrive, stops them, and keeps the conversation.

import { ApiError, newRequestId, stream } from "./api.js";
import { Answer } from "./answer.js";
import { byId, h, set, setText } from "./dom.js";
import { giveUpOn, openNewRequest, openRequest } from "./request.js";
import { samplingSettings, startSettings, systemMessage } from "./settings.js";

const SAID = { cancelled: "Stopped.", failed: "It failed." };

let turns = []; // the conversation as the API takes it
let running = null; // the AbortController of the answer that arrives
let stuck = true; // the newest words are in sight, and shall stay so
let target = null; // ms between tokens, as the deployment wants it

/** Make the controls work. */
export function startPlayground() {
  startSettings();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) send();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  byId("prompt").addEventListener("input", tellState);
  byId("clear").addEventListener("click", () => {
    clear();
    byId("prompt").focus();
  });
  for (const radio of document.getElementsByName("kind")) radio.addEventListener("change", tellKind);
  for (const button of byId("welcome").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      byId("prompt").value = button.textContent;
      send();
    });
  }
  byId("log").addEventListener("scroll", () => (stuck = atEnd()));
  tellKind();
}

/** Offer these models (names, as /v1/models gives them); the choice stays while its model does. */
export function offerModels(names) {
  const picker = byId("model");
  const before = [...picker.options].map((option) => option.value);
  if (names.join("\n") === before.join("\n")) return;
  const chosen = picker.value;
  picker.replaceChildren(
    ...(names.length ? names : [""]).map((name) => h("option", { value: name }, name || "No model yet")),
  );
  if (names.includes(chosen)) picker.value = chosen;
  tellState();
}

/** The model that is asked, or "". */
export function chosenModel() {
  return byId("model").value;
}

/** Judge gaps between pieces by this target in ms; null: there is none. */
export function judgeBy(ms) {
  target = ms;
}

async function send() {
  const prompt = byId("prompt").value;
  const settings = samplingSettings();
  if (!prompt.trim() || !chosenModel() || !settings) return;
  const chat = kind() === "chat";
  const asked = { role: "user", content: prompt };
  const id = newRequestId();
  const tell = (trace) => answer.traced(trace);
  const answer = new Answer(id, chat ? "" : prompt, () => openRequest(id, tell), follow);
  byId("welcome").hidden = true;
  byId("log").append(h("div", { class: "turn" }, chat ? h("p", { class: "asked" }, prompt) : null, answer.element));
  byId("prompt").value = "";
  running = new AbortController();
  tellState();
  stuck = true;
  follow();
  openNewRequest(id, tell);
  const options = { model: chosenModel(), ...settings, stream: true, stream_options: { include_usage: true } };
  const system = systemMessage();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, asked];
  if (chat) await receive(answer, "v1/chat/completions", { ...options, messages });
  else await receive(answer, "v1/completions", { ...options, prompt });
  running = null;
  tellState();
  if (answer.end === "failed") giveUpOn(id);
  else if (chat && answer.text) turns.push(asked, { role: "assistant", content: answer.text });
  setText(byId("said"), SAID[answer.end] ?? "The answer is complete.");
}

/** Take the answer in, to its end, whatever that is. */
async function receive(answer, path, body) {
  let end = "stop";
  try {
    for await (const event of stream(path, body, answer.id, running.signal)) {
      if (event.usage) answer.usage = event.usage;
      const [choice] = event.choices ?? [];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (text) answer.piece(text, performance.now(), target);
      if (choice?.finish_reason) end = choice.finish_reason;
    }
    answer.finish(end);
  } catch (error) {
    if (error.name === "AbortError") answer.finish("cancelled");
    else answer.finish("failed", error.message);
    if (error.name !== "AbortError" && !(error instanceof ApiError)) console.error(error);
  }
}

function clear() {
  turns = [];
  for (const turn of byId("log").querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
  tellState();
}

function kind() {
  return document.querySelector("[name=kind]:checked").value;
}

function tellKind() {
  set(byId("composer"), { "data-kind": kind() });
  set(byId("prompt"), { placeholder: kind() === "chat" ? "Ask something" : "Begin a text; the model goes on" });
  clear();
}

function tellState() {
  const send = byId("send");
  setText(send.firstElementChild, running ? "Stop" : "Send");
  set(send, {
    "data-state": running ? "stop" : null,
    disabled: !running && !(byId("prompt").value.trim() && chosenModel()),
  });
  byId("clear").disabled = Boolean(running) || !byId("log").querySelector(".turn");
  for (const radio of document.getElementsByName("kind")) radio.disabled = Boolean(running);
}

function atEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

/** Keep the newest words in sight, unless the reader has scrolled up. Called once a frame: it asks for a layout. */
function follow() {
  if (stuck) byId("log").scrollTop = byId("log").scrollHeight;
}
