// Requests to the gateway. The routes are described in /openapi.json.

import { session } from "./session.js";

const RETRY_MS = 1000; // while the gateway cannot be reached

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the gateway replied with status ${status}`);
    this.status = status;
    this.param = error?.param ?? null; // the field that is wrong
  }
}

export function url(path, query = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) {
      if (one !== null && one !== undefined && one !== "") search.append(name, one);
    }
  }
  return search.size ? `${path}?${search}` : path;
}

export function get(path, query) {
  return read(url(path, query), (response) => response.json());
}

export function getText(path) {
  return read(path, (response) => response.text());
}

// The response of a stream, which `signal` ends.
export function getStream(path, signal) {
  return request(path, { signal });
}

// An address that the browser can open by itself: it sends no header with it, so a session requests
// one that works once, within seconds.
export async function addressOf(path) {
  return session() === null ? path : (await (await post("/v1/warmd/tickets", { path })).json()).url;
}

// Tries again until the gateway can be reached: a read changes nothing, and a view keeps what it shows
// meanwhile. The header reports the lost connection.
async function read(path, bodyOf) {
  for (;;) {
    try {
      return await bodyOf(await request(path));
    } catch (error) {
      // A TypeError: the connection was lost within the body.
      if (error.status !== 0 && !(error instanceof TypeError)) throw error;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

// Changes carry a header that pages of other origins cannot set.
export async function post(path, body = {}, { signal } = {}) {
  return request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Warmd": "1" },
    body: JSON.stringify(body),
    signal,
  });
}

export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file);
  const options = { method: "POST", headers: { "X-Warmd": "1" }, body: form };
  return (await request("/v1/files", options)).json();
}

async function request(path, { headers = {}, ...options } = {}) {
  const secret = session();
  if (secret !== null) headers = { ...headers, "X-Warmd-Session": secret };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "the gateway cannot be reached" });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) window.dispatchEvent(new Event("warmd-login"));
  throw new ApiError(response.status, body.error);
}
