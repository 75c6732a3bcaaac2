// The models that a request may name, and a select for one of them.

import { html, useEffect, useState } from "./libraries.js";
import { get } from "./api.js";
import { nameOf, useNames } from "./names.js";

export function useModels() {
  const [names, setNames] = useState([]);
  useEffect(() => {
    get("/v1/models").then(
      (found) => setNames(found.data.map((model) => model.id)),
      () => setNames([]),
    );
  }, []);
  return names;
}

export function ModelSelect({ label, name, names, value, onChange }) {
  useNames(names);
  const shown = value && !names.includes(value) ? [value, ...names] : names;
  return html`<label>
    ${label}
    <select name=${name} value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${shown.map((one) => html`<option key=${one} value=${one}>${nameOf(one)}</option>`)}
    </select>
  </label>`;
}
