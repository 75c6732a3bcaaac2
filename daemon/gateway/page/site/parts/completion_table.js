// Tables of completions: by prompt with the members of a group side by side, or one a row, sorted by reward.

import { html, useEffect, useState } from "./libraries.js";
import { get } from "./api.js";
import { differences } from "./difference.js";
import { Problem, Scroll } from "./elements.js";
import { number } from "./format.js";
import { Folded } from "./folded.js";
import { useLoaded } from "./loaded.js";

const PAGE = 20; // prompts that are shown at a time
const ROWS = 50; // completions that are shown at a time, of a table sorted by reward
const AT_ONCE = 0.2; // part of them that the first frame has, where the page is at its top
const TURNS = 8; // of an episode, unless all are wanted
const STRONGEST = 22; // percent of its color that a completion with a large advantage has
const NONE = 0.01; // advantages below it are none: equal rewards differ by rounding
const SHORT = 60; // characters of completions that need little room side by side
const FOLDED = 280; // characters of a longer one
const ANSWER = 120; // characters of an answer, its last ones: there is the result

export function mean(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// The completions of each prompt of a step. Earlier versions kept no number of the group.
export function groupsOf(samples) {
  const groups = Map.groupBy(samples, (one) => `${one.step} ${one.group ?? one.prompt}`);
  return [...groups.entries()].map(([key, members]) => ({ key, members, first: members[0] }));
}

// --- by prompt ------------------------------------------------------------------------------------

export function Prompts({ job, samples, isOfAllSteps, words }) {
  const [count, drawn, setCount] = useCount(PAGE);
  const groups = groupsOf(samples);
  return html`
    <${Scroll} label="table of prompts with their completions">
      <table class="prompts">
        <thead><tr><th scope="col">Prompt</th><th scope="col">Reward</th><th scope="col">Completions</th></tr></thead>
        <tbody>
          ${groups.slice(0, drawn).map(
            (group) => html`<${Group} key=${group.key} job=${job} group=${group} isOfAllSteps=${isOfAllSteps} words=${words} />`,
          )}
        </tbody>
      </table>
    <//>
    <${More} all=${groups.length} count=${count} page=${PAGE} noun="prompts" setCount=${setCount} />
  `;
}

function Group({ job, group: { members, first }, isOfAllSteps, words }) {
  const [isCompared, setCompared] = useState(false);
  const rewards = members.map((one) => one.reward).filter(Number.isFinite);
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  const isShort = members.every((one) => !one.turns && (one.completion ?? "").length <= SHORT);
  return html`
    <tr>
      <th scope="row">
        ${isOfAllSteps && html`<p><a href="#/jobs/${job.id}/completions?step=${first.step}">Step ${first.step}</a></p>`}
        <${Folded} text=${first.prompt} words=${words} />
        ${first.answer != null && html`<div class="gold"><span class="quiet">Answer</span> <${Folded} text=${String(first.answer)} most=${ANSWER} isEnd /></div>`}
        ${first.row != null &&
        html`<p class="line">
          <a href="#/jobs/${job.id}/completions?row=${first.row}" aria-label=${`Row ${first.row} in all steps`}>row ${first.row}</a>
          <button type="button" class="small" aria-expanded=${isCompared} onClick=${() => setCompared(!isCompared)}>Compare with the step before</button>
        </p>`}
      </th>
      <td>
        <strong>${number(mean(rewards))}</strong>
        ${rewards.length > 1 && html`<small>${least === most ? "all the same" : `${number(least)} to ${number(most)}`}</small>`}
      </td>
      <td>
        <ol class=${isShort ? "members short" : "members"}>
          ${distinct(members).map(({ one, times }, index) => html`<${Member} key=${index} one=${one} times=${times} words=${words} />`)}
        </ol>
      </td>
    </tr>
    ${isCompared && html`<tr><td colspan="3"><${Before} job=${job} members=${members} first=${first} /></td></tr>`}
  `;
}

// Completions of a group that are alike are shown once, with how many there are.
function distinct(members) {
  const alike = Map.groupBy(members, (one) => JSON.stringify([one.completion, one.reward, one.rewards, one.stop, one.turns]));
  return [...alike.values()].map((found) => ({ one: found[0], times: found.length }));
}

function Member({ one, times, words }) {
  return html`<li class=${`member ${signOf(one.advantage)}`} style=${{ "--strength": strengthOf(one.advantage) }}>
    <${Score} one=${one} />
    <${Text} one=${one} words=${words} most=${FOLDED} />
    <${Details} one=${one} times=${times} />
  </li>`;
}

function Text({ one, words, most }) {
  return html`
    ${one.turns ? html`<${Turns} turns=${one.turns} words=${words} />` : html`<${Folded} text=${one.completion || "(empty)"} words=${words} most=${most} />`}
    ${one.error && html`<p class="problem">${one.error}</p>`}
  `;
}

function signOf(advantage) {
  if (!Number.isFinite(advantage) || Math.abs(advantage) < NONE) return "even";
  return advantage > 0 ? "above" : "below";
}

// An advantage is a number of standard deviations, or a difference of rewards: about 2 is much.
function strengthOf(advantage) {
  return `${Math.min(STRONGEST, 6 + 8 * Math.abs(advantage ?? 0))}%`;
}

function signed(value) {
  if (Math.abs(value) < NONE) return "0";
  return `${value > 0 ? "+" : ""}${number(Number(value.toPrecision(2)))}`;
}

function Score({ one: { reward, advantage } }) {
  return html`<p class="line">
    <strong>${number(reward)}</strong>
    ${advantage != null && html`<span class="advantage">advantage ${signed(advantage)}</span>`}
  </p>`;
}

// The parts of the reward by name, the length and the end, and how many are alike.
function Details({ one, times = 1 }) {
  const parts = Object.entries(one.rewards ?? {});
  return html`<p class="line quiet">
    ${times > 1 && html`<strong>${times} alike</strong>`}
    ${(parts.length > 1 || one.reward == null) && parts.map(([name, value]) => html`<span key=${name}>${name} ${number(value)}</span>`)}
    ${one.tokens != null && html`<span>${number(one.tokens)} tokens</span>`}
    <span>${endOf(one)}</span>
  </p>`;
}

// How a completion or an episode ended, where that is not the usual end.
function endOf({ stop, turns, success, replayed }) {
  const texts = [];
  if (turns) texts.push(stop);
  else if (stop === "length") texts.push("cut at the length");
  if (success != null) texts.push(success ? "success" : "no success");
  if (replayed) texts.push("replayed");
  return texts.join(", ");
}

// What the policy and others wrote, in turn; all but the policy's is dim.
function Turns({ turns, words }) {
  const [isWhole, setWhole] = useState(false);
  return html`
    <ol class="turns">
      ${turns.slice(0, isWhole ? turns.length : TURNS).map(
        (turn, index) => html`<li key=${index} class=${turn.role === "assistant" ? "policy" : "observation"}>
          <span class="role">${turn.role === "assistant" ? "policy" : turn.role}</span>
          <div><${Folded} text=${turn.content || "(empty)"} words=${words} /></div>
          ${turn.reward ? html`<span class="role">reward ${number(turn.reward)}</span>` : null}
        </li>`,
      )}
    </ol>
    ${turns.length > TURNS &&
    html`<button type="button" class="small" aria-expanded=${isWhole} onClick=${() => setWhole(!isWhole)}>
      ${isWhole ? "Fewer turns" : `All ${turns.length} turns`}
    </button>`}
  `;
}

// --- with the step before -------------------------------------------------------------------------

// The completions of the same prompt in the latest step before, each compared with the one of its rank.
function Before({ job, members, first }) {
  const [found, error] = useLoaded(() => get(`/v1/warmd/jobs/${job.id}/completions`, { row: first.row }), [job.id, first.row]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!found) return html`<p>Loading …</p>`;
  const earlier = found.samples.filter((one) => one.step < first.step);
  const last = earlier.at(-1)?.step;
  if (last === undefined) return html`<p class="empty">No earlier step that is kept has this prompt.</p>`;
  const [before, after] = [earlier.filter((one) => one.step === last), members].map(byReward);
  return html`
    <p>${scored(before)} and ${scored(after)}, the best ones first. Words that differ are marked.</p>
    <ol class="pairs">
      ${after.map((one, index) => html`<${Pair} key=${index} before=${before[index]} after=${one} />`)}
    </ol>
  `;
}

function scored(samples) {
  return `Step ${samples[0].step} (mean reward ${number(mean(samples.map((one) => one.reward)))})`;
}

function byReward(samples) {
  return samples.toSorted((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
}

function Pair({ before, after }) {
  const texts = [before?.completion ?? "", after.completion ?? ""];
  const sides = differences(...texts);
  return html`<li>
    ${[before, after].map(
      (one, side) => html`<div key=${side} class="card">
        ${one ? html`<p class="quiet">step ${one.step}, reward ${number(one.reward)}</p>` : html`<p class="quiet">no such completion</p>`}
        <pre>${sides[side].map((part) => (part.isDifferent && part.text.trim() ? html`<mark>${part.text}</mark>` : part.text))}</pre>
      </div>`,
    )}
  </li>`;
}

// --- sorted by reward -----------------------------------------------------------------------------

export function Sorted({ samples, isBestFirst, isOfAllSteps, words }) {
  const [count, drawn, setCount] = useCount(ROWS);
  const sorted = byReward(samples);
  if (!isBestFirst) sorted.reverse();
  return html`
    <${Scroll} label="table of completions">
      <table class="stacked completions">
        <thead>
          <tr>
            ${isOfAllSteps && html`<th scope="col">Step</th>`}
            <th scope="col">Prompt</th><th scope="col">Answer</th><th scope="col">Completion</th><th scope="col">Reward</th>
          </tr>
        </thead>
        <tbody>
          ${sorted.slice(0, drawn).map(
            (one, index) => html`<tr key=${index}>
              ${isOfAllSteps && html`<td data-label="Step">${one.step}</td>`}
              <th scope="row"><${Folded} text=${one.prompt} words=${words} /></th>
              <td data-label="Answer">${one.answer != null && html`<${Folded} text=${String(one.answer)} most=${ANSWER} isEnd />`}</td>
              <td><${Text} one=${one} words=${words} /></td>
              <td class=${`member ${signOf(one.advantage)}`} style=${{ "--strength": strengthOf(one.advantage) }}><${Score} one=${one} /><${Details} one=${one} /></td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>
    <${More} all=${sorted.length} count=${count} page=${ROWS} noun="completions" setCount=${setCount} />
  `;
}

// How many are shown, how many of them are drawn in this frame, and a function that sets how many are shown.
function useCount(page) {
  const [count, setCount] = useState(page);
  const [isFirst, setFirst] = useState(window.scrollY === 0);
  useEffect(() => {
    const timer = setTimeout(() => setFirst(false));
    return () => clearTimeout(timer);
  }, []);
  return [count, isFirst ? AT_ONCE * page : count, setCount];
}

function More({ all, count, page, noun, setCount }) {
  if (all === 0) return html`<p class="empty">No completion is as wanted.</p>`;
  if (all <= count) return null;
  return html`<p class="line">
    <span class="quiet">${number(count)} of ${number(all)} ${noun}</span>
    <button type="button" onClick=${() => setCount(count + page)}>${number(Math.min(page, all - count))} more</button>
  </p>`;
}
