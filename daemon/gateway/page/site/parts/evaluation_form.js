// The form that submits an evaluation.

import { html, useState } from "./libraries.js";
import { post, upload } from "./api.js";
import { useFiles } from "./data_set.js";
import { notify } from "./dialog.js";
import { Problem } from "./elements.js";
import { size } from "./format.js";
import { keyOf, dataName } from "./leaderboard.js";
import { ModelSelect, useModels } from "./models.js";
import { nameOf } from "./names.js";

const TASKS = ["reward", "gsm8k", "gsm8k-cot", "choice", "perplexity"];
const BUILT_IN = "arithmetic";
// Options of `warmd eval` behind the others, as inputs: name -> [label, further attributes].
const MORE = {
  template: ["Template of a prompt", { placeholder: "the question as it is" }],
  max_tokens: ["Tokens of an answer, at most", { type: "number", min: 1, placeholder: "256" }],
  temperature: ["Sampling temperature", { type: "number", min: 0, step: "any", placeholder: "0 (greedy)" }],
  repeats: ["Answers per question", { type: "number", min: 1, max: 128, placeholder: "1" }],
  seed: ["Random seed", { type: "number", min: 0, placeholder: "42" }],
};

// `earlier`: finished evaluations; `onSubmit(job)` is called with the new one.
export function EvaluationForm({ model: first, earlier, onSubmit }) {
  const names = useModels();
  const [model, setModel] = useState(first);
  const [task, setTask] = useState("reward");
  const [files, addFile] = useFiles();
  const [dataset, setDataset] = useState("");
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const needsFile = task === "choice" || task === "perplexity";

  async function take(event) {
    const [file] = event.target.files;
    if (!file) return;
    setError(null);
    try {
      const stored = await upload(file);
      addFile(stored);
      setDataset(stored.id);
    } catch (problem) {
      setError(problem);
    }
  }

  async function submit(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    const options = { task };
    if (dataset) options.dataset = dataset;
    if (task === "reward") options.reward = form.get("reward").split(/[\s,]+/).filter(Boolean);
    for (const [name, [, { type }]] of [["samples", ["", { type: "number" }]], ...Object.entries(MORE)]) {
      const text = form.get(name);
      if (text) options[name] = type === "number" ? Number(text) : text;
    }
    setBusy(true);
    setError(null);
    try {
      const body = { model: model ?? names[0], options, name: form.get("name") || null, against: form.get("against") || null };
      const job = await (await post("/v1/warmd/evaluations", body)).json();
      notify(`${job.name ?? job.id} is queued`);
      onSubmit(job);
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  }

  return html`<form class="card" aria-label="Evaluate a model" onSubmit=${submit}>
    <div class="fields">
      <${ModelSelect} label="Model" name="model" names=${names} value=${model ?? names[0]} onChange=${setModel} />
      <label>
        Task
        <select name="task" value=${task} onChange=${(event) => setTask(event.target.value)}>
          ${TASKS.map((one) => html`<option key=${one}>${one}</option>`)}
        </select>
      </label>
      <label>
        Data
        <select name="dataset" value=${dataset} required=${needsFile} onChange=${(event) => setDataset(event.target.value)}>
          <option value="">${needsFile ? "choose or upload a file" : task === "reward" ? `${BUILT_IN} (built in)` : "GSM8K, test split"}</option>
          ${files.map((file) => html`<option key=${file.id} value=${file.id}>${file.filename}, ${size(file.bytes)}</option>`)}
        </select>
      </label>
      <label>Upload a file <input type="file" name="upload" onChange=${take} /></label>
      <label>Questions, from the start <input type="number" name="samples" min="1" placeholder="all" value="200" /></label>
      ${task === "reward" && html`<label>Reward <input name="reward" value="correctness" /></label>`}
      <label>
        Compare with
        <select name="against">
          <option value="">no other evaluation</option>
          ${earlier.map((job) => html`<option key=${keyOf(job) + job.id} value=${job.id}>${nameOf(job.id)} (${nameOf(job.result.model)}, ${dataName(job)}, ${job.result.questions})</option>`)}
        </select>
      </label>
      <label>Name <input name="name" placeholder="none" /></label>
    </div>
    <details>
      <summary>More options</summary>
      <div class="fields">
        ${Object.entries(MORE).map(([name, [label, attributes]]) => html`<label key=${name}>${label} <input name=${name} ...${attributes} /></label>`)}
      </div>
    </details>
    <${Problem} error=${error} />
    <div class="buttons"><button class="primary" disabled=${isBusy || names.length === 0}>Evaluate</button></div>
  </form>`;
}
