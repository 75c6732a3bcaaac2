// Several runs' curves, options and results; and two models that answer the same prompt.

import { html, useMemo, useRef, useState } from "../parts/libraries.js";
import { differences } from "../parts/difference.js";
import { Heading, JobLink, Problem, Scroll } from "../parts/elements.js";
import { generate, throughput } from "../parts/generate.js";
import { ModelSelect, useModels } from "../parts/models.js";
import { nameOf } from "../parts/names.js";
import { DEFAULTS, numbersOf, Sampling } from "../parts/sampling.js";
import { useOverview } from "../parts/overview.js";
import { cellOf, columnsOf } from "../parts/run_columns.js";
import { differing, useRuns } from "../parts/run_list.js";
import { MOST_LINES, RunPlot } from "../parts/run_plot.js";

const LISTED = 100; // trainings to choose from, the newest

export function Compare({ query }) {
  const { may } = useOverview();
  const jobs = query.getAll("job");
  const answers = may.includes("infer") && html`<${Answers} chosen=${query.getAll("model")} />`;
  // What the address asks for comes first.
  return html`
    <${Heading}>Compare<//>
    ${jobs.length === 0 && answers}
    <${Trainings} chosen=${jobs} />
    ${jobs.length > 0 && answers}
  `;
}

// --- two models -----------------------------------------------------------------------------------

function Answers({ chosen }) {
  const names = useModels();
  const [models, setModels] = useState(chosen);
  const [sampling, setSampling] = useState(DEFAULTS);
  const [answers, setAnswers] = useState(["", ""]);
  const [notes, setNotes] = useState(["", ""]);
  const [isBusy, setBusy] = useState(false);
  const stop = useRef(null);
  const two = [models[0] ?? names[0], models[1] ?? names[1] ?? names[0]];
  const marked = useMemo(() => (isBusy ? null : differences(...answers)), [isBusy, answers]);

  async function ask(event) {
    event.preventDefault();
    const prompt = new FormData(event.target).get("prompt");
    stop.current = new AbortController();
    setAnswers(["", ""]);
    setNotes(["", ""]);
    setBusy(true);
    await Promise.all(two.map((model, at) => answer(model, at, prompt)));
    setBusy(false);
  }

  async function answer(model, at, prompt) {
    try {
      const done = await generate({
        model,
        prompt,
        sampling: numbersOf(sampling),
        signal: stop.current.signal,
        onText: (text) => setAnswers((before) => before.with(at, text)),
      });
      setNotes((before) => before.with(at, throughput(done)));
    } catch (error) {
      setNotes((before) => before.with(at, error.name === "AbortError" ? "stopped" : error.message));
    }
  }

  return html`<section aria-labelledby="answers">
    <h2 id="answers">Two models, one prompt</h2>
    <form onSubmit=${ask}>
      <div class="filter">
        ${two.map(
          (model, at) => html`<${ModelSelect}
            key=${at}
            label=${at ? "Second model" : "First model"}
            name=${`model-${at}`}
            names=${names}
            value=${model}
            onChange=${(name) => setModels(two.with(at, name))}
          />`,
        )}
      </div>
      <label>Prompt <textarea name="prompt" required></textarea></label>
      <${Sampling} values=${sampling} setValues=${setSampling} />
      <div class="buttons">
        <button class="primary" disabled=${isBusy || names.length === 0}>Complete with both</button>
        <button type="button" disabled=${!isBusy} onClick=${() => stop.current.abort()}>Stop</button>
      </div>
    </form>
    <div class="answers" aria-live="polite" aria-busy=${isBusy}>
      ${two.map(
        (model, at) => html`<div class="card answer" key=${at}>
          <h3>${model && nameOf(model)}</h3>
          <pre>${marked ? marked[at].map((part) => (part.isDifferent ? html`<mark>${part.text}</mark>` : part.text)) : answers[at]}</pre>
          <p class="quiet">${notes[at]}</p>
        </div>`,
      )}
    </div>
  </section>`;
}

// --- several runs ---------------------------------------------------------------------------------

function Trainings({ chosen }) {
  const { runs, defaults, isComplete, error } = useRuns();
  const [ids, setIds] = useState(chosen.slice(0, MOST_LINES));
  const found = ids.map((id) => runs.find((run) => run.id === id)).filter(Boolean);
  const others = runs.filter((run) => run.kind !== "eval" && !ids.includes(run.id)).slice(0, LISTED);
  return html`<section aria-labelledby="runs">
    <h2 id="runs">Runs</h2>
    <${Problem} error=${error} />
    ${!isComplete && html`<p>Loading …</p>`}
    ${isComplete && runs.length === 0 && html`<p class="empty">No training yet: <a href="#/submit">submit one</a>.</p>`}
    <ul class="line chosen">
      ${found.map(
        (run) => html`<li key=${run.id}>
          <${JobLink} id=${run.id} name=${run.legend} />
          <button type="button" class="small" aria-label=${`Leave out ${run.label}`} onClick=${() => setIds(ids.filter((id) => id !== run.id))}>×</button>
        </li>`,
      )}
    </ul>
    <p class="line">
      ${others.length > 0 &&
      ids.length < MOST_LINES &&
      html`<label class="inline">
        Add
        <select name="run" value="" onChange=${(event) => setIds([...ids, event.target.value])}>
          <option value="">a run …</option>
          ${others.map((run) => html`<option key=${run.id} value=${run.id}>${run.legend}</option>`)}
        </select>
      </label>`}
      <a href="#/runs">Choose in the table of runs</a>
    </p>
    ${found.length > 0 && html`<${RunPlot} runs=${found} />`}
    ${found.length > 1 && html`<${SideBySide} runs=${found} defaults=${defaults} />`}
  </section>`;
}

// The options that differ, and the metrics by which runs are judged.
function SideBySide({ runs, defaults }) {
  const columns = columnsOf(runs, defaults);
  const differ = differing(runs);
  const isJudge = (key) => key.startsWith("best.") || columns.has(key.replace("last.", "best."));
  const shown = [...columns.values()].filter(({ key, option }) => (option ? differ.includes(option) : key.includes(".") && isJudge(key)));
  return html`
    <h3>Options that differ, and results</h3>
    <${Scroll} label="table of options and results">
      <table class="runs">
        <thead>
          <tr><th scope="col">Option or metric</th>${runs.map((run) => html`<th scope="col" class="number" key=${run.id}>${run.label}</th>`)}</tr>
        </thead>
        <tbody>
          ${shown.map(
            (column) => html`<tr key=${column.key}>
              <th scope="row">${column.title}</th>
              ${runs.map((run) => html`<td key=${run.id} class=${column.option ? "number different" : "number"}>${cellOf(column, run)}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  `;
}
