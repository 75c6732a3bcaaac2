// The models that a request may name, a select for one of them, and what one takes.

import { html, useEffect, useState } from "./libraries.js";
import { get } from "./api.js";
import { namesOf, useNames } from "./names.js";

// Their names; null until they are known.
export function useModelNames() {
  const [names, setNames] = useState(null);
  useEffect(() => {
    get("/v1/models").then(
      (found) => setNames(found.data.map((model) => model.id)),
      () => setNames([]),
    );
  }, []);
  return names;
}

export function useModels() {
  return useModelNames() ?? [];
}

// `none`: what no model is called, where one need not be chosen.
export function ModelSelect({ label, name, names, value, onChange, none }) {
  useNames(names);
  const shown = value && !names.includes(value) ? [value, ...names] : names;
  const called = namesOf(shown);
  return html`<label>
    ${label}
    <select name=${name} value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${none && html`<option value="">${none}</option>`}
      ${shown.map((one) => html`<option key=${one} value=${one}>${called.get(one)}</option>`)}
    </select>
  </label>`;
}

// Instead of a select without options.
export function NoModels() {
  return html`<p class="empty">No model is known yet. Load one on the <a href="#/">Overview</a>, or in the terminal: <code>warmd load NAME=PATH</code></p>`;
}

// {has_chat_template, context_length, prompt_format} of a model; null until it is known, and where it cannot be read.
export function useModelInputs(name) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    setFound(null);
    if (!name) return undefined;
    let isOld = false;
    get(`/v1/warmd/models/${encodeURIComponent(name)}`).then(
      (inputs) => isOld || setFound(inputs),
      () => isOld || setFound(null),
    );
    return () => {
      isOld = true;
    };
  }, [name]);
  return found;
}
