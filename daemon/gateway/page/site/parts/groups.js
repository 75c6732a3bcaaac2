// Sweeps and curricula: their lists, what is read again whenever something in them changes, and what
// can be done with one.

import { html, useEffect, useRef, useState } from "./libraries.js";
import { get, post } from "./api.js";
import { ask } from "./dialog.js";
import { GroupLink, Heading, Problem, Scroll, Status, Tags } from "./elements.js";
import { clock, size } from "./format.js";
import { nameOf } from "./names.js";
import { useOverview } from "./overview.js";

const LISTED = 50;
const READ_MS = 1000; // between two reads, each of which reads all jobs of a group
const ENDED = ["finished", "failed", "stopped", "canceled"];

// A list of groups, newest first: `noun` as in their ids, `path` of their routes, `columns` of their
// own as {title, cell(group)}, and what to show while there is none.
export function GroupList({ title, noun, path, columns, empty }) {
  const [page, error] = useGroups(
    () => get(`/v1/warmd/${path}`, { limit: LISTED }),
    (id) => id.startsWith(`${noun}-`),
  );
  return html`
    <${Heading}>${title}<//>
    <${Problem} error=${error} />
    ${!page && !error && html`<p>Loading …</p>`}
    ${page?.data.length === 0 && html`<p class="empty">${empty}</p>`}
    ${page?.data.length > 0 &&
    html`<${Scroll} label=${`table of ${path}`}>
      <table class="stacked">
        <thead>
          <tr>
            ${[title, "Kind", "Status", ...columns.map((column) => column.title), "Created"].map(
              (name) => html`<th scope="col" key=${name}>${name}</th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${page.data.map(
            (group) => html`<tr key=${group.id}>
              <th scope="row"><${GroupLink} id=${group.id} name=${group.name} /> <${Tags} job=${group} /></th>
              <td>${group.kind}</td>
              <td><${Status} job=${group} /></td>
              ${columns.map((column) => html`<td key=${column.title}>${column.cell(group)}</td>`)}
              <td>${clock(group.created_at)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>`}
  `;
}

// Returns [found, error] of a request about the groups that `isOurs(id)` selects.
export function useGroups(request, isOurs) {
  const overview = useOverview();
  const groups = overview.groups.filter((group) => isOurs(group.id));
  const jobs = [...overview.jobs.values()].filter((job) => isOurs(job.sweep ?? job.curriculum ?? ""));
  const version = [
    overview.connection,
    ...groups.map((group) => `${group.id} ${group.active} ${group.phase} ${group.changed_at}`),
    ...jobs.map((job) => `${job.id} ${job.status} ${job.paused} ${job.step}`),
  ].join();
  return useReread(request, version);
}

// The result of a request, and its error; requested again when the version changes.
function useReread(request, version) {
  const [state, setState] = useState([null, null]);
  const reading = useRef({ at: 0, timer: null, isStale: false, isGone: false });

  useEffect(() => {
    const { current } = reading;
    current.isGone = false;
    return () => {
      current.isGone = true;
      clearTimeout(current.timer);
      current.timer = null;
    };
  }, []);

  useEffect(() => {
    const { current } = reading;
    if (current.timer === null) plan();
    else current.isStale = true;
  }, [version]);

  function plan() {
    const { current } = reading;
    current.isStale = false;
    current.timer = setTimeout(read, Math.max(0, current.at + READ_MS - Date.now()));
  }

  async function read() {
    const { current } = reading;
    const next = await request().then(
      (found) => [found, null],
      (error) => [null, error],
    );
    if (current.isGone) return;
    current.at = Date.now();
    current.timer = null;
    setState(next);
    if (current.isStale) plan();
  }

  return state;
}

// Returns the actions of a group as {name, label, run}; `path` is sweeps or curricula.
export function groupActions(group, path) {
  const act = (name, question) => ({
    name,
    label: question.label,
    run: () => ask({ ...question, title: `${question.label} ${nameOf(group.id)}?`, act: () => send(group, path, name) }),
  });
  if (ENDED.includes(group.status)) {
    const resume = act("resume", {
      label: "Resume",
      text: "Its jobs that failed or were canceled are queued again, from their checkpoints. Nothing is lost.",
      action: "Resume all",
    });
    const remove = act("remove", {
      label: "Remove",
      text: "All its jobs are deleted with their checkpoints and trained models. This cannot be undone.",
      action: "Remove all",
      isDangerous: true,
    });
    return group.status === "finished" ? [remove] : [resume, remove];
  }
  const isPaused = group.paused || group.status === "paused";
  return [
    isPaused
      ? act("unpause", {
          label: "Continue",
          text: "Its jobs continue where they were paused, or return to their queue.",
          action: "Continue all",
        })
      : act("pause", {
          label: "Pause",
          text: "A running job is held in memory at the end of its step; the others wait. Nothing is lost.",
          action: "Pause all",
        }),
    act("cancel", {
      label: "Cancel",
      text: "Running jobs save a checkpoint and stop, waiting ones leave their queue. Nothing is lost: it can be resumed.",
      action: "Cancel all",
    }),
    act("kill", {
      label: "Kill",
      text: "Running jobs stop at once. All steps since their latest checkpoints are lost.",
      action: "Kill all",
      isDangerous: true,
    }),
  ];
}

async function send(group, path, name) {
  const reply = await (await post(`/v1/warmd/${path}/${group.id}/${name}`)).json();
  if (name !== "remove") return `${nameOf(group.id)}: ${reply.outcome}`;
  location.hash = `#/${path}`;
  return `${nameOf(group.id)} removed, ${size(reply.bytes)} freed`;
}
