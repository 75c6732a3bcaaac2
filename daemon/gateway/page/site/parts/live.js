// Live updates by server-sent events, over connections that are opened again when they end.
//
// A browser opens at most six connections to one host, so a hidden page closes its own. It continues
// where it was when it is shown again.

import { getStream } from "./api.js";
import { eventsOf } from "./sse.js";

const RETRY_MS = 1000;
const listeners = new Set();
const lost = new Set(); // the followers without a connection

// Calls `listener` with whether all streams of this page are connected, when that changes.
export function onConnection(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function report(follower, isConnected) {
  const before = lost.size;
  if (isConnected) lost.delete(follower);
  else lost.add(follower);
  if (!before !== !lost.size) listeners.forEach((listener) => listener(!lost.size));
}

// Follows the stream at `address(lastId)` and calls `handlers` by the name of the event. Without a
// name that is `message`. Returns a function that ends it.
export function follow(address, handlers) {
  const follower = {};
  let connection = null; // an AbortController while there is one
  let timer = null;
  let lastId = null;

  function connect() {
    timer = null;
    if (document.hidden || connection) return;
    connection = new AbortController();
    read(connection.signal);
  }

  async function read(signal) {
    try {
      const response = await getStream(address(lastId), signal);
      report(follower, true);
      for await (const { id, name, data } of eventsOf(response)) {
        if (signal.aborted) return;
        if (id !== null) lastId = id;
        deliver(name, JSON.parse(data));
      }
    } catch {
      // Refused, lost or aborted.
    }
    if (!signal.aborted) retry();
  }

  // An error of a handler does not end the stream.
  function deliver(name, data) {
    try {
      handlers[name]?.(data);
    } catch (error) {
      reportError(error);
    }
  }

  function retry() {
    connection = null;
    report(follower, false);
    timer = setTimeout(connect, RETRY_MS);
  }

  function close() {
    connection?.abort();
    connection = null;
    clearTimeout(timer);
  }

  function onVisibility() {
    if (document.hidden) close();
    else connect();
  }

  document.addEventListener("visibilitychange", onVisibility);
  connect();
  return () => {
    document.removeEventListener("visibilitychange", onVisibility);
    close();
    report(follower, true);
  };
}
