// Several jobs' curves, evaluations and options; and two models that answer the same prompt.

import { html, useEffect, useMemo, useRef, useState } from "../parts/libraries.js";
import { get } from "../parts/api.js";
import { Chart } from "../parts/chart.js";
import { differences } from "../parts/difference.js";
import { Heading, JobLink, Problem, Scroll } from "../parts/elements.js";
import { Evaluations } from "../parts/evaluations.js";
import { number, optionText } from "../parts/format.js";
import { generate, throughput } from "../parts/generate.js";
import { ModelSelect, useModels } from "../parts/models.js";
import { DEFAULTS, numbersOf, Sampling } from "../parts/sampling.js";
import { useOverview } from "../parts/overview.js";
import { isSame } from "../parts/command.js";

const LISTED = 30; // jobs to choose from
const MAX_JOBS = 6; // as many as there are colors

export function Compare({ query }) {
  const { may } = useOverview();
  return html`
    <${Heading}>Compare<//>
    ${may.includes("infer") && html`<${Answers} chosen=${query.getAll("model")} />`}
    <${Evaluations} />
    <${Jobs} chosen=${query.getAll("job")} />
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
          <h3>${model}</h3>
          <pre>${marked ? marked[at].map((part) => (part.isDifferent ? html`<mark>${part.text}</mark>` : part.text)) : answers[at]}</pre>
          <p class="quiet">${notes[at]}</p>
        </div>`,
      )}
    </div>
  </section>`;
}

// --- several jobs ---------------------------------------------------------------------------------

function Jobs({ chosen }) {
  const [listed, setListed] = useState([]);
  const [ids, setIds] = useState(chosen.slice(0, MAX_JOBS));
  const [error, setError] = useState(null);
  const found = useJobs(ids);
  useEffect(() => {
    get("/v1/warmd/kinds")
      .then(({ data }) => get("/v1/warmd/jobs", { kind: data.map((one) => one.kind), limit: LISTED }))
      .then((page) => setListed(page.data.map((job) => job.id)), setError);
  }, []);
  const choices = [...new Set([...chosen, ...listed])];

  function toggle(id) {
    setIds(ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id].slice(-MAX_JOBS));
  }

  return html`<section aria-labelledby="jobs">
    <h2 id="jobs">Trainings</h2>
    <${Problem} error=${error} />
    ${choices.length === 0 && html`<p class="empty">No training yet.</p>`}
    ${choices.length > 0 &&
    html`<fieldset>
      <legend>Jobs (at most ${MAX_JOBS})</legend>
      <div class="fields">
        ${choices.map(
          (id) => html`<label class="inline" key=${id}>
            <input type="checkbox" name="job" value=${id} checked=${ids.includes(id)} onChange=${() => toggle(id)} /> <code>${id}</code>
          </label>`,
        )}
      </div>
    </fieldset>`}
    ${found.length > 0 && html`<${Curves} jobs=${found} /><${FirstAndLast} jobs=${found} /><${Options} jobs=${found} />`}
  </section>`;
}

// Curves and options of jobs, loaded once for each.
function useJobs(ids) {
  const [known, setKnown] = useState({});
  useEffect(() => {
    for (const id of ids.filter((one) => !(one in known))) {
      Promise.all([get(`/v1/warmd/jobs/${id}/curves`), get(`/v1/warmd/jobs/${id}`)]).then(
        ([curves, detail]) => setKnown((before) => ({ ...before, [id]: { id, curves, ...detail } })),
        () => {},
      );
    }
  }, [ids]);
  return ids.map((id) => known[id]).filter(Boolean);
}

function metricsIn(jobs) {
  return [...new Set(jobs.flatMap((job) => Object.keys(job.curves.metrics)))];
}

function Curves({ jobs }) {
  const names = metricsIn(jobs);
  const [chosen, setChosen] = useState(null);
  const metric = [chosen, "reward", "loss", names[0]].find((name) => names.includes(name));
  const { x, series } = useMemo(() => joined(jobs, metric), [jobs.map((job) => job.id).join(), metric]);
  if (!metric) return null;
  return html`
    <label class="inline">
      Metric
      <select name="metric" value=${metric} onChange=${(event) => setChosen(event.target.value)}>
        ${names.map((name) => html`<option key=${name}>${name}</option>`)}
      </select>
    </label>
    <${Chart} title=${metric} x=${x} series=${series} />
  `;
}

// One list of steps for all jobs, and the values of each job at these steps.
function joined(jobs, metric) {
  const x = [...new Set(jobs.flatMap((job) => job.curves.steps))].sort((a, b) => a - b);
  const series = jobs.map((job) => {
    const mean = job.curves.metrics[metric]?.mean ?? [];
    const at = new Map(job.curves.steps.map((step, index) => [step, mean[index] ?? null]));
    return { label: job.id, values: x.map((step) => at.get(step) ?? null) };
  });
  return { x, series };
}

function FirstAndLast({ jobs }) {
  const names = metricsIn(jobs).filter((name) => name.startsWith("eval_"));
  if (names.length === 0) return null;
  const first = (values) => values?.mean.find((value) => value !== null);
  const last = (values) => values?.mean.findLast((value) => value !== null);
  return html`
    <h3>Evaluations: first and last</h3>
    <${Scroll} label="table of evaluations">
      <table>
        <thead>
          <tr><th scope="col">Job</th>${names.map((name) => html`<th scope="col" key=${name}>${name.slice("eval_".length)}</th>`)}</tr>
        </thead>
        <tbody>
          ${jobs.map(
            (job) => html`<tr key=${job.id}>
              <th scope="row"><${JobLink} id=${job.id} /></th>
              ${names.map((name) => html`<td key=${name}>${number(first(job.curves.metrics[name]))} → ${number(last(job.curves.metrics[name]))}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  `;
}

function Options({ jobs }) {
  const names = [...new Set(jobs.flatMap((job) => Object.keys(job.options)))];
  const rows = names.filter((name) => jobs.some((job) => !isSame(job.options[name], jobs[0].options[name])));
  if (jobs.length < 2) return null;
  if (rows.length === 0) return html`<p>All options of these jobs are equal.</p>`;
  return html`
    <h3>Options that differ</h3>
    <${Scroll} label="table of options that differ">
      <table>
        <thead>
          <tr><th scope="col">Option</th>${jobs.map((job) => html`<th scope="col" key=${job.id}>${job.id}</th>`)}</tr>
        </thead>
        <tbody>
          ${rows.map(
            (name) => html`<tr key=${name}>
              <th scope="row">${name}</th>
              ${jobs.map((job) => html`<td key=${job.id} class="different">${optionText(job.options[name])}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  `;
}
