// What the page asks the server.

const KEY = "tandem-api-key";

/** An error that the server named. */
export class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) || "";
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers(more = {}) {
  const key = apiKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function refused(response) {
  let message = `the server answered ${response.status}`, code = "";
  try {
    const body = await response.json();
    message = body.error?.message || message;
    code = body.error?.code || "";
  } catch { /* no JSON: the status says it */ }
  const error = new ServerError(response.status, message, code);
  if (response.status === 401) window.dispatchEvent(new CustomEvent("tandem-key"));
  return error;
}

async function asked(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-cache", ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "the server cannot be reached. Is it still running?", "");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given).toString();
  return (await asked(text ? `${path}?${text}` : path)).json();
}

export async function post(path, body, method = "POST") {
  const options = { method, headers: { "Content-Type": "application/json" } };
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await asked(path, options);
  return response.status === 204 ? {} : response.json();
}

export const runs = {
  list: () => get("/api/runs"),
  of: (run, view = "", query = {}) =>
    get(`/api/runs/${encodeURIComponent(run)}${view ? `/${view}` : ""}`, query),
};

/** The events of a streamed completion, as objects. */
export async function* streamed(path, body, signal) {
  const response = await asked(path, {
    method: "POST", body: JSON.stringify(body), signal,
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value.replaceAll("\r\n", "\n");
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (!data) continue;
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new ServerError(500, found.error.message || "the stream failed", found.error.code);
        yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
