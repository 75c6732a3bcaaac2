// The curves of a job: loaded in few points, continued by its live events.

import { useEffect, useRef, useState } from "./libraries.js";
import { get } from "./api.js";
import { follow } from "./live.js";

const POINTS = 400;
const MAX_LIVE = 400; // points that are added before the curves are loaded in few points again
const DRAW_MS = 250; // between two updates of the charts
const ENVELOPE = ["seq", "execution", "time", "type", "step", "steps_total"];

// The metrics of an event `step` or `eval`, by the names that the curves of the gateway have.
export function metricsOf(event) {
  const prefix = event.type === "eval" ? "eval_" : "";
  const found = {};
  for (const [name, value] of Object.entries(event)) {
    if (ENVELOPE.includes(name)) continue;
    if (Number.isFinite(value)) found[prefix + name] = value;
    if (value && typeof value === "object" && !Array.isArray(value)) {
      for (const [part, number] of Object.entries(value)) {
        if (Number.isFinite(number)) found[`${prefix}${name}.${part}`] = number;
      }
    }
  }
  return found;
}

// Returns {curves, events, status, error}. `range` is the [first, last] step to show, or null.
// `isEnded` is whether the job has ended: when it is resumed, it is followed again.
export function useCurves(id, range, isEnded) {
  const [state, setState] = useState({ curves: null, events: [], error: null });
  const [version, setVersion] = useState(0); // of the loaded curves
  const fresh = useRef([]);

  useEffect(() => {
    let stop = () => {};
    let timer = null;
    let isGone = false;

    function draw() {
      timer = null;
      const events = fresh.current;
      fresh.current = [];
      setState((before) => {
        const curves = range ? before.curves : continued(before.curves, events);
        return { ...before, curves, events: [...before.events, ...events].slice(-MAX_LIVE) };
      });
    }

    async function load() {
      try {
        const [first, last] = range ?? [null, null];
        const curves = await get(`/v1/warmd/jobs/${id}/curves`, { points: POINTS, first, last });
        if (isGone) return;
        setState((before) => ({ ...before, curves, events: [], error: null }));
        let added = 0;
        stop = follow((lastId) => `/v1/warmd/jobs/${id}/events/stream?after=${lastId ?? curves.seq}`, {
          message(event) {
            fresh.current.push(event);
            added += event.type === "step" ? 1 : 0;
            timer ??= setTimeout(draw, DRAW_MS);
            if (added > MAX_LIVE) setVersion((number) => number + 1);
          },
          end: () => stop(),
          problem: () => {},
        });
      } catch (error) {
        if (!isGone) setState((before) => ({ ...before, error }));
      }
    }

    load();
    return () => {
      isGone = true;
      clearTimeout(timer);
      fresh.current = [];
      stop();
    };
  }, [id, range, isEnded, version]);

  return state;
}

// The curves with the metrics of later events.
export function continued(curves, events) {
  if (!curves) return curves;
  const found = {
    ...curves,
    steps: [...curves.steps],
    times: [...curves.times],
    tokens: [...curves.tokens],
    metrics: Object.fromEntries(
      Object.entries(curves.metrics).map(([name, { mean }]) => [name, { mean: [...mean] }]),
    ),
  };
  for (const event of events) {
    if (!["step", "eval"].includes(event.type) || event.step === null) continue;
    if (event.step > (found.steps.at(-1) ?? -1)) {
      found.steps.push(event.step);
      found.times.push(event.time);
      found.tokens.push((found.tokens.at(-1) ?? 0) + (event.tokens ?? 0) || null);
      Object.values(found.metrics).forEach(({ mean }) => mean.push(null));
    }
    for (const [name, value] of Object.entries(metricsOf(event))) {
      found.metrics[name] ??= { mean: found.steps.map(() => null) };
      found.metrics[name].mean[found.steps.length - 1] = value;
    }
  }
  return found;
}
