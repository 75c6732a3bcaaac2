// Completions that a step was trained on, with the parts of their rewards.

import { html, useEffect, useState } from "../parts/libraries.js";
import { get } from "../parts/api.js";
import { Problem } from "../parts/elements.js";
import { useEvents } from "../parts/events.js";
import { number } from "../parts/format.js";
import { isPending } from "../parts/overview.js";

export function Completions({ job }) {
  const [step, setStep] = useState(null); // null: the latest
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [events] = useEvents(job.id, !isPending(job));
  const latest = (events ?? []).findLast((event) => event.samples?.length);
  useEffect(() => {
    get(`/v1/warmd/jobs/${job.id}/completions`, { step }).then(
      (page) => {
        setFound(page);
        setError(null);
      },
      setError,
    );
  }, [job.id, step]);

  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<p>Loading …</p>`;
  if (found.step === null) return html`<p class="empty">No completions are logged.</p>`;
  const isLive = step === null && latest && latest.step > found.step;
  const shown = isLive ? latest : found;
  const previous = isLive ? found.step : found.previous_step;
  return html`
    <div class="line">
      <h2>Step ${shown.step}</h2>
      <span class="buttons">
        <button type="button" class="small" disabled=${previous === null} onClick=${() => setStep(previous)}>
          Earlier step
        </button>
        <button type="button" class="small" disabled=${step === null || found.next_step === null} onClick=${() => setStep(found.next_step)}>
          Later step
        </button>
        ${step !== null && html`<button type="button" class="small" onClick=${() => setStep(null)}>Latest</button>`}
      </span>
    </div>
    <ul class="cards">
      ${shown.samples.map((sample, index) => html`<${Sample} key=${index} sample=${sample} />`)}
    </ul>
  `;
}

// Texts of a model are shown as text, whatever they contain.
function Sample({ sample }) {
  const { prompt, completion, answer, rewards, reward, advantage, tokens, stop } = sample;
  const parts = Object.entries(rewards ?? {});
  return html`<li>
    <dl class="sample">
      <dt>Prompt</dt>
      <dd><pre>${prompt}</pre></dd>
      ${answer != null && html`<dt>Answer</dt><dd><pre>${answer}</pre></dd>`}
      <dt>Completion</dt>
      <dd><pre>${completion}</pre></dd>
      <dt>Reward</dt>
      <dd class="line">
        ${reward != null && parts.length > 1 && html`<strong>${number(reward)}</strong>`}
        ${parts.map(([name, value]) => html`<span key=${name}>${name} <strong>${number(value)}</strong></span>`)}
        ${advantage != null && html`<span>advantage <strong>${number(advantage)}</strong></span>`}
        ${tokens != null && html`<span>${tokens} tokens${stop === "length" ? ", cut at the length" : ""}</span>`}
      </dd>
    </dl>
  </li>`;
}
