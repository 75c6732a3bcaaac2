// All evaluations of this home, the best first, as a table for each data set.

import { html } from "./libraries.js";
import { JobLink, Scroll } from "./elements.js";
import { clock, number } from "./format.js";
import { nameOf } from "./names.js";

// Metrics of which less is better; the others are shares, rewards and accuracies.
const LOWER_IS_BETTER = /bits_per_byte|perplexity/;

// `jobs`: finished evaluations with their results, newest first.
export function Leaderboards({ jobs }) {
  return boardsOf(jobs).map((ranked) => html`<${Board} key=${keyOf(ranked[0])} jobs=${ranked} />`);
}

// Evaluations can be compared if they have the same task and the same questions.
export function keyOf({ result }) {
  return `${result.task} ${result.data.digest}`;
}

// The primary metric is the first one.
export function primaryOf({ result }) {
  const [[name, metric]] = Object.entries(result.metrics);
  return { name, ...metric };
}

export function dataName({ result }) {
  return result.data.dataset.split("/").at(-1);
}

function boardsOf(jobs) {
  const boards = [...Map.groupBy(jobs, keyOf).values()];
  return boards.map((board) => {
    const sign = LOWER_IS_BETTER.test(primaryOf(board[0]).name) ? 1 : -1;
    return board.sort((a, b) => sign * (primaryOf(a).value - primaryOf(b).value));
  });
}

function Board({ jobs }) {
  const { task, questions } = jobs[0].result;
  const { name } = primaryOf(jobs[0]);
  const title = `${dataName(jobs[0])}, task ${task}, ${questions} questions`;
  const ends = jobs.map(primaryOf).flatMap(({ value, low, high }) => [low ?? value, high ?? value]);
  const range = [Math.min(...ends), Math.max(...ends)];
  return html`
    <h3>${title}</h3>
    <${Scroll} label=${title}>
      <table class="stacked board">
        <thead>
          <tr>
            <th scope="col">Rank</th>
            <th scope="col">Model</th>
            <th scope="col" class="number">${name}</th>
            <th scope="col">95 % interval</th>
            <th scope="col">Evaluation</th>
            <th scope="col">When</th>
            <th scope="col">Question by question</th>
          </tr>
        </thead>
        <tbody>
          ${jobs.map((job, index) => html`<${Row} key=${job.id} job=${job} rank=${index + 1} best=${jobs[0]} other=${jobs[1]} range=${range} />`)}
        </tbody>
      </table>
    <//>
  `;
}

function Row({ job, rank, best, other, range }) {
  const { value, low, high, unscored, completions } = primaryOf(job);
  const against = rank > 1 ? best : other;
  const words = rank > 1 ? "against the best" : "against the second";
  return html`<tr>
    <td data-label="rank">${rank}</td>
    <th scope="row">${nameOf(job.result.model)}</th>
    <td class="number">${number(value)}${/* results of earlier versions have no counts */ unscored ? ` (unscored: ${unscored} of ${completions})` : ""}</td>
    <td class="word">${number(low)} to ${number(high)} <${Interval} value=${value} low=${low} high=${high} range=${range} /></td>
    <td><${JobLink} id=${job.id} name=${job.name} /></td>
    <td class="word">${clock(job.ended_at)}</td>
    <td class="word">
      <a href="#/evaluations/${job.id}" aria-label=${`answers of ${nameOf(job.id)}`}>answers</a>
      ${against && html`, <a href="#/evaluations/${job.id}?against=${against.id}" aria-label=${`${words}: ${nameOf(job.id)} against ${nameOf(against.id)}`}>${words}</a>`}
    </td>
  </tr>`;
}

// Interval plot of a value. Hidden from screen readers: the cell has the same numbers as text.
export function Interval({ value, low, high, range: [from, to] }) {
  if (value === null || to === from) return null;
  const at = (one) => (100 * (one - from)) / (to - from);
  return html`<svg class="interval" viewBox="-2 0 104 8" preserveAspectRatio="none" aria-hidden="true">
    <line x1=${at(low ?? value)} x2=${at(high ?? value)} y1="4" y2="4" />
    <circle cx=${at(value)} cy="4" r="2" />
  </svg>`;
}
