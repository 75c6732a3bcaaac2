// One option of a job kind as a field of a form.

import { html } from "./libraries.js";
import { optionText } from "./format.js";

const LONG_TEXTS = ["template", "system"]; // they may have several lines

// `value` is text, "" for the default; `effective` is the value that the gateway then uses, if it has said so.
export function OptionField({ option, value, effective, problem, onChange }) {
  const usual = option.default_text ?? optionText(effective ?? option.default);
  const described = {
    name: option.name,
    value,
    "aria-invalid": problem ? "true" : undefined,
    "aria-describedby": `help-${option.name}`,
  };
  const onInput = (event) => onChange(event.target.value);
  return html`<label>
    ${option.name.replaceAll("_", " ")}
    ${inputOf(option, usual, described, onInput)}
    ${problem && html`<small class="problem">${problem.text}</small>`}
    <small id=${`help-${option.name}`}>${option.help}${option.many ? " (separated by commas)" : ""}</small>
  </label>`;
}

function inputOf(option, usual, described, onInput) {
  const choices = option.type === "bool" ? ["true", "false"] : option.many ? null : option.choices;
  if (choices) {
    return html`<select ...${described} onChange=${onInput}>
      <option value="">${usual} (default)</option>
      ${choices.map((choice) => html`<option key=${choice}>${choice}</option>`)}
    </select>`;
  }
  const placeholder = usual.split("\n")[0];
  if (LONG_TEXTS.includes(option.name)) return html`<textarea rows="1" ...${described} placeholder=${placeholder} onInput=${onInput}></textarea>`;
  const mode = ["int", "float"].includes(option.type) ? "decimal" : "text";
  return html`<input ...${described} placeholder=${placeholder} inputmode=${mode} onInput=${onInput} />`;
}
