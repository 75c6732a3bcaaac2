// The dashboard: navigation, the view of the address, and parts shared by all views.

import { html, render, useEffect, useState } from "./parts/libraries.js";
import { get } from "./parts/api.js";
import { onConnection } from "./parts/live.js";
import { useOverview, watchOverview } from "./parts/overview.js";
import { Dialogs } from "./parts/dialog.js";
import { Heading } from "./parts/elements.js";
import { Overview } from "./views/overview.js";
import { Evaluations } from "./views/evaluations.js";
import { Requests } from "./views/requests.js";
import { Runs } from "./views/runs.js";
import { Job } from "./views/job.js";
import { Compare } from "./views/compare.js";
import { Sweeps } from "./views/sweeps.js";
import { Curricula } from "./views/curricula.js";
import { Submit } from "./views/submit.js";
import { Chat } from "./views/chat.js";
import { Login } from "./views/login.js";

// Address (behind #/) -> view. A view gets the id behind its name, if any, and the query.
const VIEWS = {
  "": ["Overview", Overview],
  runs: ["Runs", Runs],
  evaluations: ["Evaluations", Evaluations],
  sweeps: ["Sweeps", Sweeps],
  curricula: ["Curricula", Curricula],
  submit: ["Submit", Submit],
  compare: ["Compare", Compare],
  chat: ["Chat", Chat],
  requests: ["Requests", Requests],
};

// A view's name of earlier versions; `#/jobs/ID` is a job.
const FORMER = { jobs: "runs" };

// View -> the right without which it is not shown.
const NEEDS = { submit: "train", chat: "infer" };

function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [first, ...rest] = path.split("/");
  const name = rest[0] ? first : (FORMER[first] ?? first);
  return { name, rest, query: new URLSearchParams(query), hash };
}

function useRoute() {
  const [route, setRoute] = useState(routeOf(location.hash));
  useEffect(() => {
    const onChange = () => setRoute(routeOf(location.hash));
    window.addEventListener("hashchange", onChange);
    return () => window.removeEventListener("hashchange", onChange);
  }, []);
  return route;
}

function View({ route }) {
  if (route.name === "jobs" && route.rest[0]) {
    const [id, section] = route.rest;
    return html`<${Job} key=${id} id=${id} section=${section} query=${route.query} />`;
  }
  if (!(route.name in VIEWS)) return html`<${Unknown} />`;
  const [, Found] = VIEWS[route.name];
  // A list begins anew with another query; a view of one thing keeps its state and the focus.
  const key = route.rest[0] ? route.name : `${route.name}?${route.query}`;
  return html`<${Found} key=${key} id=${route.rest[0]} query=${route.query} />`;
}

function Unknown() {
  return html`<${Heading}>No such view<//><p class="empty">The address names no view of this page: <a href="#/">Overview</a></p>`;
}

function Navigation({ current }) {
  const { may } = useOverview();
  const names = Object.keys(VIEWS).filter((name) => !NEEDS[name] || may.includes(NEEDS[name]));
  return html`<nav aria-label="Main">
    <a class="brand" href="#/">warmd</a>
    ${names.map(
      (name) => html`<a href="#/${name}" aria-current=${name === current ? "page" : undefined}>
        ${VIEWS[name][0]}
      </a>`,
    )}
  </nav>`;
}

function Connection() {
  const [isConnected, setConnected] = useState(true);
  useEffect(() => onConnection(setConnected), []);
  const { problem } = useOverview();
  const text = isConnected ? problem : "The connection is lost. Connecting again …";
  return html`<p class="connection" role="status" aria-live="polite">${text ?? ""}</p>`;
}

function App() {
  const route = useRoute();
  const [isOpen, setOpen] = useState(null); // null: not known yet
  useEffect(() => {
    const close = () => setOpen(false);
    window.addEventListener("warmd-login", close);
    get("/v1/warmd/overview").then(
      () => setOpen(true),
      (error) => setOpen(error.status !== 401),
    );
    return () => window.removeEventListener("warmd-login", close);
  }, []);
  useEffect(() => (isOpen ? watchOverview() : undefined), [isOpen]);
  if (isOpen === null) return html`<p class="loading">warmd …</p>`;
  if (!isOpen) return html`<${Login} onDone=${() => setOpen(true)} />`;
  return html`
    <a class="skip" href="#heading" onClick=${toHeading}>Skip to the content</a>
    <header><${Navigation} current=${route.name === "jobs" ? "runs" : route.name} /><${Connection} /></header>
    <main><${View} route=${route} /></main>
    <${Dialogs} />
  `;
}

// Not by the address, which names the view.
function toHeading(event) {
  event.preventDefault();
  document.getElementById("heading")?.focus();
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
