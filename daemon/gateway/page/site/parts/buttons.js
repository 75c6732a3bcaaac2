// The buttons for the actions on a job or a group.

import { html } from "./libraries.js";

export function ActionButtons({ id, actions }) {
  return html`<span class="buttons">
    ${actions.map(
      (action) => html`<button
        type="button"
        key=${action.name}
        class="small"
        aria-label=${`${action.label} ${id}`}
        onClick=${action.run}
      >
        ${action.label}
      </button>`,
    )}
  </span>`;
}
