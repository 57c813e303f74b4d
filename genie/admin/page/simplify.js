// Reduce the wait-for graph to what can be drawn: at most `MAX_NODES` nodes, with few links.
//
// A node is a request, or a collapsed node for many similar requests: all wait for the same resources, or all hold the
// same. The kinds of links are `held`, from a waiting request to a holder; `queued`, to a request ahead in the queue; and
// `same`, from what a transaction holds to what it waits for: it will not release the one before it gets the other. Of
// the `queued` links only the one to the next request ahead is drawn; the others follow from it.
//
// A bracket shows which nodes are for a subtree, or for names below it.

import { containsName, isSubtree, overlap, splitResource } from "./format.js";

export const MAX_NODES = 60;
const MAX_BRACKETS = 3; // in a group
const MIN_COLLAPSED = 7; // similar requests from which on they are collapsed
const NOT_COLLAPSED = 4; // of them that are drawn separately

/**
 * `waits` is the response of /api/waits, `queues` the longest queues of /api/state. Returns `groups`, the connected
 * components of the graph as {nodes, links, brackets}, longest waits first, and `omitted`, the number of waiting requests that
 * are not drawn. A node is {key, state, since, resources, lock} with either the `request` or, if it is collapsed, the number
 * `collapsed` of requests; a link is {key, from, to, kind, resources}, a bracket {key, subtree, members}.
 */
export function simplifyGraph(waits, queues) {
  const requests = new Map(waits.nodes.map((node) => [node.id, node]));
  const edges = waits.edges.filter((edge) => requests.has(edge.waiter) && requests.has(edge.blocker));
  const nodeById = makeNodes(requests, edges, queues);
  const links = makeLinks(nodeById, edges, requests);
  const groups = limitNodes(connectedComponents(new Set(nodeById.values()), links));
  const waitingNodes = groups.flatMap((group) => group.nodes).filter((node) => node.state === "queued");
  const drawn = waitingNodes.reduce((sum, node) => sum + (node.collapsed ?? 1), 0);
  for (const group of groups) group.brackets = makeBrackets(group.nodes);
  return { groups, omitted: Math.max(0, waits.queueTotal - drawn) };
}

/** Return the node of each request, by its id. Similar requests share a collapsed node. */
function makeNodes(requests, edges, queues) {
  const resourcesById = new Map([...requests.keys()].map((id) => [id, new Set()]));
  for (const edge of edges) {
    resourcesById.get(edge.waiter).add(edge.resource);
    if (edge.state === "held") resourcesById.get(edge.blocker).add(edge.resource);
  }
  const blockedHolders = transactionsThatHoldAndWait(requests);
  const similar = new Map(); // ids of the requests with the same state and resources
  const nodeById = new Map();
  for (const request of oldestFirst(requests.values())) {
    const resources = [...resourcesById.get(request.id)].sort();
    const lock = blockingLock(request, resources[0]);
    nodeById.set(request.id, { key: `${request.id}`, state: request.state, since: request.since, request, resources, lock });
    if (blockedHolders.has(request.transactionName) || resources.length === 0) continue;
    const key = JSON.stringify([request.state, ...resources]);
    similar.set(key, [...(similar.get(key) ?? []), request.id]);
  }
  for (const [key, ids] of similar) {
    if (ids.length < MIN_COLLAPSED) continue;
    const collapsedIds = ids.slice(NOT_COLLAPSED);
    const { state, since, resources } = nodeById.get(collapsedIds[0]);
    // The graph may contain only a part of the requests; the length of the queue is known for the longest ones.
    const queue = queues.find((each) => resources.length === 1 && each.resource === resources[0]);
    const queued = state === "queued" && queue !== undefined ? queue.waiting - NOT_COLLAPSED : 0;
    const lock = { mode: "", name: resources[0] };
    const node = { key, state, since, resources, lock, collapsed: Math.max(queued, collapsedIds.length) };
    for (const id of collapsedIds) nodeById.set(id, node);
  }
  return nodeById;
}

/** Return the lock of a request, {mode, name}, that waits because of `resource`, or that others wait for because of it. */
function blockingLock(request, resource) {
  const locks = request.resources.map(splitResource);
  if (resource === undefined) return locks[0];
  const unlisted = { mode: "", name: resource };
  return locks.find(({ name }) => name === resource) ?? locks.find(({ name }) => overlap(name, resource)) ?? unlisted;
}

/** Return a bracket for each subtree that a node is for, if other nodes are for the same or for names below it; the smallest first. */
function makeBrackets(nodes) {
  const subtrees = new Set(nodes.map((node) => node.lock.name).filter(isSubtree));
  const brackets = [...subtrees].map((subtree) => ({
    key: `${nodes[0].key} ${subtree}`,
    subtree,
    members: nodes.filter(({ lock }) => lock.name === subtree || containsName(subtree, lock.name)),
  }));
  return brackets
    .filter(({ members }) => members.length > 1)
    .sort((a, b) => a.members.length - b.members.length)
    .slice(0, MAX_BRACKETS);
}

/** Return the transactions that hold a resource in the graph and wait for another. */
function transactionsThatHoldAndWait(requests) {
  const statesByTransaction = new Map();
  for (const { transactionName, state } of requests.values()) {
    if (transactionName === undefined) continue;
    statesByTransaction.set(transactionName, (statesByTransaction.get(transactionName) ?? new Set()).add(state));
  }
  return new Set([...statesByTransaction].filter(([, states]) => states.size === 2).map(([name]) => name));
}

/** Return the links between nodes, each once, without `queued` links that follow from others. */
function makeLinks(nodeById, edges, requests) {
  const linkByKey = new Map();
  const add = (from, to, kind, resource) => {
    if (from === to) return;
    const key = `${from.key} ${to.key} ${kind}`;
    if (!linkByKey.has(key)) linkByKey.set(key, { key, from, to, kind, resources: new Set() });
    if (resource !== undefined) linkByKey.get(key).resources.add(resource);
  };
  const queueKey = (node, resource) => `${node.key} ${resource}`;
  const nodesAhead = new Map(); // by node and resource: the nodes ahead of it in that queue
  for (const { waiter, blocker, resource, state } of edges) {
    if (state !== "queued") continue;
    const key = queueKey(nodeById.get(waiter), resource);
    nodesAhead.set(key, (nodesAhead.get(key) ?? new Set()).add(nodeById.get(blocker)));
  }
  for (const { waiter, blocker, resource, state } of edges) {
    const [from, to] = [nodeById.get(waiter), nodeById.get(blocker)];
    if (state === "queued") {
      const ahead = [...nodesAhead.get(queueKey(from, resource))];
      const isBetween = (node) => node !== to && node !== from && nodesAhead.get(queueKey(node, resource))?.has(to);
      if (ahead.some(isBetween)) continue;
    }
    add(from, to, state, resource);
  }
  for (const [held, waiting] of sameTransaction(requests)) add(nodeById.get(held), nodeById.get(waiting), "same");
  return [...linkByKey.values()];
}

/** Return pairs of ids of the same transaction: a held request and a waiting one. */
function sameTransaction(requests) {
  const waitingIds = new Map();
  for (const { id, state, transactionName } of requests.values()) {
    if (state === "queued" && transactionName !== undefined) {
      waitingIds.set(transactionName, [...(waitingIds.get(transactionName) ?? []), id]);
    }
  }
  const held = [...requests.values()].filter(({ state }) => state === "held");
  return held.flatMap(({ id, transactionName }) => (waitingIds.get(transactionName) ?? []).map((waiting) => [id, waiting]));
}

/** Return the connected components of the graph (union-find), longest waits first. */
function connectedComponents(nodes, links) {
  const parent = new Map([...nodes].map((node) => [node, node]));
  const root = (node) => {
    while (parent.get(node) !== node) node = parent.get(node);
    return node;
  };
  for (const { from, to } of links) parent.set(root(from), root(to));
  const groups = new Map();
  for (const node of nodes) {
    if (!groups.has(root(node))) groups.set(root(node), { nodes: [], links: [], since: Infinity });
    const group = groups.get(root(node));
    group.nodes.push(node);
    if (node.state === "queued") group.since = Math.min(group.since, node.since);
  }
  for (const link of links) groups.get(root(link.from)).links.push(link);
  return [...groups.values()].sort((a, b) => a.since - b.since || (a.nodes[0].key < b.nodes[0].key ? -1 : 1));
}

/** Return the first groups with at most `MAX_NODES` nodes in total; of the last one, the longest waits that fit. */
function limitNodes(groups) {
  const limited = [];
  let remaining = MAX_NODES;
  for (const group of groups) {
    if (group.nodes.length <= remaining) {
      limited.push(group);
      remaining -= group.nodes.length;
      continue;
    }
    const nodes = new Set();
    for (const node of group.nodes.filter((each) => each.state === "queued").sort(byAge)) {
      const blockers = group.links.filter((link) => link.from === node).map((link) => link.to);
      const added = [node, ...blockers].filter((each) => !nodes.has(each));
      if (nodes.size + added.length <= remaining) for (const each of added) nodes.add(each);
    }
    const links = group.links.filter((link) => nodes.has(link.from) && nodes.has(link.to));
    if (nodes.size > 1) limited.push({ ...group, nodes: [...nodes], links });
    break;
  }
  return limited;
}

const byAge = (a, b) => a.since - b.since || (a.request?.id ?? Infinity) - (b.request?.id ?? Infinity);

const oldestFirst = (requests) => [...requests].sort((a, b) => a.since - b.since || a.id - b.id);
