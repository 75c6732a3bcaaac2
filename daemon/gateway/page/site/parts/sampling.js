// The sampling settings of a request, as a form.

import { html } from "./libraries.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", help: "0: greedy", step: "0.1", min: 0, max: 2 },
  { name: "top_p", label: "Top-p", help: "nucleus, 0 to 1", step: "0.05", min: 0, max: 1 },
  { name: "max_tokens", label: "Tokens", help: "at most; empty: as the model says", step: "1", min: 1 },
  { name: "seed", label: "Seed", help: "random when empty", step: "1", min: 0 },
];

export const DEFAULTS = { temperature: "0", top_p: "1", max_tokens: "", seed: "" };

export function Sampling({ values, setValues }) {
  return html`<fieldset>
    <legend>Sampling</legend>
    <div class="filter">
      ${FIELDS.map(
        (field) => html`<label key=${field.name}>
          ${field.label}
          <input
            type="number"
            name=${field.name}
            step=${field.step}
            min=${field.min}
            max=${field.max}
            value=${values[field.name]}
            onInput=${(event) => setValues({ ...values, [field.name]: event.target.value })}
          />
          <small>${field.help}</small>
        </label>`,
      )}
    </div>
  </fieldset>`;
}

// The settings as numbers; those that are empty are left out.
export function numbersOf(values) {
  const given = Object.entries(values).filter(([, value]) => value !== "");
  return Object.fromEntries(given.map(([name, value]) => [name, Number(value)]));
}
