// Conversations with one or two models, kept in this browser. A model without a chat template completes texts.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../parts/libraries.js";
import { Answer } from "../parts/answer.js";
import { ChatSettings } from "../parts/chat_settings.js";
import { conversations, isUnanswered, newConversation, remove, requestOf, save, SETTINGS, titleOf, toolsOf } from "../parts/conversations.js";
import { ask } from "../parts/dialog.js";
import { Copy, Heading } from "../parts/elements.js";
import { clock, number } from "../parts/format.js";
import { generate, throughput } from "../parts/generate.js";
import { ModelSelect, NoModels, useModelInputs, useModelNames } from "../parts/models.js";
import { nameOf } from "../parts/names.js";

const NEAR_PX = 120; // from the end of the page: then new text is followed
const EMPTY = { content: "", reasoning: "", calls: [] };

export function Chat({ query }) {
  const names = useModelNames();
  if (!names) return html`<${Heading}>Chat<//><p>Loading …</p>`;
  if (names.length === 0) return html`<${Heading}>Chat<//><${NoModels} />`;
  return html`<${Heading}>Chat<//><${Conversations} names=${names} wanted=${query.get("model")} />`;
}

function Conversations({ names, wanted }) {
  const [all, setAll] = useState(conversations);
  const [current, setCurrent] = useState(() => first(all, names, wanted));
  const [live, setLive] = useState(null); // what is generated now: {id, columns: [step or null]}
  const [draft, setDraft] = useState("");
  const [isSent, setSent] = useState(false); // before it is known whether the model takes chats
  const [isListed, setListed] = useState(() => matchMedia("(min-width: 60rem)").matches);
  const [isSet, setSet] = useState(false);
  const stop = useRef(null);
  const field = useRef();
  const latest = useRef();
  latest.current = current;
  const { settings } = current;
  const [one, other] = settings.models;
  const inputs = [useModelInputs(one), useModelInputs(other)].filter((_, at) => settings.models[at]);
  const isKnown = inputs.every(Boolean);
  const mode = settings.mode || (inputs.every((found) => found?.has_chat_template) ? "chat" : "text");
  const problem = mode === "chat" ? problemOf(settings.tools) : null;
  const isBusy = live !== null;
  const begins = current.turns.length > 0 && current.mode !== mode; // a new conversation with what is sent next
  useEffect(() => () => stop.current?.abort(), []); // what has been generated is kept
  useEffect(() => void (isSent && isKnown && send()), [isSent, isKnown]);
  useFollowed(current, live);

  function keep(changed) {
    if (changed.turns.length > 0) save(changed);
    setAll(conversations());
    setCurrent((before) => (before.id === changed.id ? changed : before));
  }

  function change(changed) {
    keep({ ...current, settings: { ...settings, ...changed } });
  }

  function open(conversation) {
    stop.current?.abort();
    setCurrent(conversation);
    if (!matchMedia("(min-width: 60rem)").matches) setListed(false);
    field.current?.focus();
  }

  function onKey(event) {
    if (event.key === "Escape") stop.current?.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter chooses a character
    event.preventDefault();
    event.target.form.requestSubmit();
  }

  function send(event) {
    event?.preventDefault();
    if (!draft.trim() || isBusy || problem) return;
    setSent(!isKnown);
    if (!isKnown) return;
    const base = begins ? newConversation(settings) : current;
    const columns = settings.models.filter(Boolean).map(() => []);
    const next = { ...base, mode, turns: [...base.turns, { user: draft, columns }] };
    setDraft("");
    setCurrent(next);
    field.current.focus(); // the button is replaced
    run(next, columns.map((_, at) => at));
  }

  // Generates the next step of some columns of the last turn.
  async function run(conversation, columns) {
    const { id, turns } = conversation;
    save(conversation); // what was asked is kept, whatever happens to the answer
    stop.current = new AbortController();
    const { signal } = stop.current;
    const models = conversation.settings.models.filter(Boolean);
    setLive({ id, columns: models.map((model, at) => (columns.includes(at) ? { ...EMPTY, model } : null)) });
    const steps = await Promise.all(columns.map((column) => answerOf(conversation, column, models[column], signal, setLive)));
    const last = { ...turns.at(-1), columns: turns.at(-1).columns.map((before, at) => (columns.includes(at) ? [...before, steps[columns.indexOf(at)]] : before)) };
    setLive(null);
    // The settings may have been changed meanwhile.
    const { settings: kept } = latest.current.id === id ? latest.current : conversation;
    keep({ ...conversation, settings: kept, turns: [...turns.slice(0, -1), last] });
  }

  // The last turn with another content of a column.
  function withColumn(column, steps) {
    const last = current.turns.at(-1);
    return { ...current, turns: [...current.turns.slice(0, -1), { ...last, columns: last.columns.with(column, steps) }] };
  }

  const regenerate = (column) => run(withColumn(column, []), [column]);

  function giveResults(column, results) {
    const steps = current.turns.at(-1).columns[column];
    run(withColumn(column, [...steps.slice(0, -1), { ...steps.at(-1), results }]), [column]);
  }

  function edit() {
    setDraft(current.turns.at(-1).user);
    keep({ ...current, turns: current.turns.slice(0, -1) });
    field.current.focus();
  }

  function forget(conversation) {
    ask({
      title: `Delete “${titleOf(conversation)}”?`,
      text: "The conversation is removed from this browser. This cannot be undone.",
      action: "Delete the conversation",
      isDangerous: true,
      act: () => {
        remove(conversation.id);
        const rest = conversations();
        setAll(rest);
        if (conversation.id === current.id) setCurrent(newConversation(settings));
      },
    });
  }

  const shown = live?.id === current.id ? live.columns : [];
  const buttons = { isBusy, models: settings.models, onRegenerate: regenerate, onResults: giveResults, onEdit: edit };
  const View = (current.mode ?? mode) === "text" ? Texts : Turns;
  return html`<div class="chat ${isListed ? "listed" : ""}">
    ${isListed &&
    html`<nav class="chat-list" aria-label="Conversations">
      <button type="button" onClick=${() => open(newConversation(settings))}>New conversation</button>
      <ul>
        ${all.map(
          (conversation) => html`<li key=${conversation.id}>
            <button type="button" class="title" aria-current=${conversation.id === current.id ? "true" : undefined} onClick=${() => open(conversation)}>
              ${titleOf(conversation)} <small>${clock(conversation.changed / 1000)}</small>
            </button>
            <button type="button" class="small" aria-label=${`Delete ${titleOf(conversation)}`} onClick=${() => forget(conversation)}>×</button>
          </li>`,
        )}
      </ul>
      <p class="quiet">Kept in this browser only.</p>
    </nav>`}
    <div class="chat-main">
      <div class="chat-head">
        <${ModelSelect} label="Model" name="model" names=${names} value=${one} onChange=${(name) => change({ models: [name, other] })} />
        <${ModelSelect} label="Second model" name="second" none="none" names=${names} value=${other} onChange=${(name) => change({ models: [one, name] })} />
        <span class="buttons">
          <button type="button" aria-expanded=${String(isListed)} onClick=${() => setListed(!isListed)}>Conversations</button>
          <button type="button" aria-expanded=${String(isSet)} aria-controls="chat-settings" onClick=${() => setSet(!isSet)}>Settings</button>
        </span>
      </div>
      ${isSet && html`<${ChatSettings} value=${settings} mode=${mode} problem=${problem} onChange=${change} />`}
      <div class="chat-turns" role="log" aria-label="Messages" aria-busy=${String(isBusy)}>
        <${View} turns=${current.turns} live=${shown} isPlain=${settings.isPlain} ...${buttons} />
      </div>
      <form class="composer" onSubmit=${send}>
        ${begins && html`<p class="quiet" role="status">${mode === "text" ? "A text is completed now, not a chat: it begins a new conversation." : "It begins a new conversation, as a chat."}</p>`}
        ${problem && html`<p class="problem">${problem}</p>`}
        <label for="prompt" class="quiet">${mode === "chat" ? "Message" : "Text to complete"}</label>
        ${mode === "text" && formatsOf(inputs).map((text) => html`<p class="quiet" key=${text}>Put into, as in the training: <code>${text}</code></p>`)}
        <div class="composer-line">
          <textarea ref=${field} id="prompt" name="prompt" rows="1" aria-describedby="keys" value=${draft} onInput=${(event) => setDraft(event.target.value)}
            onKeyDown=${onKey}></textarea>
          ${isBusy
            ? html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>`
            : html`<button class="primary" disabled=${!draft.trim() || Boolean(problem)}>Send</button>`}
        </div>
        <small id="keys">Enter sends, Shift+Enter begins a new line, Escape stops${limitOf(inputs)}</small>
      </form>
    </div>
  </div>`;
}

// The conversation that is shown first: the latest one, unless a model is asked for that it is not with.
function first(all, names, wanted) {
  const [latest] = all;
  const [one, other] = latest?.settings.models ?? SETTINGS.models;
  if (latest && (!wanted || wanted === one)) return { ...latest, settings: { ...latest.settings, models: [one || names[0], other] } };
  return newConversation({ ...(latest?.settings ?? SETTINGS), models: [wanted ?? names[0], ""] });
}

function problemOf(tools) {
  try {
    toolsOf(tools);
    return null;
  } catch (error) {
    return error.message;
  }
}

function limitOf(inputs) {
  const limits = inputs.map((found) => found?.context_length).filter(Boolean);
  return limits.length > 0 ? `; at most ${number(Math.min(...limits))} tokens with the answer` : "";
}

// The next step of a column, also one that fails or is stopped; it is shown while it is generated.
async function answerOf(conversation, column, model, signal, setLive) {
  let step = { ...EMPTY, model };
  try {
    const done = await generate({
      model,
      ...requestOf(conversation, column),
      signal,
      onText: (_, message) => {
        step = { ...message, model };
        setLive((before) => before && { ...before, columns: before.columns.with(column, step) });
      },
    });
    const cut = done.reason === "length" ? "; cut: the limit of tokens is reached" : "";
    return { ...step, note: throughput(done) + cut };
  } catch (error) {
    return error.name === "AbortError" ? { ...step, note: "stopped" } : { ...step, note: "", error: error.message };
  }
}

// Keeps the end of a conversation in view while it grows, unless the reader has scrolled up.
function useFollowed({ id, turns }, live) {
  const isNear = useRef(true);
  useEffect(() => {
    const look = () => (isNear.current = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_PX);
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  useLayoutEffect(() => {
    if (turns.length > 0) scrollTo(0, document.documentElement.scrollHeight);
  }, [id, turns.length]);
  useLayoutEffect(() => {
    if (turns.length > 0 && isNear.current) scrollTo(0, document.documentElement.scrollHeight);
  }, [live]);
}

// --- chats ------------------------------------------------------------------------------------------

function Turns({ turns, live, ...rest }) {
  if (turns.length === 0) return html`<p class="empty">Ask something. A second model answers side by side.</p>`;
  return turns.map((turn, at) => {
    const isLast = at === turns.length - 1;
    return html`<${Turn} key=${at} turn=${turn} isLast=${isLast} live=${isLast ? live : []} ...${rest} />`;
  });
}

function Turn({ turn, isLast, live, isPlain, isBusy, models, onRegenerate, onResults, onEdit }) {
  const isAlone = turn.columns.every((steps) => steps.every(isUnanswered));
  return html`<section class="turn" aria-label=${turn.user.slice(0, 60)}>
    <pre class="user">${turn.user}</pre>
    <p class="answer-foot">
      <span class="quiet">${isAlone && !isLast ? "not answered, and not sent again" : ""}</span>
      <span class="buttons">
        <${Copy} text=${turn.user} />
        ${isLast && !isBusy && html`<button type="button" class="small" onClick=${onEdit}>Edit</button>`}
      </span>
    </p>
    <div class="answers">
      ${turn.columns.map((steps, column) => {
        const isLive = Boolean(live[column]);
        const again = isLast && !isBusy && models[column] && html`<${Regenerate} steps=${steps} model=${models[column]} onClick=${() => onRegenerate(column)} />`;
        const lastStep = steps.length - 1;
        return html`<div class="column" key=${column}>
          ${steps.map(
            (step, at) => html`<${Answer} key=${at} step=${step} isPlain=${isPlain}
              onResults=${isLast && !isBusy && at === lastStep ? (results) => onResults(column, results) : null}>${at === lastStep && again}<//>`,
          )}
          ${isLive && html`<${Answer} step=${live[column]} isLive isPlain=${isPlain} />`}
          ${steps.length === 0 && !isLive && html`<p class="quiet">No answer. ${again}</p>`}
        </div>`;
      })}
    </div>
  </section>`;
}

function Regenerate({ steps, model, onClick }) {
  const before = steps.at(-1)?.model;
  return html`<button type="button" class="small" onClick=${onClick}>${before && before !== model ? `Answer with ${model}` : "Regenerate"}</button>`;
}

// --- texts ------------------------------------------------------------------------------------------

// The templates that the models were trained with, into which their prompts are put.
function formatsOf(inputs) {
  const templates = inputs.map((found) => found?.prompt_format?.template);
  return [...new Set(templates.filter((template) => template && template !== "{question}"))];
}

// Each text is completed alone: earlier ones are not sent, so they are folded.
function Texts({ turns, ...rest }) {
  if (turns.length === 0) return html`<p class="empty">The model continues your text.</p>`;
  const earlier = turns.slice(0, -1);
  return html`
    ${earlier.length > 0 &&
    html`<details>
      <summary>${earlier.length} earlier ${earlier.length === 1 ? "text" : "texts"}, not sent again</summary>
      ${earlier.map((turn, at) => html`<${Text} key=${at} turn=${turn} live=${[]} models=${[]} />`)}
    </details>`}
    <${Text} turn=${turns.at(-1)} isLast ...${rest} />
  `;
}

function Text({ turn, isLast, live, isBusy, models, onRegenerate, onEdit }) {
  return html`<div class="answers">
    ${turn.columns.map((steps, column) => {
      const step = live[column] ?? steps.at(-1) ?? { ...EMPTY, model: "" };
      const canChange = isLast && !isBusy;
      return html`<article class="text-step card" key=${column} aria-label=${`Completion of ${nameOf(step.model)}`}>
        <h2>${nameOf(step.model)}</h2>
        <pre><span class="given">${turn.user}</span>${step.content}${live[column] && " …"}</pre>
        ${!step.content && !live[column] && !step.error && html`<p class="quiet">(empty: the model ended at once)</p>`}
        ${step.error && html`<p class="problem" role="alert">${step.error}</p>`}
        <p class="answer-foot">
          <span class="quiet">${step.note}</span>
          <span class="buttons">
            ${step.content && html`<${Copy} text=${step.content} />`}
            ${canChange && html`<button type="button" class="small" onClick=${onEdit}>Edit</button>`}
            ${canChange && models[column] && html`<${Regenerate} steps=${steps} model=${models[column]} onClick=${() => onRegenerate(column)} />`}
          </span>
        </p>
      </article>`;
    })}
  </div>`;
}
