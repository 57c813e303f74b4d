// The page: polls the server every second while the tab is visible, and shows its responses.

import { api, RequestRejected, ServerUnavailable, token } from "./api.js";
import { DeadlockList } from "./deadlocks.js";
import { Details } from "./details.js";
import { html, setText } from "./dom.js";
import { escapeInvisible, formatDuration, splitResource } from "./format.js";
import { Graph } from "./graph.js";
import { InversionList } from "./lockorder.js";
import { NamespaceSelect } from "./namespaces.js";
import { Overview } from "./overview.js";
import { ReleaseDialog } from "./release.js";
import { RequestTable } from "./requests.js";
import { HotTable, QueueTable, showOutcomes } from "./tables.js";

const POLL_INTERVAL_MS = 1000;
const MAX_RETRY_INTERVAL_MS = 15_000;
const MAX_NODES = 200;
const MAX_HOT = 10;
const MAX_REQUESTS = 50;

const byId = (id) => document.getElementById(id);

const latest = { state: null, waits: null, hot: null, deadlocks: null, order: null, requests: null, resource: null }; // responses
let selection = null;
let timer = null;
let polling = false;
let failures = 0; // in succession

const namespaceSelect = new NamespaceSelect(byId("namespace"));
const overview = new Overview(byId("figures"), byId("rates"));
const graph = new Graph(byId("graph"), byId("graph-count"), byId("legend"), select);
const queueTable = new QueueTable(byId("queues"), byId("queues-count"), select);
const hotTable = new HotTable(byId("hot"), byId("hot-count"), select);
const deadlockList = new DeadlockList(byId("deadlocks"), byId("deadlocks-count"));
const inversionList = new InversionList(byId("inversions"), byId("inversions-count"));
const releaseDialog = new ReleaseDialog(byId("release"), () => schedulePoll(0));
const requestTable = new RequestTable(byId("requests"), byId("requests-count"), byId("search"), select, (request) => releaseDialog.open(request), () => schedulePoll(0));
const details = new Details(byId("details"), select, (request) => releaseDialog.open(request), (name) => api.history(name));

/** Query everything that the page shows; deadlocks and the lock order only if they are new, and of a follower only its state. */
async function query() {
  const state = await api.state();
  if (state.role !== "leader") return { state };
  const newDeadlocks =
    latest.deadlocks === null || latest.deadlocks.total !== state.deadlocks || latest.state.uptime > state.uptime;
  const newInversions = state.inversions > 0 && (latest.order === null || latest.order.total !== state.inversions || latest.state.uptime > state.uptime);
  const text = requestTable.text;
  const [waits, hot, deadlocks, order, requests] = await Promise.all([
    api.waits(MAX_NODES),
    api.hot(MAX_HOT),
    newDeadlocks ? api.deadlocks() : latest.deadlocks,
    newInversions ? api.order() : state.inversions > 0 ? latest.order : null,
    api.requests(text, MAX_REQUESTS),
  ]);
  state.waiting = waits.queueTotal; // of one response, so that the figure and the graph show the same number
  return { state, waits, hot, deadlocks, order, requests: { ...requests, text }, resource: await querySelectedResource(waits) };
}

/** Query the selected resource, or the first one of the selected request: its rows have more fields than the graph. */
async function querySelectedResource(waits) {
  if (selection === null) return null;
  const name = selection.resource ?? selection.of ?? (selection.of = firstResource(selection.request, waits));
  if (name === undefined) return null;
  try {
    return await api.resource(name);
  } catch (error) {
    if (error instanceof RequestRejected && ![401, 403, 503].includes(error.status)) return error;
    throw error;
  }
}

function firstResource(id, waits) {
  const node = waits.nodes.find((each) => each.id === id);
  return node === undefined ? undefined : splitResource(node.resources[0]).name;
}

async function poll() {
  if (polling || document.hidden) return;
  polling = true;
  clearTimeout(timer);
  try {
    const responses = await query();
    failures = 0;
    Object.assign(latest, responses);
    onSuccess();
    schedulePoll(POLL_INTERVAL_MS);
  } catch (error) {
    if (!(error instanceof ServerUnavailable || error instanceof RequestRejected)) {
      showNotice(`Error in this page: ${error.message}`);
      throw error;
    }
    onFailure(error);
  } finally {
    polling = false;
  }
}

function schedulePoll(delayMs) {
  clearTimeout(timer);
  timer = setTimeout(poll, delayMs);
}

function onSuccess() {
  const { state } = latest;
  byId("sign-in").hidden = true;
  showHeader(state);
  showStatus("live", "Live");
  if (state.role !== "leader") {
    byId("main").hidden = true;
    showNotice(describeRole(state));
    return;
  }
  showNotice(describeStore(state));
  byId("main").hidden = false;
  showResponses();
}

function showResponses() {
  const { state, waits, hot, deadlocks, order, requests, resource } = latest;
  if (waits === null) return;
  overview.show(state);
  graph.show(waits, state.queues, state.now, selection);
  queueTable.show(state);
  hotTable.show(hot, state.now);
  deadlockList.show(deadlocks, state.now);
  inversionList.show(order, state.now);
  requestTable.show(requests, state.now);
  showOutcomes(byId("outcomes"), state);
  details.show(selection, waits, resource, state.now, state.history);
}

function describeStore(state) {
  if (!state.storeAvailable) {
    const since = state.storeUnavailableSince === null ? "" : ` since ${new Date(state.storeUnavailableSince).toLocaleString()}`;
    return `The store (${state.store}) is unavailable${since}. No lock can be granted or released until it is available.`;
  }
  return state.storeFull ? `The store (${state.store}) is out of memory. Locks can be released, but no requests are accepted.` : "";
}

function describeRole(state) {
  const { role, leader } = state;
  if (role === "follower") return `This server follows ${leader ?? "another one"}, the leader. Open its page to see the locks.`;
  if (role === "starting") return "This server is starting: its store has not answered yet.";
  if (role === "waiting") return "This server waits for a leader. No lock can be granted or released until there is one.";
  if (role === "unavailable") return describeStore(state);
  return `This server is ${role}.`;
}

function showHeader({ version, namespace, namespaces, role, store, uptime }) {
  namespaceSelect.show(namespaces, namespace);
  const texts = [role, store === "memory" ? "in memory" : store, `up ${formatDuration(uptime)}`, version];
  if (namespaces.length === 1) texts.unshift(namespace);
  byId("server").replaceChildren(
    ...texts.map((text) => html("span", {}, text)),
  );
  document.title = `${escapeInvisible(namespace)} · Genie`;
}

function onFailure(error) {
  if (error instanceof RequestRejected && error.status === 401) {
    showSignIn(token.get() === null ? "This server requires authentication." : `Token rejected: ${error.message}`);
    return;
  }
  failures += 1;
  const delayMs = Math.min(MAX_RETRY_INTERVAL_MS, POLL_INTERVAL_MS * 2 ** (failures - 1));
  if (error instanceof ServerUnavailable) {
    showNotice(`The server is unreachable: ${error.message}. The data below is stale.`);
    showStatus("away", `Retrying every ${formatDuration(delayMs)}`);
  } else if (error.status === 403) {
    showNotice(`Permission denied: ${error.message}`);
    showStatus("away", "Denied");
  } else {
    showNotice(error.leader === undefined ? error.message : `${error.message} (${error.leader} leads)`);
    showStatus("away", `Retrying every ${formatDuration(delayMs)}`);
  }
  byId("main").classList.add("stale");
  schedulePoll(delayMs);
}

function showSignIn(reason) {
  byId("main").hidden = true;
  byId("sign-in").hidden = false;
  setText(byId("sign-in-reason"), reason);
  showNotice("");
  showStatus("away", "Token required");
  byId("token").focus();
}

function showNotice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = text === "";
}

/** Show the state of the connection: `live` or `away`. */
function showStatus(kind, text) {
  byId("status").className = kind;
  setText(byId("status"), text);
  if (kind === "live") byId("main").classList.remove("stale");
}

/** Select {request: id}, {resource: name} or nothing (null). */
function select(selected) {
  selection = selected;
  latest.resource = null;
  showResponses();
  if (selected !== null) {
    byId("details").scrollTop = 0;
    poll();
  }
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(byId("token").value);
  byId("token").value = "";
  schedulePoll(0);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("release").open && selection !== null) select(null);
});

document.addEventListener("visibilitychange", poll);
poll();
