// Live updates by server-sent events, which connect again by themselves.
//
// A browser opens at most six connections to one host, so a hidden page closes its own. It continues
// where it was when it is shown again.

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
  let source = null;
  let timer = null;
  let lastId = null;

  function open() {
    timer = null;
    if (document.hidden || source) return;
    source = new EventSource(address(lastId));
    source.onopen = () => report(follower, true);
    source.onerror = () => {
      report(follower, false);
      if (source?.readyState === EventSource.CLOSED) {
        close(); // an error status: a browser does not retry after one
        timer = setTimeout(open, RETRY_MS);
      }
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        if (event.lastEventId) lastId = event.lastEventId;
        handle(JSON.parse(event.data));
      });
    }
  }

  function close() {
    source?.close();
    source = null;
    clearTimeout(timer);
  }

  function onVisibility() {
    if (document.hidden) close();
    else open();
  }

  document.addEventListener("visibilitychange", onVisibility);
  open();
  return () => {
    document.removeEventListener("visibilitychange", onVisibility);
    close();
    report(follower, true);
  };
}
