// Stream one answer: generate.js HOST:PORT PROMPT
import { setTimeout } from "node:timers/promises";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { type Client, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { InferenceService } from "./gen/pdserve/v1/inference_pb.js";

/** Writes the text as it comes and returns the token ids. Leaving the loop early would cancel the request. */
async function generate(client: Client<typeof InferenceService>, prompt: string): Promise<number[]> {
  const request = {
    prompt: { case: "text", value: prompt },
    sampling: { temperature: 0 },
    stopping: { maxTokens: 32 },
  } as const;
  const tokens: number[] = [];
  for await (const { event } of client.generate(request, { timeoutMs: 120_000 })) {
    if (event.case !== "output") continue;
    tokens.push(...event.value.tokens.map((token) => token.id));
    process.stdout.write(event.value.text);
  }
  return tokens;
}

/** Milliseconds after which a full fleet wants to be asked again. Any other error is thrown. */
function retryDelay(error: unknown): number {
  const [retry] = ConnectError.from(error).findDetails(RetryInfoSchema);
  if (!retry?.retryDelay) throw error;
  return durationMs(retry.retryDelay);
}

const [target, prompt] = process.argv.slice(2);
const client = createClient(InferenceService, createGrpcTransport({ baseUrl: `http://${target}` }));
const tokens = await generate(client, prompt).catch(async (error) => {
  await setTimeout(retryDelay(error));
  return generate(client, prompt);
});
console.log(`\ntokens: ${tokens.join(" ")}`);
