// Small elements that several views use.

import { html, useEffect, useState } from "./libraries.js";
import { nameOf } from "./names.js";
import { duration, clock, now, percent, progressOf, statusOf } from "./format.js";

export function Status({ job }) {
  const status = statusOf(job);
  return html`<span class="status ${status}">${status}</span>`;
}

// `name`: what the job is called, where the view knows it; its id is in the address.
export function JobLink({ id, name }) {
  const shown = name ?? nameOf(id);
  return html`<a class=${shown === id ? "job" : "name"} href="#/jobs/${id}" title=${id}>${shown}</a>`;
}

// The sweep or the curriculum that a job belongs to, if any.
export function GroupLink({ id, name }) {
  if (!id) return null;
  const shown = name ?? nameOf(id);
  const path = id.startsWith("sweep-") ? "sweeps" : "curricula";
  return html`<a class=${shown === id ? "job" : "name"} href="#/${path}/${id}" title=${id}>${shown}</a>`;
}

// Without the id of its group, which is a tag of its jobs.
export function tagsOf(job) {
  return job.tags.filter((tag) => tag !== job.sweep && tag !== job.curriculum);
}

export function Tags({ job }) {
  return tagsOf(job).map((tag) => html` <span class="tag" key=${tag}>${tag}</span>`);
}

export function Progress({ job }) {
  const found = progressOf(job);
  if (!found) return null;
  const [done, total] = found;
  const label = `${done} of ${total}`;
  return html`<span class="progress">
    <progress value=${done} max=${total} aria-label=${`progress of ${job.id}`}>${label}</progress>
    <span class="count">${done}/${total}</span>
  </span>`;
}

// What a running job waits for because its machine lacks it; or, for one that no machine could run: nodes, or a machine
// with its model folder and the labels that it needs.
export function WaitsFor({ job }) {
  if (job.waits_for) return html`<span>waits for ${job.waits_for}</span>`;
  if (job.status !== "queued" || job.position !== null || job.paused) return null;
  if (job.awaited_nodes) return html`<span>waits for ${job.awaited_nodes}</span>`;
  const labels = Object.entries(job.needs).map(([name, value]) => `${name}=${value}`);
  const wanted = [...(job.missing_model ? [job.missing_model] : []), ...labels];
  return wanted.length > 0 && html`<span>waits for a machine with ${wanted.join(", ")}</span>`;
}

export function Eta({ job }) {
  if (job.eta_s === null) return null;
  return html`<span title="estimated end">${duration(job.eta_s)}, at ${clock(now() + job.eta_s)}</span>`;
}

// A bar of how much of something is used.
export function Usage({ label, used, total, text }) {
  return html`<div class="usage">
    <span>${label}</span>
    <meter min="0" max=${total || 1} value=${used} aria-label=${label}>${percent(used, total)}</meter>
    <span>${text}</span>
  </div>`;
}

export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message ?? String(error)}</p>` : null;
}

// A heading that gets the focus when a view opens, so that a screen reader begins there.
export function Heading({ children }) {
  const text = [children].flat().join("");
  useEffect(() => document.getElementById("heading")?.focus({ preventScroll: true }), []);
  useEffect(() => {
    document.title = `${text} · warmd`;
  }, [text]);
  return html`<h1 id="heading" tabindex="-1">${children}</h1>`;
}

// A table that scrolls sideways where it is too wide, also by the keyboard.
export function Scroll({ label, children }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${children}</div>`;
}

export function Copy({ text, label = "Copy" }) {
  const [isCopied, setCopied] = useState(false);
  async function copy() {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  }
  return html`<button type="button" class="small" onClick=${copy}>${isCopied ? "Copied" : label}</button>`;
}
