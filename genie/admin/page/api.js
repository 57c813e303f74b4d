// The HTTP client of the page: requests to the API of the server, and the errors they throw.

const TOKEN_KEY = "genie-token";
const RESPONSE_TIMEOUT_MS = 5000;

/** The bearer token, stored until the tab is closed; null if there is none. */
export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (value) => sessionStorage.setItem(TOKEN_KEY, value),
};

/** An error response: `status` is that of HTTP, `code` an error code of the API, `leader` the server to use instead. */
export class RequestRejected extends Error {
  constructor(status, problem) {
    super(problem.message ?? `the server responded with status ${status}`);
    this.status = status;
    this.code = problem.code;
    this.leader = problem.leader;
  }
}

/** The server could not be reached, or its response was incomplete. */
export class ServerUnavailable extends Error {}

/** The namespace in the URL of the page; null: the first of the server. */
export const selectedNamespace = new URLSearchParams(location.search).get("namespace");

/** Return a path with its query parameters and the namespace. */
function withQuery(path, parameters = {}) {
  const query = `${new URLSearchParams({ ...parameters, ...(selectedNamespace !== null && { namespace: selectedNamespace }) })}`;
  return query === "" ? path : `${path}?${query}`;
}

/** Send a request and return the decoded JSON. Throws RequestRejected or ServerUnavailable. */
async function request(path, options = {}) {
  const bearer = token.get();
  const headers = { ...options.headers, ...(bearer && { Authorization: `Bearer ${bearer}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(RESPONSE_TIMEOUT_MS) });
  } catch (error) {
    throw new ServerUnavailable(error.name === "TimeoutError" ? "it does not respond" : "there is no connection");
  }
  let body;
  try {
    body = await response.json();
  } catch {
    if (response.ok) throw new ServerUnavailable("its response is incomplete");
    body = {};
  }
  if (!response.ok) throw new RequestRejected(response.status, body);
  return body;
}

export const api = {
  state: () => request(withQuery("api/state")),
  waits: (limit) => request(withQuery("api/waits", { limit })),
  hot: (limit) => request(withQuery("api/hot", { limit })),
  deadlocks: () => request(withQuery("api/deadlocks")),
  order: () => request(withQuery("api/order")),
  history: (name) => request(withQuery(`api/history/${encodeURIComponent(name)}`)),
  requests: (search, limit) => request(withQuery("api/requests", { limit, ...(search !== "" && { search }) })),
  resource: (name) => request(withQuery(`api/resources/${encodeURIComponent(name)}`)),
  release: (id) =>
    request(withQuery("api/release"), {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Genie": "1" },
      body: JSON.stringify({ id }),
    }),
};
