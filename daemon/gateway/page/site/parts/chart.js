// A line chart with its latest values and a table of the same numbers. Drawn by uPlot on a canvas.

import { html, uPlot, useEffect, useRef, useState } from "./libraries.js";
import { Scroll } from "./elements.js";
import { clock, number } from "./format.js";
import { Term } from "./term.js";

const HEIGHT = 220;
const MAX_TABLE = 50; // rows
const SPARSE = 30; // values up to which a line shows each of them as a point
const DIGIT = 7; // pixels, of the axes' font
// Distinguishable also by people who are color-blind (Okabe and Ito).
const COLORS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#b08600", "#56b4e9"];

export function colorOf(index) {
  return COLORS[index % COLORS.length];
}

// Exponential moving average, debiased, over about `span` values; null stays null.
export function smoothed(values, span) {
  if (span <= 1) return values;
  const keep = 1 - 2 / (span + 1);
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

// `x` are the numbers of the x axis, `series` the lines as {label, values, raw}: `raw` is drawn pale
// behind a smoothed line. `onZoom(from, to)` is called with the part of the x axis that was chosen
// with the mouse, and `onZoom(null)` to show all again. `about` explains the title. Charts with the
// same `group` show their values at the same place of the x axis.
export function Chart({ title, about, x, isTime = false, isLog = false, series, onZoom, height = HEIGHT, group }) {
  const place = useRef();
  const [at, setAt] = useState(null); // the index under the cursor
  const key = [isTime, isLog, title, height, ...series.map((one) => one.label + !!one.raw)].join();

  useEffect(() => {
    const plot = new uPlot(options(), dataOf(), place.current);
    place.current.plot = plot;
    const observer = new ResizeObserver(() => {
      const width = Math.floor(place.current.clientWidth);
      if (width && width !== plot.width) plot.setSize({ width, height });
    });
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [key]);

  useEffect(() => place.current.plot.setData(dataOf()), [x, series]);

  function dataOf() {
    const lines = series.flatMap((one) => (one.raw ? [one.raw, one.values] : [one.values]));
    return [x, ...lines.map((line) => (isLog ? line.map((v) => (v > 0 ? v : null)) : line))];
  }

  function options() {
    const color = getComputedStyle(document.body).color;
    const axis = { stroke: color, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
    const lines = series.flatMap((one, index) => {
      const isSparse = one.values.filter((value) => value !== null).length <= SPARSE;
      const line = { label: one.label, stroke: colorOf(index), width: 2, spanGaps: true };
      if (isSparse) line.points = { show: true, size: 6 };
      return one.raw ? [{ ...line, stroke: `${colorOf(index)}55`, width: 1 }, line] : [line];
    });
    return {
      width: Math.max(200, Math.floor(place.current.clientWidth)),
      height,
      legend: { show: false },
      scales: { x: { time: isTime }, y: isLog ? { distr: 3 } : { range: rangeOf } },
      axes: [
        { ...axis, size: 32, ...(isTime ? { values: times, space: 70 } : {}) },
        { ...axis, size: widthOf, values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(t))) },
      ],
      series: [{}, ...lines],
      cursor: { drag: { x: true, y: false, setScale: false }, ...(group ? { sync: { key: group } } : {}) },
      hooks: {
        setCursor: [(plot) => setAt(plot.cursor.idx ?? null)],
        setSelect: [
          (plot) => {
            if (plot.select.width < 5) return;
            const from = plot.posToVal(plot.select.left, "x");
            const to = plot.posToVal(plot.select.left + plot.select.width, "x");
            plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            onZoom?.(from, to);
          },
        ],
      },
    };
  }

  const index = at === null || at >= x.length ? x.length - 1 : at;
  const values = series.map((one) => latest(one.values, index));
  const shownAt = isTime ? clock(x[index]) : number(x[index]);
  return html`<figure class="card">
    <figcaption>
      <${Term} word=${title} about=${about} />
      <span class="quiet">${at === null ? "" : `at ${shownAt}`}</span>
      ${series.length === 1
        ? html`<strong class="value">${number(values[0])}</strong>`
        : html`<span class="keys">
            ${series.map(
              (one, n) => html`<span class="key quiet" key=${one.label} style=${{ "--key": colorOf(n) }}>
                ${one.label} <strong class="value">${number(values[n])}</strong>
              </span>`,
            )}
          </span>`}
    </figcaption>
    <div ref=${place} role="img" aria-label=${`chart of ${title}; the table below has its numbers`} onDblClick=${() => onZoom?.(null)}></div>
    <${Numbers} title=${title} x=${x} isTime=${isTime} series=${series} />
  </figure>`;
}

// A flat line is in the middle of its chart: uPlot would show zeros at the bottom of 0 to 100.
function rangeOf(_, low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const margin = Math.abs(low) / 10 || 1;
  return [low - margin, low + margin];
}

// The width of the y axis, in which its longest label fits.
function widthOf(_, labels) {
  return 20 + DIGIT * Math.max(3, ...(labels ?? []).map((label) => label.length));
}

function times(_, ticks) {
  const isShort = ticks.at(-1) - ticks[0] < 600;
  const shown = { hour: "2-digit", minute: "2-digit", second: isShort ? "2-digit" : undefined, hourCycle: "h23" };
  return ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString([], shown));
}

// The last value up to an index: evaluations have one at a few steps only.
function latest(values, index) {
  for (let at = index; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

// The numbers as a table, made only when it is opened.
function Numbers({ title, x, isTime, series }) {
  const [isOpen, setOpen] = useState(false);
  const every = Math.max(1, Math.ceil(x.length / MAX_TABLE));
  const rows = x.map((_, index) => index).filter((index) => (x.length - 1 - index) % every === 0);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary aria-label=${`Numbers of ${title}`}>Numbers</summary>
    ${isOpen &&
    html`<${Scroll} label=${`numbers of ${title}`}>
      <table>
        <thead>
          <tr>
            <th scope="col">${isTime ? "time" : "at"}</th>
            ${series.map((one) => html`<th scope="col" class="number" key=${one.label}>${one.label}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (index) => html`<tr key=${index}>
              <th scope="row">${isTime ? clock(x[index]) : number(x[index])}</th>
              ${series.map((one) => html`<td class="number">${number(one.values[index])}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    <//>`}
  </details>`;
}
