// Chat with a model, or complete a text, while it is generated.

import { html, useRef, useState } from "../parts/libraries.js";
import { Heading, Problem } from "../parts/elements.js";
import { generate, throughput } from "../parts/generate.js";
import { ModelSelect, useModels } from "../parts/models.js";
import { DEFAULTS, numbersOf, Sampling } from "../parts/sampling.js";

export function Chat({ query }) {
  const names = useModels();
  const [chosen, setChosen] = useState(query.get("model") ?? "");
  const [isChat, setChat] = useState(false);
  const [sampling, setSampling] = useState({ ...DEFAULTS, temperature: "0.7" });
  const [messages, setMessages] = useState([]);
  const [answer, setAnswer] = useState(null); // the one that is generated now
  const [note, setNote] = useState("");
  const [error, setError] = useState(null);
  const stop = useRef(null);
  const model = chosen || names[0];

  async function send(event) {
    event.preventDefault();
    const form = event.target;
    const prompt = new FormData(form).get("prompt");
    const history = [...messages, { role: "user", content: prompt }];
    let text = "";
    let isDone = false;
    setMessages(history);
    setAnswer("");
    setError(null);
    setNote("");
    stop.current = new AbortController();
    try {
      const done = await generate({
        model,
        ...(isChat ? { messages: history } : { prompt }),
        sampling: numbersOf(sampling),
        signal: stop.current.signal,
        onText: (all) => setAnswer((text = all)),
      });
      isDone = true; // also where the model ended at once
      setNote(throughput(done));
      form.reset();
    } catch (problem) {
      if (problem.name === "AbortError") setNote("stopped");
      else setError(problem);
    }
    setMessages(isDone || text ? [...history, { role: "assistant", content: text }] : messages);
    setAnswer(null);
  }

  const isBusy = answer !== null;
  const shown = isBusy ? [...messages, { role: "assistant", content: answer }] : messages;
  return html`
    <${Heading}>Chat<//>
    <div class="filter">
      <${ModelSelect} label="Model" name="model" names=${names} value=${model} onChange=${setChosen} />
      <label>
        Mode
        <select name="mode" value=${isChat ? "chat" : "complete"} onChange=${(event) => setChat(event.target.value === "chat")}>
          <option value="complete">complete a text</option>
          <option value="chat">chat (needs a chat template)</option>
        </select>
      </label>
    </div>
    <${Sampling} values=${sampling} setValues=${setSampling} />
    <ol class="messages" aria-live="polite" aria-busy=${isBusy}>
      ${shown.map(
        (message, index) => html`<li key=${index} class="card ${message.role}">
          <small>${message.role === "user" ? "you" : model}</small>
          <pre>${message.content || (isBusy && index === shown.length - 1 ? "…" : "(empty)")}</pre>
        </li>`,
      )}
    </ol>
    <p class="quiet" role="status">${note}</p>
    <${Problem} error=${error} />
    <form onSubmit=${send}>
      <label>${isChat ? "Message" : "Text"} <textarea name="prompt" required></textarea></label>
      <div class="buttons">
        <button class="primary" disabled=${isBusy || !model}>Send</button>
        <button type="button" disabled=${!isBusy} onClick=${() => stop.current.abort()}>Stop</button>
        <button type="button" disabled=${isBusy || shown.length === 0} onClick=${() => setMessages([])}>Clear</button>
      </div>
    </form>
  `;
}
