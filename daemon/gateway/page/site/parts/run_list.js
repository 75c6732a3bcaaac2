// All trainings and evaluations with their options and metrics: read once, the newest first, and kept while the page
// is open. Those that change are read again, so sorting and filtering need no request.

import { useEffect, useReducer } from "./libraries.js";
import { get } from "./api.js";
import { optionText } from "./format.js";
import { remember } from "./names.js";
import { isRun, overview, useOverview } from "./overview.js";

const FIRST = 100; // runs of the first request: the table is shown with them
const MORE = 500;
const READ_MS = 2000; // between two reads of runs that have changed
const MOST_IDS = 100; // of one request

const watchers = new Set();
const list = { runs: [], defaults: {}, groups: {}, isComplete: false, error: null };
let byId = new Map();
let loadedAt = 0; // the overview's connection with which the list was loaded; 0: not yet
let isLoading = false;
let stale = new Set(); // ids of runs whose metrics may have changed
let timer = null;

// Renders the component again whenever a run changes. Returns {runs, defaults, groups, isComplete, error}: `runs` newest
// first, `defaults` by kind, and the names of `groups` by id.
export function useRuns() {
  const [, rerender] = useReducer((count) => count + 1, 0);
  const { connection } = useOverview();
  useEffect(() => {
    watchers.add(rerender);
    return () => watchers.delete(rerender);
  }, []);
  useEffect(() => {
    // The first load does not wait for the first snapshot, which has what changes meanwhile.
    if ((loadedAt === 0 || connection > loadedAt) && !isLoading) load(Math.max(connection, 1));
  }, [connection]);
  useEffect(follow);
  return list;
}

async function load(connection) {
  isLoading = true;
  loadedAt = connection;
  const found = new Map();
  list.error = null;
  try {
    for (let after = null, hasMore = true; hasMore; ) {
      const page = await get("/v1/warmd/runs", { after, limit: after === null ? FIRST : MORE });
      take(page, found);
      if (byId.size < found.size) byId = found;
      after = page.data.at(-1)?.id;
      hasMore = page.has_more;
      if (hasMore) update();
    }
    byId = found;
    list.isComplete = true;
  } catch (error) {
    list.error = error;
  }
  isLoading = false;
  update();
  if (overview.connection > loadedAt) load(overview.connection);
}

function take(page, found) {
  Object.assign(list.defaults, page.defaults);
  Object.assign(list.groups, page.groups);
  for (const run of page.data) found.set(run.id, run);
}

// Takes over what the overview's stream reports, and has the metrics of these runs read again.
function follow() {
  if (!list.isComplete) return;
  let isChanged = false;
  for (const job of overview.jobs.values()) {
    const run = byId.get(job.id);
    if (!isRun(job) || run?.seen === job) continue;
    stale.add(job.id);
    isChanged = true;
    const { result, notes, ...fields } = job;
    byId.set(job.id, { options: {}, metrics: {}, ...run, ...fields, seen: job });
  }
  for (const id of overview.gone) isChanged = byId.delete(id) || isChanged;
  if (!isChanged) return;
  timer ??= setTimeout(readAgain, READ_MS);
  update();
}

async function readAgain() {
  const ids = [...stale].slice(0, MOST_IDS);
  stale = new Set([...stale].slice(MOST_IDS));
  try {
    const page = await get("/v1/warmd/runs", { id: ids });
    Object.assign(list.defaults, page.defaults);
    Object.assign(list.groups, page.groups);
    for (const run of page.data) byId.set(run.id, { ...run, seen: byId.get(run.id)?.seen });
  } catch {
    // Removed meanwhile, or the connection is lost: the list is loaded again with the next one.
  }
  timer = stale.size ? setTimeout(readAgain, READ_MS) : null;
  update();
}

function update() {
  list.runs = [...byId.values()].sort((a, b) => b.created_at - a.created_at);
  remember(Object.entries(list.groups).map(([id, name]) => ({ id, name })));
  label();
  watchers.forEach((watcher) => watcher());
}

// Gives each run its `label`, its name or id; its `legend`, which adds what was varied in its sweep; and its `text`, for
// searches.
function label() {
  const sweeps = Map.groupBy(list.runs.filter((run) => run.sweep), (run) => run.sweep);
  const varied = new Map([...sweeps].map(([id, runs]) => [id, differing(runs)]));
  for (const run of list.runs) {
    const values = (varied.get(run.sweep) ?? []).map((name) => `${name} ${optionText(optionOf(run, name))}`).join(", ");
    run.label = run.name ?? run.id;
    run.legend = run.name && values ? `${run.name}: ${values}` : values || run.label;
    run.text = [run.legend, run.id, run.model, run.kind, ...run.tags, list.groups[run.sweep], run.sweep].join(" ").toLowerCase();
  }
  remember(list.runs);
}

// The value of an option, also where it is the default; undefined for an option that the kind does not have.
export function optionOf(run, name) {
  return name in run.options ? run.options[name] : list.defaults[run.kind]?.[name];
}

// The options that differ between runs of the same kind; those with the most values first, seeds last.
export function differing(runs) {
  const found = new Map(); // name -> number of values
  for (const [kind, ones] of Map.groupBy(runs, (run) => run.kind)) {
    const set = new Map(); // name -> value -> number of runs
    for (const run of ones) {
      for (const [name, value] of Object.entries(run.options)) {
        const values = set.get(name) ?? new Map();
        values.set(String(value), (values.get(String(value)) ?? 0) + 1);
        set.set(name, values);
      }
    }
    for (const [name, values] of set) {
      const counted = [...values.values()].reduce((sum, count) => sum + count, 0);
      const number = values.size + (counted < ones.length ? 1 : 0); // the others have the default
      if (number > 1) found.set(name, Math.max(number, found.get(name) ?? 0));
    }
  }
  return [...found].sort(([a, m], [b, n]) => (a === "seed") - (b === "seed") || n - m).map(([name]) => name);
}
