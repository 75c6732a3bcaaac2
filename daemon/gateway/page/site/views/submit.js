// A form for a training, made from the options of its kind and checked by the gateway as one types.

import { html, useEffect, useMemo, useState } from "../parts/libraries.js";
import { get, post, upload } from "../parts/api.js";
import { commandOf } from "../parts/command.js";
import { Copy, Heading, Problem, Scroll } from "../parts/elements.js";
import { optionText, size } from "../parts/format.js";
import { ModelSelect, useModels } from "../parts/models.js";

const CHECK_MS = 400; // after the last change
const PREVIEW_BYTES = 64 * 1024; // of an uploaded file
const PREVIEW_ROWS = 5;
const OPEN_GROUPS = ["data", "sampling", "reward"];

export function Submit({ query }) {
  const [kinds, setKinds] = useState(null);
  const [start, setStart] = useState(null); // of an earlier job: {kind, model, values}
  const [error, setError] = useState(null);
  const from = query.get("job");
  useEffect(() => {
    const asked = [get("/v1/warmd/kinds"), from ? get(`/v1/warmd/jobs/${from}`) : null];
    Promise.all(asked).then(([found, detail]) => {
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
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const kind = kinds.data.find((one) => one.kind === kindName);
  const model = chosen ?? names[0];
  const file = data ?? kind.builtin_data;
  const request = useMemo(() => requestOf(kind, model, file, values), [kind, model, file, values]);
  const check = useCheck(request);

  function choose(name) {
    setKindName(name);
    setData(null);
    setValues({});
  }

  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const job = await (await post("/v1/fine_tuning/jobs", request)).json();
      location.hash = `#/jobs/${job.id}`;
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
    <${Data} kind=${kind} value=${file} onChange=${setData} />
    ${Object.entries(kinds.groups).map(
      ([group, title]) => html`<${Group} key=${kindName + group} title=${title} isOpen=${OPEN_GROUPS.includes(group)}
        options=${kind.options.filter((option) => option.group === group)} values=${values} setValues=${setValues} problem=${check.error} />`,
    )}
    ${request ? html`<${Plan} check=${check} kind=${kind} />` : html`<p class="quiet" role="status">Choose a data set.</p>`}
    <${Problem} error=${error} />
    <div class="buttons"><button class="primary" disabled=${isBusy || !request}>Submit</button></div>
  </form>`;
}

// The body of the request to /v1/fine_tuning/jobs; null while something is missing.
function requestOf(kind, model, file, values) {
  if (!model || !file) return null;
  const hyperparameters = {};
  for (const option of kind.options) {
    const text = values[option.name];
    if (text === undefined || text === "") continue;
    hyperparameters[option.name] = option.many ? text.split(",").map((one) => one.trim()).filter(Boolean) : text;
  }
  const method = { type: kind.method, [kind.method]: { hyperparameters } };
  return { model, training_file: file, method };
}

// What the gateway says of a request: {options, steps_total} or {error}.
function useCheck(request) {
  const [found, setFound] = useState({});
  useEffect(() => {
    if (!request) return undefined;
    const timer = setTimeout(async () => {
      try {
        const { problem, ...checked } = await (await post("/v1/warmd/check", request)).json();
        setFound({ ...checked, error: problem });
      } catch (error) {
        setFound({ error });
      }
    }, CHECK_MS);
    return () => clearTimeout(timer);
  }, [request]);
  return found;
}

function Plan({ check, kind }) {
  if (check.error) return html`<p class="problem" role="status">${check.error.message}</p>`;
  if (!check.options) return html`<p class="quiet" role="status">Checking …</p>`;
  const command = commandOf(check.kind, kind.defaults, check.options);
  const steps = check.steps_total ? `${check.steps_total} steps. ` : "";
  return html`<div class="card">
    <p role="status">${steps}The same in the terminal:</p>
    <pre>${command}</pre>
    <p><${Copy} text=${command} label="Copy the command" /></p>
  </div>`;
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

// --- data -----------------------------------------------------------------------------------------

function Data({ kind, value, onChange }) {
  const [files, setFiles] = useState([]);
  const [rows, setRows] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    get("/v1/files", { limit: 100 }).then((page) => setFiles(page.data), setError);
  }, []);

  async function take(event) {
    const [file] = event.target.files;
    if (!file) return;
    setError(null);
    try {
      setRows(await previewOf(file));
      const stored = await upload(file);
      setFiles((before) => [stored, ...before]);
      onChange(stored.id);
    } catch (problem) {
      setError(problem);
    }
  }

  return html`<fieldset>
    <legend>Data set</legend>
    <div class="fields">
      <label>
        Records
        <select name="data" value=${value ?? ""} onChange=${(event) => onChange(event.target.value)}>
          ${kind.builtin_data ? html`<option value=${kind.builtin_data}>${kind.builtin_data} (built in)</option>` : html`<option value="">choose or upload one</option>`}
          ${files.map((file) => html`<option key=${file.id} value=${file.id}>${file.filename}, ${size(file.bytes)}</option>`)}
        </select>
      </label>
      <label>Upload a JSONL file <input type="file" name="upload" accept=".jsonl,.json" onChange=${take} /></label>
    </div>
    <${Problem} error=${error} />
    ${rows && html`<${Preview} rows=${rows} />`}
  </fieldset>`;
}

// The first records of a file, read in the browser.
async function previewOf(file) {
  const text = await file.slice(0, PREVIEW_BYTES).text();
  const lines = text.split("\n").filter((line) => line.trim());
  return lines.slice(0, PREVIEW_ROWS).map((line) => {
    try {
      return JSON.parse(line);
    } catch {
      return { "not JSON": line.slice(0, 200) };
    }
  });
}

function Preview({ rows }) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  return html`<${Scroll} label="table of first records">
    <table>
      <thead><tr>${names.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((row, index) => html`<tr key=${index}>${names.map((name) => html`<td key=${name}>${optionText(row[name]).slice(0, 300)}</td>`)}</tr>`)}
      </tbody>
    </table>
  <//>`;
}
