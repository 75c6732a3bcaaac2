// The result of a run in a few figures: held-out evaluations before and after, the best one, the training's.

import { html } from "./libraries.js";
import { get } from "./api.js";
import { duration, number, tookOf } from "./format.js";
import { wordsOf } from "./metric_words.js";
import { isPending } from "./overview.js";
import { Term } from "./term.js";
import { useLoaded } from "./loaded.js";

// The metrics by which runs of a kind are judged, the first one before all.
const JUDGED_BY = {
  grpo: ["reward"],
  sft: ["loss", "mean_token_accuracy"],
  dpo: ["rewards/accuracies", "loss"],
  mlm: ["mlm_acc", "mnm_acc", "mlm_loss", "mnm_loss"],
};
const TRAINED_BY = { grpo: "reward" }; // by default the loss
const TENTHS = 10; // stretches of a run, of which the first and the last one are compared

// `events` are those of the job without its steps, or null while they are loaded.
export function RunResult({ job, events }) {
  const evaluations = (events ?? []).filter((event) => event.type === "eval" && event.step !== null);
  const judged = JUDGED_BY[job.kind] ?? [];
  return html`<dl class="tiles">
    ${judged.map((name) => html`<${HeldOut} key=${name} name=${name} evaluations=${evaluations} />`)}
    <${Training} job=${job} />
    <${Time} job=${job} />
  </dl>`;
}

function Tile({ word, about, children }) {
  return html`<div>
    <dt><${Term} word=${word} about=${about} /></dt>
    <dd>${children}</dd>
  </div>`;
}

function HeldOut({ name, evaluations }) {
  const found = evaluations.filter((one) => Number.isFinite(one[name]));
  if (found.length === 0) return null;
  const [first, last] = [found[0], found.at(-1)];
  const isLess = name.endsWith("loss");
  const best = found.reduce((a, b) => ((isLess ? b[name] < a[name] : b[name] > a[name]) ? b : a));
  return html`<${Tile} word=${`held-out ${name}`} about=${wordsOf(name)}>
    <strong>${found.length === 1 ? number(first[name]) : `${number(first[name])} → ${number(last[name])}`}</strong>
    <small>${verdict(name, first, last, isLess)}</small>
    ${found.length > 2 &&
    html`<small>best ${best === last ? "of all: the latest" : `${number(best[name])} at step ${best.step}`}</small>`}
  <//>`;
}

// In words whether the last evaluation is better than the first one, as far as their intervals tell.
export function verdict(name, first, last, isLess = false) {
  const asked = `n = ${number(last.n)}`;
  if (first === last) return `${first.step === 0 ? "before the training" : `step ${first.step}`}, ${asked}`;
  const [before, after] = [first.intervals?.[name], last.intervals?.[name]];
  const change = last[name] - first[name];
  const signed = `${change > 0 ? "+" : ""}${number(change)}`;
  if (!before || !after) return `${signed}, ${asked}`;
  const shown = ([low, high]) => `${number(round(low))} to ${number(round(high))}`;
  const isApart = before[1] < after[0] || after[1] < before[0];
  const word = isApart ? (change > 0 !== isLess ? "better" : "worse") : "undecided";
  return `${signed}, ${word}: 95 % intervals ${shown(before)} and ${shown(after)}, ${asked}`;
}

function round(value) {
  return Number(value.toPrecision(2));
}

// A noisy curve is judged by its first and its last tenth.
function Training({ job }) {
  const tenth = job.steps_total ? Math.floor((TENTHS * job.step) / job.steps_total) : job.step;
  const [curves] = useLoaded(
    () => get(`/v1/warmd/jobs/${job.id}/curves`, { points: TENTHS }),
    [job.id, job.status, job.execution, tenth],
  );
  const name = TRAINED_BY[job.kind] ?? "loss";
  const found = ["success", name].filter((one) => curves?.metrics[one]);
  return found.map((one) => {
    const values = curves.metrics[one].mean.filter((value) => value !== null);
    return html`<${Tile} key=${one} word=${`training ${one}`} about=${wordsOf(one)}>
      <strong>${values.length === 1 ? number(values[0]) : `${number(values[0])} → ${number(values.at(-1))}`}</strong>
      <small>${values.length === 1 ? "" : isPending(job) ? "first steps and latest steps" : "first and last tenth of the steps"}</small>
    <//>`;
  });
}

function Time({ job }) {
  if (!job.started_at) return null;
  return html`<${Tile} word=${isPending(job) ? "running for" : "took"}>
    <strong>${duration(tookOf(job))}</strong>
    <small>
      ${job.seconds_per_step && `${duration(job.seconds_per_step)} per step`}
      ${job.execution > 1 && `, ${job.execution} executions`}
    </small>
  <//>`;
}
