// Login with the daemon's token, where http_token is set.

import { html, useState } from "../parts/libraries.js";
import { post } from "../parts/api.js";
import { Heading, Problem } from "../parts/elements.js";
import { keepSession } from "../parts/session.js";

export function Login({ onDone }) {
  const [error, setError] = useState(null);

  async function submit(event) {
    event.preventDefault();
    const { token } = Object.fromEntries(new FormData(event.target));
    try {
      const { session } = await (await post("/v1/warmd/login", { token })).json();
      keepSession(session);
      onDone();
    } catch (problem) {
      setError(problem);
    }
  }

  return html`<main class="login">
    <${Heading}>Log in<//>
    <form onSubmit=${submit}>
      <label>
        Token
        <input name="token" type="password" autocomplete="current-password" required />
        <small>the daemon's setting http_token</small>
      </label>
      <${Problem} error=${error} />
      <div class="buttons"><button class="primary">Log in</button></div>
    </form>
  </main>`;
}
