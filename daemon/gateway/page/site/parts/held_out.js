// The evaluation that belongs to a training: on records that are held out, or on a file of their own.

import { html } from "./libraries.js";
import { size } from "./format.js";

const SHARE = 10; // one in so many records is held out, if nobody says another number
const MOST = 64;
const BUILTIN = 16; // of problems that are made, of which there are enough

export const HELD_OUT = { isOn: true, samples: "", file: "" };

// How many records are held out where the form does not say.
export function usualNumber(rows) {
  return rows === undefined ? BUILTIN : Math.min(MOST, Math.floor(rows / SHARE));
}

// The part of a request that asks for the evaluation: {eval_samples, validation_file}, as they are needed.
export function evaluationOf({ isOn, samples, file }, rows) {
  if (!isOn) return { eval_samples: "0" };
  if (file) return { eval_samples: samples, validation_file: file };
  return { eval_samples: samples || String(usualNumber(rows)) };
}

export function HeldOut({ kind, files, rows, value, problems, onChange }) {
  const change = (changed) => onChange({ ...value, ...changed });
  const problem = problems.eval_samples ?? problems.validation_file;
  const usual = value.file ? "all" : String(usualNumber(rows));
  return html`
    <label class="inline">
      <input type="checkbox" name="evaluate" checked=${value.isOn} onChange=${(event) => change({ isOn: event.target.checked })} />
      <span>Measure before and after the training, on records that it does not learn</span>
    </label>
    ${value.isOn &&
    html`<div class="fields">
      <label>
        records
        <input name="eval_samples" inputmode="numeric" placeholder=${usual} value=${value.samples} aria-invalid=${problem ? "true" : undefined}
          onInput=${(event) => change({ samples: event.target.value.trim() })} />
        ${problem && html`<small class="problem">${problem.text}</small>`}
      </label>
      ${kind.validation &&
      html`<label>
        from
        <select name="validation" value=${value.file} onChange=${(event) => change({ file: event.target.value })}>
          <option value="">the training data, held out</option>
          ${files.map((file) => html`<option key=${file.id} value=${file.id}>${file.filename}, ${size(file.bytes)}</option>`)}
        </select>
      </label>`}
    </div>`}
  `;
}
