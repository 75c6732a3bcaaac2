// Curricula: the list, and one with the attempts at its stages and the decisions at its gates.

import { html } from "../parts/libraries.js";
import { get } from "../parts/api.js";
import { ActionButtons } from "../parts/buttons.js";
import { Heading, JobLink, Problem, Progress, Scroll, Status, Tags } from "../parts/elements.js";
import { clock, number } from "../parts/format.js";
import { groupActions, GroupList, useGroups } from "../parts/groups.js";
import { nameOf, useNames } from "../parts/names.js";
import { useOverview } from "../parts/overview.js";

const COMPARED = 6; // jobs of which the view Compare draws curves

export function Curricula({ id }) {
  return id ? html`<${Curriculum} key=${id} id=${id} />` : html`<${List} />`;
}

const COLUMNS = [{ title: "Stage", cell: stageText }];

function List() {
  const empty = html`No curriculum yet. A job file with <code>stages</code> makes one: <code>warmd submit grpo --config FILE</code>`;
  return html`<${GroupList} title="Curricula" noun="curriculum" path="curricula" columns=${COLUMNS} empty=${empty} />`;
}

function stageText({ attempts, stages }) {
  const { stage } = attempts.at(-1);
  return `${stage}, ${stages.indexOf(stage) + 1} of ${stages.length}`;
}

// --- one curriculum -------------------------------------------------------------------------------

function Curriculum({ id }) {
  const { may } = useOverview();
  const [found, error] = useGroups(() => get(`/v1/warmd/curricula/${id}`), (one) => one === id);
  if (!found) return html`<${Heading}>${nameOf(id)}<//>${error ? html`<${Problem} error=${error} />` : html`<p>Loading …</p>`}`;
  const compared = found.attempts.slice(-COMPARED).map((attempt) => `job=${attempt.job}`);
  return html`
    <${Heading}>${found.name ?? id}<//>
    <div class="card">
      <div class="line">
        <${Status} job=${found} /> <${Tags} job=${found} />
        ${may.includes("train") && html`<${ActionButtons} id=${id} actions=${groupActions(found, "curricula")} />`}
      </div>
      ${found.problem && html`<p class="problem">${found.problem}</p>`}
      <p class="line quiet">
        <span>${found.kind}, stages ${found.stages.join(", ")}</span><span>created ${clock(found.created_at)}</span>
      </p>
      ${found.model &&
      html`<p class="line">
        <span>The latest model that a gate let through: <${JobLink} id=${found.model} /></span>
        <a href="#/chat?model=${found.model}">Chat with it</a>
      </p>`}
    </div>
    <${Attempts} attempts=${found.attempts} />
    <p><a href="#/compare?${compared.join("&")}">Compare curves</a></p>
  `;
}

function Attempts({ attempts }) {
  useNames(attempts.map((attempt) => attempt.job));
  return html`<section aria-labelledby="attempts">
    <h2 id="attempts">Stages</h2>
    <${Scroll} label="table of stages">
      <table class="stacked">
        <thead>
          <tr>
            <th scope="col">Stage</th><th scope="col">Job</th><th scope="col">Status</th><th scope="col">Steps</th>
            <th scope="col">Decision</th><th scope="col">Comparison</th><th scope="col">Evaluations</th>
          </tr>
        </thead>
        <tbody>
          ${attempts.map(
            (attempt) => html`<tr key=${attempt.job}>
              <th scope="row">${attempt.stage}${attempt.attempt > 1 && ` (attempt ${attempt.attempt})`}</th>
              <td><${JobLink} id=${attempt.job} /></td>
              <td><${Status} job=${attempt} /></td>
              <td>${attempt.steps_total && html`<${Progress} job=${{ ...attempt, id: attempt.job }} />`}</td>
              <td class="word">${attempt.decision ?? (attempt.questions ? `evaluating on ${attempt.questions} questions` : "")}</td>
              <td>${comparisonText(attempt.comparison)}</td>
              <td>${attempt.evaluations.map((one) => html`<${Evaluations} key=${one.after} ...${one} />`)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  </section>`;
}

function Evaluations({ questions, before, after }) {
  return html`<div>
    ${questions} questions: <a href="#/jobs/${before}" aria-label=${`${before}, before the stage`}>before</a>${", "}
    <a href="#/jobs/${after}" aria-label=${`${after}, after the stage`}>after</a>
  </div>`;
}

// reward +0.12 (+0.05 to +0.19, n 200, p 0.001): better
function comparisonText(found) {
  if (!found) return "";
  const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));
  const p = found.p === null ? "" : `, p ${number(found.p)}`;
  return `${found.metric} ${signed(found.difference)} (${signed(found.low)} to ${signed(found.high)}, n ${found.n}${p}): ${found.words}`;
}
