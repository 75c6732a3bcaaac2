// Text of a model, as it is generated, by OpenAI's API.

import { ApiError, post } from "./api.js";
import { eventsOf } from "./sse.js";

const LEAST_S = 0.25; // pieces of a shorter time arrive together: a rate would say nothing

// Completes `messages` as a chat, with `tools` if there are any, or `prompt` as a text. Calls `onText(text, message)`
// with all text so far, and with the whole message: {content, reasoning, calls}. Resolves with
// {tokens, seconds, reason}: the completion's tokens, the time since the first of them, and why it ended.
export async function generate({ model, messages, tools, prompt, sampling, onText, signal }) {
  const path = messages ? "/v1/chat/completions" : "/v1/completions";
  const body = { model, ...sampling, stream: true, stream_options: { include_usage: true } };
  Object.assign(body, messages ? { messages } : { prompt }, tools && { tools });
  const response = await post(path, body, { signal });
  const message = { content: "", reasoning: "", calls: [] };
  let tokens = null;
  let began = null;
  let reason = null;
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error);
    const choice = chunk.choices[0];
    reason = choice?.finish_reason ?? reason;
    if (choice && add(message, choice.delta ?? { content: choice.text })) {
      began ??= performance.now();
      onText(message.content, { ...message });
    }
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
  }
  return { tokens, seconds: began === null ? 0 : (performance.now() - began) / 1000, reason };
}

// Adds a piece to a message; returns whether it has something new. A call's name comes first, its arguments follow.
function add(message, { content, reasoning_content: reasoning, tool_calls: calls }) {
  message.content += content ?? "";
  message.reasoning += reasoning ?? "";
  for (const { index, id, function: called } of calls ?? []) {
    const before = message.calls[index] ?? { id, name: "", arguments: "" };
    const next = { ...before, name: before.name + (called.name ?? ""), arguments: before.arguments + (called.arguments ?? "") };
    message.calls = [...message.calls.slice(0, index), next];
  }
  return Boolean(content || reasoning || calls);
}

export function throughput({ tokens, seconds }) {
  if (tokens === null) return "";
  const rate = seconds > LEAST_S && tokens > 1 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${tokens} tokens${rate}`;
}
