// The overview: running and waiting jobs, alerts, models, queues and the machine.

import { html, useEffect, useState } from "../parts/libraries.js";
import { get, post } from "../parts/api.js";
import { actionsOf } from "../parts/actions.js";
import { ActionButtons } from "../parts/buttons.js";
import { ask } from "../parts/dialog.js";
import { Eta, GroupLink, Heading, JobLink, Progress, Scroll, Status, Tags, Usage, WaitsFor } from "../parts/elements.js";
import { clock, duration, NOTHING, now, number, size, statusOf } from "../parts/format.js";
import { useModelInputs } from "../parts/models.js";
import { nameOf, namesOf, useNames } from "../parts/names.js";
import { isPending, isRun, pendingJobs, useOverview } from "../parts/overview.js";
import { useStored } from "../parts/stored.js";

const DISK_LOW = 0.05; // of its size
const RECENT_S = 86_400; // how long a failure needs attention

export function Overview() {
  const overview = useOverview();
  const failed = useFailed(overview.connection);
  if (!overview.isLoaded) return html`<${Heading}>Overview<//><p>Loading …</p>`;
  return html`
    <${Heading}>Overview<//>
    <${Attention} overview=${overview} failed=${failed} />
    <${Pending} jobs=${pendingJobs()} isReadOnly=${!overview.may.includes("train")} />
    <${Groups} groups=${overview.groups ?? []} />
    <div class="columns">
      <${Models} models=${overview.models ?? []} isReadOnly=${!overview.may.includes("train")} />
      <div>
        <${Queues} queues=${overview.queues ?? []} />
        <${Machine} machine=${overview.machine} overview=${overview} />
      </div>
    </div>
  `;
}

// The newest failed runs; read again after each connection.
function useFailed(connection) {
  const [failed, setFailed] = useState([]);
  useEffect(() => {
    if (!connection) return;
    get("/v1/warmd/runs", { status: "failed", limit: 20 }).then(
      (page) => setFailed(page.data),
      () => setFailed([]),
    );
  }, [connection]);
  return failed;
}

// Failed requests are not among it: their clients got the error.
function Attention({ overview, failed }) {
  const [dismissed, setDismissed] = useStored("dismissed", []);
  const notes = new Map(); // what a note is about, which is dismissed with it -> the note
  const jobs = new Map(failed.map((job) => [job.id, job]));
  const runs = new Set(jobs.keys()); // they have no queue, by which those of the stream are known as runs
  for (const [id, job] of overview.jobs) jobs.set(id, job);
  for (const [id, job] of jobs) {
    if (overview.gone.has(id)) continue;
    const link = html`<${JobLink} id=${job.id} name=${job.name} />`;
    if (job.status === "failed" && (runs.has(id) || isRun(job)) && job.ended_at > now() - RECENT_S) {
      notes.set(`${job.id} ${job.ended_at}`, html`${link} failed: ${job.error}`);
    } else if (isPending(job) && job.alert) {
      notes.set(`${job.id} ${job.alert}`, html`${link}: ${job.alert}`);
    }
  }
  const { disk_bytes: disk, disk_free_bytes: free } = overview.machine;
  if (free < disk * DISK_LOW) notes.set("disk", html`The disk has ${size(free)} left.`);
  const shown = [...notes].filter(([about]) => !dismissed.includes(about));
  if (shown.length === 0) return null;
  // Those of the past are forgotten with the next one.
  const dismiss = (about) => setDismissed([...dismissed.filter((one) => notes.has(one)), about]);
  return html`<section class="attention" aria-labelledby="attention">
    <h2 id="attention">Needs attention</h2>
    <ul>
      ${shown.map(
        ([about, note]) => html`<li key=${about}>
          ${note} <button type="button" class="small" aria-label=${`Dismiss ${about}`} onClick=${() => dismiss(about)}>Dismiss</button>
        </li>`,
      )}
    </ul>
  </section>`;
}

function Pending({ jobs, isReadOnly }) {
  return html`<section aria-labelledby="pending">
    <h2 id="pending">Running and waiting</h2>
    ${jobs.length === 0
      ? html`<p class="empty">No job runs or waits. <a href="#/submit">Submit one</a> or see the <a href="#/runs">runs</a></p>`
      : html`<ul class="cards">
          ${jobs.map((job) => html`<${PendingJob} key=${job.id} job=${job} isReadOnly=${isReadOnly} />`)}
        </ul>`}
  </section>`;
}

function PendingJob({ job, isReadOnly }) {
  const waits = job.position && html`<span>position ${job.position} in ${job.queue}</span>`;
  return html`<li>
    <div class="line">
      <${Status} job=${job} /> <${JobLink} id=${job.id} name=${job.name} /> <${Tags} job=${job} />
      <span class="quiet">${job.kind}, ${job.model ? nameOf(job.model) : "no model"}</span> <${GroupLink} id=${job.sweep ?? job.curriculum} />
    </div>
    <div class="line">
      <${Progress} job=${job} /> <${Eta} job=${job} /> ${waits} <${WaitsFor} job=${job} />
      ${job.scheduled_at && html`<span>starts at ${clock(job.scheduled_at)}</span>`}
      ${job.after.length > 0 && html`<span>after ${job.after.map(nameOf).join(", ")}</span>`}
      ${!isReadOnly && html`<${ActionButtons} id=${job.id} actions=${actionsOf(job)} />`}
    </div>
  </li>`;
}

function Groups({ groups }) {
  const pending = new Set(pendingJobs().flatMap((job) => [job.sweep, job.curriculum]));
  const shown = groups.filter((group) => group.active || group.phase === "paused" || pending.has(group.id));
  if (shown.length === 0) return null;
  return html`<section aria-labelledby="groups">
    <h2 id="groups">Sweeps and curricula</h2>
    <ul class="cards">
      ${shown.map(
        (group) => html`<li class="line" key=${group.id}>
          <span class="status ${group.phase}">${group.phase}</span> <${GroupLink} id=${group.id} name=${group.name} />
          <span class="quiet">${group.kind}</span>
        </li>`,
      )}
    </ul>
  </section>`;
}

function Models({ models, isReadOnly }) {
  useNames(models.map((model) => model.name));
  return html`<section aria-labelledby="models">
    <h2 id="models">Warm models</h2>
    ${models.length === 0 && html`<p class="empty">No model is loaded.</p>`}
    <ul class="cards">
      ${models.map((model) => html`<${Model} key=${model.name} model=${model} isReadOnly=${isReadOnly} />`)}
    </ul>
    ${!isReadOnly && html`<${Load} loaded=${models.map((model) => model.name)} />`}
  </section>`;
}

function Model({ model, isReadOnly }) {
  const inputs = useModelInputs(model.name); // null: not known yet, or a model that takes no text
  return html`<li>
    <div class="line">
      <strong>${nameOf(model.name)}</strong>
      ${!isReadOnly &&
      html`<button type="button" class="small" aria-label=${`Unload ${nameOf(model.name)}`} onClick=${() => unload(model)}>
        Unload
      </button>`}
    </div>
    <div class="line quiet">
      <span>${size(model.bytes)}</span><span>${number(model.parameters)} parameters</span>
      <span>${model.precision}</span><span>loaded ${clock(model.loaded_at)}</span>
      ${inputs && html`<span>${inputs.has_chat_template ? "chat template" : "no chat template"}</span>`}
      ${inputs?.context_length && html`<span>${number(inputs.context_length)} positions</span>`}
    </div>
    <div class="quiet digest" title=${`digest of its weights: ${model.weights}`}>${model.path}</div>
  </li>`;
}

function unload(model) {
  ask({
    title: `Unload ${nameOf(model.name)}?`,
    text: "Its memory is freed. Running jobs keep it until they end; its files stay.",
    action: "Unload the model",
    act: async () => {
      await post("/v1/warmd/models/unload", { name: model.name });
      return `${nameOf(model.name)} unloaded`;
    },
  });
}

function Load({ loaded }) {
  const [names, setNames] = useState(null);
  const [name, setName] = useState("");
  async function list() {
    setNames((await get("/v1/models")).data.map((model) => model.id));
  }
  const free = (names ?? []).filter((one) => !loaded.includes(one));
  useNames(free);
  const called = namesOf(free);
  function load(event) {
    event.preventDefault();
    const chosen = name || free[0];
    ask({
      title: `Load ${called.get(chosen)}?`,
      text: "It stays in memory, also after a restart of the daemon, until it is unloaded.",
      action: "Load the model",
      act: async () => {
        const model = await (await post("/v1/warmd/models/load", { name: chosen })).json();
        setNames(null);
        return `${nameOf(model.name)} loaded`;
      },
    });
  }
  if (names === null) {
    return html`<p><button type="button" class="small" onClick=${list}>Load a model …</button></p>`;
  }
  if (free.length === 0) return html`<p class="empty">All known models are loaded.</p>`;
  return html`<form class="line" onSubmit=${load}>
    <label class="inline">
      Model
      <select value=${name} onChange=${(event) => setName(event.target.value)}>
        ${free.map((one) => html`<option key=${one} value=${one}>${called.get(one)}</option>`)}
      </select>
    </label>
    <button class="small">Load</button>
  </form>`;
}

function Queues({ queues }) {
  const shown = ["queued", "started", "finished", "failed"];
  return html`<section aria-labelledby="queues">
    <h2 id="queues">Queues</h2>
    <${Scroll} label="table of queues">
      <table>
        <thead>
          <tr>
            <th scope="col">Queue</th>
            ${shown.map((name) => html`<th scope="col" class="number">${statusOf({ status: name })}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${queues.map(
            (queue) => html`<tr key=${queue.name}>
              <th scope="row">${queue.name}</th>
              ${shown.map((name) => html`<td class="number">${failedLink(queue, name) ?? queue[name]}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  </section>`;
}

// The failed jobs of a queue, by the list that has them.
function failedLink(queue, status) {
  if (status !== "failed" || !queue.failed) return null;
  const list = queue.name === "train" ? "runs" : "requests";
  return html`<a href="#/${list}?status=failed" aria-label=${`${queue.failed} failed in ${queue.name}`}>${queue.failed}</a>`;
}

function Machine({ machine, overview }) {
  const memory = machine.memory_bytes - machine.memory_free_bytes;
  const disk = machine.disk_bytes - machine.disk_free_bytes;
  const { daemon, workers = [] } = overview;
  return html`<section aria-labelledby="machine">
    <h2 id="machine">Machine</h2>
    <${Usage} label="Load" used=${machine.load} total=${machine.cores} text=${`${number(machine.load)} on ${machine.cores} cores`} />
    <${Usage} label="Memory" used=${memory} total=${machine.memory_bytes} text=${`${size(machine.memory_free_bytes)} free`} />
    <${Usage} label="Disk" used=${disk} total=${machine.disk_bytes} text=${`${size(machine.disk_free_bytes)} free`} />
    ${daemon &&
    html`<p class="quiet">
      warmd ${daemon.version}, up ${duration(now() - daemon.started)};
      workers ${workers?.map((worker) => `${worker.name} ${worker.state}`).join(", ") || NOTHING}
    </p>`}
  </section>`;
}
