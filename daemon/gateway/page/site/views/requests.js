// The list of requests: completions, embeddings and all other jobs that are no runs, newest first, page by page.

import { html, useEffect, useState } from "../parts/libraries.js";
import { actionsOf } from "../parts/actions.js";
import { get } from "../parts/api.js";
import { ActionButtons } from "../parts/buttons.js";
import { Eta, Heading, JobLink, Problem, Progress, Scroll, Status, Tags, WaitsFor } from "../parts/elements.js";
import { clock, duration, NOTHING, tookOf } from "../parts/format.js";
import { useLoaded } from "../parts/loaded.js";
import { useOverview } from "../parts/overview.js";

// What can be chosen -> statuses of the gateway.
const STATUSES = {
  queued: ["queued", "scheduled", "deferred"],
  running: ["started"],
  finished: ["finished"],
  failed: ["failed"],
  stopped: ["stopped"],
  canceled: ["canceled"],
};
const PAGE = 50;

export function Requests({ query }) {
  const [kinds, error] = useLoaded(() => get("/v1/warmd/kinds"), []);
  if (!kinds) return html`<${Heading}>Requests<//>${error ? html`<${Problem} error=${error} />` : html`<p>Loading …</p>`}`;
  return html`<${List} query=${query} kinds=${kinds.every.filter((kind) => !kinds.runs.includes(kind))} />`;
}

function List({ query, kinds }) {
  const overview = useOverview();
  const [filter, setFilter] = useState({ kind: query.get("kind") ?? "", status: query.get("status") ?? "", text: query.get("text") ?? "" });
  const { jobs, hasMore, error, more } = useJobs(filter, kinds, overview.connection);
  if (!jobs) return html`<${Heading}>Requests<//><p>Loading …</p>`;
  const rows = current(jobs, filter, kinds, overview);
  const isFiltered = filter.kind || filter.status || filter.text;
  return html`
    <${Heading}>Requests<//>
    ${(rows.length > 0 || isFiltered) && html`<${Filter} kinds=${kinds} filter=${filter} setFilter=${setFilter} />`}
    <${Problem} error=${error} />
    ${rows.length > 0
      ? html`<${Table} jobs=${rows} isReadOnly=${!overview.may.includes("train")} />`
      : html`<p class="empty">${isFiltered ? "No request fits these filters." : html`No request yet: <a href="#/chat">chat with a model</a>.`}</p>`}
    ${hasMore && html`<p><button type="button" onClick=${more}>Older requests</button></p>`}
  `;
}

function useJobs({ kind, status, text }, kinds, connection) {
  const [found, setFound] = useState({ jobs: null, hasMore: false, error: null });

  async function load(after, before) {
    try {
      const page = await get("/v1/warmd/jobs", { kind: kind || kinds, status: STATUSES[status], text, after, limit: PAGE });
      setFound({ jobs: [...before, ...page.data], hasMore: page.has_more, error: null });
    } catch (error) {
      setFound({ jobs: before ?? [], hasMore: false, error });
    }
  }

  useEffect(() => {
    load(null, []);
  }, [kind, status, text, connection]);
  return { ...found, more: () => load(found.jobs.at(-1).id, found.jobs) };
}

// The loaded jobs with the latest changes of the stream, and new jobs.
function current(jobs, filter, kinds, overview) {
  const rows = new Map(jobs.map((job) => [job.id, overview.jobs.get(job.id) ?? job]));
  const oldest = jobs.at(-1)?.created_at ?? 0;
  for (const job of overview.jobs.values()) {
    if (!rows.has(job.id) && job.created_at > oldest) rows.set(job.id, job);
  }
  return [...rows.values()]
    .filter((job) => !overview.gone.has(job.id) && fits(job, filter, kinds))
    .sort((a, b) => b.created_at - a.created_at);
}

// Whether a job of the stream belongs to the list.
function fits(job, { kind, status, text }, kinds) {
  const isOfKind = kind ? job.kind === kind : kinds.includes(job.kind);
  return isOfKind && (!status || STATUSES[status].includes(job.status)) && job.id.includes(text);
}

function Filter({ kinds, filter, setFilter }) {
  const set = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  return html`<form class="filter" role="search" onSubmit=${(event) => event.preventDefault()}>
    <label>
      Kind
      <select value=${filter.kind} onChange=${set("kind")}>
        <option value="">all</option>
        ${kinds.map((kind) => html`<option key=${kind}>${kind}</option>`)}
      </select>
    </label>
    <label>
      Status
      <select value=${filter.status} onChange=${set("status")}>
        <option value="">all</option>
        ${Object.keys(STATUSES).map((status) => html`<option key=${status}>${status}</option>`)}
      </select>
    </label>
    <label>Part of the id <input type="search" value=${filter.text} onInput=${set("text")} /></label>
  </form>`;
}

function Table({ jobs, isReadOnly }) {
  return html`<${Scroll} label="table of requests">
    <table class="stacked requests">
      <thead>
        <tr>
          <th scope="col">Request</th>
          <th scope="col">Status</th>
          <th scope="col">Model</th>
          <th scope="col">Progress</th>
          <th scope="col">Created</th>
          <th scope="col">Took</th>
          ${!isReadOnly && html`<th scope="col">Actions</th>`}
        </tr>
      </thead>
      <tbody>
        ${jobs.map(
          (job) => html`<tr key=${job.id}>
            <th scope="row"><${JobLink} id=${job.id} name=${job.name} /> <${Tags} job=${job} /></th>
            <td><${Status} job=${job} /> <${WaitsFor} job=${job} /></td>
            <td>${job.model ?? NOTHING}</td>
            <td><${Progress} job=${job} /> <${Eta} job=${job} /></td>
            <td>${clock(job.created_at)}</td>
            <td>${job.started_at ? duration(tookOf(job)) : NOTHING}</td>
            ${!isReadOnly && html`<td><${ActionButtons} id=${job.id} actions=${actionsOf(job)} /></td>`}
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

