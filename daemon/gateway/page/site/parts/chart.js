// A line chart with a table of the same numbers. Drawn by uPlot on a canvas.

import { html, uPlot, useEffect, useRef, useState } from "./libraries.js";
import { Scroll } from "./elements.js";
import { clock, NOTHING, number } from "./format.js";

const HEIGHT = 220;
const MAX_TABLE = 50; // rows
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
// with the mouse, and `onZoom(null)` to show all again.
export function Chart({ title, x, isTime = false, isLog = false, series, onZoom }) {
  const place = useRef();
  const readout = useRef();
  const key = [isTime, isLog, title, ...series.map((one) => one.label + !!one.raw)].join();

  useEffect(() => {
    const plot = new uPlot(options(), dataOf(), place.current);
    place.current.plot = plot;
    const observer = new ResizeObserver(() => {
      const width = Math.floor(place.current.clientWidth);
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
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
      const line = { label: one.label, stroke: colorOf(index), width: 2, spanGaps: true };
      return one.raw ? [{ ...line, stroke: `${colorOf(index)}55`, width: 1 }, line] : [line];
    });
    return {
      width: Math.max(200, Math.floor(place.current.clientWidth)),
      height: HEIGHT,
      legend: { show: false },
      scales: { x: { time: isTime }, y: { distr: isLog ? 3 : 1 } },
      axes: [axis, { ...axis, size: 60, values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(t))) }],
      series: [{}, ...lines],
      cursor: { drag: { x: true, y: false, setScale: false } },
      hooks: {
        setCursor: [read],
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

  // Shows the values below the mouse.
  function read(plot) {
    const { idx } = plot.cursor;
    if (idx === null || idx === undefined) {
      readout.current.textContent = "";
      return;
    }
    const at = isTime ? clock(plot.data[0][idx]) : number(plot.data[0][idx]);
    const values = plot.series.slice(1).map((one, n) => [one, plot.data[n + 1][idx]]);
    const shown = values.filter(([one]) => one.width === 2).map(([, value]) => number(value));
    readout.current.textContent = `${at}: ${shown.join(", ")}`;
  }

  return html`<figure class="card">
    <figcaption>
      <span>${title}</span>
      ${series.length > 1 && series.map((one, n) => html`<${Key} key=${one.label} label=${one.label} color=${colorOf(n)} />`)}
      <span class="quiet" ref=${readout}></span>
    </figcaption>
    <div ref=${place} role="img" aria-label=${`chart of ${title}; the table below has its numbers`} onDblClick=${() => onZoom?.(null)}></div>
    <${Numbers} title=${title} x=${x} isTime=${isTime} series=${series} />
  </figure>`;
}

function Key({ label, color }) {
  return html`<span class="key quiet" style=${{ "--key": color }}>${label}</span>`;
}

// The numbers as a table, made only when it is opened.
function Numbers({ title, x, isTime, series }) {
  const [isOpen, setOpen] = useState(false);
  const every = Math.max(1, Math.ceil(x.length / MAX_TABLE));
  const rows = x.map((_, index) => index).filter((index) => (x.length - 1 - index) % every === 0);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Numbers of ${title}</summary>
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
              ${series.map((one) => html`<td class="number">${number(one.values[index] ?? null) ?? NOTHING}</td>`)}
            </tr>`,
          )}
        </tbody>
      </table>
    <//>`}
  </details>`;
}
