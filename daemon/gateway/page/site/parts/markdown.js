// A model's text with code blocks, lists, bold text and inline code; all else is shown as it is.
//
// It is built from elements and text nodes, never from HTML: a model may write anything.

import { html } from "./libraries.js";

const FENCE = /^\s*(```+|~~~+)/;
const ITEM = /^\s*([-*+]|\d+[.)])\s+/;
const SPAN = /(\*\*[^*\n]+\*\*|`[^`\n]+`)/;

export function Markdown({ text }) {
  return html`<div class="markdown">${blocksOf(text).map(element)}</div>`;
}

// [{kind: "code" | "list" | "text", lines, isOrdered}]; a block that has not ended yet ends with the text.
function blocksOf(text) {
  const blocks = [];
  let fence = null;
  for (const line of text.split("\n")) {
    const last = blocks.at(-1);
    if (fence !== null) {
      if (line.trim().startsWith(fence)) fence = null;
      else last.lines.push(line);
      continue;
    }
    const opening = line.match(FENCE);
    if (opening) {
      [, fence] = opening;
      blocks.push({ kind: "code", lines: [] });
      continue;
    }
    const item = line.match(ITEM);
    const kind = item ? "list" : "text";
    const isOrdered = item ? /\d/.test(item[1]) : false;
    if (last?.kind === kind && last.isOrdered === isOrdered) last.lines.push(line);
    else blocks.push({ kind, lines: [line], isOrdered });
  }
  return blocks;
}

function element({ kind, lines, isOrdered }, index) {
  if (kind === "code") return html`<pre key=${index} tabindex="0" role="region" aria-label="code"><code>${lines.join("\n")}</code></pre>`;
  if (kind === "text") {
    const text = lines.join("\n").trim();
    return text && html`<p key=${index}>${spans(text)}</p>`;
  }
  const items = lines.map((line, at) => html`<li key=${at}>${spans(line.replace(ITEM, ""))}</li>`);
  const begin = Number(lines[0].match(ITEM)[1].slice(0, -1));
  return isOrdered ? html`<ol key=${index} start=${begin}>${items}</ol>` : html`<ul key=${index}>${items}</ul>`;
}

function spans(text) {
  return text.split(SPAN).map((part) => {
    if (!SPAN.test(part)) return part;
    return part.startsWith("**") ? html`<strong>${part.slice(2, -2)}</strong>` : html`<code>${part.slice(1, -1)}</code>`;
  });
}
