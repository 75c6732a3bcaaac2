// Numbers, sizes and times in words.

export const NOTHING = "–";

export function number(value) {
  if (value === null || value === undefined) return NOTHING;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? Number(value.toPrecision(3)) : value} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// The time of day as on the command line: of 24 hours, with the day or the date unless it is today.
export function clock(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  const when = new Date(seconds * 1000);
  const time = when.toTimeString().slice(0, 5);
  if (when.toDateString() === new Date().toDateString()) return time;
  if (Math.abs(seconds - now()) < 6 * 86_400) return `${when.toLocaleDateString("en", { weekday: "short" })} ${time}`;
  return `${when.toLocaleDateString("sv")} ${time}`; // as ISO 8601 has it
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : NOTHING;
}

// The running time of a job in all its executions, in seconds; null before the first.
export function tookOf(job) {
  if (!job.started_at) return null;
  const isWaiting = !job.ended_at && job.status !== "started";
  return job.earlier_s + (isWaiting ? 0 : (job.ended_at ?? now()) - job.started_at);
}

export function now() {
  return Date.now() / 1000;
}

// One word for all ways to wait: a view that knows why shows the time, the job or the machine that is waited for.
const WORDS = { started: "running", scheduled: "queued", deferred: "queued" };

export function statusOf(job) {
  return job.paused ? "paused" : (WORDS[job.status] ?? job.status);
}

export function progressOf(job) {
  // A job of few rows ends before it reports one.
  if (job.rows_total) return [job.status === "finished" ? job.rows_total : (job.rows_done ?? 0), job.rows_total];
  return job.steps_total ? [job.step, job.steps_total] : null;
}

// An option's value as one types it on the command line.
export function optionText(value) {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.join(", ") || "none";
  return typeof value === "string" ? value : JSON.stringify(value);
}
