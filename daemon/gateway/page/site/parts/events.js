// The newest events of a job, continued live.

import { useEffect, useState } from "./libraries.js";
import { get } from "./api.js";
import { follow } from "./live.js";

const KEPT = 1000;
const DRAW_MS = 250; // between two updates of a view

// Returns [events, error], oldest first; null while they are loaded. `isEnded` is whether the job has
// ended: when it is resumed, it is followed again; null: not known yet. `without`: types of events that are
// left out.
export function useEvents(id, isEnded, without = []) {
  const [state, setState] = useState([null, null]);

  useEffect(() => {
    if (isEnded === null) return undefined;
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
        const { data, seq } = await get(`/v1/warmd/jobs/${id}/events`, { limit: KEPT, without });
        if (isGone) return;
        setState([data, null]);
        stop = follow((lastId) => `/v1/warmd/jobs/${id}/events/stream?after=${lastId ?? seq}`, {
          message(event) {
            if (without.includes(event.type)) return;
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
  }, [id, isEnded, without.join()]);

  return state;
}
