// One job: its name, state, actions and result, and sections with all its data.

import { html, useState } from "../parts/libraries.js";
import { actionsOf } from "../parts/actions.js";
import { get, getText } from "../parts/api.js";
import { ActionButtons } from "../parts/buttons.js";
import { Download } from "../parts/download.js";
import { useEvents } from "../parts/events.js";
import { Linked, wordsOf } from "../parts/event_words.js";
import { Copy, Eta, GroupLink, Heading, JobLink, Problem, Progress, Scroll, Status, WaitsFor } from "../parts/elements.js";
import { clock, NOTHING, number, size } from "../parts/format.js";
import { useLoaded } from "../parts/loaded.js";
import { isPending, useOverview } from "../parts/overview.js";
import { RunCharts } from "../parts/run_charts.js";
import { RunOptions } from "../parts/run_options.js";
import { RunResult } from "../parts/run_result.js";
import { Completions } from "./completions.js";

const SECTIONS = ["curves", "completions", "checkpoints", "options", "events", "log"];
const NO_TRAININGS = ["infer", "encode", "eval"]; // their jobs have neither curves nor checkpoints
const MANY = ["step", "text", "progress"]; // types of events of which a job has thousands
const TROUBLES = ["warning", "divergence", "stall", "save_failed"];
const LISTED = 200; // events

export function Job({ id, section, query }) {
  const overview = useOverview();
  const live = overview.jobs.get(id);
  const causes = [id, overview.connection, live?.status, live?.execution];
  const [detail, error] = useLoaded(() => get(`/v1/warmd/jobs/${id}`), causes);
  const job = live ?? detail?.job;
  const isEnded = job ? !isPending(job) : null;
  const [events] = useEvents(id, isEnded, MANY);

  if (error) return html`<${Heading}>${id}<//><${Problem} error=${error} />`;
  if (!job || !detail) return html`<${Heading}>${id}<//><p>Loading …</p>`;
  const sections = sectionsOf(job);
  const current = section ?? (job.status === "failed" ? "log" : sections[0]);
  return html`
    <${Heading} key=${job.name ?? id}>${job.name ?? id}<//>
    <${State} job=${job} events=${events ?? []} isReadOnly=${!overview.may.includes("train")} />
    ${NO_TRAININGS.includes(job.kind) ? html`<${Answer} job=${job} />` : html`<${RunResult} job=${job} events=${events} />`}
    <nav class="sections" aria-label="Sections of the job">
      ${sections.map(
        (name) => html`<a key=${name} href="#/jobs/${id}/${name}" aria-current=${name === current ? "page" : undefined}>${name}</a>`,
      )}
    </nav>
    <${Section} key=${current} name=${current} job=${job} detail=${detail} events=${events} query=${query} />
  `;
}

function sectionsOf(job) {
  if (NO_TRAININGS.includes(job.kind)) return ["options", "events", "log"];
  return job.kind === "grpo" ? SECTIONS : SECTIONS.filter((name) => name !== "completions");
}

function State({ job, events, isReadOnly }) {
  const alert = (isPending(job) && job.alert) || "";
  return html`
    <p class="line">
      <${Status} job=${job} /> <${Progress} job=${job} /> <${Eta} job=${job} />
      ${job.position && html`<span>position ${job.position} in ${job.queue}</span>`} <${WaitsFor} job=${job} />
      ${job.result?.model &&
      !NO_TRAININGS.includes(job.kind) &&
      html`<a href="#/chat?model=${job.id}">Chat with the trained model</a>
        <a href="#/compare?model=${job.model}&model=${job.id}">Compare it with ${job.model}</a>`}
      ${!isReadOnly && html`<${ActionButtons} id=${job.id} actions=${actionsOf(job)} />`}
    </p>
    <p class="line quiet">
      ${job.name && html`<span><code>${job.id}</code> <${Copy} text=${job.id} label="Copy the id" /></span>`}
      <span>${job.kind} of ${job.model ?? "a new model"}</span> <${GroupLink} id=${job.sweep ?? job.curriculum} />
      <span>created ${clock(job.created_at)}</span>
      ${job.tags.map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}
    </p>
    ${job.error && html`<p class="problem">${job.error}</p>`}
    ${alert && html`<p class="problem"><${Linked} text=${alert} id=${job.id} /></p>`}
    <${Troubles} id=${job.id} events=${events.filter((event) => TROUBLES.includes(event.type) && !alert.includes(wordsOf(event)))} />
    ${job.notes.map((note, index) => html`<p class="quiet" key=${index}>${note.text}</p>`)}
  `;
}

// What needs attention; the same text once.
function Troubles({ id, events }) {
  const texts = [...new Set(events.map((event) => `${event.type}: ${wordsOf(event)}`))];
  if (texts.length === 0) return null;
  return html`<details class="attention">
    <summary>${texts.length === 1 ? "1 warning" : `${texts.length} warnings`}</summary>
    <ul>
      ${texts.map((text) => html`<li key=${text}><${Linked} text=${text} id=${id} /></li>`)}
    </ul>
  </details>`;
}

// What an evaluation has measured, or the texts of an answer.
function Answer({ job }) {
  if (!job.result) return null;
  const { choices = [], metrics, comparison, against } = job.result;
  const numbers = Object.entries(metrics ? {} : job.result).filter(([, value]) => typeof value === "number");
  return html`
    ${choices.map((choice, index) => html`<pre class="card" key=${index}>${choice.text}</pre>`)}
    <dl class="tiles">
      ${Object.entries(metrics ?? {}).map(
        ([name, one]) => html`<div key=${name}>
          <dt>${name}</dt>
          <dd>
            <strong>${number(one.value)}</strong>
            <small>95 % interval ${number(one.low)} to ${number(one.high)}, ${number(one.n)} questions</small>
            ${comparison?.[name] && html`<small>${comparison[name].words}, compared with <${JobLink} id=${against} /></small>`}
          </dd>
        </div>`,
      )}
      ${numbers.map(([name, value]) => html`<div key=${name}><dt>${name.replaceAll("_", " ")}</dt><dd><strong>${number(value)}</strong></dd></div>`)}
    </dl>
  `;
}

function Section({ name, job, detail, events, query }) {
  if (name === "completions") return html`<${Completions} job=${job} query=${query} />`;
  if (name === "checkpoints") return html`<${Checkpoints} job=${job} events=${events} />`;
  if (name === "options") {
    const begin = (events ?? []).findLast((event) => event.type === "begin") ?? null;
    return html`<${RunOptions} job=${job} detail=${detail} begin=${begin} />`;
  }
  if (name === "events") return html`<${Events} job=${job} events=${events} />`;
  if (name === "log") return html`<${Log} job=${job} events=${events} />`;
  return html`<${RunCharts} job=${job} />`;
}

// --- checkpoints ----------------------------------------------------------------------------------

function Checkpoints({ job, events }) {
  const saved = (events ?? []).filter((event) => event.type === "checkpoint").length;
  const [found, error] = useLoaded(() => get(`/v1/warmd/jobs/${job.id}/checkpoints`), [job.id, saved]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<p>Loading …</p>`;
  if (found.data.length === 0) return html`<p class="empty">No checkpoint yet.</p>`;
  return html`<${Scroll} label="table of checkpoints">
    <table>
      <thead>
        <tr><th scope="col">Step</th><th scope="col">Saved</th><th scope="col">Size</th><th scope="col">State</th><th scope="col">Metrics</th></tr>
      </thead>
      <tbody>
        ${found.data.map(
          (one) => html`<tr key=${one.step}>
            <th scope="row">${one.step}${one.is_best ? " (best)" : ""}</th>
            <td>${clock(one.saved_at)}</td>
            <td>${size(one.bytes)}</td>
            <td>${one.error ? "damaged" : "whole"}</td>
            <td>${one.error ?? metricsText(one.metrics)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

function metricsText(metrics) {
  const numbers = Object.entries(metrics).filter(([, value]) => typeof value === "number");
  return numbers.slice(0, 4).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

// --- events and log -------------------------------------------------------------------------------

function Events({ job, events }) {
  const [isWithSteps, setWithSteps] = useState(false);
  return html`
    <p>
      <label class="inline">
        <input type="checkbox" checked=${isWithSteps} onChange=${(event) => setWithSteps(event.target.checked)} />
        Steps, too
      </label>
    </p>
    ${isWithSteps ? html`<${AllEvents} job=${job} />` : html`<${EventTable} job=${job} events=${events} />`}
  `;
}

function AllEvents({ job }) {
  const [events, error] = useEvents(job.id, !isPending(job));
  if (error) return html`<${Problem} error=${error} />`;
  return html`<${EventTable} job=${job} events=${events} />`;
}

function EventTable({ job, events }) {
  if (!events) return html`<p>Loading …</p>`;
  if (events.length === 0) return html`<p class="empty">No event yet.</p>`;
  return html`<${Scroll} label="table of events">
    <table class="stacked">
      <thead><tr><th scope="col">Time</th><th scope="col">Event</th><th scope="col">Step</th><th scope="col">Details</th></tr></thead>
      <tbody>
        ${events.slice(-LISTED).reverse().map(
          (event) => html`<tr key=${event.seq}>
            <td class="time">${new Date(event.time * 1000).toLocaleTimeString([], { hourCycle: "h23" })}</td>
            <th scope="row">${event.type}</th>
            <td>${event.step ?? NOTHING}</td>
            <td><${Linked} text=${wordsOf(event)} id=${job.id} /></td>
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

function Log({ job, events }) {
  const [text, error] = useLoaded(() => getText(`/v1/warmd/jobs/${job.id}/log`), [job.id, job.status]);
  const { traceback } = (job.status === "failed" && events?.findLast((event) => event.type === "failed")) || {};
  if (error) return html`<${Problem} error=${error} />`;
  if (text === null) return html`<p>Loading …</p>`;
  return html`
    ${traceback && html`<h2>Traceback</h2><pre class="card" tabindex="0">${traceback}</pre>`}
    ${text
      ? html`<div class="line">
            <h2>Log</h2>
            <${Download} path=${`/v1/warmd/jobs/${job.id}/log`} name=${`${job.id}.txt`} label="Download" />
          </div>
          <pre class="card" tabindex="0">${text}</pre>`
      : html`<p class="empty">The log is empty.</p>`}
  `;
}
