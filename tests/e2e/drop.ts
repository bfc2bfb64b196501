// Open STREAMS answers at once, drop a third of them at random moments, and say how many did what:
// drop.js HOST:PORT STREAMS SEED prints {"completed": .., "cancelled": .., "failed": .., "answers": {PROMPT: TEXT, ..}}
// with the answers that were completed, and ends well if none failed.
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { InferenceService } from "./gen/pdserve/v1/inference_pb.js";

const MAX_TOKENS = 64;
type End = "completed" | "cancelled" | "failed";

/** Numbers in [0, 1) that are the same for the same seed (a linear congruential generator). */
function* draws(seed: number): Generator<number, never> {
  for (let state = seed >>> 0; ; ) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    yield state / 2 ** 32;
  }
}

/** Read an answer, or leave it after `dropAfter` tokens; 0 leaves as soon as it is asked for. */
async function read(prompt: string, dropAfter: number): Promise<End> {
  const abort = new AbortController();
  if (dropAfter === 0) setImmediate(() => abort.abort());
  const request = {
    prompt: { case: "text", value: prompt },
    sampling: { temperature: 0 },
    stopping: { maxTokens: MAX_TOKENS, ignoreEos: true },
  } as const;
  let tokens = 0;
  let text = "";
  try {
    for await (const { event } of client.generate(request, { signal: abort.signal })) {
      if (event.case === "output") {
        tokens += event.value.tokens.length;
        text += event.value.text;
      }
      if (tokens >= dropAfter) abort.abort();
    }
  } catch (error) {
    if (abort.signal.aborted && ConnectError.from(error).code === Code.Canceled) return "cancelled";
    console.error(`${ConnectError.from(error)}`);
    return "failed";
  }
  if (tokens !== MAX_TOKENS) return "failed";
  answers[prompt] = text;
  return "completed";
}

const [target, streams, seed] = process.argv.slice(2);
const baseUrl = `http://${target}`;
const sessionManager = new Http2SessionManager(baseUrl);
const client = createClient(InferenceService, createGrpcTransport({ baseUrl, sessionManager }));
const random = draws(Number(seed));
const counts: Record<End, number> = { completed: 0, cancelled: 0, failed: 0 };
const answers: Record<string, string> = {};
const reads = Array.from({ length: Number(streams) }, (_, index) => {
  const moment = Math.floor(random.next().value * MAX_TOKENS);
  return read(`Story number ${index}: `, index % 3 === 0 ? moment : Number.POSITIVE_INFINITY);
});
for (const end of await Promise.all(reads)) counts[end] += 1;
console.log(JSON.stringify({ ...counts, answers }));
sessionManager.abort(); // else the connection idles on, and Node with it
process.exitCode = counts.failed ? 1 : 0;
