// Text of a model, as it is generated, by OpenAI's API.

import { ApiError, post } from "./api.js";
import { eventsOf } from "./sse.js";

// Completes `messages` as a chat, or `prompt` as a text. Calls `onText(text)` with all text so far;
// resolves with {tokens, seconds}: the completion's tokens, and the time since the first of them.
export async function generate({ model, messages, prompt, sampling, onText, signal }) {
  const path = messages ? "/v1/chat/completions" : "/v1/completions";
  const body = { model, ...sampling, stream: true, stream_options: { include_usage: true } };
  Object.assign(body, messages ? { messages } : { prompt });
  const response = await post(path, body, { signal });
  let text = "";
  let tokens = null;
  let began = null;
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error);
    const choice = chunk.choices[0];
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    if (piece) {
      began ??= performance.now();
      text += piece;
      onText(text);
    }
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
  }
  return { tokens, seconds: began === null ? 0 : (performance.now() - began) / 1000 };
}

export function throughput({ tokens, seconds }) {
  if (tokens === null) return "";
  const rate = seconds > 0 && tokens > 1 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${tokens} tokens${rate}`;
}
