// Data that a view needs once.

import { useEffect, useState } from "./libraries.js";

const RETRY_MS = 1000; // while the gateway cannot be reached

// What a request returns, and its error; requested again when `causes` change. While the gateway
// cannot be reached, what was found before stays, and the request is tried again.
export function useLoaded(request, causes) {
  const [state, setState] = useState([null, null]);
  useEffect(() => {
    let isGone = false;
    let timer = null;

    function load() {
      request().then(
        (found) => !isGone && setState([found, null]),
        (error) => {
          if (isGone) return;
          const isUnreachable = error.status === 0;
          setState(([found]) => (isUnreachable && found ? [found, null] : [null, error]));
          if (isUnreachable) timer = setTimeout(load, RETRY_MS);
        },
      );
    }

    load();
    return () => {
      isGone = true;
      clearTimeout(timer);
    };
  }, causes);
  return state;
}
