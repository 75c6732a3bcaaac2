// A word with an explanation, which opens below it: also by the keyboard and on a touch screen.

import { html, useState } from "./libraries.js";

export function Term({ word, about }) {
  const [isOpen, setOpen] = useState(false);
  if (!about) return html`<span>${word}</span>`;
  return html`<span class="term">
    <button type="button" title=${about} aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>${word}</button>
    ${isOpen && html`<small>${about}</small>`}
  </span>`;
}
