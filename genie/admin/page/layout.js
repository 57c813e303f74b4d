// Where the nodes of the wait graph stand. Who waits is to the left of whom it waits for. A line stands in one column, in
// its order, and so does what one transaction holds and waits for. The same graph gives the same picture.

export const WIDTH = 172;
export const HEIGHT = 42;
const BETWEEN = 40; // columns
const BELOW = 14; // nodes of one column
const APART = 36; // groups
const ROUNDS = 4;

/** Sets `x` and `y` of all nodes, for a picture that is `width` wide (a wide group may need more); returns the size that it takes. */
export function place(groups, width) {
  const placed = [];
  for (const group of groups) {
    const size = arrange(group);
    const spot = lowest(placed, size, width);
    for (const node of group.nodes) {
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
  for (const node of nodes) columns[depth.get(node)].push(node);
  const near = new Map(nodes.map((node) => [node, []]));
  for (const { from, to, kind } of links) {
    if (kind === "queued") continue;
    near.get(from).push(to);
    near.get(to).push(from);
  }
  for (const column of columns) {
    column.sort((a, b) => a.since - b.since || Number(a.folds !== undefined) - Number(b.folds !== undefined));
    for (const [row, node] of column.entries()) node.y = row * (HEIGHT + BELOW);
  }
  for (let round = 0; round < ROUNDS; round += 1) {
    for (const column of round % 2 ? columns : columns.toReversed()) settle(column, near);
  }
  const top = Math.min(...nodes.map((node) => node.y));
  for (const node of nodes) {
    node.x = (deepest - depth.get(node)) * (WIDTH + BETWEEN);
    node.y = Math.round(node.y - top);
  }
  return {
    width: (deepest + 1) * WIDTH + deepest * BETWEEN,
    height: Math.max(...nodes.map((node) => node.y)) + HEIGHT,
  };
}

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
  const step = HEIGHT + BELOW;
  const wish = new Map();
  for (const node of column) {
    const others = near.get(node);
    wish.set(node, others.length ? others.reduce((sum, other) => sum + other.y, 0) / others.length : node.y);
  }
  column.sort((a, b) => wish.get(a) - wish.get(b)); // stable: a line stays in its order
  const blocks = []; // nodes that touch each other: {nodes, y of the first}
  for (const node of column) {
    let block = { nodes: [node], y: wish.get(node) };
    while (blocks.length && blocks.at(-1).y + blocks.at(-1).nodes.length * step > block.y) {
      const upper = blocks.pop();
      const [m, n] = [upper.nodes.length, block.nodes.length];
      block = {
        nodes: [...upper.nodes, ...block.nodes],
        y: (m * upper.y + n * (block.y - m * step)) / (m + n),
      };
    }
    blocks.push(block);
  }
  for (const block of blocks) for (const [row, node] of block.nodes.entries()) node.y = block.y + row * step;
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
