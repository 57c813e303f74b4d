// Where the nodes of the wait graph stand. Who waits is to the left of whom it waits for. A line stands in one column, in
// its order, and so does what one transaction holds and waits for. A group that is too wide for that is stacked: waiters
// stand below whom they wait for, indented. The same graph gives the same picture.

const WIDTH = 186;
export const HEIGHT = 42;
export const LANE = 8; // height of a link that passes a column
const BETWEEN = 28; // columns
const BELOW = 14; // nodes of one column
const APART = 28; // groups
const ROUNDS = 4;
const INDENT = 18; // of a stacked node, for each holder that it waits for
const [NARROWEST, WIDEST] = [150, 260]; // stacked nodes

/** Sets `x`, `y` and `width` of all nodes and of the bends (`via`) of links, for a picture that is `width` wide; returns the size that it takes. */
export function place(groups, width) {
  const placed = [];
  for (const group of groups) {
    let size = arrange(group);
    if (size.width > width) size = stack(group, width);
    const spot = lowest(placed, size, width);
    for (const node of [...group.nodes, ...group.links.flatMap((link) => link.via)]) {
      node.x += spot.x;
      node.y += spot.y;
    }
    placed.push({ ...spot, ...size });
  }
  return {
    width: Math.max(0, ...placed.map((box) => box.x + box.width)),
    height: Math.max(0, ...placed.map((box) => box.y + box.height)),
  };
}

/** One group by itself, from (0, 0) on. */
function arrange({ nodes, links }) {
  const depth = depths(nodes, links);
  const deepest = Math.max(...depth.values());
  const columns = Array.from({ length: deepest + 1 }, () => []);
  for (const node of nodes) columns[depth.get(node)].push(Object.assign(node, { width: WIDTH, height: HEIGHT, stacked: false }));
  const near = new Map(nodes.map((node) => [node, []]));
  for (const link of links) {
    link.via = bends(link, depth, columns);
    if (link.kind === "queued" && link.via.length === 0) continue;
    for (const [one, other] of pairs([link.from, ...link.via, link.to])) {
      near.set(one, [...(near.get(one) ?? []), other]);
      near.set(other, [...(near.get(other) ?? []), one]);
    }
  }
  for (const column of columns) {
    column.sort((a, b) => a.since - b.since || Number(a.folds !== undefined) - Number(b.folds !== undefined));
    for (const [row, node] of column.entries()) node.y = row * (HEIGHT + BELOW);
  }
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const column of round % 2 ? columns : columns.toReversed()) settle(column, near);
  }
  const all = columns.flat();
  const top = Math.min(...all.map((node) => node.y));
  for (const [place, column] of columns.entries()) {
    for (const node of column) {
      node.x = (deepest - place) * (WIDTH + BETWEEN);
      node.y = Math.round(node.y - top);
    }
  }
  return {
    width: (deepest + 1) * WIDTH + deepest * BETWEEN,
    height: Math.max(...all.map((node) => node.y + node.height)),
  };
}

/** One group by itself in one column, for a picture that is `width` wide: waiters below whom they wait for. */
function stack({ nodes, links }, width) {
  const depth = depths(nodes, links);
  for (const link of links) link.via = [];
  for (const [row, node] of inReadingOrder(nodes, links).entries()) {
    const x = Math.max(0, Math.min(depth.get(node) * INDENT, width - NARROWEST));
    Object.assign(node, { x, y: row * (HEIGHT + BELOW), width: Math.min(WIDEST, width - x), stacked: true });
  }
  return { width: Math.max(...nodes.map((node) => node.x + node.width)), height: nodes.length * (HEIGHT + BELOW) - BELOW };
}

/** Each node behind those it is linked to, as near to them as can be; of several the one that has waited or held longest. */
function inReadingOrder(nodes, links) {
  const open = new Map(nodes.map((node) => [node, new Set()]));
  for (const { from, to } of links) open.get(from).add(to);
  const bySince = (some) => [...some].sort((a, b) => b.since - a.since);
  const left = new Set(nodes);
  const ready = bySince(nodes.filter((node) => open.get(node).size === 0));
  const order = [];
  while (left.size > 0) {
    const next = ready.pop() ?? bySince(left).at(-1); // none is ready in a ring, which will be gone with the next answer
    if (!left.delete(next)) continue;
    order.push(next);
    const freed = [...left].filter((node) => open.get(node).delete(next) && open.get(node).size === 0);
    ready.push(...bySince(freed));
  }
  return order;
}

/** Places of its own for a link in the columns that it passes, lest it runs behind other nodes. */
function bends({ from, to }, depth, columns) {
  const via = [];
  for (let place = depth.get(from) - 1; place > depth.get(to); place -= 1) {
    via.push({ since: from.since, width: WIDTH, height: LANE });
    columns[place].push(via.at(-1));
  }
  return via;
}

const pairs = (row) => row.slice(1).map((each, place) => [row[place], each]);

/** How many holders are between each and those who wait for nobody, itself included. */
function depths(nodes, links) {
  const known = new Map();
  const from = new Map(nodes.map((node) => [node, []]));
  for (const link of links) from.get(link.from).push(link);
  const depth = (node, path) => {
    if (known.has(node)) return known.get(node);
    if (path.has(node)) return 0; // a ring, which will be gone with the next answer
    path.add(node);
    let most = 0;
    for (const { to, kind } of from.get(node)) most = Math.max(most, depth(to, path) + (kind === "held" ? 1 : 0));
    path.delete(node);
    known.set(node, most);
    return most;
  };
  for (const node of nodes) depth(node, new Set());
  return known;
}

/** Move the nodes of a column to the middle of those they are linked with, as far as they leave each other room. */
function settle(column, near) {
  const middle = (node) => node.y + node.height / 2;
  const wish = new Map();
  for (const node of column) {
    const others = near.get(node);
    const wanted = others.length ? others.reduce((sum, other) => sum + middle(other), 0) / others.length : middle(node);
    wish.set(node, wanted - node.height / 2);
  }
  column.sort((a, b) => wish.get(a) + a.height / 2 - wish.get(b) - b.height / 2); // stable: a line stays in its order
  const blocks = []; // nodes that touch each other, their height, and the sum of where each wants the first to be
  const top = (block) => block.sum / block.nodes.length;
  for (const node of column) {
    let block = { nodes: [node], height: node.height + BELOW, sum: wish.get(node) };
    while (blocks.length && top(blocks.at(-1)) + blocks.at(-1).height > top(block)) {
      const upper = blocks.pop();
      block = {
        nodes: [...upper.nodes, ...block.nodes],
        height: upper.height + block.height,
        sum: upper.sum + block.sum - block.nodes.length * upper.height,
      };
    }
    blocks.push(block);
  }
  for (const block of blocks) {
    let y = top(block);
    for (const node of block.nodes) {
      node.y = y;
      y += node.height + BELOW;
    }
  }
}

/** Where there is room for a box beside and below those that are there: as high as it can be, then as far left. */
function lowest(placed, size, within) {
  const rights = [0, ...placed.map((box) => box.x + box.width + APART)].sort((a, b) => a - b);
  const bottoms = [0, ...placed.map((box) => box.y + box.height + APART)].sort((a, b) => a - b);
  for (const y of bottoms) {
    for (const x of rights) {
      const box = { x, y, ...size };
      if ((x === 0 || x + size.width <= within) && !placed.some((other) => meet(box, other))) return { x, y };
    }
  }
  return { x: 0, y: bottoms.at(-1) };
}

const meet = (a, b) =>
  a.x < b.x + b.width + APART && b.x < a.x + a.width + APART && a.y < b.y + b.height + APART && b.y < a.y + a.height + APART;
