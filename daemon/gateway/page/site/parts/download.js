// A button that saves a response of the gateway as a file.

import { html } from "./libraries.js";
import { addressOf } from "./api.js";
import { notify } from "./dialog.js";

export function Download({ path, name, label }) {
  async function download() {
    const link = document.createElement("a");
    try {
      link.href = await addressOf(path);
    } catch (error) {
      notify(error.message);
      return;
    }
    link.download = name;
    link.click();
  }
  return html`<button type="button" class="small" onClick=${download}>${label}</button>`;
}
