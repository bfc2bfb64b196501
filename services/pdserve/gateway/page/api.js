// The gateway over HTTP: JSON, and answers as server-sent events. Everything goes to the page's own origin.

const CALL_TIMEOUT = 12_000; // ms; the gateway gives its own calls 10 s

/** A call that failed. `status` is 0 where the gateway did not answer at all. */
export class ApiError extends Error {
  constructor(message, status = 0, type = "") {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.type = type;
  }
}

let apiKey = "";

/** Send this key from now on. It lives in the page's memory only. */
export function useKey(key) {
  apiKey = key;
}

/** GET a path and return its JSON. Throws ApiError. */
export async function getJson(path) {
  const response = await send(path, { signal: AbortSignal.timeout(CALL_TIMEOUT) });
  return response.json();
}

/** A name for a request, so that it can be followed before its first token is here. */
export function newRequestId() {
  const random = crypto.getRandomValues(new Uint8Array(6));
  return `page-${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * POST a request for a streamed answer under this id. Yields each event's JSON, until "[DONE]". Throws ApiError for a
 * refusal and for an error in mid-stream. Aborting `signal` closes the connection, which cancels the request.
 */
export async function* stream(path, body, id, signal) {
  const headers = { "content-type": "application/json", "x-request-id": id };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(breakOff);
    if (done) breakOff();
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const data of events.map(dataOf).filter(Boolean)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, Number(event.error.code) || 500, event.error.type);
      yield event;
    }
  }
}

/** An end before the end. Being stopped is no failure, and stays what it is. */
function breakOff(error) {
  if (error?.name === "AbortError") throw error;
  throw new ApiError("the answer broke off: the connection to the gateway was lost");
}

async function send(path, options) {
  const headers = { ...options.headers, ...(apiKey ? { authorization: `Bearer ${apiKey}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the gateway does not answer");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const error = await response.json().then(
    (answer) => answer.error ?? {},
    () => ({}),
  );
  return new ApiError(error.message ?? `${response.status} ${response.statusText}`, response.status, error.type);
}

/** The `data` of one server-sent event; comments have none. */
function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
