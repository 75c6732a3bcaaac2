// A text of a model or a user, folded where it is long, with the words of a search marked.

import { html, useState } from "./libraries.js";
import { number } from "./format.js";

const LONG = 500; // characters
const LINES = 12;
const SPARE = 1.5; // times as much: what is only a little longer is not folded

// `most`: characters that are shown while it is folded; `isEnd`: the last ones of them, not the first.
export function Folded({ text, words = "", most = LONG, isEnd = false }) {
  const [isOpen, setOpen] = useState(false);
  const isFound = words !== "" && text.toLowerCase().includes(words.toLowerCase());
  const isLong = text.length > SPARE * most || text.split("\n").length > SPARE * LINES;
  const isFolded = isLong && !isOpen && !isFound;
  const shown = !isFolded ? text : isEnd ? `… ${text.slice(-most)}` : `${text.split("\n", LINES).join("\n").slice(0, most)} …`;
  return html`
    <pre>${marked(shown, words)}</pre>
    ${isLong &&
    !isFound &&
    html`<button type="button" class="small" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
      ${isOpen ? "Fold" : `All ${number(text.length)} characters`}
    </button>`}
  `;
}

function marked(text, words) {
  if (!words) return text;
  const [all, wanted] = [text.toLowerCase(), words.toLowerCase()];
  if (all.length !== text.length) return text; // letters whose lower case has another length
  const parts = [];
  let end = 0;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, end)) {
    parts.push(text.slice(end, at), html`<mark>${text.slice(at, at + wanted.length)}</mark>`);
    end = at + wanted.length;
  }
  return [...parts, text.slice(end)];
}
