// What of the wait graph is drawn. It may be large; a picture may not.
//
// Drawn are requests, links and folds. A link of the kind `held` goes from one that waits to one that holds what it wants,
// `queued` to one that is ahead in the line, `same` from what a transaction holds to what it waits for itself: until it gets
// that, it will hardly give the other back. A fold stands for many requests that are alike: all wait for the same
// resources, or all hold the same. Of a line `queued` links tell only the next ahead, as that one has its own link.

export const MOST = 60;
const FOLD_FROM = 7; // alike, from which on they are folded
const UNFOLDED = 4; // of them that are drawn one by one

/**
 * `waits` is the API's answer, `lines` are those of its state. Returns the drawn `nodes` ({key, request} or {key, folds,
 * state, resources}), the `links` ({from, to, kind, resources}; keys of nodes), grouped: a list of {nodes, links}, those
 * first in which somebody waits longest; and `left`, how many requests wait and are not among them.
 */
export function choose(waits, lines) {
  const requests = new Map(waits.nodes.map((node) => [node.id, node]));
  const edges = waits.edges.filter((edge) => requests.has(edge.waiter) && requests.has(edge.blocker));
  const places = fold(requests, edges, lines);
  const links = join(places, edges, requests);
  const groups = grouped(new Set(places.values()), links);
  const drawn = within(groups);
  const shown = drawn.flatMap((group) => group.nodes).filter((node) => node.state === "queued");
  const waiting = shown.reduce((sum, node) => sum + (node.folds ?? 1), 0);
  return { groups: drawn, left: Math.max(0, waits.queueTotal - waiting) };
}

/** Which node stands for each request, by id. */
function fold(requests, edges, lines) {
  const about = new Map([...requests.keys()].map((id) => [id, new Set()]));
  for (const edge of edges) {
    about.get(edge.waiter).add(edge.resource);
    if (edge.state === "held") about.get(edge.blocker).add(edge.resource);
  }
  const both = inBothStates(requests);
  const alike = new Map();
  const places = new Map();
  for (const request of inOrder(requests.values())) {
    const resources = [...about.get(request.id)].sort();
    places.set(request.id, { key: `${request.id}`, state: request.state, since: request.since, request, resources });
    if (both.has(request.transactionName) || resources.length === 0) continue;
    const key = JSON.stringify([request.state, ...resources]);
    alike.set(key, [...(alike.get(key) ?? []), request.id]);
  }
  for (const [key, ids] of alike) {
    if (ids.length < FOLD_FROM) continue;
    const [first, ...others] = ids.slice(UNFOLDED);
    const { state, since, resources } = places.get(first);
    const line = lines.find((each) => resources.length === 1 && each.resource === resources[0]);
    const known = state === "queued" && line !== undefined ? line.waiting - UNFOLDED : 0;
    const node = { key, state, since, resources, folds: Math.max(known, others.length + 1) };
    for (const id of [first, ...others]) places.set(id, node);
  }
  return places;
}

/** Transactions that hold something in the graph and wait for something else. */
function inBothStates(requests) {
  const states = new Map();
  for (const { transactionName, state } of requests.values()) {
    if (transactionName === undefined) continue;
    states.set(transactionName, (states.get(transactionName) ?? new Set()).add(state));
  }
  return new Set([...states].filter(([, found]) => found.size === 2).map(([name]) => name));
}

/** Links between nodes, each once, without those that others imply. */
function join(places, edges, requests) {
  const ahead = new Map(); // node and resource: the nodes ahead of it in that line
  const found = new Map();
  const add = (from, to, kind, resource) => {
    if (from === to) return;
    const key = `${from.key} ${to.key} ${kind}`;
    if (!found.has(key)) found.set(key, { key, from, to, kind, resources: new Set() });
    if (resource !== undefined) found.get(key).resources.add(resource);
  };
  const line = (node, resource) => `${node.key} ${resource}`;
  for (const { waiter, blocker, resource, state } of edges) {
    if (state !== "queued") continue;
    const key = line(places.get(waiter), resource);
    ahead.set(key, (ahead.get(key) ?? new Set()).add(places.get(blocker)));
  }
  for (const { waiter, blocker, resource, state } of edges) {
    const [from, to] = [places.get(waiter), places.get(blocker)];
    if (state === "queued") {
      const others = [...ahead.get(line(from, resource))];
      if (others.some((other) => other !== to && other !== from && ahead.get(line(other, resource))?.has(to))) continue;
    }
    add(from, to, state, resource);
  }
  const waiting = new Map();
  for (const { id, state, transactionName } of requests.values()) {
    if (state === "queued" && transactionName !== undefined) {
      waiting.set(transactionName, [...(waiting.get(transactionName) ?? []), id]);
    }
  }
  for (const { id, state, transactionName } of requests.values()) {
    if (state !== "held") continue;
    for (const other of waiting.get(transactionName) ?? []) add(places.get(id), places.get(other), "same");
  }
  return [...found.values()];
}

/** Nodes that are linked, together; those first in which somebody waits longest. */
function grouped(nodes, links) {
  const leader = new Map([...nodes].map((node) => [node, node]));
  const find = (node) => {
    while (leader.get(node) !== node) node = leader.get(node);
    return node;
  };
  for (const { from, to } of links) leader.set(find(from), find(to));
  const groups = new Map();
  for (const node of nodes) {
    const first = find(node);
    if (!groups.has(first)) groups.set(first, { nodes: [], links: [], since: Infinity });
    const group = groups.get(first);
    group.nodes.push(node);
    if (node.state === "queued") group.since = Math.min(group.since, node.since);
  }
  for (const link of links) groups.get(find(link.from)).links.push(link);
  return [...groups.values()].sort((a, b) => a.since - b.since || (a.nodes[0].key < b.nodes[0].key ? -1 : 1));
}

/** As much as may be drawn: whole groups while they fit, then of one as many as fit, the longest waits first. */
function within(groups) {
  const drawn = [];
  let room = MOST;
  for (const group of groups) {
    if (group.nodes.length <= room) {
      drawn.push(group);
      room -= group.nodes.length;
      continue;
    }
    const nodes = new Set();
    for (const node of group.nodes.filter((each) => each.state === "queued").sort(earlier)) {
      const needed = [node, ...group.links.filter((link) => link.from === node).map((link) => link.to)];
      const more = needed.filter((each) => !nodes.has(each));
      if (nodes.size + more.length <= room) for (const each of more) nodes.add(each);
    }
    const links = group.links.filter((link) => nodes.has(link.from) && nodes.has(link.to));
    if (nodes.size > 1) drawn.push({ ...group, nodes: [...nodes], links });
    break;
  }
  return drawn;
}

const earlier = (a, b) => a.since - b.since || (a.request?.id ?? Infinity) - (b.request?.id ?? Infinity);

const inOrder = (requests) => [...requests].sort((a, b) => a.since - b.since || a.id - b.id);
