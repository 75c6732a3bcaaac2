// A choice of the user that stays when the page is opened again.

import { useState } from "./libraries.js";

// As useState, with a JSON value that is kept in this browser under the key.
export function useStored(key, first) {
  const [value, setValue] = useState(() => read(`warmd.${key}`) ?? first);
  function set(next) {
    setValue(next);
    try {
      localStorage.setItem(`warmd.${key}`, JSON.stringify(next));
    } catch {
      // Storage is refused or full: the choice lasts as long as the view.
    }
  }
  return [value, set];
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}
