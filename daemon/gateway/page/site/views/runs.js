// The table of runs: trainings and evaluations, with columns of the user's choice, sorted, filtered, grouped by sweep;
// the curves of those that are selected are drawn above it.

import { html, useMemo, useState } from "../parts/libraries.js";
import { colorOf } from "../parts/chart.js";
import { GroupLink, Heading, JobLink, Problem, Scroll, tagsOf } from "../parts/elements.js";
import { statusOf } from "../parts/format.js";
import { Pages } from "../parts/pages.js";
import { automatic, cellOf, columnsOf, ordered, summaryOf } from "../parts/run_columns.js";
import { differing, useRuns } from "../parts/run_list.js";
import { MOST_LINES, RunPlot } from "../parts/run_plot.js";
import { useStored } from "../parts/stored.js";

const PAGE = 100; // rows
const NEWEST = { key: "created", isDescending: true };
const GROUPS = ["Run", "Options that differ", "Metrics, last value", "Metrics, best value", "Other options"]; // of columns
const FILTERS = ["text", "kind", "status", "tag", "sweep"];

export function Runs({ query }) {
  const { runs, defaults, groups, isComplete, error } = useRuns();
  const [filter, setFilter] = useState(() => Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""])));
  const [chosen, setChosen] = useStored("runs.columns", null); // null: chosen automatically
  const [order, setOrder] = useStored("runs.order", NEWEST);
  const [isGrouped, setGrouped] = useStored("runs.grouped", true);
  const [open, setOpen] = useState([]); // ids of the sweeps whose runs are shown
  const [selected, setSelected] = useState([]);
  const [page, setPage] = useState(0);

  const shown = useMemo(() => runs.filter((run) => fits(run, filter)), [runs, filter]);
  const columns = useMemo(() => columnsOf(runs, defaults), [runs]);
  const keys = useMemo(() => chosen ?? automatic(shown), [chosen, shown]);
  const visible = keys.map((key) => columns.get(key)).filter(Boolean);
  const by = columns.get(order.key) ?? { value: (run) => run.label };
  const sorted = useMemo(() => ordered(shown, by, order.isDescending), [shown, order, columns]);
  const rows = useMemo(() => rowsOf(sorted, isGrouped && !filter.sweep, open), [sorted, isGrouped, open, filter.sweep]);
  const drawn = selected.map((id) => runs.find((run) => run.id === id)).filter(Boolean);
  const first = Math.min(page, Math.floor(Math.max(rows.length - 1, 0) / PAGE)) * PAGE;

  function setFilters(changed) {
    const next = { ...filter, ...changed };
    setFilter(next);
    setPage(0);
    const search = new URLSearchParams(Object.entries(next).filter(([, value]) => value));
    history.replaceState(null, "", search.size ? `#/runs?${search}` : "#/runs");
  }

  function select(ids, isSelected) {
    setSelected((before) => [...before.filter((id) => !ids.includes(id)), ...(isSelected ? ids : [])]);
  }

  function sortBy(key, isNumber) {
    setOrder({ key, isDescending: order.key === key ? !order.isDescending : Boolean(isNumber) });
    setPage(0);
  }

  if (error && runs.length === 0) return html`<${Heading}>Runs<//><${Problem} error=${error} />`;
  if (!isComplete && runs.length === 0) return html`<${Heading}>Runs<//><p>Loading …</p>`;
  if (runs.length === 0) return html`<${Heading}>Runs<//><${NoRun} />`;
  return html`
    <${Heading}>Runs<//>
    <${Filters} runs=${runs} groups=${groups} filter=${filter} set=${setFilters} />
    <div class="line toolbar">
      <span role="status">${countText(shown.length, runs.length, isComplete)}</span>
      <label class="inline">
        <input type="checkbox" name="grouped" checked=${isGrouped} onChange=${(event) => setGrouped(event.target.checked)} /> Group by sweep
      </label>
      <${Selection} drawn=${drawn} clear=${() => setSelected([])} />
    </div>
    <${Problem} error=${error} />
    <${Columns} columns=${columns} keys=${keys} shown=${shown} isChosen=${chosen !== null} set=${setChosen} />
    ${drawn.length > 0 &&
    html`<section class="plot" aria-label="Curves of the selected runs"><${RunPlot} runs=${drawn} /></section>`}
    ${rows.length === 0
      ? html`<p class="empty">
          No run fits these filters. <button type="button" class="small" onClick=${() => setFilters(Object.fromEntries(FILTERS.map((name) => [name, ""])))}>Clear the filters</button>
        </p>`
      : html`<${Table} rows=${rows.slice(first, first + PAGE)} columns=${visible} order=${order} sortBy=${sortBy} selected=${selected} select=${select} open=${open} setOpen=${setOpen} />`}
    <${Pages} label="Pages of runs" first=${first} size=${PAGE} total=${rows.length} go=${(index) => setPage(index / PAGE)} />
  `;
}

function NoRun() {
  return html`<p class="empty">
    No training or evaluation yet: <a href="#/submit">submit a training</a> or <a href="#/evaluations">evaluate a model</a>.
  </p>`;
}

function fits(run, { text, kind, status, tag, sweep }) {
  if ((kind && run.kind !== kind) || (status && statusOf(run) !== status)) return false;
  if ((tag && !run.tags.includes(tag)) || (sweep && run.sweep !== sweep)) return false;
  return text === "" || text.toLowerCase().split(/\s+/).every((word) => run.text.includes(word));
}

function countText(shown, total, isComplete) {
  const all = `${total.toLocaleString("en")} ${total === 1 ? "run" : "runs"}`;
  const text = shown === total ? all : `${shown.toLocaleString("en")} of ${all}`;
  return isComplete ? text : `${text}, reading more …`;
}

// Rows of the table: a run, or a sweep as {id, runs} at the place of its first run, followed by its runs where it is open.
function rowsOf(runs, isGrouped, open) {
  if (!isGrouped) return runs.map((run) => ({ run }));
  const members = Map.groupBy(runs.filter((run) => run.sweep), (run) => run.sweep);
  const rows = [];
  const seen = new Set();
  for (const run of runs) {
    if (!run.sweep) rows.push({ run });
    else if (!seen.has(run.sweep)) {
      seen.add(run.sweep);
      rows.push({ id: run.sweep, runs: members.get(run.sweep) });
      if (open.includes(run.sweep)) rows.push(...members.get(run.sweep).map((one) => ({ run: one, isMember: true })));
    }
  }
  return rows;
}

// --- above the table ------------------------------------------------------------------------------

function Filters({ runs, groups, filter, set }) {
  const choices = useMemo(() => {
    const unique = (values) => [...new Set(values)].filter(Boolean).sort();
    return {
      kind: unique(runs.map((run) => run.kind)),
      status: unique(runs.map(statusOf)),
      tag: unique(runs.flatMap(tagsOf)),
      sweep: unique(runs.map((run) => run.sweep)),
    };
  }, [runs]);
  return html`<form class="filter" role="search" onSubmit=${(event) => event.preventDefault()}>
    <label>
      Search
      <input type="search" name="text" value=${filter.text} placeholder="name, id, model, tag" onInput=${(event) => set({ text: event.target.value })} />
    </label>
    ${Object.entries(choices).map(
      ([name, values]) => html`<label key=${name}>
        ${name[0].toUpperCase() + name.slice(1)}
        <select name=${name} value=${filter[name]} onChange=${(event) => set({ [name]: event.target.value })}>
          <option value="">all</option>
          ${[...new Set(filter[name] ? [...values, filter[name]] : values)].map(
            (value) => html`<option key=${value} value=${value}>${name === "sweep" ? (groups[value] ?? value) : value}</option>`,
          )}
        </select>
      </label>`,
    )}
  </form>`;
}

function Selection({ drawn, clear }) {
  if (drawn.length === 0) return html`<span class="quiet">select runs to draw their curves</span>`;
  const ids = drawn.slice(0, MOST_LINES).map((run) => `job=${run.id}`);
  return html`
    <span>${drawn.length} selected${drawn.length > MOST_LINES && `, the first ${MOST_LINES} are drawn`}</span>
    <a href="#/compare?${ids.join("&")}">Compare options</a>
    <button type="button" class="small" onClick=${clear}>Clear the selection</button>
  `;
}

function Columns({ columns, keys, shown, isChosen, set }) {
  const [text, setText] = useState("");
  const [isOpen, setOpen] = useState(false);
  const differ = useMemo(() => new Set(isOpen ? differing(shown) : []), [isOpen, shown]);
  const groupOf = ({ option, group }) => (differ.has(option) ? "Options that differ" : group);
  const found = [...columns.values()].filter((column) => column.title.includes(text));
  const groups = Map.groupBy(found, groupOf);
  // A new column is added behind the others of its group.
  const toggle = ({ key }) => {
    const wanted = keys.includes(key) ? keys.filter((one) => one !== key) : [...keys, key];
    const places = [...columns.keys()];
    set(keys.includes(key) ? wanted : wanted.sort((a, b) => places.indexOf(a) - places.indexOf(b)));
  };
  return html`<details class="columns-choice" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Columns</summary>
    ${isOpen &&
    html`<div class="line">
        <label class="inline">Find <input type="search" name="column" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
        <button type="button" class="small" disabled=${!isChosen} onClick=${() => set(null)}>Choose automatically</button>
      </div>
      ${GROUPS.filter((name) => groups.has(name)).map(
        (name) => html`<fieldset key=${name}>
          <legend>${name}</legend>
          <div class="choices">
            ${groups.get(name).map(
              (column) => html`<label class="inline" key=${column.key}>
                <input type="checkbox" name=${column.key} checked=${keys.includes(column.key)} onChange=${() => toggle(column)} /> ${column.title}
              </label>`,
            )}
          </div>
        </fieldset>`,
      )}`}
  </details>`;
}

// --- the table ------------------------------------------------------------------------------------

function Table({ rows, columns, order, sortBy, selected, select, open, setOpen }) {
  const header = { order, sortBy };
  return html`<${Scroll} label="table of runs">
    <table class="runs">
      <thead>
        <tr>
          <th scope="col" class="mark"><span class="hidden">Selected</span></th>
          <${Header} ...${header} column=${{ key: "name", title: "Name" }} />
          ${columns.map((column) => html`<${Header} key=${column.key} ...${header} column=${column} />`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map((row) =>
          row.run
            ? html`<${Run} key=${row.run.id} ...${row} columns=${columns} place=${selected.indexOf(row.run.id)} select=${select} />`
            : html`<${Sweep} key=${row.id} ...${row} columns=${columns} selected=${selected} select=${select} open=${open} setOpen=${setOpen} />`,
        )}
      </tbody>
    </table>
  <//>`;
}

function Header({ column, order, sortBy }) {
  const isSorted = order.key === column.key;
  const direction = order.isDescending ? "descending" : "ascending";
  return html`<th scope="col" class=${column.isNumber ? "number" : ""} aria-sort=${isSorted ? direction : "none"}>
    <button type="button" class="sort" onClick=${() => sortBy(column.key, column.isNumber)}>
      ${column.title}<span aria-hidden="true">${isSorted ? (order.isDescending ? " ↓" : " ↑") : ""}</span>
    </button>
  </th>`;
}

function Run({ run, isMember, columns, place, select }) {
  const isSelected = place >= 0;
  const color = isSelected && place < MOST_LINES ? colorOf(place) : undefined;
  return html`<tr class=${isMember ? "member" : ""} aria-selected=${isSelected}>
    <td class="mark" style=${{ "--key": color }}>
      <input type="checkbox" aria-label=${`Select ${run.label}`} checked=${isSelected} onChange=${() => select([run.id], !isSelected)} />
    </td>
    <th scope="row" class="name"><${JobLink} id=${run.id} name=${run.label} /></th>
    ${columns.map((column) => html`<td key=${column.key} class=${column.isNumber ? "number" : ""}>${cellOf(column, run)}</td>`)}
  </tr>`;
}

function Sweep({ id, runs, columns, selected, select, open, setOpen }) {
  const isOpen = open.includes(id);
  const ids = runs.map((run) => run.id);
  const isSelected = ids.every((one) => selected.includes(one));
  return html`<tr class="group">
    <td class="mark">
      <input type="checkbox" aria-label=${`Select the runs of ${id}`} checked=${isSelected} onChange=${() => select(ids, !isSelected)} />
    </td>
    <th scope="row" class="name">
      <button
        type="button"
        class="fold"
        aria-expanded=${isOpen}
        aria-label=${`Runs of ${id}`}
        onClick=${() => setOpen(isOpen ? open.filter((one) => one !== id) : [...open, id])}
      >
        ${isOpen ? "▾" : "▸"}
      </button>
      <${GroupLink} id=${id} /> <span class="quiet">${runs.length} runs</span>
    </th>
    ${columns.map((column) => html`<td key=${column.key} class=${column.isNumber ? "number" : ""}>${column.key === "sweep" ? "" : summaryOf(column, runs)}</td>`)}
  </tr>`;
}
