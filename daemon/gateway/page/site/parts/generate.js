// Text of a model, as it is generated, by OpenAI's API.

import { ApiError, post } from "./api.js";

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
  for await (const chunk of chunksOf(response)) {
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

// The objects in the body of a stream of server-sent events, until [DONE].
async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a comment
      const data = frame.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

export function throughput({ tokens, seconds }) {
  if (tokens === null) return "";
  const rate = seconds > 0 && tokens > 1 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${tokens} tokens${rate}`;
}
