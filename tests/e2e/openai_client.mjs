// OpenAI's own Node client against a gateway: node openai_client.mjs BASE_URL. One JSON object a line, for the test.
import OpenAI from "openai";

const baseURL = process.argv[2];
let requests = 0;
const counting = (...given) => (requests++, fetch(...given));
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 2, fetch: counting });
const tell = (step, fields) => console.log(JSON.stringify({ step, ...fields }));
const messages = [{ role: "user", content: "hello" }];
const greedy = { model: "tiny", temperature: 0, max_tokens: 8, ignore_eos: true };

const whole = await client.chat.completions.create({ ...greedy, messages });
tell("whole", { text: whole.choices[0].message.content, tokens: whole.usage.completion_tokens });

const stream = await client.chat.completions.create({
  ...greedy, messages, stream: true, stream_options: { include_usage: true },
});
let text = "", usage = null;
const roles = [];
for await (const chunk of stream) {
  roles.push(...chunk.choices.map((choice) => choice.delta.role).filter(Boolean));
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
tell("streamed", { text, roles, tokens: usage.completion_tokens });

const { choices } = await client.completions.create({ ...greedy, prompt: ["one", "two"], logprobs: 1 });
tell("completions", { texts: choices.map((choice) => choice.text), logprobs: choices[0].logprobs.tokens.length });

try {
  await client.chat.completions.create({ ...greedy, messages, top_p: 7 });
} catch (error) {
  tell("refused", { status: error.status, param: error.param, type: error.type, kind: error.constructor.name });
}

const left = await client.completions.create({ ...greedy, prompt: "left", max_tokens: 900, stream: true });
for await (const _ of left) break; // leaving aborts the request
tell("left", {});

const broken = await client.completions.create({ ...greedy, prompt: "broken", max_tokens: 900, stream: true });
try {
  let chunks = 0;
  for await (const _ of broken) if (++chunks === 3) tell("streaming", {}); // the test kills the router now
} catch (error) {
  tell("broken", { code: error.code, type: error.type });
}

requests = 0;
const started = Date.now();
try {
  await client.chat.completions.create({ ...greedy, messages });
} catch (error) {
  tell("retried", { status: error.status, requests, seconds: (Date.now() - started) / 1e3 });
}
