// The options that a sweep varies: a part of the form Submit.

import { html } from "./libraries.js";
import { quoted } from "./command.js";
import { optionText } from "./format.js";

export const NO_SWEEP = { axes: [], seeds: "", halving: "", search: "", trials: "", metric: "" };

// The fields that a request to /v1/warmd/sweeps has besides those of a job; null for a single job.
export function sweepFields({ axes, seeds, halving, search, trials, metric }) {
  const varied = axes.filter((axis) => axis.option && axis.values.trim());
  if (varied.length === 0 && !seeds) return null;
  const sweep = {};
  for (const { option, values } of varied) {
    sweep[option] = [...(sweep[option] ?? []), ...values.split(",").map((one) => one.trim()).filter(Boolean)];
  }
  const numbers = { seeds: seeds && Number(seeds), halving: halving && Number(halving), trials: trials && Number(trials) };
  const fields = { sweep, ...numbers, search, metric };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== ""));
}

// The words of the command line that make a sweep of a checked job.
export function sweepWords(varied, { seeds, halving, search, trials, metric }) {
  const words = Object.entries(varied).flatMap(([option, values]) => ["--sweep", quoted(`${option}=${values.map(optionText).join(",")}`)]);
  for (const [flag, value] of Object.entries({ seeds, halving, search, trials, metric })) {
    if (value !== undefined) words.push(`--${flag}`, quoted(String(value)));
  }
  return words.join(" ");
}

// `problems`: those of the form, by field.
export function SweepForm({ kind, value, onChange, problems }) {
  const change = (changed) => onChange({ ...value, ...changed });
  const changeAxis = (index, changed) => change({ axes: value.axes.map((axis, at) => (at === index ? { ...axis, ...changed } : axis)) });
  const own = ["sweep", "seeds", "halving", "search", "trials", "metric"].find((name) => problems[name]);
  const text = (name, takes, help) => html`<label>
    ${takes}
    <input name=${`sweep_${name}`} value=${value[name]} inputmode="numeric"
      aria-invalid=${own === name ? "true" : undefined} aria-describedby=${`help-sweep-${name}`}
      onInput=${(event) => change({ [name]: event.target.value.trim() })} />
    <small id=${`help-sweep-${name}`}>${help}</small>
  </label>`;
  return html`<details open=${sweepFields(value) !== null}>
    <summary>Sweep <small>several jobs that differ in options or seeds</small></summary>
    <p class="quiet">One job for each combination of values and each seed, compared in one table.</p>
    ${value.axes.map(
      (axis, index) => html`<${Axis} key=${index} axis=${axis} number=${index + 1} kind=${kind} onChange=${(changed) => changeAxis(index, changed)}
        onRemove=${() => change({ axes: value.axes.filter((_, at) => at !== index) })} />`,
    )}
    <p><button type="button" onClick=${() => change({ axes: [...value.axes, { option: "", values: "" }] })}>Vary an option</button></p>
    <div class="fields">
      ${text("seeds", "jobs per combination", "with the seeds seed, seed + 1, …")}
      ${text("halving", "successive halving", "3: the best third of the combinations continues for three times as many steps, and so on; empty: all are trained to the end")}
      <label>
        search
        <select name="sweep_search" value=${value.search} aria-describedby="help-sweep-search" onChange=${(event) => change({ search: event.target.value })}>
          <option value="">all combinations (default)</option>
          <option>optuna</option>
        </select>
        <small id="help-sweep-search">optuna: each trial's values are chosen by the scores of those before; a range is written 1e-6..1e-3:log</small>
      </label>
      ${text("trials", "trials", "combinations that a search tries; empty: 20")}
      <label>
        compared by
        <select name="sweep_metric" value=${value.metric} aria-describedby="help-sweep-metric" onChange=${(event) => change({ metric: event.target.value })}>
          <option value="">held-out data if there is any (default)</option>
          ${kind.judged_by.map((metric) => html`<option key=${metric}>${metric}</option>`)}
        </select>
        <small id="help-sweep-metric">a metric on held-out data, or of the last tenth of the steps</small>
      </label>
    </div>
    ${own && html`<p class="problem">${own}: ${problems[own].text}</p>`}
  </details>`;
}

function Axis({ axis, number, kind, onChange, onRemove }) {
  const options = kind.options.filter((option) => !option.many);
  return html`<div class="line axis" role="group" aria-label=${`option ${number}`}>
    <label>
      option
      <select name="sweep_option" value=${axis.option} onChange=${(event) => onChange({ option: event.target.value })}>
        <option value="">choose</option>
        ${options.map(({ name }) => html`<option key=${name}>${name}</option>`)}
      </select>
    </label>
    <label>
      values, with commas between
      <input name="sweep_values" value=${axis.values} placeholder="1e-5, 1e-4" onInput=${(event) => onChange({ values: event.target.value })} />
    </label>
    <button type="button" aria-label=${`Remove option ${number}`} onClick=${onRemove}>Remove</button>
  </div>`;
}
