// The curves of several runs, one line each, in a chart for each metric.

import { html, useEffect, useMemo, useState } from "./libraries.js";
import { get } from "./api.js";
import { Chart } from "./chart.js";
import { isPending } from "./overview.js";
import { MAIN } from "./run_columns.js";

export const MOST_LINES = 6; // as many as there are colors
const MOST_CHARTS = 4;

// `runs`: {id, legend, status, step}; the first ones are drawn, in this order.
export function RunPlot({ runs }) {
  const drawn = runs.slice(0, MOST_LINES);
  const curves = useCurvesOf(drawn);
  const [chosen, setChosen] = useState("");
  const loaded = drawn.filter((run) => curves[run.id]);
  const names = [...new Set(loaded.flatMap((run) => Object.keys(curves[run.id].metrics)))];
  const main = MAIN.filter((name) => names.includes(name));
  const shown = names.includes(chosen) ? [chosen] : (main.length ? main : names).slice(0, MOST_CHARTS);
  if (loaded.length < drawn.length && loaded.length === 0) return html`<p>Loading …</p>`;
  if (names.length === 0) return html`<p class="empty">These runs have no curves: an evaluation is measured once, and no step has ended yet.</p>`;
  return html`
    <label class="inline">
      Metric
      <select name="metric" value=${chosen} onChange=${(event) => setChosen(event.target.value)}>
        <option value="">the main ones</option>
        ${names.map((name) => html`<option key=${name}>${name}</option>`)}
      </select>
    </label>
    <div class="charts">
      ${shown.map((name) => html`<${Lines} key=${name} metric=${name} runs=${drawn} curves=${curves} />`)}
    </div>
  `;
}

function Lines({ metric, runs, curves }) {
  const { x, series } = useMemo(() => joined(runs, curves, metric), [curves, metric, runs.map((run) => run.id).join()]);
  return html`<${Chart} title=${metric} x=${x} series=${series} />`;
}

// The curves of runs by id; those of a run that is not ended are read again with each of its steps that is shown.
function useCurvesOf(runs) {
  const [known, setKnown] = useState({});
  const version = (run) => `${run.status} ${isPending(run) ? run.step : ""}`;
  const wanted = runs.map((run) => `${run.id} ${version(run)}`).join();
  useEffect(() => {
    for (const run of runs) {
      if (known[run.id]?.version === version(run)) continue;
      get(`/v1/warmd/jobs/${run.id}/curves`).then(
        (curves) => setKnown((before) => ({ ...before, [run.id]: { ...curves, version: version(run) } })),
        () => {}, // removed meanwhile
      );
    }
  }, [wanted]);
  return known;
}

// One list of steps for all runs that have the metric, and the values of each run at these steps. A run without it keeps
// its color.
function joined(runs, curves, metric) {
  const having = (run) => curves[run.id]?.metrics[metric];
  const x = [...new Set(runs.filter(having).flatMap((run) => curves[run.id].steps))].sort((a, b) => a - b);
  const series = runs.map((run) => {
    const mean = having(run)?.mean ?? [];
    const at = new Map((curves[run.id]?.steps ?? []).map((step, index) => [step, mean[index] ?? null]));
    return { label: run.legend, values: x.map((step) => at.get(step) ?? null) };
  });
  return { x, series };
}
