// One evaluation question by question, side by side with another one on the same questions.

import { html, useEffect, useState } from "../parts/libraries.js";
import { get } from "../parts/api.js";
import { Heading, JobLink, Problem, Scroll } from "../parts/elements.js";
import { NOTHING, number, optionText } from "../parts/format.js";
import { dataName, keyOf, primaryOf } from "../parts/leaderboard.js";
import { useLoaded } from "../parts/loaded.js";
import { nameOf, useNames } from "../parts/names.js";
import { Pages } from "../parts/pages.js";

const PAGE = 50;
const CUT = 300; // characters of a prompt that are shown
const ONLY = { "": "all questions", different: "with another score", better: "better", worse: "worse" };

export function Questions({ id, against }) {
  const [detail, error] = useLoaded(() => get(`/v1/warmd/jobs/${id}`), [id]);
  const [page] = useLoaded(() => get("/v1/warmd/jobs", { kind: "eval", status: "finished", limit: 200 }), []);
  const job = detail?.job;
  const comparable = (page?.data ?? []).filter((one) => job?.result && one.result && one.id !== id && keyOf(one) === keyOf(job));
  const models = [job?.result?.model, ...comparable.map((one) => one.result.model)].filter(Boolean);
  useNames([...models, against].filter(Boolean));
  if (!job) return html`<${Heading}>${nameOf(id)}<//>${error ? html`<${Problem} error=${error} />` : html`<p>Loading …</p>`}`;
  const choose = (event) => {
    location.hash = event.target.value ? `#/evaluations/${id}?against=${event.target.value}` : `#/evaluations/${id}`;
  };
  return html`
    <${Heading}>${job.name ?? id}<//>
    ${job.result && html`<${Facts} job=${job} />`}
    <label class="inline">
      Compare with
      <select name="against" value=${against ?? ""} onChange=${choose}>
        <option value="">no other evaluation</option>
        ${against && !comparable.some((one) => one.id === against) && html`<option value=${against}>${nameOf(against)}</option>`}
        ${comparable.map((one) => html`<option key=${one.id} value=${one.id}>${titleOf(one)}</option>`)}
      </select>
    </label>
    <${Found} key=${against} id=${id} against=${against} label=${titleOf(job)} other=${comparable.find((one) => one.id === against)} />
  `;
}

function titleOf(job) {
  return `${job.name ?? job.id} (${nameOf(job.model)})`;
}

function Facts({ job }) {
  const { name, value, low, high, n } = primaryOf(job);
  return html`<p class="line">
    <span>model <strong>${nameOf(job.result.model)}</strong></span>
    <span>${dataName(job)}, task ${job.result.task}</span>
    <span>${name} <strong>${number(value)}</strong> (95 %: ${number(low)} to ${number(high)}, ${n} questions)</span>
    <${JobLink} id=${job.id} name="the job" />
  </p>`;
}

function Found({ id, against, label, other }) {
  const [filter, setFilter] = useState({ only: "", text: "", offset: 0 });
  const [state, setState] = useState({ page: null, error: null });
  useEffect(() => {
    let isGone = false;
    const query = { ...filter, against, limit: PAGE };
    get(`/v1/warmd/evaluations/${id}/questions`, query).then(
      (page) => !isGone && setState({ page, error: null }),
      (error) => !isGone && setState({ page: null, error }),
    );
    return () => {
      isGone = true;
    };
  }, [id, against, filter]);
  const { page, error } = state;
  const set = (changed) => setFilter({ ...filter, offset: 0, ...changed });
  return html`
    <form class="line toolbar" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label class="inline">Search <input type="search" name="text" value=${filter.text} onInput=${(event) => set({ text: event.target.value })} /></label>
      ${against &&
      html`<label class="inline">
        Show
        <select name="only" value=${filter.only} onChange=${(event) => set({ only: event.target.value })}>
          ${Object.entries(ONLY).map(([value, text]) => html`<option key=${value} value=${value}>${text}${countText(page, value)}</option>`)}
        </select>
      </label>`}
    </form>
    <${Problem} error=${error} />
    ${page?.comparison && html`<${Verdict} comparison=${page.comparison} />`}
    ${!page && !error && html`<p>Loading …</p>`}
    ${page && page.data.length === 0 && html`<p class="empty">${filter.text || filter.only ? "No question fits." : "No question is answered yet."}</p>`}
    ${page && page.data.length > 0 && html`<${Table} page=${page} label=${label} other=${against && (other ? titleOf(other) : nameOf(against))} />`}
    ${page && html`<${Pages} label="Pages of questions" first=${filter.offset} size=${PAGE} total=${page.total} go=${(offset) => setFilter({ ...filter, offset })} />`}
  `;
}

function countText(page, only) {
  if (!page || !only) return "";
  const counts = { better: page.better, worse: page.worse, different: page.better + page.worse };
  return ` (${counts[only]})`;
}

function Verdict({ comparison }) {
  const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));
  return html`<ul class="verdict">
    ${Object.entries(comparison).map(
      ([name, found]) => html`<li key=${name}>
        ${name} ${signed(found.difference)}${found.low !== null && ` (95 %: ${signed(found.low)} to ${signed(found.high)})`}: <strong>${found.words}</strong>
      </li>`,
    )}
  </ul>`;
}

function Table({ page, label, other }) {
  return html`<${Scroll} label="table of questions">
    <table class="stacked questions">
      <thead>
        <tr>
          <th scope="col">No.</th>
          <th scope="col">Question</th>
          <th scope="col">Expected</th>
          <th scope="col">${label}</th>
          ${other && html`<th scope="col">${other}</th><th scope="col" class="number">Difference</th>`}
        </tr>
      </thead>
      <tbody>
        ${page.data.map(
          ({ row, other: second, difference }) => html`<tr key=${row.row}>
            <th scope="row">${row.row}</th>
            <td><${Text} text=${textOf(row.prompt)} /></td>
            <td data-label="expected"><${Text} text=${textOf(row.answer)} /></td>
            <td data-label=${label}><${Answer} row=${row} /></td>
            ${other &&
            html`<td data-label=${other}>${second ? html`<${Answer} row=${second} />` : NOTHING}</td>
              <td class="number ${difference > 0 ? "better" : difference < 0 ? "worse" : ""}" data-label="difference">${difference > 0 ? "+" : ""}${number(difference)}</td>`}
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
}

function textOf(value) {
  return value === null || value === undefined ? NOTHING : typeof value === "string" ? value : optionText(value);
}

// A long text is folded to its end, where the question is.
function Text({ text }) {
  if (text.length <= CUT) return html`<pre>${text}</pre>`;
  return html`<pre>… ${text.slice(-CUT)}</pre><details><summary>whole, ${number(text.length)} characters</summary><pre>${text}</pre></details>`;
}

// The completions of a question; for tasks without them, the text that was chosen.
function Answer({ row }) {
  const scores = Object.entries(row.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const texts = (row.completions ?? []).map((one) => one.text ?? optionText(one));
  if (row.chosen !== undefined) texts.push(row.chosen);
  return html`${texts.map((text, index) => html`<pre key=${index}>${text}</pre>`)} <small>${scores}</small>`;
}
