// One job: its state and actions, and sections with all its data.

import { html, useState } from "../parts/libraries.js";
import { actionsOf } from "../parts/actions.js";
import { get, getText } from "../parts/api.js";
import { ActionButtons } from "../parts/buttons.js";
import { Chart, smoothed } from "../parts/chart.js";
import { commandOf, isSame } from "../parts/command.js";
import { useCurves } from "../parts/curves.js";
import { Download } from "../parts/download.js";
import { useEvents } from "../parts/events.js";
import { Copy, Eta, GroupLink, Heading, Labels, Problem, Progress, Scroll, Status, WaitsFor } from "../parts/elements.js";
import { clock, duration, NOTHING, now, number, optionText, size } from "../parts/format.js";
import { useLoaded } from "../parts/loaded.js";
import { isPending, useOverview } from "../parts/overview.js";
import { Completions } from "./completions.js";

const SECTIONS = ["curves", "completions", "checkpoints", "options", "events", "log"];
const FIRST = ["loss", "reward", "eval_reward", "reward_std", "grad_norm", "learning_rate"];

export function Job({ id, section = "curves" }) {
  const overview = useOverview();
  const live = overview.jobs.get(id);
  const causes = [id, overview.connection, live?.status, live?.execution];
  const [detail, error] = useLoaded(() => get(`/v1/warmd/jobs/${id}`), causes);
  const job = live ?? detail?.job;

  if (error) return html`<${Heading}>${id}<//><${Problem} error=${error} />`;
  if (!job || !detail) return html`<${Heading}>${id}<//><p>Loading …</p>`;
  return html`
    <${Heading}>${id}<//>
    <${State} job=${job} isReadOnly=${!overview.may.includes("train")} />
    <${Sections} id=${id} current=${section} />
    <${Section} key=${section} name=${section} job=${job} detail=${detail} />
  `;
}

function State({ job, isReadOnly }) {
  return html`<div class="card">
    <div class="line">
      <${Status} job=${job} /> <${Labels} job=${job} /> <${Progress} job=${job} /> <${Eta} job=${job} />
      ${job.position && html`<span>position ${job.position} in ${job.queue}</span>`} <${WaitsFor} job=${job} />
      ${!isReadOnly && html`<${ActionButtons} id=${job.id} actions=${actionsOf(job)} />`}
    </div>
    ${job.error && html`<p class="problem">${job.error}</p>`}
    ${job.alert && isPending(job) && html`<p class="problem">${job.alert}</p>`}
    <p class="line quiet">
      <span>model ${job.model ?? NOTHING}</span> <${GroupLink} id=${job.sweep ?? job.curriculum} />
      <span>created ${clock(job.created_at)}</span>
      ${job.started_at && html`<span>took ${duration((job.ended_at ?? now()) - job.started_at)}</span>`}
      ${job.seconds_per_step && html`<span>${duration(job.seconds_per_step)} per step</span>`}
      ${job.execution > 1 && html`<span>${job.execution} executions</span>`}
    </p>
    ${job.notes.map((note, index) => html`<p class="quiet" key=${index}>${note.text}</p>`)}
    ${job.result && html`<${Result} job=${job} />`}
  </div>`;
}

function Result({ job }) {
  const texts = (job.result.choices ?? []).map((choice) => choice.text);
  const numbers = Object.entries(job.result).filter(([, value]) => typeof value === "number");
  return html`
    ${texts.map((text, index) => html`<pre key=${index}>${text}</pre>`)}
    <p class="line">
      ${numbers.map(([name, value]) => html`<span key=${name}>${name.replaceAll("_", " ")} <strong>${number(value)}</strong></span>`)}
    </p>
    ${job.result.model &&
    html`<p class="line">
      <a href="#/chat?model=${job.id}">Chat with the trained model</a>
      <a href="#/compare?model=${job.model}&model=${job.id}">Compare it with ${job.model}</a>
    </p>`}
  `;
}

function Sections({ id, current }) {
  return html`<nav class="sections" aria-label="Sections of the job">
    ${SECTIONS.map(
      (name) => html`<a key=${name} href="#/jobs/${id}/${name}" aria-current=${name === current ? "page" : undefined}>${name}</a>`,
    )}
  </nav>`;
}

function Section({ name, job, detail }) {
  if (name === "completions") return html`<${Completions} job=${job} />`;
  if (name === "checkpoints") return html`<${Checkpoints} job=${job} />`;
  if (name === "options") return html`<${Options} job=${job} detail=${detail} />`;
  if (name === "events") return html`<${Events} job=${job} />`;
  if (name === "log") return html`<${Log} job=${job} />`;
  return html`<${Curves} job=${job} />`;
}

// --- curves ---------------------------------------------------------------------------------------

function Curves({ job }) {
  const [range, setRange] = useState(null);
  const [axis, setAxis] = useState("steps");
  const [span, setSpan] = useState(1);
  const [isLog, setLog] = useState(false);
  const { curves, error } = useCurves(job.id, range, !isPending(job));
  if (error) return html`<${Problem} error=${error} />`;
  if (!curves) return html`<p>Loading …</p>`;
  const names = Object.keys(curves.metrics).sort((a, b) => rank(a) - rank(b));
  if (names.length === 0) return html`<p class="empty">No step has ended yet.</p>`;
  const x = axis === "tokens" ? curves.tokens.map((value) => value ?? 0) : curves[axis];

  function zoom(from, to) {
    if (from === null) return setRange(null);
    const inside = curves.steps.filter((_, index) => x[index] >= from && x[index] <= to);
    return inside.length > 1 && setRange([inside[0], inside.at(-1)]);
  }

  return html`
    <form class="line" aria-label="How the curves are drawn" onSubmit=${(event) => event.preventDefault()}>
      <label class="inline">
        Over
        <select value=${axis} onChange=${(event) => setAxis(event.target.value)}>
          <option>steps</option>
          <option value="times">time</option>
          <option>tokens</option>
        </select>
      </label>
      <label class="inline">
        Smooth
        <input type="range" min="1" max="50" value=${span} onInput=${(event) => setSpan(Number(event.target.value))} />
        <span class="count">${span === 1 ? "off" : span}</span>
      </label>
      <label class="inline"><input type="checkbox" checked=${isLog} onChange=${(event) => setLog(event.target.checked)} /> Logarithmic</label>
      ${range
        ? html`<button type="button" class="small" onClick=${() => setRange(null)}>All steps</button>`
        : html`<span class="quiet">drag over a chart to zoom</span>`}
    </form>
    <div class="charts">
      ${names.map((name) => {
        const { mean } = curves.metrics[name];
        const isSmooth = span > 1 && !name.startsWith("eval_");
        const line = { label: name, values: isSmooth ? smoothed(mean, span) : mean, raw: isSmooth ? mean : null };
        return html`<${Chart} key=${name} title=${name} x=${x} isTime=${axis === "times"} isLog=${isLog} series=${[line]} onZoom=${zoom} />`;
      })}
    </div>
  `;
}

function rank(name) {
  const at = FIRST.indexOf(name);
  return at < 0 ? FIRST.length : at;
}

// --- checkpoints ----------------------------------------------------------------------------------

function Checkpoints({ job }) {
  const [events] = useEvents(job.id, !isPending(job));
  const saved = (events ?? []).filter((event) => event.type === "checkpoint").length;
  const [found, error] = useLoaded(() => get(`/v1/warmd/jobs/${job.id}/checkpoints`), [job.id, saved]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<p>Loading …</p>`;
  if (found.data.length === 0) return html`<p class="empty">No checkpoint yet.</p>`;
  return html`<${Scroll} label="table of checkpoints">
    <table>
      <thead>
        <tr><th scope="col">Step</th><th scope="col">Saved</th><th scope="col">Size</th><th scope="col">State</th><th scope="col">Metrics</th></tr>
      </thead>
      <tbody>
        ${found.data.map(
          (one) => html`<tr key=${one.step}>
            <th scope="row">${one.step}${one.is_best ? " (best)" : ""}</th>
            <td>${clock(one.saved_at)}</td>
            <td>${size(one.bytes)}</td>
            <td>${one.error ? "damaged" : "whole"}</td>
            <td>${one.error ?? metricsText(one.metrics)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

function metricsText(metrics) {
  const numbers = Object.entries(metrics).filter(([, value]) => typeof value === "number");
  return numbers.slice(0, 4).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

// --- options --------------------------------------------------------------------------------------

function Options({ job, detail }) {
  const [kinds, error] = useLoaded(() => get("/v1/warmd/kinds"), []);
  if (error) return html`<${Problem} error=${error} />`;
  if (!kinds) return html`<p>Loading …</p>`;
  const kind = kinds.data.find((one) => one.kind === job.kind);
  const known = new Map((kind?.options ?? []).map((option) => [option.name, option]));
  const defaults = kind?.defaults ?? {};
  const command = commandOf(job.kind, defaults, detail.options);
  const differs = (name, value) => name in defaults && !isSame(value, defaults[name]);
  const rows = Object.entries(detail.options).sort(([a, x], [b, y]) => differs(b, y) - differs(a, x));
  return html`
    <div class="card">
      <pre>${command}</pre>
      <p class="buttons">
        <${Copy} text=${command} label="Copy as command" />
        ${kind && html`<a href="#/submit?job=${job.id}">Start a new job from these options</a>`}
      </p>
    </div>
    <${Revisions} revisions=${detail.revisions} />
    <h2>Options</h2>
    <p class="quiet">Marked: different from the default.</p>
    <${Scroll} label="table of options">
      <table class="stacked">
        <thead><tr><th scope="col">Option</th><th scope="col">Value</th><th scope="col">Default</th></tr></thead>
        <tbody>
          ${rows.map(
            ([name, value]) => html`<tr key=${name}>
              <th scope="row">${name}</th>
              <td class=${differs(name, value) ? "different" : ""}><pre>${optionText(value)}</pre></td>
              <td class="quiet">${name in defaults ? (known.get(name)?.default_text ?? optionText(defaults[name])) : ""}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
    ${detail.weights &&
    html`<h2>Initial weights</h2>
      <dl class="facts">
        ${Object.entries(detail.weights).map(([name, value]) => html`<dt>${name}</dt><dd>${optionText(value)}</dd>`)}
      </dl>`}
  `;
}

function Revisions({ revisions }) {
  if (revisions.length === 0) return null;
  return html`<h2>Changes on resume</h2>
    <ul>
      ${revisions.map(
        (one) => html`<li key=${one.revision}>
          ${clock(one.time)}: ${Object.entries(one.changes).map(([name, [before, after]]) => `${name} ${optionText(before)} → ${optionText(after)}`).join(", ")}
        </li>`,
      )}
    </ul>`;
}

// --- events and log -------------------------------------------------------------------------------

function Events({ job }) {
  const [isWithSteps, setWithSteps] = useState(false);
  const [events, error] = useEvents(job.id, !isPending(job));
  if (error) return html`<${Problem} error=${error} />`;
  if (!events) return html`<p>Loading …</p>`;
  const wanted = events.filter((event) => isWithSteps || !["step", "text"].includes(event.type));
  const shown = wanted.slice(-200);
  return html`
    <p><label class="inline"><input type="checkbox" checked=${isWithSteps} onChange=${(event) => setWithSteps(event.target.checked)} /> Steps, too</label></p>
    <${Scroll} label="table of events">
      <table class="stacked">
        <thead><tr><th scope="col">Time</th><th scope="col">Event</th><th scope="col">Step</th><th scope="col">Details</th></tr></thead>
        <tbody>
          ${shown.reverse().map(
            (event) => html`<tr key=${event.seq}>
              <td class="time">${new Date(event.time * 1000).toLocaleTimeString()}</td>
              <th scope="row">${event.type}</th>
              <td>${event.step ?? NOTHING}</td>
              <td>${detailsOf(event)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
  `;
}

const ENVELOPE = ["seq", "execution", "time", "type", "step", "samples", "steps_total"];

function detailsOf(event) {
  const fields = Object.entries(event).filter(([name, value]) => !ENVELOPE.includes(name) && value !== null);
  const text = fields.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : optionText(value)}`).join(", ");
  return text.length > 600 ? `${text.slice(0, 600)} …` : text;
}

function Log({ job }) {
  const [text, error] = useLoaded(() => getText(`/v1/warmd/jobs/${job.id}/log`), [job.id, job.status]);
  if (error) return html`<${Problem} error=${error} />`;
  if (text === null) return html`<p>Loading …</p>`;
  if (!text) return html`<p class="empty">The log is empty.</p>`;
  return html`
    <p><${Download} path=${`/v1/warmd/jobs/${job.id}/log`} name=${`${job.id}.txt`} label="Download" /></p>
    <pre class="card" tabindex="0">${text}</pre>
  `;
}
