// Evaluations: those that run, the leaderboard of each data set, and the form for a new one.

import { html, useState } from "../parts/libraries.js";
import { get } from "../parts/api.js";
import { Eta, Heading, JobLink, Problem, Progress, Status } from "../parts/elements.js";
import { EvaluationForm } from "../parts/evaluation_form.js";
import { Leaderboards } from "../parts/leaderboard.js";
import { useLoaded } from "../parts/loaded.js";
import { nameOf, useNames } from "../parts/names.js";
import { pendingJobs, useOverview } from "../parts/overview.js";
import { Questions } from "./questions.js";

const LISTED = 200; // the newest ones

export function Evaluations({ id, query }) {
  if (id) return html`<${Questions} key=${id} id=${id} against=${query.get("against")} />`;
  return html`<${List} model=${query.get("model")} />`;
}

function List({ model }) {
  const overview = useOverview();
  const [isOpen, setOpen] = useState(model !== null);
  const evaluations = [...overview.jobs.values()].filter((job) => job.kind === "eval");
  const ended = evaluations.filter((job) => job.status === "finished").length;
  const [page, error] = useLoaded(
    () => get("/v1/warmd/jobs", { kind: "eval", status: "finished", limit: LISTED }),
    [overview.connection, ended],
  );
  const finished = (page?.data ?? []).filter((job) => job.result);
  useNames(finished.map((job) => job.result.model));
  const pending = pendingJobs().filter((job) => job.kind === "eval");
  const failed = evaluations.filter((job) => job.status === "failed");
  const mayTrain = overview.may.includes("train");
  return html`
    <${Heading}>Evaluations<//>
    <${Problem} error=${error} />
    ${mayTrain &&
    html`<p><button type="button" class="primary" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>Evaluate a model …</button></p>`}
    ${mayTrain && isOpen && html`<${EvaluationForm} model=${model} earlier=${finished} onSubmit=${() => setOpen(false)} />`}
    <ul class="cards">
      ${[...pending, ...failed].map(
        (job) => html`<li class="line" key=${job.id}>
          <${Status} job=${job} /> <${JobLink} id=${job.id} name=${job.name} /> <span class="quiet">${nameOf(job.model)}</span>
          <${Progress} job=${job} /> <${Eta} job=${job} /> ${job.error && html`<span class="problem">${job.error}</span>`}
        </li>`,
      )}
    </ul>
    ${!page && !error && html`<p>Loading …</p>`}
    ${page && finished.length === 0 && html`<p class="empty">No evaluation has finished yet. On the command line: <code>warmd eval MODEL</code></p>`}
    ${finished.length > 0 && html`<h2>Leaderboards</h2><${Leaderboards} jobs=${finished} />`}
  `;
}
