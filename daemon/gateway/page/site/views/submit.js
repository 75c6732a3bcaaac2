// A form for a training job or a sweep: what everyone sets first, all other options folded. The gateway checks it as
// one types, and renders the first prompt.

import { html, useEffect, useMemo, useRef, useState } from "../parts/libraries.js";
import { get, post } from "../parts/api.js";
import { commandOf, quoted } from "../parts/command.js";
import { DataSet, useFiles, useRecords } from "../parts/data_set.js";
import { Copy, Heading, Problem } from "../parts/elements.js";
import { number, optionText } from "../parts/format.js";
import { evaluationOf, HELD_OUT, HeldOut } from "../parts/held_out.js";
import { ModelSelect, NoModels, useModelInputs, useModelNames } from "../parts/models.js";
import { OptionField } from "../parts/option_field.js";
import { inWords } from "../parts/problems.js";
import { hasReward, Rewards } from "../parts/rewards.js";
import { NO_SWEEP, SweepForm, sweepFields, sweepWords } from "../parts/sweep_form.js";

const CHECK_MS = 400; // after the last change
const JOB = { create: "/v1/fine_tuning/jobs", check: "/v1/warmd/check", view: "jobs" };
const SWEEP = { create: "/v1/warmd/sweeps", check: "/v1/warmd/sweeps/check", view: "sweeps" };
// Options that are not folded, by the part of the form that has them.
const PROMPT = ["template", "chat_template"];
const LENGTH = ["samples", "epochs", "steps"];
const REWARD = "reward";
const EVALUATION = "eval_samples";

export function Submit({ query }) {
  const [kinds, setKinds] = useState(null);
  const [start, setStart] = useState(null); // of an earlier job: {kind, model, data, values, heldOut, tags}
  const [error, setError] = useState(null);
  const names = useModelNames();
  const from = query.get("job");
  useEffect(() => {
    const requests = [get("/v1/warmd/kinds"), from ? get(`/v1/warmd/jobs/${from}`) : null];
    Promise.all(requests).then(([found, detail]) => {
      setKinds(found);
      setStart(detail ? startOf(detail, found) : { kind: firstOf(found).kind, values: {}, heldOut: HELD_OUT, tags: "" });
    }, setError);
  }, [from]);
  if (error) return html`<${Heading}>Submit<//><${Problem} error=${error} />`;
  if (!start || !names) return html`<${Heading}>Submit<//><p>Loading …</p>`;
  return html`<${Heading}>Submit<//><${Form} kinds=${kinds} names=${names} start=${start} />`;
}

// A kind that needs no file, so that the form can be submitted as it is.
function firstOf(kinds) {
  return kinds.data.find((kind) => kind.builtin_data) ?? kinds.data[0];
}

// The options of an earlier job that a form can set.
function startOf({ job, options }, kinds) {
  const kind = kinds.data.find((one) => one.kind === job.kind) ?? kinds.data[0];
  const values = {};
  for (const { name, default: usual } of kind.options) {
    if (name !== EVALUATION && name in options && JSON.stringify(options[name]) !== JSON.stringify(usual)) {
      values[name] = optionText(options[name]);
    }
  }
  const { [EVALUATION]: samples, [kind.validation]: file } = options;
  const heldOut = { isOn: Boolean(samples || file), samples: samples ? String(samples) : "", file: fileOf(file) ?? "" };
  return { kind: kind.kind, model: options.model, data: fileOf(options[kind.data]), values, heldOut, tags: job.tags.join(", ") };
}

// The id of an uploaded file in a path; null for other data.
function fileOf(path) {
  return path?.match(/\/(file-[0-9a-f]{24})\//)?.[1] ?? null;
}

function Form({ kinds, names, start }) {
  const [kindName, setKindName] = useState(start.kind);
  const [chosen, setModel] = useState(start.model);
  const [data, setData] = useState(start.data);
  const [values, setValues] = useState(start.values);
  const [heldOut, setHeldOut] = useState(start.heldOut);
  const [sweep, setSweep] = useState(NO_SWEEP);
  const [label, setLabel] = useState({ name: "", tags: start.tags, seed: "" });
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const [files, addFile] = useFiles();
  const form = useRef();
  const kind = kinds.data.find((one) => one.kind === kindName);
  const option = (name) => kind.options.find((one) => one.name === name);
  const model = chosen ?? names[0];
  const file = data ?? kind.builtin_data;
  const records = useRecords(file);
  const inputs = useModelInputs(model);
  const evaluation = useMemo(
    () => (option(EVALUATION) ? evaluationOf(heldOut, records.rows) : {}),
    [kind, heldOut, records.rows],
  );
  const request = useMemo(
    () => requestOf(kind, model, file, values, evaluation, label, sweepFields(sweep)),
    [kind, model, file, values, evaluation, label, sweep],
  );
  const check = useCheck(request);
  const wrong = check.error ? inWords(check.error) : null;
  const problems = wrong?.field ? { [wrong.field]: wrong } : {};
  const field = (name) =>
    option(name) &&
    html`<${OptionField} key=${kindName + name} option=${option(name)} value=${values[name] ?? ""} effective=${check.options?.[name]}
      problem=${problems[name]} onChange=${(value) => setValues((before) => ({ ...before, [name]: value }))} />`;
  const isShown = (name) => !name.startsWith("custom_") || hasReward(option(REWARD), values[REWARD], "custom");
  const folded = kind.options.filter(({ name }) => ![...PROMPT, ...LENGTH, REWARD, EVALUATION].includes(name) && isShown(name));

  function choose(name) {
    setKindName(name);
    setData(data?.startsWith("file-") ? data : null);
    setValues({});
    setSweep(NO_SWEEP);
  }

  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const { path, body } = request;
      const made = await (await post(path.create, body)).json();
      location.hash = `#/${path.view}/${made.id}`;
    } catch (problem) {
      const { label: where, text } = inWords(problem);
      setError({ message: where ? `${where}: ${text}` : text });
      setBusy(false);
    }
  }

  // Opens the part of the form that has the wrong field, and goes there.
  function showProblem() {
    const first = form.current.querySelector("[aria-invalid=true]") ?? form.current.querySelector(".part .problem");
    const part = first?.closest("details");
    if (part) part.open = true;
    first?.scrollIntoView({ block: "center" });
    first?.focus();
  }

  return html`<form class="submit" ref=${form} onSubmit=${submit} noValidate>
    <${Part} title="Training">
      <div class="fields">
        <label>
          Method
          <select name="kind" value=${kindName} onChange=${(event) => choose(event.target.value)}>
            ${kinds.data.map((one) => html`<option key=${one.kind}>${one.kind}</option>`)}
          </select>
          <small>${kind.help}</small>
        </label>
        ${names.length > 0 || model ? html`<${ModelSelect} label="Model" name="model" names=${names} value=${model} onChange=${setModel} />` : html`<${NoModels} />`}
      </div>
      ${problems.model && html`<small class="problem">${problems.model.text}</small>`}
    <//>
    <${Part} title="Data">
      <${DataSet} kind=${kind} files=${files} addFile=${addFile} value=${file} records=${records} problem=${problems.training_file} onChange=${setData} />
      ${PROMPT.some(option) && html`<div class="fields">${PROMPT.map(field)}</div>`}
    <//>
    ${option("chat_template") && html`<${Preview} prompt=${check.prompt} inputs=${inputs} isPlain=${values.chat_template !== "true"} />`}
    ${option(REWARD) &&
    html`<${Part} title="Reward">
      <${Rewards} option=${option(REWARD)} value=${values[REWARD]} problem=${problems[REWARD]}
        onChange=${(value) => setValues((before) => ({ ...before, [REWARD]: value }))} />
    <//>`}
    <${Part} title="Length"><div class="fields short">${LENGTH.map(field)}</div><//>
    ${option(EVALUATION) &&
    html`<${Part} title="Evaluation">
      <${HeldOut} kind=${kind} files=${files} rows=${records.rows} value=${heldOut} problems=${problems} onChange=${setHeldOut} />
    <//>`}
    <${Part} title="Name">
      <div class="fields">
        ${Text({ name: "name", title: "name", help: "a word, shown in lists", problem: problems.name ?? problems.suffix, label, setLabel })}
        ${Text({ name: "tags", title: "tags", help: "separated by commas", problem: problems.tags ?? problems.tag, label, setLabel })}
      </div>
    <//>
    <${Part} title="All other options">
      ${Object.entries(kinds.groups).map(
        ([group, title]) => html`<${Group} key=${kindName + group} title=${title} values=${values}
          options=${folded.filter((one) => one.group === group)} field=${field}>
          ${group === "optimization" && Text({ name: "seed", title: "seed", help: "of all random numbers of the job; empty: 42", problem: problems.seed, label, setLabel })}
        <//>`,
      )}
      ${kind.judged_by.length > 0 && html`<${SweepForm} kind=${kind} value=${sweep} onChange=${setSweep} problems=${problems} />`}
      ${request && check.options && html`<${Command} check=${check} kind=${kind} fields=${request.fields} label=${label} />`}
    <//>
    <div class="submit-bar">
      <${State} request=${request} check=${check} wrong=${wrong} error=${error} onShow=${wrong?.field ? showProblem : null} />
      <button class="primary" disabled=${isBusy || !request || Boolean(wrong)}>Submit</button>
    </div>
  </form>`;
}

// The request {path, body, fields}; `fields` are those of a sweep, null for a job. Null while something is missing.
function requestOf(kind, model, file, values, { validation_file, ...evaluation }, { name, tags, seed }, fields) {
  if (!model || !file) return null;
  const hyperparameters = {};
  for (const option of kind.options) {
    const text = { ...values, ...evaluation }[option.name];
    if (text === undefined || text === "") continue;
    hyperparameters[option.name] = option.many ? listOf(text) : text;
  }
  const method = { type: kind.method, [kind.method]: { hyperparameters } };
  const body = { model, training_file: file, method, ...fields };
  if (validation_file) body.validation_file = validation_file;
  if (name) body[fields ? "name" : "suffix"] = name;
  if (tags.trim()) body.tags = listOf(tags);
  if (seed) body.seed = Number.isNaN(Number(seed)) ? seed : Number(seed); // the gateway reports the error of a text
  return { path: fields ? SWEEP : JOB, body, fields };
}

function listOf(text) {
  return text.split(",").map((one) => one.trim()).filter(Boolean);
}

// The gateway's reply to a check of a request: {options, steps_total, …} or {error}; both with the first `prompt`.
function useCheck(request) {
  const [found, setFound] = useState({});
  useEffect(() => {
    if (!request) return undefined;
    let isOld = false;
    const { model, training_file: file, method } = request.body;
    const of = JSON.stringify([model, file, method.type]);
    const timer = setTimeout(async () => {
      let checked;
      try {
        const { problem, ...plan } = await (await post(request.path.check, request.body)).json();
        checked = { ...plan, error: problem };
      } catch (error) {
        checked = { error };
      }
      // An answer to an earlier request may come late. A wrong field elsewhere leaves the prompt as it was.
      if (!isOld) setFound((before) => ({ ...checked, prompt: checked.first_prompt ?? (before.of === of ? before.prompt : null), of }));
    }, CHECK_MS);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [request]);
  return request ? found : {};
}

// --- parts of the form ------------------------------------------------------------------------------

function Part({ title, children }) {
  return html`<section class="part" aria-label=${title}><h2>${title}</h2><div>${children}</div></section>`;
}

function Group({ title, options, values, field, children }) {
  if (options.length === 0) return null;
  const changed = options.filter(({ name }) => values[name]).length;
  return html`<details open=${changed > 0}>
    <summary>${title} <small>${changed > 0 ? `${changed} set` : options.map(({ name }) => name.replaceAll("_", " ")).slice(0, 4).join(", ")}</small></summary>
    <div class="fields">${options.map(({ name }) => field(name))}${children}</div>
  </details>`;
}

function Text({ name, title, help, problem, label, setLabel }) {
  return html`<label key=${name}>
    ${title}
    <input name=${name} value=${label[name]} aria-invalid=${problem ? "true" : undefined} aria-describedby=${`help-${name}`}
      onInput=${(event) => setLabel((before) => ({ ...before, [name]: event.target.value }))} />
    ${problem && html`<small class="problem">${problem.text}</small>`}
    <small id=${`help-${name}`}>${help}</small>
  </label>`;
}

function Preview({ prompt, inputs, isPlain }) {
  const limit = inputs?.context_length;
  return html`<aside class="preview" aria-label="First prompt">
    <h2>First prompt</h2>
    ${prompt
      ? html`<p class="quiet">as the model gets it</p>
          ${prompt.tokens !== null && html`<p class=${limit && prompt.tokens > limit ? "problem" : "quiet"}>${number(prompt.tokens)} tokens${limit && ` of the ${number(limit)} that the model takes`}</p>`}
          <pre tabindex="0" role="region" aria-label="text of the first prompt">${prompt.text}</pre>`
      : html`<p class="quiet">It is shown as soon as the data can be read.</p>`}
    ${prompt && inputs?.has_chat_template && isPlain && html`<p class="quiet">This model has a chat template. Plain prompts get it with “chat template: true”.</p>`}
  </aside>`;
}

// What would be submitted, or why it cannot be.
function State({ request, check, wrong, error, onShow }) {
  if (error) return html`<${Problem} error=${error} />`;
  if (!request) return html`<p class="quiet" role="status">Choose a model and data.</p>`;
  if (wrong) {
    return html`<p class="problem" role="status">
      ${wrong.label ? `${wrong.label}: ${wrong.text}` : wrong.text} ${onShow && html`<button type="button" class="small" onClick=${onShow}>Show the field</button>`}
    </p>`;
  }
  if (!check.options) return html`<p class="quiet" role="status">Checking …</p>`;
  return html`<p role="status">${sizeOf(check)}</p>`;
}

function sizeOf({ jobs, steps_total: steps, rungs, metric }) {
  if (!jobs) return steps ? `${number(steps)} steps.` : "Ready.";
  const compared = rungs.length > 1 ? `, compared at steps ${rungs.join(", ")}` : "";
  const length = steps ? `${number(steps)} steps in all` : "each to its time limit";
  return `${jobs} jobs, ${length}${compared}, by ${metric}.`;
}

function Command({ check, kind, fields, label }) {
  const command = fields && check.varied ? sweepCommand(check, kind, fields) : commandOf(check.kind, kind.defaults, check.options);
  const labels = [...(label.name ? ["--name", label.name] : []), ...listOf(label.tags).flatMap((tag) => ["--tag", tag])];
  const text = [command, ...labels.map(quoted)].join(" ");
  return html`<details>
    <summary>The same in the terminal</summary>
    ${command.includes("HOME/") && html`<p class="quiet">HOME is the daemon's home.</p>`}
    <pre class="command">${text}</pre>
    <p><${Copy} text=${text} label="Copy the command" /></p>
  </details>`;
}

function sweepCommand(check, kind, fields) {
  const same = Object.fromEntries(Object.entries(check.options).filter(([name]) => !(name in check.varied)));
  return `${commandOf(check.kind, kind.defaults, same)} ${sweepWords(check.varied, fields)}`;
}
