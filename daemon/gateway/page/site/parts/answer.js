// What a model answered: its thinking, text and tool calls, labeled by its name.

import { html, useState } from "./libraries.js";
import { Copy } from "./elements.js";
import { Markdown } from "./markdown.js";

// `step` as in conversations.js; `isLive` while it is generated. `onResults` takes the results of its calls, if they are
// awaited. `children` are further buttons.
export function Answer({ step, isLive, isPlain, onResults, children }) {
  const { model, content, reasoning, calls, results, note, error } = step;
  const isEmpty = !content && calls.length === 0;
  return html`<article class="answer-step" aria-label=${`Answer of ${model}`}>
    <h2>${model}</h2>
    ${reasoning &&
    html`<details class="thinking" open=${isLive && isEmpty}>
      <summary>Thinking${isLive && isEmpty ? " …" : ""}</summary>
      <pre>${reasoning}</pre>
    </details>`}
    ${content && (isPlain ? html`<pre>${content}</pre>` : html`<${Markdown} text=${content} />`)}
    ${calls.map((call, at) => html`<${Call} key=${at} call=${call} result=${results?.[at]} />`)}
    ${onResults && calls.length > 0 && !results && html`<${Results} calls=${calls} onDone=${onResults} />`}
    ${isEmpty && (isLive ? !reasoning && html`<p class="waiting">…</p>` : !error && html`<p class="quiet">(empty: the model ended at once)</p>`)}
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    ${!isLive &&
    html`<p class="answer-foot">
      <span class="quiet">${note}</span>
      <span class="buttons">${content && html`<${Copy} text=${content} />`}${children}</span>
    </p>`}
  </article>`;
}

function Call({ call, result }) {
  return html`<div class="call">
    <p>Calls <code>${call.name}</code></p>
    <pre>${indented(call.arguments)}</pre>
    ${result !== undefined && html`<p>Result</p><pre>${result}</pre>`}
  </div>`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still generated
  }
}

function Results({ calls, onDone }) {
  const [texts, setTexts] = useState(calls.map(() => ""));
  return html`<form
    onSubmit=${(event) => {
      event.preventDefault();
      onDone(texts);
    }}
  >
    ${calls.map(
      (call, at) => html`<label key=${at}>
        Result of ${call.name}
        <input name=${`result-${at}`} value=${texts[at]} onInput=${(event) => setTexts(texts.with(at, event.target.value))} />
      </label>`,
    )}
    <button class="small">Send ${calls.length > 1 ? "the results" : "the result"}</button>
  </form>`;
}
