// The choice of a data set: built in, a stored file or one that is uploaded, with its first records.

import { html, useEffect, useState } from "./libraries.js";
import { get, upload } from "./api.js";
import { Download } from "./download.js";
import { Problem, Scroll } from "./elements.js";
import { number, size } from "./format.js";
import { inWords } from "./problems.js";

const SHOWN = 2; // records
const SUFFIXES = ".jsonl,.json,.csv,.parquet,.arrow"; // those that the gateway's reader takes

// The uploaded files, newest first, and a function that adds one.
export function useFiles() {
  const [files, setFiles] = useState([]);
  useEffect(() => {
    get("/v1/files", { limit: 100 }).then(
      (page) => setFiles(page.data),
      () => setFiles([]),
    );
  }, []);
  return [files, (file) => setFiles((before) => [file, ...before])];
}

// {rows, records, faults} of an uploaded file, or {error}; {} while it is read and for other data.
export function useRecords(id) {
  const [found, setFound] = useState({});
  useEffect(() => {
    setFound({});
    if (!id?.startsWith("file-")) return undefined;
    let isOld = false;
    get(`/v1/warmd/files/${id}/records`, { limit: SHOWN }).then(
      (records) => isOld || setFound(records),
      (error) => isOld || setFound({ error }),
    );
    return () => {
      isOld = true;
    };
  }, [id]);
  return found;
}

export function DataSet({ kind, files, addFile, value, records, problem, onChange }) {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);

  async function take(event) {
    const [file] = event.target.files;
    if (!file) return;
    setError(null);
    setBusy(true);
    try {
      const stored = await upload(file);
      addFile(stored);
      onChange(stored.id);
    } catch (caught) {
      setError(caught);
    }
    setBusy(false);
  }

  const chosen = files.find((file) => file.id === value);
  return html`
    <div class="fields">
      <label>
        Training data
        <select name="data" value=${value ?? ""} aria-invalid=${problem ? "true" : undefined} onChange=${(event) => onChange(event.target.value)}>
          ${kind.builtin_data ? html`<option value=${kind.builtin_data}>${kind.builtin_data} (built in)</option>` : html`<option value="">choose or upload one</option>`}
          ${value && value !== kind.builtin_data && !chosen && html`<option value=${value}>${value}</option>`}
          ${files.map((file) => html`<option key=${file.id} value=${file.id}>${file.filename}, ${size(file.bytes)}</option>`)}
        </select>
        ${problem && html`<small class="problem">${problem.text}</small>`}
      </label>
      <label>
        or upload a JSONL, CSV or Parquet file
        <input type="file" name="upload" accept=${SUFFIXES} onChange=${take} />
        ${isBusy && html`<small role="status">Uploading …</small>`}
      </label>
    </div>
    <${Problem} error=${error} />
    ${records.error && html`<${Problem} error=${{ message: inWords(records.error).text }} />`}
    ${records.rows !== undefined && html`<${Records} ...${records} file=${chosen} />`}
  `;
}

function Records({ rows, records, faults, file }) {
  const names = [...new Set(records.flatMap((record) => Object.keys(record)))];
  return html`
    <p class="line">
      <span>${number(rows)} ${rows === 1 ? "record" : "records"}</span>
      ${file && html`<${Download} path=${`/v1/files/${file.id}/content`} name=${file.filename} label="Download the file" />`}
    </p>
    ${faults.map((fault) => html`<p class="problem" key=${fault}>${inWords({ message: fault }).text}</p>`)}
    ${records.length > 0 &&
    html`<${Scroll} label="table of first records">
      <table class="records">
        <thead><tr>${names.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
        <tbody>
          ${records.map((record, index) => html`<tr key=${index}>${names.map((name) => html`<td key=${name}><div>${record[name] ?? ""}</div></td>`)}</tr>`)}
        </tbody>
      </table>
    <//>`}
  `;
}
