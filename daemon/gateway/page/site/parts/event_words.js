// Events of a job in words. As a text with commands in it, which become links to where the page has the same.

import { html } from "./libraries.js";
import { clock, duration, number, size } from "./format.js";

const ENVELOPE = ["seq", "execution", "time", "type", "step", "steps_total", "traceback", "phase", "n", "pid"];
// Command of the terminal -> section of a job's page.
const SECTIONS = { samples: "completions", tail: "events", plot: "curves" };

const SENTENCES = {
  started: (event) => `on ${event.device ?? "this machine"}${event.execution > 1 ? `, execution ${event.execution}` : ""}, after ${duration(event.queued_s)} in its queue`,
  eval: (event) => `held out: ${evaluated(event)}`,
  checkpoint: (event) => `${size(event.bytes)}, in ${duration(event.seconds)}`,
  warning: (event) => event.message,
  stall: (event) => `the ${event.activity ?? "step"} has taken ${duration(event.seconds)} and has not ended${event.median_s ? `; the median is ${duration(event.median_s)}` : ""}`,
  divergence: (event) => `${event.metric ?? "the loss"} is ${number(event.value)}, its median ${number(event.median)}`,
  paused: (event) => (event.released ? "saved, and its memory released" : "in memory"),
  unpaused: () => "continues",
  progress: (event) => `${event.activity ?? ""} ${number(event.done)}${event.total ? ` of ${number(event.total)}` : ""} ${event.unit ?? "records"}`,
  waiting: (event) => `waits for ${event.what ?? "space"}${event.reason ? `: ${event.reason}` : ""}`,
  waited: (event) => `continues after ${duration(event.seconds)} of waiting`,
  save_failed: (event) => `no checkpoint: ${event.error ?? "it failed"}`,
  finished: ({ result, peak_bytes }) => facts({ ...result, model: null, peak_bytes }),
  failed: (event) => event.error,
  plan: (event) => `${number(event.steps_total)} steps${event.left_s ? `, until ${clock(event.time + event.left_s)}` : ""}`,
};

export function wordsOf(event) {
  if (SENTENCES[event.type]) return SENTENCES[event.type](event) ?? "";
  return facts(event);
}

function evaluated(event) {
  const { intervals = {} } = event;
  const found = Object.entries(event).filter(([name, value]) => !ENVELOPE.includes(name) && Number.isFinite(value) && name !== "eval_s");
  const texts = found.map(([name, value]) => {
    const interval = intervals[name]?.map((end) => number(Number(end.toPrecision(2))));
    return `${name} ${number(value)}${interval ? ` (${interval.join(" to ")})` : ""}`;
  });
  return `${texts.join(", ")}, n = ${number(event.n)}`;
}

// Names and values of single words and numbers, changes as "before → after"; no lists and objects.
function facts(fields) {
  const found = [];
  for (const [name, value] of Object.entries(fields)) {
    if (ENVELOPE.includes(name)) continue;
    if (name === "changes" && value) {
      for (const [option, [before, after]] of Object.entries(value)) found.push(`${option} ${before ?? "default"} → ${after ?? "default"}`);
    } else if (typeof value === "number") found.push(amount(name, value));
    else if (typeof value === "boolean" || (typeof value === "string" && value)) found.push(`${name.replaceAll("_", " ")} ${value}`);
  }
  return found.join(", ");
}

function amount(name, value) {
  if (name.endsWith("_s")) return `${name.slice(0, -2).replaceAll("_", " ")} ${duration(value)}`;
  if (name === "seconds") return duration(value);
  if (name === "bytes" || name.endsWith("_bytes")) return `${name.replace(/_?bytes$/, "").replaceAll("_", " ")} ${size(value)}`.trim();
  return `${name.replaceAll("_", " ")} ${number(value)}`;
}

// A text of an event: `warmd samples` and the like are links to the job's sections, other commands are code.
export function Linked({ text, id }) {
  return String(text ?? "")
    .split(/`([^`]*)`/)
    .map((part, index) => {
      if (index % 2 === 0) return part;
      const section = SECTIONS[part.match(/^warmd (\w+)/)?.[1]];
      if (!section) return html`<code>${part}</code>`;
      return html`<a href="#/jobs/${id}/${section}">${section}</a>`;
    });
}
