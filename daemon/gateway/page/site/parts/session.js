// The second secret of the session, where the gateway has a token.
//
// The browser sends the session's cookie to servers at all ports of this host. It sends this secret,
// which is in the storage of this origin, to none: only the page reads it, and sends it as a header.

const KEY = "warmd-session";
let kept = null; // where the browser allows no storage: other tabs and the next visit log in again

export function keepSession(secret) {
  try {
    localStorage.setItem(KEY, secret);
  } catch {
    kept = secret;
  }
}

// Read anew each time: a login in another tab replaces it.
export function session() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return kept;
  }
}
