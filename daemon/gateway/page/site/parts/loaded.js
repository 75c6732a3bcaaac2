// Data that a view needs once.

import { useLayoutEffect, useState } from "./libraries.js";

// The result of a request, and its error; requested again when `causes` change.
export function useLoaded(request, causes) {
  const [state, setState] = useState([null, null]);
  // Without waiting until this frame is drawn.
  useLayoutEffect(() => {
    let isGone = false;
    request().then(
      (found) => !isGone && setState([found, null]),
      (error) => !isGone && setState([null, error]),
    );
    return () => {
      isGone = true;
    };
  }, causes);
  return state;
}
