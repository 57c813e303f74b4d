// What the server is asked, and what it may answer instead of what was asked for.

const TOKEN = "genie-token";
const PATIENCE_MS = 5000;

export const tokens = {
  get: () => sessionStorage.getItem(TOKEN),
  keep: (token) => sessionStorage.setItem(TOKEN, token),
};

/** The server answered with something else than what was asked for. `status` is HTTP's, `code` the wire's. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.message ?? `the answer is ${status}`);
    this.status = status;
    this.code = problem.code;
    this.leader = problem.leader;
  }
}

/** Nobody answered. */
export class Away extends Error {}

/** The namespace that the page's own address names; null where it names none, so that it is the server's first. */
export const chosen = new URLSearchParams(location.search).get("namespace");

/** A path with what is asked there. */
function within(path, asked = {}) {
  const query = `${new URLSearchParams({ ...asked, ...(chosen !== null && { namespace: chosen }) })}`;
  return query === "" ? path : `${path}?${query}`;
}

async function ask(path, options = {}) {
  const token = tokens.get();
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  } catch (error) {
    throw new Away(error.name === "TimeoutError" ? "it does not answer" : "there is no connection");
  }
  let answer;
  try {
    answer = await response.json();
  } catch {
    if (response.ok) throw new Away("its answer broke off");
    answer = {};
  }
  if (!response.ok) throw new Refused(response.status, answer);
  return answer;
}

export const api = {
  state: () => ask(within("api/state")),
  waits: (limit) => ask(within("api/waits", { limit })),
  hot: (limit) => ask(within("api/hot", { limit })),
  deadlocks: () => ask(within("api/deadlocks")),
  resource: (name) => ask(within(`api/resources/${encodeURIComponent(name)}`)),
  release: (id) =>
    ask(within("api/release"), {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Genie": "1" },
      body: JSON.stringify({ id }),
    }),
};
