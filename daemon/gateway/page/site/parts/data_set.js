// The choice of a data set: a stored file, or one that is uploaded, with its first records.

import { html, useEffect, useState } from "./libraries.js";
import { get, upload } from "./api.js";
import { Download } from "./download.js";
import { Problem, Scroll } from "./elements.js";
import { optionText, size } from "./format.js";

const PREVIEW_BYTES = 64 * 1024; // of an uploaded file
const PREVIEW_ROWS = 5;

export function DataSet({ kind, value, onChange }) {
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

  const chosen = files.find((file) => file.id === value);
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
    ${chosen && html`<p><${Download} path=${`/v1/files/${chosen.id}/content`} name=${chosen.filename} label="Download the file" /></p>`}
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
