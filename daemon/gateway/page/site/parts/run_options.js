// The options of a job: what was given, the values in effect, and the command that submits the same.

import { html } from "./libraries.js";
import { get } from "./api.js";
import { commandOf, isSame } from "./command.js";
import { Copy, Problem, Scroll } from "./elements.js";
import { clock, optionText } from "./format.js";
import { useLoaded } from "./loaded.js";
import { Term } from "./term.js";

// `begin` is the event with which the latest execution began: it has the values that were chosen for
// options without one. null: it has not begun.
export function RunOptions({ job, detail, begin }) {
  const [kinds, error] = useLoaded(() => get("/v1/warmd/kinds"), []);
  if (error) return html`<${Problem} error=${error} />`;
  if (!kinds) return html`<p>Loading …</p>`;
  const kind = kinds.data.find((one) => one.kind === job.kind);
  const known = new Map((kind?.options ?? []).map((option) => [option.name, option]));
  const defaults = kind?.defaults ?? {};
  const command = commandOf(job.kind, defaults, detail.options);
  const rows = Object.entries(detail.options).map(([name, value]) => ({
    name,
    value,
    isGiven: name in defaults && !isSame(value, defaults[name]),
    chosen: isEmpty(value) && !isEmpty(begin?.[name]) && typeof begin[name] !== "object" ? begin[name] : null,
    about: known.get(name),
    hasDefault: name in defaults,
    defaultText: known.get(name)?.default_text ?? valueText(defaults[name]),
  }));
  const others = rows.filter((row) => !isTelling(row));
  return html`
    <div class="card">
      <pre>${command}</pre>
      <p class="buttons">
        <${Copy} text=${command} label="Copy as command" />
        ${kind && html`<a href="#/submit?job=${job.id}">Start a new job from these options</a>`}
      </p>
    </div>
    ${begin?.first_prompt != null &&
    html`<h2>First prompt</h2>
      <p class="quiet">As the model gets it.</p>
      <pre class="card">${begin.first_prompt}</pre>`}
    <${Revisions} revisions=${detail.revisions} />
    <h2>Options</h2>
    <p class="quiet">Marked: different from the default. Chosen: by warmd, because no value was given.</p>
    <${Table} label="table of options" rows=${rows.filter(isTelling)} />
    <details>
      <summary>${others.length} options that are as by default</summary>
      <${Table} label="table of options that are as by default" rows=${others} />
    </details>
    ${detail.weights &&
    html`<h2>Initial weights</h2>
      <dl class="facts">
        ${Object.entries(detail.weights).map(([name, value]) => html`<dt>${name}</dt><dd>${optionText(value)}</dd>`)}
      </dl>`}
  `;
}

function isEmpty(value) {
  return value === null || value === undefined || (Array.isArray(value) && value.length === 0);
}

function valueText(value) {
  return isEmpty(value) ? "not set" : optionText(value);
}

// Of kinds that the page cannot submit it knows no defaults: what is set tells something.
function isTelling({ value, isGiven, chosen, hasDefault }) {
  return isGiven || chosen !== null || (!hasDefault && !isEmpty(value));
}

function Table({ label, rows }) {
  return html`<${Scroll} label=${label}>
    <table class="stacked">
      <thead><tr><th scope="col">Option</th><th scope="col">Value</th><th scope="col">Default</th></tr></thead>
      <tbody>
        ${rows.map(
          ({ name, value, isGiven, chosen, about, hasDefault, defaultText }) => html`<tr key=${name}>
            <th scope="row"><${Term} word=${name} about=${about?.help} /></th>
            <td class=${isGiven ? "different" : ""}>
              <pre>${valueText(chosen ?? value)}</pre>
              ${chosen !== null && html`<small>chosen</small>`}
            </td>
            <td class="quiet">${hasDefault ? defaultText : ""}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  <//>`;
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
