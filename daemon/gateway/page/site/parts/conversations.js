// The conversations with models, kept in this browser: one entry of its storage each, so that two tabs do not
// replace each other's.
//
// A conversation is {id, changed, mode, settings, turns}. A turn is {user, columns}: what was asked, and for each of one
// or two models its steps {model, content, reasoning, calls, results, note, error}; `results` are those of its calls.

import { numbersOf } from "./sampling.js";

const PREFIX = "warmd-chat-";
const MOST = 100; // conversations; the oldest are dropped

export const SETTINGS = {
  models: ["", ""], // the second one is "" for none
  mode: "", // "chat" or "text"; "": chat where the model has a chat template
  system: "",
  tools: "",
  sampling: { temperature: "0.7", top_p: "1", max_tokens: "", seed: "" },
  isPlain: false, // answers without Markdown
};

export function newConversation(settings = SETTINGS) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, changed: Date.now(), mode: null, settings, turns: [] };
}

export function titleOf({ turns }) {
  return turns[0]?.user.trim().split("\n")[0].slice(0, 60) || "New conversation";
}

// All of them, the latest first.
export function conversations() {
  const found = stored().map((key) => read(key)).filter(Boolean);
  return found.sort((one, other) => other.changed - one.changed);
}

export function save(conversation) {
  const text = JSON.stringify({ ...conversation, changed: Date.now() });
  for (const old of conversations().slice(MOST - 1)) if (old.id !== conversation.id) remove(old.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return;
    } catch {
      // The storage is full, or not allowed: then there is nothing to drop.
      const oldest = conversations().filter(({ id }) => id !== conversation.id).at(-1);
      if (!oldest) return;
      remove(oldest.id);
    }
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

function stored() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    return []; // the browser allows no storage
  }
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // another tab has removed it, or it is damaged
  }
}

// --- what is sent -----------------------------------------------------------------------------------

// The part of a request that asks for the next step of a column of the last turn.
export function requestOf({ mode, settings, turns }, column) {
  const { user } = turns.at(-1);
  const sampling = numbersOf(settings.sampling);
  if (mode === "text") return { prompt: user, sampling };
  const messages = turns.flatMap((turn, at) => messagesOf(turn, column, at === turns.length - 1));
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  return { messages, tools: toolsOf(settings.tools) ?? undefined, sampling };
}

// An earlier turn that was not answered is left out. The first column stands in where there was no second one.
function messagesOf({ user, columns }, column, isLast) {
  const steps = (columns[column] ?? columns[0]).filter((step) => !isUnanswered(step));
  if (steps.length === 0 && !isLast) return [];
  return [{ role: "user", content: user }, ...steps.flatMap(stepMessages)];
}

export function isUnanswered(step) {
  return Boolean(step.error) && !step.content && step.calls.length === 0;
}

function stepMessages({ content, calls, results }) {
  if (calls.length === 0) return [{ role: "assistant", content }];
  const called = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  const answered = (results ?? []).map((text, at) => ({ role: "tool", tool_call_id: calls[at].id, content: text }));
  return [{ role: "assistant", content: content || null, tool_calls: called }, ...answered];
}

// The tools of their JSON; null without any. Throws an Error in words.
export function toolsOf(text) {
  if (!text.trim()) return null;
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`tools: must be JSON, got a text that is not: ${error.message}`);
  }
  if (!Array.isArray(found)) throw new Error('tools: must be a list such as [{"type": "function", "function": {"name": "add"}}]');
  return found.length > 0 ? found : null;
}
