// The buttons below a table of which only some rows are shown.

import { html } from "./libraries.js";

// `first`: index of the first row that is shown; `go(index)` shows the rows from there.
export function Pages({ label, first, size, total, go }) {
  if (total <= size) return null;
  const last = Math.min(first + size, total);
  return html`<nav class="pages" aria-label=${label}>
    <button type="button" class="small" disabled=${first === 0} onClick=${() => go(first - size)}>Previous</button>
    <span>${first + 1} to ${last} of ${total.toLocaleString("en")}</span>
    <button type="button" class="small" disabled=${last === total} onClick=${() => go(last)}>Next</button>
  </nav>`;
}
