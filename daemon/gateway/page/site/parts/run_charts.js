// The curves of a run in groups: what it learns, its completions, its speed.

import { html, useState } from "./libraries.js";
import { Chart, smoothed } from "./chart.js";
import { useCurves } from "./curves.js";
import { Problem } from "./elements.js";
import { number } from "./format.js";
import { GROUPS, groupOf, isEssential, rankOf, wordsOf } from "./metric_words.js";
import { isPending } from "./overview.js";

const HEIGHT = 170;
const MOST_LINES = 6; // in one chart: as many as there are colors
const HELD_OUT = "eval_"; // how metrics of evaluations begin

export function RunCharts({ job }) {
  const [range, setRange] = useState(null);
  const [axis, setAxis] = useState("steps");
  const [span, setSpan] = useState(1);
  const [isLog, setLog] = useState(false);
  const { curves, error } = useCurves(job.id, range, !isPending(job));
  if (error) return html`<${Problem} error=${error} />`;
  if (!curves) return html`<p>Loading …</p>`;
  if (curves.steps.length === 0) return html`<p class="empty">No step has ended yet.</p>`;
  const x = axis === "tokens" ? curves.tokens.map((value) => value ?? 0) : curves[axis];
  const { charts, constants } = chartsOf(curves.metrics);

  function zoom(from, to) {
    if (from === null) return setRange(null);
    const inside = curves.steps.filter((_, index) => x[index] >= from && x[index] <= to);
    return inside.length > 1 && setRange([inside[0], inside.at(-1)]);
  }

  function drawn({ label, values, isHeldOut }) {
    const isSmooth = span > 1 && !isHeldOut;
    return { label, values: isSmooth ? smoothed(values, span) : values, raw: isSmooth ? values : null };
  }

  return html`
    <form class="line" aria-label="How the curves are drawn" onSubmit=${(event) => event.preventDefault()}>
      <label class="inline">
        Over
        <select value=${axis} onChange=${(event) => setAxis(event.target.value)}>
          <option>steps</option>
          <option value="times">time</option>
          <option>tokens</option>
        </select>
      </label>
      <label class="inline">
        Smooth
        <input type="range" min="1" max="50" value=${span} onInput=${(event) => setSpan(Number(event.target.value))} />
        <span class="count">${span === 1 ? "off" : span}</span>
      </label>
      <label class="inline"><input type="checkbox" checked=${isLog} onChange=${(event) => setLog(event.target.checked)} /> Logarithmic</label>
      ${range
        ? html`<button type="button" class="small" onClick=${() => setRange(null)}>All steps</button>`
        : html`<span class="quiet">drag over a chart to zoom</span>`}
    </form>
    ${GROUPS.map((group) => {
      const own = charts.filter((chart) => chart.group === group);
      if (own.length === 0) return null;
      return html`<section key=${group} aria-labelledby=${`charts-${group}`}>
        <h2 id=${`charts-${group}`}>${group[0].toUpperCase() + group.slice(1)}</h2>
        <div class="charts dense">
          ${own.map(
            (chart) => html`<${Chart}
              key=${chart.title}
              title=${chart.title}
              about=${wordsOf(chart.name)}
              x=${x}
              isTime=${axis === "times"}
              isLog=${isLog}
              series=${chart.lines.map(drawn)}
              onZoom=${zoom}
              height=${HEIGHT}
              group=${job.id}
            />`,
          )}
        </div>
      </section>`;
    })}
    <${Constants} values=${constants} />
  `;
}

// Metrics with one value in all steps need no chart.
function Constants({ values }) {
  if (values.length === 0) return null;
  return html`<details class="constants">
    <summary>${values.length === 1 ? "1 metric that does not change" : `${values.length} metrics that do not change`}</summary>
    <dl class="facts">
      ${values.map(
        ([name, value]) => html`<dt key=${name}>${name}</dt>
          <dd><strong>${number(value)}</strong> ${wordsOf(partsOf(name)[0])}</dd>`,
      )}
    </dl>
  </details>`;
}

// Returns {charts, constants}. A chart is {name, title, group, lines}: a metric of the training and the
// same one of evaluations share a chart, and so do the parts of one (`rewards.correctness`).
export function chartsOf(metrics) {
  const charts = new Map();
  const constants = [];
  for (const [key, { mean: values }] of Object.entries(metrics)) {
    const isHeldOut = key.startsWith(HELD_OUT);
    const full = isHeldOut ? key.slice(HELD_OUT.length) : key;
    const [name, part] = partsOf(full);
    if (part && isSingle(metrics, key, name)) continue; // it repeats the sum
    if (!isEssential(name) && isConstant(values)) {
      constants.push([isHeldOut ? `held-out ${full}` : full, values.find((value) => value !== null)]);
      continue;
    }
    const at = placeOf(charts, name);
    charts.get(at).lines.push({ label: part ?? (isHeldOut ? "held out" : "training"), values, isHeldOut });
  }
  for (const chart of charts.values()) {
    chart.lines.sort((a, b) => a.isHeldOut - b.isHeldOut);
    const [line] = chart.lines;
    if (chart.lines.length === 1) chart.title = line.isHeldOut ? `held-out ${chart.name}` : titleOf(chart.name, line.label);
  }
  return { charts: [...charts.values()].sort((a, b) => rankOf(a.name) - rankOf(b.name)), constants };
}

// The key of the chart of a metric, which is made where there is none with room.
function placeOf(charts, name) {
  for (let number = 1; ; number += 1) {
    const at = number === 1 ? name : `${name} (${number})`;
    if (!charts.has(at)) charts.set(at, { name, title: at, group: groupOf(name), lines: [] });
    if (charts.get(at).lines.length < MOST_LINES) return at;
  }
}

function titleOf(name, label) {
  return label === "training" ? name : `${name}: ${label}`;
}

function partsOf(name) {
  const dot = name.indexOf(".");
  return dot < 0 ? [name, null] : [name.slice(0, dot), name.slice(dot + 1)];
}

// Whether a metric is the only part of a reward.
function isSingle(metrics, key, name) {
  if (!["rewards", "rewards_std"].includes(name)) return false;
  return Object.keys(metrics).filter((other) => other.startsWith(`${name}.`)).length === 1 && key.startsWith(`${name}.`);
}

function isConstant(values) {
  const known = values.filter((value) => value !== null);
  return known.length > 1 && known.every((value) => value === known[0]);
}
