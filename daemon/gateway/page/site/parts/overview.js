// The daemon's overview, kept current by its stream, for all views.

import { useEffect, useReducer } from "./libraries.js";
import { get } from "./api.js";
import { follow } from "./live.js";
import { remember } from "./names.js";

const PENDING = ["started", "queued", "scheduled", "deferred"];
const watchers = new Set();

// `jobs` has the latest state of each job in the stream since the page was opened. `connection` counts the
// snapshots: a list that was loaded before the latest one may have missed a change. `may`: the user's rights on
// the page.
export const overview = {
  jobs: new Map(),
  gone: new Set(),
  connection: 0,
  isLoaded: false,
  groups: [],
  may: ["read", "infer", "train"],
};

export function watchOverview() {
  return follow(() => "/v1/warmd/overview/stream", {
    snapshot(part) {
      overview.connection += 1;
      const before = [...overview.jobs.values()].filter(isPending);
      take(part);
      const known = new Set(part.jobs.map((job) => job.id));
      before.filter((job) => !known.has(job.id)).forEach((job) => readAgain(job.id));
    },
    change: take,
  });
}

function take({ jobs = [], gone = [], ...rest }) {
  Object.assign(overview, rest, { isLoaded: true });
  for (const job of jobs) overview.jobs.set(job.id, job);
  gone.forEach(forget);
  remember(jobs);
  remember(overview.groups);
  update();
}

// Reads a job that has ended while the page was not connected.
async function readAgain(id) {
  try {
    overview.jobs.set(id, (await get(`/v1/warmd/jobs/${id}`)).job);
    update();
  } catch (error) {
    if (error.status === 404) forget(id);
  }
}

export function forget(id) {
  overview.jobs.delete(id);
  overview.gone.add(id);
  update();
}

function update() {
  watchers.forEach((watcher) => watcher());
}

// Renders the component again whenever the overview changes, and returns the overview.
export function useOverview() {
  const [, rerender] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    watchers.add(rerender);
    return () => watchers.delete(rerender);
  }, []);
  return overview;
}

// Whether a job is a training or an evaluation, as in the table of runs; the others are requests.
export function isRun(job) {
  return job.queue === "train" || job.kind === "eval";
}

export function isPending(job) {
  return PENDING.includes(job.status);
}

// Running jobs, then waiting ones in the order of their queues.
export function pendingJobs() {
  const jobs = [...overview.jobs.values()].filter(isPending);
  const rank = (job) => [job.queue, PENDING.indexOf(job.status), job.position ?? 0, job.created_at];
  return jobs.sort((a, b) => compare(rank(a), rank(b)));
}

function compare(a, b) {
  const at = a.findIndex((value, index) => value !== b[index]);
  if (at < 0) return 0;
  return a[at] < b[at] ? -1 : 1;
}
