// The evaluations of this home, as a table for each data set.

import { html } from "./libraries.js";
import { get } from "./api.js";
import { JobLink, Problem, Scroll } from "./elements.js";
import { number } from "./format.js";
import { useLoaded } from "./loaded.js";

const LISTED = 100; // the newest ones

export function Evaluations() {
  const [page, error] = useLoaded(() => get("/v1/warmd/jobs", { kind: "eval", status: "finished", limit: LISTED }), []);
  if (error) return html`<${Problem} error=${error} />`;
  if (!page || page.data.length === 0) return null;
  return html`<section aria-labelledby="evaluations">
    <h2 id="evaluations">Evaluations</h2>
    ${grouped(page.data).map((jobs) => html`<${Group} key=${keyOf(jobs[0])} jobs=${jobs} />`)}
  </section>`;
}

// Evaluations can be compared if they have the same task and the same questions.
function keyOf({ result }) {
  return `${result.task} ${result.data.digest}`;
}

function grouped(jobs) {
  const groups = Map.groupBy(jobs.filter((job) => job.result), keyOf);
  return [...groups.values()];
}

function Group({ jobs }) {
  const { task, data, questions } = jobs[0].result;
  const title = `${data.dataset}, task ${task}, ${questions} questions`;
  return html`
    <h3>${title}</h3>
    <${Scroll} label=${title}>
      <table>
        <thead>
          <tr>
            <th scope="col">Model</th>
            <th scope="col">Metric</th>
            <th scope="col">Value</th>
            <th scope="col">95 % interval</th>
            <th scope="col">Job</th>
            <th scope="col">Compared with another</th>
          </tr>
        </thead>
        <tbody>
          ${jobs.map((job) => html`<${Row} key=${job.id} job=${job} />`)}
        </tbody>
      </table>
    <//>
  `;
}

// The primary metric is the first one.
function Row({ job }) {
  const { model, metrics, comparison, against } = job.result;
  const [[name, { value, low, high, unscored, completions }]] = Object.entries(metrics);
  // Results of earlier versions have no counts.
  const leftOut = unscored ? ` (unscored: ${unscored} of ${completions})` : "";
  return html`<tr>
    <th scope="row">${model}</th>
    <td>${name}</td>
    <td>${number(value)}${leftOut}</td>
    <td>${number(low)} to ${number(high)}</td>
    <td><${JobLink} id=${job.id} /></td>
    <td>${comparison && html`${comparison[name].words} (<${JobLink} id=${against} />)`}</td>
  </tr>`;
}
