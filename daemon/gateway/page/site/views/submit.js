// A form for a training job or a sweep, made from the options of its kind and checked by the gateway as one types.

import { html, useEffect, useMemo, useState } from "../parts/libraries.js";
import { get, post } from "../parts/api.js";
import { commandOf } from "../parts/command.js";
import { DataSet } from "../parts/data_set.js";
import { Copy, Heading, Problem } from "../parts/elements.js";
import { optionText } from "../parts/format.js";
import { ModelSelect, useModels } from "../parts/models.js";
import { NO_SWEEP, SweepForm, sweepFields, sweepWords } from "../parts/sweep_form.js";

const CHECK_MS = 400; // after the last change
const OPEN_GROUPS = ["data", "sampling", "reward"];
const JOB = { create: "/v1/fine_tuning/jobs", check: "/v1/warmd/check", view: "jobs" };
const SWEEP = { create: "/v1/warmd/sweeps", check: "/v1/warmd/sweeps/check", view: "sweeps" };

export function Submit({ query }) {
  const [kinds, setKinds] = useState(null);
  const [start, setStart] = useState(null); // of an earlier job: {kind, model, values}
  const [error, setError] = useState(null);
  const from = query.get("job");
  useEffect(() => {
    const requests = [get("/v1/warmd/kinds"), from ? get(`/v1/warmd/jobs/${from}`) : null];
    Promise.all(requests).then(([found, detail]) => {
      setKinds(found);
      setStart(detail ? startOf(detail, found) : { kind: firstOf(found).kind, values: {} });
    }, setError);
  }, [from]);
  if (error) return html`<${Heading}>Submit<//><${Problem} error=${error} />`;
  if (!start) return html`<${Heading}>Submit<//><p>Loading …</p>`;
  return html`<${Heading}>Submit<//><${Form} kinds=${kinds} start=${start} />`;
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
    if (name in options && JSON.stringify(options[name]) !== JSON.stringify(usual)) {
      values[name] = optionText(options[name]);
    }
  }
  const data = options[kind.data];
  return { kind: kind.kind, model: options.model, data: data === kind.builtin_data ? data : null, values };
}

function Form({ kinds, start }) {
  const names = useModels();
  const [kindName, setKindName] = useState(start.kind);
  const [chosen, setModel] = useState(start.model);
  const [data, setData] = useState(start.data);
  const [values, setValues] = useState(start.values);
  const [sweep, setSweep] = useState(NO_SWEEP);
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const kind = kinds.data.find((one) => one.kind === kindName);
  const model = chosen ?? names[0];
  const file = data ?? kind.builtin_data;
  const request = useMemo(() => requestOf(kind, model, file, values, sweepFields(sweep)), [kind, model, file, values, sweep]);
  const check = useCheck(request);

  function choose(name) {
    setKindName(name);
    setData(null);
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
      setError(problem);
      setBusy(false);
    }
  }

  return html`<form onSubmit=${submit} noValidate>
    <div class="filter">
      <label>
        Kind
        <select name="kind" value=${kindName} onChange=${(event) => choose(event.target.value)}>
          ${kinds.data.map((one) => html`<option key=${one.kind}>${one.kind}</option>`)}
        </select>
      </label>
      <${ModelSelect} label="Model" name="model" names=${names} value=${model} onChange=${setModel} />
    </div>
    <p class="quiet">${kind.help}</p>
    <${DataSet} kind=${kind} value=${file} onChange=${setData} />
    ${Object.entries(kinds.groups).map(
      ([group, title]) => html`<${Group} key=${kindName + group} title=${title} isOpen=${OPEN_GROUPS.includes(group)}
        options=${kind.options.filter((option) => option.group === group)} values=${values} setValues=${setValues} problem=${check.error} />`,
    )}
    ${kind.judged_by.length > 0 && html`<${SweepForm} kind=${kind} value=${sweep} onChange=${setSweep} problem=${check.error} />`}
    ${request ? html`<${Plan} check=${check} kind=${kind} fields=${request.fields} />` : html`<p class="quiet" role="status">Choose a data set.</p>`}
    <${Problem} error=${error} />
    <div class="buttons"><button class="primary" disabled=${isBusy || !request}>Submit</button></div>
  </form>`;
}

// The request {path, body, fields}; `fields` are those of a sweep, null for a job. Null while something is missing.
function requestOf(kind, model, file, values, fields) {
  if (!model || !file) return null;
  const hyperparameters = {};
  for (const option of kind.options) {
    const text = values[option.name];
    if (text === undefined || text === "") continue;
    hyperparameters[option.name] = option.many ? text.split(",").map((one) => one.trim()).filter(Boolean) : text;
  }
  const method = { type: kind.method, [kind.method]: { hyperparameters } };
  return { path: fields ? SWEEP : JOB, body: { model, training_file: file, method, ...fields }, fields };
}

// The gateway's reply to a check of a request: {options, steps_total, …} or {error}.
function useCheck(request) {
  const [found, setFound] = useState({});
  useEffect(() => {
    if (!request) return undefined;
    let isOld = false;
    const timer = setTimeout(async () => {
      let checked;
      try {
        const { problem, ...plan } = await (await post(request.path.check, request.body)).json();
        checked = { ...plan, error: problem };
      } catch (error) {
        checked = { error };
      }
      if (!isOld) setFound(checked); // an answer to an earlier request may come late
    }, CHECK_MS);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [request]);
  return found;
}

function Plan({ check, kind, fields }) {
  if (check.error) return html`<p class="problem" role="status">${check.error.message}</p>`;
  if (!check.options) return html`<p class="quiet" role="status">Checking …</p>`;
  const command = fields && check.varied ? sweepCommand(check, kind, fields) : commandOf(check.kind, kind.defaults, check.options);
  return html`<div class="card">
    <p role="status">${sizeOf(check)} The same in the terminal${command.includes("HOME/") ? ", with the daemon's home for HOME" : ""}:</p>
    <pre>${command}</pre>
    <p><${Copy} text=${command} label="Copy the command" /></p>
  </div>`;
}

function sizeOf({ jobs, steps_total: steps, rungs, metric }) {
  if (!jobs) return steps ? `${steps} steps.` : "";
  const compared = rungs.length > 1 ? `, compared at steps ${rungs.join(", ")}` : "";
  const length = steps ? `${steps} steps in all` : "each to its time limit";
  return `${jobs} jobs, ${length}${compared}, by ${metric}.`;
}

function sweepCommand(check, kind, fields) {
  const same = Object.fromEntries(Object.entries(check.options).filter(([name]) => !(name in check.varied)));
  return `${commandOf(check.kind, kind.defaults, same)} ${sweepWords(check.varied, fields)}`;
}

// --- options --------------------------------------------------------------------------------------

function Group({ title, isOpen, options, values, setValues, problem }) {
  if (options.length === 0) return null;
  return html`<details open=${isOpen || options.some((option) => option.name in values)}>
    <summary>${title}</summary>
    <div class="fields">
      ${options.map(
        (option) => html`<${Field} key=${option.name} option=${option} value=${values[option.name] ?? ""}
          problem=${problem?.param?.endsWith(`.${option.name}`) ? problem : null}
          onChange=${(value) => setValues({ ...values, [option.name]: value })} />`,
      )}
    </div>
  </details>`;
}

function Field({ option, value, problem, onChange }) {
  const usual = option.default_text ?? optionText(option.default);
  const described = { name: option.name, value, "aria-invalid": problem ? "true" : undefined, "aria-describedby": `help-${option.name}` };
  const choices = option.type === "bool" ? ["true", "false"] : option.many ? null : option.choices;
  const input = choices
    ? html`<select ...${described} onChange=${(event) => onChange(event.target.value)}>
        <option value="">${usual} (default)</option>
        ${choices.map((choice) => html`<option key=${choice}>${choice}</option>`)}
      </select>`
    : html`<input ...${described} placeholder=${usual.split("\n")[0]} inputmode=${["int", "float"].includes(option.type) ? "decimal" : "text"} onInput=${(event) => onChange(event.target.value)} />`;
  return html`<label>
    ${option.name.replaceAll("_", " ")} ${input}
    <small id=${`help-${option.name}`}>${option.help}${option.many ? " (separated by commas)" : ""}</small>
    ${problem && html`<small class="problem">${problem.message}</small>`}
  </label>`;
}
