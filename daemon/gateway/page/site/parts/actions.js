// The actions on a job in its state, and what they lose.

import { post } from "./api.js";
import { ask, notify } from "./dialog.js";
import { forget, isPending } from "./overview.js";
import { size, statusOf } from "./format.js";
import { nameOf } from "./names.js";

// Returns the actions of a job as {name, label, run}.
export function actionsOf(job) {
  const status = statusOf(job);
  if (!isPending(job)) return [resume(job), remove(job)];
  const actions = [];
  if (job.paused) actions.push(unpause(job));
  else if (job.kind !== "infer" && job.kind !== "encode") actions.push(pause(job));
  if (job.position) actions.push(...moves(job));
  actions.push(cancel(job));
  if (status === "running" || (job.paused && job.status === "started")) actions.push(kill(job));
  return actions;
}

async function send(job, name, body) {
  const reply = await (await post(`/v1/warmd/jobs/${job.id}/${name}`, body)).json();
  return `${nameOf(job.id)}: ${reply.outcome}`;
}

function cancel(job) {
  const isRunning = job.status === "started";
  return {
    name: "cancel",
    label: "Cancel",
    run: () =>
      ask({
        title: `Cancel ${nameOf(job.id)}?`,
        text: isRunning
          ? "It saves a checkpoint at the end of its step and stops. Nothing is lost: it can be resumed."
          : "It leaves its queue. Nothing is lost: it can be queued again by resuming it.",
        action: "Cancel the job",
        act: () => send(job, "cancel"),
      }),
  };
}

function kill(job) {
  return {
    name: "kill",
    label: "Kill",
    run: () =>
      ask({
        title: `Kill ${nameOf(job.id)}?`,
        text: `It stops at once, at step ${job.step}. All steps since its latest checkpoint are lost.`,
        action: "Kill the job",
        isDangerous: true,
        act: () => send(job, "kill"),
      }),
  };
}

function pause(job) {
  return {
    name: "pause",
    label: "Pause",
    run: () =>
      ask({
        title: `Pause ${nameOf(job.id)}?`,
        text:
          job.status === "started"
            ? "It is held in memory at the end of its step. Nothing is lost; the worker stays occupied."
            : "It leaves its queue until it is continued. Nothing is lost.",
        action: "Pause the job",
        act: () => send(job, "pause"),
      }),
  };
}

function unpause(job) {
  return {
    name: "unpause",
    label: "Continue",
    run: () =>
      ask({
        title: `Continue ${nameOf(job.id)}?`,
        text: "It continues where it was paused, or returns to the front of its queue.",
        action: "Continue the job",
        act: () => send(job, "unpause"),
      }),
  };
}

function resume(job) {
  const fields = [];
  if (job.steps_total) {
    fields.push({
      name: "steps",
      label: "Steps in total",
      type: "number",
      value: job.steps_total,
      help: `It is at step ${job.step}. With more steps, a finished job is trained further.`,
    });
  }
  return {
    name: "resume",
    label: "Resume",
    run: () =>
      ask({
        title: `Resume ${nameOf(job.id)}?`,
        text: "It is queued again and continues from its latest checkpoint. Nothing is lost.",
        action: "Resume the job",
        fields,
        act: ({ steps }) => {
          const isNew = steps && Number(steps) !== job.steps_total;
          return send(job, "resume", { changes: isNew ? { steps: Number(steps) } : {} });
        },
      }),
  };
}

function remove(job) {
  return {
    name: "remove",
    label: "Remove",
    run: () =>
      ask({
        title: `Remove ${nameOf(job.id)}?`,
        text:
          "Its run directory is deleted: events, log, completions, checkpoints and the trained " +
          "model. This cannot be undone.",
        action: "Remove the job",
        isDangerous: true,
        act: async () => {
          const reply = await (await post(`/v1/warmd/jobs/${job.id}/remove`)).json();
          forget(job.id);
          if (location.hash.includes(job.id)) location.hash = "#/runs";
          return `${nameOf(job.id)} removed, ${size(reply.bytes)} freed`;
        },
      }),
  };
}

// Moving loses nothing and can be undone by moving back: no confirmation.
function moves(job) {
  const to = (position) => async () => {
    try {
      notify(await send(job, "move", { position }));
    } catch (error) {
      notify(error.message);
    }
  };
  const up = { name: "up", label: "Move up", run: to(job.position - 1) };
  const down = { name: "down", label: "Move down", run: to(job.position + 1) };
  return job.position > 1 ? [up, down] : [down];
}
