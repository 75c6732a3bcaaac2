// Confirmation of actions, with their effect and loss; and notes about completed actions.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./libraries.js";
import { Problem } from "./elements.js";

let open = () => {};
let show = () => {};

// Asks, and then runs `act(values)`; `fields` are inputs of {name, label, value, help, type}.
// The dialog stays open with the error when `act` fails.
export function ask({ title, text, action, isDangerous = false, fields = [], act }) {
  open({ title, text, action, isDangerous, fields, act });
}

export function notify(text) {
  show(text);
}

export function Dialogs() {
  const [question, setQuestion] = useState(null);
  const [note, setNote] = useState("");
  open = setQuestion;
  show = setNote;
  useEffect(() => {
    if (!note) return undefined;
    const timer = setTimeout(() => setNote(""), 6000);
    return () => clearTimeout(timer);
  }, [note]);
  return html`
    ${question && html`<${Question} ...${question} close=${() => setQuestion(null)} />`}
    <p class="note" role="status" aria-live="polite">${note}</p>
  `;
}

function Question({ title, text, action, isDangerous, fields, act, close }) {
  const dialog = useRef();
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  useLayoutEffect(() => dialog.current.showModal(), []); // it must not stand on the page closed

  async function submit(event) {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.target));
    setBusy(true);
    setError(null);
    try {
      const done = await act(values);
      close();
      if (done) notify(done);
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }

  return html`<dialog ref=${dialog} onClose=${close} aria-labelledby="question">
    <form onSubmit=${submit}>
      <h2 id="question">${title}</h2>
      <p>${text}</p>
      ${fields.map(
        (field) => html`<label key=${field.name}>
          ${field.label}
          <input name=${field.name} type=${field.type ?? "text"} value=${field.value} />
          ${field.help && html`<small>${field.help}</small>`}
        </label>`,
      )}
      <${Problem} error=${error} />
      <div class="buttons">
        <button type="button" onClick=${close}>Back</button>
        <button class=${isDangerous ? "danger" : "primary"} disabled=${isBusy}>${action}</button>
      </div>
    </form>
  </dialog>`;
}
