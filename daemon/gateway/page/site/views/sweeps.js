// Sweeps: the list, and one with its table of points.

import { html } from "../parts/libraries.js";
import { get } from "../parts/api.js";
import { ActionButtons } from "../parts/buttons.js";
import { Eta, Heading, JobLink, Problem, Progress, Scroll, Status, Tags } from "../parts/elements.js";
import { clock, NOTHING, number, optionText, statusOf } from "../parts/format.js";
import { groupActions, GroupList, useGroups } from "../parts/groups.js";
import { Interval } from "../parts/leaderboard.js";
import { nameOf, useNames } from "../parts/names.js";
import { useOverview } from "../parts/overview.js";

const COMPARED = 6; // jobs of which the view Compare draws curves

export function Sweeps({ id }) {
  return id ? html`<${Sweep} key=${id} id=${id} />` : html`<${List} />`;
}

const COLUMNS = [
  { title: "Steps", cell: (sweep) => html`<${Progress} job=${sweep} /> <${Eta} job=${sweep} />` },
  { title: "Jobs", cell: statusesText },
];

function List() {
  const empty = html`No sweep yet: <a href="#/submit">submit one</a>, or by <code>warmd submit grpo --sweep learning_rate=1e-5,1e-4 --seeds 3</code>.`;
  return html`<${GroupList} title="Sweeps" noun="sweep" path="sweeps" columns=${COLUMNS} empty=${empty} />`;
}

function statusesText({ statuses }) {
  return Object.entries(statuses).map(([status, count]) => `${count} ${statusOf({ status })}`).join(", ");
}

// --- one sweep ------------------------------------------------------------------------------------

function Sweep({ id }) {
  const { may } = useOverview();
  const [sweep, error] = useGroups(() => get(`/v1/warmd/sweeps/${id}`), (one) => one === id);
  if (!sweep) return html`<${Heading}>${nameOf(id)}<//>${error ? html`<${Problem} error=${error} />` : html`<p>Loading …</p>`}`;
  return html`
    <${Heading}>${sweep.name ?? id}<//>
    <div class="card">
      <div class="line">
        <${Status} job=${sweep} /> <${Tags} job=${sweep} /> <${Progress} job=${sweep} /> <${Eta} job=${sweep} />
        ${may.includes("train") && html`<${ActionButtons} id=${id} actions=${groupActions(sweep, "sweeps")} />`}
      </div>
      <p class="line quiet">
        ${sweep.name && html`<code>${id}</code>`}
        <span>${sweep.kind}, ${statusesText(sweep)}</span>
        <span>metric ${sweep.metric}, ${sweep.lower_is_better ? "lower" : "higher"} is better</span>
        ${sweep.search && html`<span>search ${sweep.search.sampler}, ${sweep.search.trials} trials${rangesText(sweep.search)}</span>`}
        ${sweep.halving && html`<span>halving ${sweep.halving}, compared at steps ${sweep.rungs.join(", ")}</span>`}
        <span>created ${clock(sweep.created_at)}</span>
      </p>
    </div>
    <${Points} sweep=${sweep} />
    <${Decisions} sweep=${sweep} />
    <${Jobs} sweep=${sweep} />
  `;
}

function rangesText({ ranges }) {
  return Object.entries(ranges).map(([name, text]) => `, ${name} ${text}`).join("");
}

function valuesText(values) {
  return Object.entries(values).map(([name, value]) => `${name} ${optionText(value)}`).join(", ") || "the seeds only";
}

function Points({ sweep }) {
  const ends = sweep.points.flatMap((point) => [point.low ?? point.mean, point.high ?? point.mean]).filter((end) => end !== null);
  const range = [Math.min(...ends), Math.max(...ends)];
  return html`<section aria-labelledby="points">
    <h2 id="points">Combinations</h2>
    <${Scroll} label="table of combinations">
      <table class="stacked">
        <thead>
          <tr>
            <th scope="col">Values</th><th scope="col">Seeds</th><th scope="col">Step</th>
            <th scope="col">Mean</th><th scope="col">95 % interval</th><th scope="col">State</th>
          </tr>
        </thead>
        <tbody>
          ${sweep.points.map(
            (point, index) => html`<tr key=${index}>
              <th scope="row">${valuesText(point.values)} ${index === sweep.best && html`<strong>best</strong>`}</th>
              <td data-label="seeds">${point.n} of ${point.jobs.length}</td>
              <td data-label="step">${point.step || NOTHING}</td>
              <td data-label="mean">${number(point.mean)}</td>
              <td data-label="interval">${point.low === null ? NOTHING : `${number(point.low)} to ${number(point.high)}`} <${Interval} value=${point.mean} low=${point.low} high=${point.high} range=${range} /></td>
              <td>${point.dropped_at === null ? statesOf(point) : `dropped at step ${point.dropped_at}`}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
    <p class="line">
      <a href="#/compare?${comparedJobs(sweep).map((job) => `job=${job}`).join("&")}">Compare curves</a>
      <a href="#/runs?sweep=${sweep.id}">Its runs as a table</a>
    </p>
  </section>`;
}

function statesOf(point) {
  return [...new Set(point.jobs.map(statusOf))].join(", ");
}

// The first job of each combination that was trained longest, the best one first.
function comparedJobs({ points, best }) {
  const order = points.map((_, index) => index).sort((a, b) => (b === best) - (a === best) || points[b].step - points[a].step);
  return order.slice(0, COMPARED).map((index) => points[index].jobs[0].id);
}

function Decisions({ sweep }) {
  if (sweep.decisions.length === 0) return null;
  return html`<section aria-labelledby="decisions">
    <h2 id="decisions">Comparisons</h2>
    <ul>
      ${sweep.decisions.map(
        (one) => html`<li key=${one.step}>
          step ${one.step}: ${one.kept.map((index) => valuesText(sweep.points[index].values)).join("; ")} continued
        </li>`,
      )}
    </ul>
  </section>`;
}

function Jobs({ sweep }) {
  const rows = sweep.points.flatMap((point) => point.jobs.map((job) => ({ ...job, values: point.values })));
  useNames(rows.map((job) => job.id));
  return html`<section aria-labelledby="members">
    <h2 id="members">Jobs</h2>
    <${Scroll} label="table of jobs">
      <table class="stacked">
        <thead>
          <tr><th scope="col">Job</th><th scope="col">Values</th><th scope="col">Seed</th><th scope="col">Status</th><th scope="col">Step</th><th scope="col">Score</th></tr>
        </thead>
        <tbody>
          ${rows.map(
            (job) => html`<tr key=${job.id}>
              <th scope="row"><${JobLink} id=${job.id} /></th>
              <td>${valuesText(job.values)}</td>
              <td data-label="seed">${job.seed}</td>
              <td><${Status} job=${job} /> ${job.error}</td>
              <td data-label="step">${job.step ?? NOTHING}</td>
              <td data-label="score">${number(job.score)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  </section>`;
}
