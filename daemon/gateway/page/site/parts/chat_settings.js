// The settings of a conversation: system prompt, sampling, tools, and how answers are shown.

import { html } from "./libraries.js";
import { Sampling } from "./sampling.js";

const EXAMPLE = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}]';

export function ChatSettings({ value, mode, problem, onChange }) {
  const change = (changed) => onChange({ ...value, ...changed });
  return html`<section class="chat-settings card" id="chat-settings" aria-label="Settings">
    <label>
      Mode
      <select name="mode" value=${value.mode} onChange=${(event) => change({ mode: event.target.value })}>
        <option value="">by the model</option>
        <option value="chat">chat</option>
        <option value="text">complete a text</option>
      </select>
      <small>By the model: a chat if it has a chat template, else its text is completed.</small>
    </label>
    ${mode === "chat" &&
    html`<label>
        System prompt
        <textarea name="system" rows="3" value=${value.system} onInput=${(event) => change({ system: event.target.value })}></textarea>
      </label>
      <details open=${Boolean(problem)}>
        <summary>Tools</summary>
        <label>
          Functions that the model may call, as JSON
          <textarea name="tools" rows="6" class="code" placeholder=${EXAMPLE} value=${value.tools} aria-invalid=${problem ? "true" : undefined}
            onInput=${(event) => change({ tools: event.target.value })}></textarea>
          ${problem && html`<small class="problem">${problem}</small>`}
          <small>Its calls are shown; you enter their results.</small>
        </label>
      </details>`}
    <${Sampling} values=${value.sampling} setValues=${(sampling) => change({ sampling })} />
    <label class="inline">
      <input type="checkbox" name="plain" checked=${value.isPlain} onChange=${(event) => change({ isPlain: event.target.checked })} />
      <span>Show answers as plain text</span>
    </label>
  </section>`;
}
