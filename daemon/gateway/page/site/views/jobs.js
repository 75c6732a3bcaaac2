// The list of jobs: filters, pages, and the changes of the jobs that it shows.

import { html, useEffect, useState } from "../parts/libraries.js";
import { actionsOf } from "../parts/actions.js";
import { get } from "../parts/api.js";
import { ActionButtons } from "../parts/buttons.js";
import { Eta, Heading, JobLink, Labels, Problem, Progress, Scroll, Status, WaitsFor } from "../parts/elements.js";
import { clock, duration, NOTHING, now } from "../parts/format.js";
import { useOverview } from "../parts/overview.js";

const STATUSES = ["queued", "started", "finished", "failed", "stopped", "canceled", "deferred", "scheduled"];
const PAGE = 50;

export function Jobs({ query }) {
  const overview = useOverview();
  const [filter, setFilter] = useState({
    kind: query.get("kind") ?? "",
    status: query.get("status") ?? "",
    text: query.get("text") ?? "",
    name: query.get("name") ?? "",
    tag: query.get("tag") ?? "",
  });
  const { jobs, hasMore, error, more } = useJobs(filter, overview.connection);
  const kinds = useKinds();
  if (!jobs) return html`<${Heading}>Jobs<//><p>Loading …</p>`;
  const rows = current(jobs, filter, overview);
  return html`
    <${Heading}>Jobs<//>
    <${Filter} kinds=${kinds} filter=${filter} setFilter=${setFilter} />
    <${Problem} error=${error} />
    <${Table} jobs=${rows} isReadOnly=${!overview.may.includes("train")} />
    ${hasMore && html`<p><button type="button" onClick=${more}>Older jobs</button></p>`}
  `;
}

function useJobs(filter, connection) {
  const [found, setFound] = useState({ jobs: null, hasMore: false, error: null });

  async function load(after, before) {
    try {
      const page = await get("/v1/warmd/jobs", { ...filter, after, limit: PAGE });
      setFound({ jobs: [...before, ...page.data], hasMore: page.has_more, error: null });
    } catch (error) {
      setFound({ jobs: before ?? [], hasMore: false, error });
    }
  }

  useEffect(() => {
    load(null, []);
  }, [filter, connection]);
  return { ...found, more: () => load(found.jobs.at(-1).id, found.jobs) };
}

// The loaded jobs with the latest changes of the stream, and new jobs.
function current(jobs, filter, overview) {
  const rows = new Map(jobs.map((job) => [job.id, overview.jobs.get(job.id) ?? job]));
  const oldest = jobs.at(-1)?.created_at ?? 0;
  for (const job of overview.jobs.values()) {
    if (!rows.has(job.id) && job.created_at > oldest) rows.set(job.id, job);
  }
  return [...rows.values()]
    .filter((job) => !overview.gone.has(job.id) && fits(job, filter))
    .sort((a, b) => b.created_at - a.created_at);
}

// Whether a job of the stream belongs to the list; patterns of names are left to the gateway.
function fits(job, { kind, status, text, name, tag }) {
  const isOfKind = (!kind || job.kind === kind) && (!status || job.status === status);
  const isLabeled = (!name || job.name === name || /[*?]/.test(name)) && (!tag || job.tags.includes(tag));
  return isOfKind && isLabeled && job.id.includes(text);
}

function useKinds() {
  const [names, setNames] = useState([]);
  useEffect(() => {
    get("/v1/warmd/kinds").then(({ every }) => setNames(every), () => {});
  }, []);
  return names;
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
        ${STATUSES.map((status) => html`<option key=${status}>${status}</option>`)}
      </select>
    </label>
    <label>Name <input type="search" name="name" value=${filter.name} onInput=${set("name")} /></label>
    <label>Tag <input type="search" name="tag" value=${filter.tag} onInput=${set("tag")} /></label>
    <label>Part of the id <input type="search" value=${filter.text} onInput=${set("text")} /></label>
  </form>`;
}

function Table({ jobs, isReadOnly }) {
  if (jobs.length === 0) return html`<p class="empty">No such job.</p>`;
  return html`<${Scroll} label="table of jobs">
    <table class="stacked">
      <thead>
        <tr>
          <th scope="col">Job</th>
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
            <th scope="row"><${JobLink} id=${job.id} /> <${Labels} job=${job} /></th>
            <td><${Status} job=${job} /> <${WaitsFor} job=${job} /></td>
            <td>${job.model ?? NOTHING}</td>
            <td><${Progress} job=${job} /> <${Eta} job=${job} /></td>
            <td>${clock(job.created_at)}</td>
            <td>${took(job)}</td>
            ${!isReadOnly && html`<td><${ActionButtons} id=${job.id} actions=${actionsOf(job)} /></td>`}
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

function took(job) {
  return job.started_at ? duration((job.ended_at ?? now()) - job.started_at) : NOTHING;
}
