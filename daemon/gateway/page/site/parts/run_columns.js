// The columns of the table of runs: how a run is sorted by them, and what its cell shows.

import { html } from "./libraries.js";
import { GroupLink, Progress, Status, Tags, tagsOf } from "./elements.js";
import { clock, duration, NOTHING, number, optionText, progressOf, statusOf, tookOf } from "./format.js";
import { differing, optionOf } from "./run_list.js";

const MOST_OPTIONS = 4; // that are shown without a choice
// Metrics that are shown without a choice, the first ones that a run has.
export const MAIN = ["eval_reward", "reward", "eval_loss", "loss"];
const MOST_MAIN = 2; // of each run

const FIXED = [
  { key: "status", title: "Status", value: statusOf, cell: (run) => html`<${Status} job=${run} /> ${run.status === "started" && html`<${Progress} job=${run} />`}` },
  { key: "kind", title: "Kind", value: (run) => run.kind },
  { key: "model", title: "Model", value: (run) => run.model },
  { key: "tags", title: "Tags", value: (run) => tagsOf(run).join(" ") || null, cell: (run) => html`<${Tags} job=${run} />` },
  { key: "sweep", title: "Sweep", value: (run) => run.sweep ?? run.curriculum, cell: (run) => html`<${GroupLink} id=${run.sweep ?? run.curriculum} />` },
  { key: "steps", title: "Steps", isNumber: true, value: (run) => progressOf(run)?.[0] ?? null },
  { key: "took", title: "Took", isNumber: true, value: tookOf, text: duration },
  { key: "created", title: "Created", isNumber: true, value: (run) => run.created_at, text: clock },
  { key: "user", title: "By", value: (run) => run.submitted_by },
  { key: "error", title: "Error", value: (run) => run.error },
];

// The columns that there are for these runs, by key: fixed ones, options, and metrics.
export function columnsOf(runs, defaults) {
  const metrics = new Map(); // name -> whether it judges a run
  for (const run of runs) {
    for (const name in run.metrics) metrics.set(name, metrics.get(name) || run.metrics[name].best !== undefined);
  }
  const kinds = new Set(runs.map((run) => run.kind));
  const options = new Set([...kinds].flatMap((kind) => Object.keys(defaults[kind] ?? {})));
  const found = FIXED.map((column) => ({ group: "Run", ...column }));
  for (const name of options) found.push(optionColumn(name));
  for (const [name, isJudge] of [...metrics].sort(([a], [b]) => rank(a) - rank(b))) {
    found.push(metricColumn(name, "last"));
    if (isJudge) found.push(metricColumn(name, "best"));
  }
  return new Map(found.map((column) => [column.key, column]));
}

function rank(name) {
  const at = MAIN.indexOf(name);
  return at < 0 ? MAIN.length : at;
}

function optionColumn(name) {
  const value = (run) => {
    const found = optionOf(run, name);
    return typeof found === "number" ? found : found === undefined || found === null ? null : optionText(found);
  };
  return { key: `option.${name}`, option: name, group: "Other options", title: name, isNumber: true, value, text: shortText };
}

// A path by its last part: data sets differ there.
function shortText(value) {
  return typeof value === "string" && /^\S*\/\S+$/.test(value) ? `…/${value.split("/").at(-1)}` : optionText(value);
}

function metricColumn(name, which) {
  const value = (run) => run.metrics[name]?.[which] ?? null;
  const column = { key: `${which}.${name}`, group: which === "last" ? "Metrics, last value" : "Metrics, best value", isNumber: true, value };
  if (which === "best") return { ...column, title: `${name}, best` };
  return { ...column, title: name, cell: (run) => withInterval(run.metrics[name]) };
}

// A value with its 95 % interval, if it is known.
function withInterval(metric) {
  if (!metric) return NOTHING;
  const interval = metric.low !== undefined && html` <small title="95 % interval">${short(metric.low)} – ${short(metric.high)}</small>`;
  return html`${number(metric.last)}${interval}`;
}

function mainOf(run) {
  return MAIN.filter((name) => name in run.metrics).slice(0, MOST_MAIN);
}

function short(value) {
  return number(Number(value.toPrecision(3)));
}

// The columns that are shown without a choice of the user.
export function automatic(runs) {
  const main = new Set(runs.flatMap(mainOf));
  const metrics = MAIN.filter((name) => main.has(name));
  const best = metrics.slice(0, 1).map((name) => `best.${name}`);
  const options = differing(runs).slice(0, MOST_OPTIONS).map((name) => `option.${name}`);
  const varied = ["kind", "model", "tags"].filter((key) => new Set(runs.map((run) => String(run[key]))).size > 1);
  return ["status", ...varied, ...options, ...metrics.map((name) => `last.${name}`), ...best, "took", "created"];
}

export function cellOf(column, run) {
  if (column.cell) return column.cell(run);
  const value = column.value(run);
  if (value === null || value === undefined) return NOTHING;
  return column.text ? column.text(value) : number(value);
}

// What a cell shows of several runs: their value where it is the same, else the range of numbers or how many there are.
export function summaryOf(column, runs) {
  const values = [...new Set(runs.map(column.value))].filter((value) => value !== null && value !== undefined);
  if (values.length === 0) return NOTHING;
  const text = column.text ?? number;
  if (values.length === 1) return text(values[0]);
  if (values.some((value) => typeof value !== "number")) return `${values.length} values`;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return `${text(low)} – ${text(high)}`;
}

// Compares two runs by a column; runs without a value come last in both directions.
export function ordered(runs, column, isDescending) {
  const sign = isDescending ? -1 : 1;
  const keyed = runs.map((run) => [column.value(run) ?? null, run]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === typeof b) return a < b ? -sign : a > b ? sign : 0;
    return typeof a === "number" ? -sign : sign;
  });
  return keyed.map(([, run]) => run);
}
