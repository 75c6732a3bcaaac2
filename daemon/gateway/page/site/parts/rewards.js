// The choice of the rewards of a training, each with its weight.

import { html } from "./libraries.js";

// What the built-in rewards score; one without a line is shown by its name alone.
const ABOUT = {
  correctness: "1 if the number in the completion equals that of the answer",
  math: "looks like a worked solution, -0.9 to 1.4",
  general: "length and variety of words, -0.5 to 0.7",
  reasoning: "reasoning steps and numbers, 0 to 3",
  custom: "length, terms and a format that you set",
};
const NONE = ","; // an empty list; an empty text is the default

// `value` is the option's text, such as "correctness, math=0.2"; "" for its default.
export function Rewards({ option, value, problem, onChange }) {
  const chosen = weightsOf(value || option.default.join(","));
  const shown = [...new Set([...option.choices, ...chosen.keys()])]; // also one of an earlier job that is refused here
  function change(name, weight) {
    const next = new Map(chosen);
    if (weight === null) next.delete(name);
    else next.set(name, weight);
    onChange([...next].map(([one, by]) => (by === "1" ? one : `${one}=${by}`)).join(", ") || NONE);
  }
  return html`<div class="rewards" role="group" aria-label="Rewards" aria-describedby=${problem ? "problem-reward" : undefined}>
    ${shown.map(
      (name) => html`<div class="reward" key=${name}>
        <label class="inline">
          <input type="checkbox" name=${`reward-${name}`} checked=${chosen.has(name)} aria-invalid=${problem ? "true" : undefined}
            onChange=${(event) => change(name, event.target.checked ? "1" : null)} />
          <span><strong>${name}</strong> <small>${ABOUT[name]}</small></span>
        </label>
        ${chosen.has(name) && html`<label class="inline">weight
          <input name=${`weight-${name}`} inputmode="decimal" value=${chosen.get(name)} onInput=${(event) => change(name, event.target.value)} />
        </label>`}
      </div>`,
    )}
    ${problem && html`<small class="problem" id="problem-reward">${problem.text}</small>`}
  </div>`;
}

function weightsOf(text) {
  const named = text.split(",").map((one) => one.trim()).filter(Boolean);
  return new Map(named.map((one) => [one.split("=")[0], one.split("=")[1] ?? "1"]));
}

export function hasReward(option, value, name) {
  return weightsOf(value || option.default.join(",")).has(name);
}
