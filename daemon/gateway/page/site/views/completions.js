// Completions and episodes that a job was trained on: by prompt or sorted by reward, of any step that is kept.

import { html, useEffect, useMemo, useRef, useState } from "../parts/libraries.js";
import { get, url } from "../parts/api.js";
import { groupsOf, mean, Prompts, Sorted } from "../parts/completion_table.js";
import { Problem } from "../parts/elements.js";
import { number } from "../parts/format.js";
import { useLoaded } from "../parts/loaded.js";

const FOUND = 1000; // completions of a search in all steps, the latest ones
const FOLLOW_MS = 2000; // between two reads of the latest step of a running job
const ORDERS = { prompt: "by prompt", worst: "lowest reward first", best: "highest reward first" };

// `query`, of the address: `step`, else the latest one; or `row` or `text`, in all steps.
export function Completions({ job, query }) {
  const [step, row, text] = ["step", "row", "text"].map((name) => query.get(name));
  const isOfAllSteps = row !== null || text !== null;
  const latest = useLatestStep(job, step === null && !isOfAllSteps);
  const [found, error] = useLoaded(
    async () => {
      const asked = { step, row, text, limit: isOfAllSteps ? FOUND : null };
      return { ...(await get(`/v1/warmd/jobs/${job.id}/completions`, asked)), row, text };
    },
    [job.id, step, row, text, latest],
  );
  const [filter, setFilter] = useState({ order: "prompt", least: "", most: "", words: text ?? "" });
  const shown = useMemo(() => (found ? found.samples.filter((one) => isWanted(one, filter)) : []), [found, filter]);

  const { order, words } = filter;
  // The same table while the next step is read: it is not drawn twice.
  const table = useMemo(() => {
    if (!found) return null;
    const isOfAllSteps = found.step === null;
    return order === "prompt"
      ? html`<${Prompts} key=${title(found)} job=${job} samples=${shown} isOfAllSteps=${isOfAllSteps} words=${words} />`
      : html`<${Sorted} samples=${shown} isBestFirst=${order === "best"} isOfAllSteps=${isOfAllSteps} words=${words} />`;
  }, [found, shown, order, words]);

  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<p>Loading …</p>`;
  if (found.steps.length === 0) return html`<p class="empty">No completions are kept yet.</p>`;
  const go = (asked) => {
    location.hash = url(`#/jobs/${job.id}/completions`, asked);
  };
  return html`
    <${Bar} found=${found} step=${step} filter=${filter} setFilter=${setFilter} go=${go} />
    <p role="status">
      ${title(found)}: ${summary(shown, found.samples.length)}
      ${found.step === null && html` <a href="#/jobs/${job.id}/completions">Back to the latest step</a>`}
    </p>
    ${table}
  `;
}

// The step of a running job, some time later: the latest completions are not read more often.
function useLatestStep(job, isFollowed) {
  const [step, setStep] = useState(job.step);
  const latest = useRef({ step, timer: null });
  latest.current.step = job.step;
  useEffect(() => {
    const { current } = latest;
    if (!isFollowed || job.step === step || current.timer !== null) return;
    current.timer = setTimeout(() => {
      current.timer = null;
      setStep(current.step);
    }, FOLLOW_MS);
  }, [isFollowed, job.step, step]);
  useEffect(() => () => clearTimeout(latest.current.timer), []);
  return isFollowed ? step : null;
}

function isWanted({ reward, prompt, completion }, { least, most, words }) {
  if (least !== "" && !(reward >= Number(least))) return false;
  if (most !== "" && !(reward !== null && reward <= Number(most))) return false;
  const wanted = words.toLowerCase();
  return !wanted || `${prompt}\n${completion}`.toLowerCase().includes(wanted);
}

function title({ step, row, text }) {
  if (text !== null) return `“${text}” in all steps that are kept`;
  return row !== null ? `Row ${row} of the data in all steps that are kept` : `Step ${step}`;
}

function summary(samples, all) {
  const prompts = groupsOf(samples).length;
  const counted = samples.length === all ? `${number(all)}` : `${number(samples.length)} of ${number(all)}`;
  const reward = mean(samples.map((one) => one.reward));
  const cut = samples.filter((one) => one.stop === "length").length;
  const noun = samples[0]?.turns ? "episodes" : "completions";
  const texts = [`${counted} ${noun} of ${number(prompts)} ${noun === "episodes" ? "tasks" : "prompts"}`];
  if (reward !== null) texts.push(`mean reward ${number(reward)}`);
  if (cut > 0) texts.push(`${number(cut)} cut at the maximum length`);
  return texts.join(", ");
}

function Bar({ found, step, filter, setFilter, go }) {
  const isOfAllSteps = found.step === null;
  const change = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  const at = found.steps.indexOf(found.step);
  const move = (by) => go({ step: found.steps[at + by] });

  function search(event) {
    event.preventDefault();
    if (filter.words) go({ text: filter.words });
  }

  return html`<form class="line chooser" aria-label="Which completions are shown" onSubmit=${search}>
    <label class="inline">
      Step
      <select name="step" value=${isOfAllSteps ? "all" : (step ?? "")} onChange=${(event) => event.target.value !== "all" && go({ step: event.target.value })}>
        ${isOfAllSteps && html`<option value="all">all</option>`}
        <option value="">latest (${found.steps.at(-1)})</option>
        ${found.steps.toReversed().map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>
    </label>
    ${!isOfAllSteps &&
    html`<span class="buttons">
      <button type="button" class="small" aria-label="Earlier step" disabled=${at <= 0} onClick=${() => move(-1)}>Earlier</button>
      <button type="button" class="small" aria-label="Later step" disabled=${at === found.steps.length - 1} onClick=${() => move(1)}>Later</button>
    </span>`}
    <label class="inline">
      Order
      <select name="order" value=${filter.order} onChange=${change("order")}>
        ${Object.entries(ORDERS).map(([name, words]) => html`<option key=${name} value=${name}>${words}</option>`)}
      </select>
    </label>
    <span class="inline range" role="group" aria-label="Range of rewards">
      <label class="inline">Reward <input type="number" step="any" name="least" value=${filter.least} onInput=${change("least")} /></label>
      <label class="inline">to <input type="number" step="any" name="most" value=${filter.most} onInput=${change("most")} /></label>
    </span>
    <label class="inline">Search <input type="search" name="words" value=${filter.words} onInput=${change("words")} /></label>
    <button class="small" disabled=${!filter.words}>Search all steps</button>
  </form>`;
}
