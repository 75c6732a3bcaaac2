// What jobs and groups are called, for views that know only their ids.

import { useEffect, useState } from "./libraries.js";
import { get } from "./api.js";

const MOST_IDS = 100; // of one request
const RUN = /^(?!infer|encode|sweep|curriculum)[a-z_]+-\d{8}-\d{6}-[a-z0-9]{4}$/; // ids that a model may be called by

const names = new Map();
const known = new Set(); // ids that were asked for, or whose job was seen
const users = new Set(); // functions that render what shows names, when others have asked for them

// `found`: jobs or groups as {id, name}.
export function remember(found) {
  for (const { id, name } of found) {
    known.add(id);
    if (name) names.set(id, name);
  }
}

// The name of a job, a sweep or a curriculum; its id if it has none. JOB@STEP keeps its step.
export function nameOf(id) {
  const [job, step] = id.split("@");
  const name = names.get(job) ?? job;
  return step === undefined ? name : `${name}@${step}`;
}

// What each of these is called, by id; the id follows a name that several of them have.
export function namesOf(ids) {
  const all = ids.map(nameOf);
  const isTwice = (name) => all.indexOf(name) !== all.lastIndexOf(name);
  return new Map(ids.map((id, at) => [id, isTwice(all[at]) ? `${all[at]} ${id}` : all[at]]));
}

// Requests the names of those of these runs and models that are not known yet, and renders again with them, and with
// those that other parts of the page request meanwhile.
export function useNames(ids) {
  const [, setCount] = useState(0);
  const missing = [...new Set(ids.map((id) => id.split("@")[0]))].filter((id) => RUN.test(id) && !known.has(id));
  useEffect(() => {
    const render = () => setCount((count) => count + 1);
    users.add(render);
    return () => users.delete(render);
  }, []);
  useEffect(() => {
    for (let at = 0; at < missing.length; at += MOST_IDS) {
      const asked = missing.slice(at, at + MOST_IDS);
      asked.forEach((id) => known.add(id));
      get("/v1/warmd/runs", { id: asked }).then(
        (page) => {
          remember(page.data);
          users.forEach((render) => render());
        },
        () => {}, // the ids are shown
      );
    }
  }, [missing.join()]);
}
