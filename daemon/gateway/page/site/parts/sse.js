// Server-sent events in the body of a response: fetch sends the header of the session, EventSource
// cannot.

// Yields {id, name, data} of each event until the stream ends; `id` is null without one.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const { id = null, event = "message", data } = fieldsOf(frame);
      if (data !== undefined) yield { id, name: event, data };
    }
  }
}

// The lines `name: value`; a comment has no name. The gateway sends each field once.
function fieldsOf(frame) {
  const lines = frame.split("\n").map((line) => [line.indexOf(": "), line]);
  return Object.fromEntries(lines.filter(([at]) => at > 0).map(([at, line]) => [line.slice(0, at), line.slice(at + 2)]));
}
