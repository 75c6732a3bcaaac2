// The newest events of a job, continued live.

import { useEffect, useState } from "./libraries.js";
import { get } from "./api.js";
import { follow } from "./live.js";

const KEPT = 1000;
const DRAW_MS = 250; // between two updates of a view

// Returns [events, error], oldest first; null while they are loaded. `isEnded` is whether the job has
// ended: when it is resumed, it is followed again.
export function useEvents(id, isEnded) {
  const [state, setState] = useState([null, null]);

  useEffect(() => {
    let stop = () => {};
    let timer = null;
    let isGone = false;
    let fresh = [];

    function draw() {
      timer = null;
      const added = fresh;
      fresh = [];
      setState(([events]) => [[...events, ...added].slice(-KEPT), null]);
    }

    async function load() {
      try {
        const { data } = await get(`/v1/warmd/jobs/${id}/events`, { limit: KEPT });
        if (isGone) return;
        setState([data, null]);
        const seq = data.at(-1)?.seq ?? 0;
        stop = follow((lastId) => `/v1/warmd/jobs/${id}/events/stream?after=${lastId ?? seq}`, {
          message(event) {
            fresh.push(event);
            timer ??= setTimeout(draw, DRAW_MS);
          },
          end: () => stop(),
        });
      } catch (error) {
        if (!isGone) setState([null, error]);
      }
    }

    load();
    return () => {
      isGone = true;
      clearTimeout(timer);
      stop();
    };
  }, [id, isEnded]);

  return state;
}
