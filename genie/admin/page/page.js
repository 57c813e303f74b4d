// The page: asks every second, while somebody looks, and shows what the server answers.

import { api, Away, Refused, tokens } from "./api.js";
import { Deadlocks } from "./deadlocks.js";
import { Details } from "./details.js";
import { say } from "./dom.js";
import { duration, parts } from "./format.js";
import { Graph } from "./graph.js";
import { Namespaces } from "./namespaces.js";
import { Overview } from "./overview.js";
import { Release } from "./release.js";
import { Hot, Lines, outcomes } from "./tables.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 15_000; // between two tries, at most, where nobody answers
const WAITS = 200;
const HOT = 10;

const at = (id) => document.getElementById(id);

const seen = { state: null, waits: null, hot: null, deadlocks: null, resource: null };
let selected = null;
let timer = null;
let asking = false;
let failures = 0;

const namespaces = new Namespaces(at("namespace"));
const overview = new Overview(at("figures"), at("rates"));
const graph = new Graph(at("graph"), at("graph-count"), at("legend"), select);
const lines = new Lines(at("lines"), at("lines-count"), select);
const hot = new Hot(at("hot"), at("hot-count"), select);
const deadlocks = new Deadlocks(at("deadlocks"), at("deadlocks-count"));
const release = new Release(at("release"), () => soon(0));
const details = new Details(at("details"), select, (request) => release.ask(request));

/** What is asked each time; deadlocks only when there are new ones. */
async function ask() {
  const state = await api.state();
  if (state.role !== "leader") return { state };
  const stale = seen.deadlocks === null || seen.deadlocks.total !== state.deadlocks || seen.state.uptime > state.uptime;
  const [waits, hot, deadlocks] = await Promise.all([
    api.waits(WAITS),
    api.hot(HOT),
    stale ? api.deadlocks() : seen.deadlocks,
  ]);
  return { state, waits, hot, deadlocks, resource: await resource(waits) };
}

/** The resource that is selected, or one of the selected request, of which rows tell more than the graph does. */
async function resource(waits) {
  if (selected === null) return null;
  const name = selected.resource ?? selected.of ?? (selected.of = about(selected.request, waits));
  if (name === undefined) return null;
  try {
    return await api.resource(name);
  } catch (error) {
    if (error instanceof Refused && ![401, 403, 503].includes(error.status)) return error;
    throw error;
  }
}

function about(id, waits) {
  const node = waits.nodes.find((each) => each.id === id);
  return node === undefined ? undefined : parts(node.resources[0]).name;
}

async function turn() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    const found = await ask();
    failures = 0;
    Object.assign(seen, found);
    answered();
    soon(EVERY_MS);
  } catch (error) {
    if (!(error instanceof Away || error instanceof Refused)) {
      notice(`Error in this page: ${error.message}`);
      throw error;
    }
    refused(error);
  } finally {
    asking = false;
  }
}

function soon(ms) {
  clearTimeout(timer);
  timer = setTimeout(turn, ms);
}

function answered() {
  const { state } = seen;
  at("sign-in").hidden = true;
  head(state);
  pulse("live", "Live");
  if (state.role !== "leader") {
    at("main").hidden = true;
    notice(roles(state));
    return;
  }
  notice(state.storeAvailable ? "" : `The store (${state.store}) does not answer. No lock can be granted or released until it does.`);
  at("main").hidden = false;
  show();
}

function show() {
  const { state, waits } = seen;
  if (waits === null) return;
  overview.show(state);
  graph.show(waits, state.queues, state.now, selected);
  lines.show(state);
  hot.show(seen.hot, state.now);
  deadlocks.show(seen.deadlocks, state.now);
  outcomes(at("outcomes"), state);
  details.show(selected, waits, seen.resource, state.now);
}

function roles({ role, leader }) {
  if (role === "follower") return `This server follows ${leader ?? "another one"}, the leader. Open its page to see the locks.`;
  if (role === "starting") return "This server is starting: no leader is known yet.";
  return `This server is ${role}.`;
}

function head({ version, namespace, namespaces: all, role, store, uptime }) {
  namespaces.show(all, namespace);
  at("server").replaceChildren(
    ...[...(all.length > 1 ? [] : [namespace]), role, store === "memory" ? "in memory" : store, `up ${duration(uptime)}`, version].map((text) => {
      const part = document.createElement("span");
      part.textContent = text;
      return part;
    }),
  );
  document.title = `${namespace} · Genie`;
}

function refused(error) {
  if (error instanceof Refused && error.status === 401) {
    signIn(tokens.get() === null ? "This server requires authentication." : `Token rejected: ${error.message}`);
    return;
  }
  failures += 1;
  const wait = Math.min(PATIENCE_MS, EVERY_MS * 2 ** (failures - 1));
  if (error instanceof Away) {
    notice(`The server is unreachable: ${error.message}. The data below is stale.`);
    pulse("away", `Retrying every ${duration(wait)}`);
  } else if (error.status === 403) {
    notice(`Permission denied: ${error.message}`);
    pulse("away", "Denied");
  } else {
    notice(error.leader === undefined ? error.message : `${error.message} (${error.leader} leads)`);
    pulse("away", `Retrying every ${duration(wait)}`);
  }
  at("main").classList.add("stale");
  soon(wait);
}

function signIn(why) {
  at("main").hidden = true;
  at("sign-in").hidden = false;
  say(at("sign-in-why"), why);
  notice("");
  pulse("away", "Token required");
  at("token").focus();
}

function notice(text) {
  say(at("notice"), text);
  at("notice").hidden = text === "";
}

function pulse(kind, text) {
  at("pulse").className = kind;
  say(at("pulse"), text);
  if (kind === "live") at("main").classList.remove("stale");
}

/** Select {request: id}, {resource: name} or nothing (null). */
function select(what) {
  selected = what;
  seen.resource = null;
  show();
  if (what !== null) {
    at("details").scrollTop = 0;
    turn();
  }
}

at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  tokens.keep(at("token").value);
  at("token").value = "";
  soon(0);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("release").open && selected !== null) select(null);
});

document.addEventListener("visibilitychange", turn);
turn();
