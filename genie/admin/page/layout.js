// The layout of the wait-for graph. A waiting request is to the left of its holders. The requests of one queue are in one
// column, in queue order, and so are the held and the waiting requests of one transaction. A group that is too wide for
// columns is stacked: waiting requests are below their holders, indented. The same graph has always the same layout.

const NODE_WIDTH = 186;
export const NODE_HEIGHT = 42;
export const LANE_HEIGHT = 8; // of a link that passes through a column
const COLUMN_GAP = 28;
const ROW_GAP = 14;
const GROUP_GAP = 28;
const ALIGNMENT_ROUNDS = 4;
const INDENT = 18; // of a stacked node, for each level of the chain of holders that it waits for
const [MIN_STACKED_WIDTH, MAX_STACKED_WIDTH] = [150, 260];
const [BRACKET_GAP, BRACKET_WIDTH, BRACKET_TEXT_GAP] = [8, 6, 5]; // px before a bracket, its width, and before its text

/**
 * Lay out groups of nodes in a picture of at most `maxWidth` px: set `x`, `y` and `width` of the nodes, the waypoints
 * `via` of links, and the position of the brackets. `bracketTextWidth(bracket)` returns the width of the text of a bracket in
 * px. Returns the size of the picture.
 */
export function layoutGraph(groups, maxWidth, bracketTextWidth) {
  const boxes = [];
  for (const group of groups) {
    let size = layoutInColumns(group);
    if (size.width > maxWidth) size = layoutStacked(group, maxWidth);
    size.width = placeBrackets(group, size.width, maxWidth, bracketTextWidth);
    const position = findFreePosition(boxes, size, maxWidth);
    for (const item of [...group.nodes, ...group.links.flatMap((link) => link.via), ...group.brackets]) {
      item.x += position.x;
      item.y += position.y;
    }
    boxes.push({ ...position, ...size });
  }
  return {
    width: Math.max(0, ...boxes.map((box) => box.x + box.width)),
    height: Math.max(0, ...boxes.map((box) => box.y + box.height)),
  };
}

/** Lay out one group in columns, one for each depth, with its top left corner at (0, 0). Returns its size. */
function layoutInColumns({ nodes, links }) {
  const depth = depths(nodes, links);
  const maxDepth = Math.max(...depth.values());
  const columns = Array.from({ length: maxDepth + 1 }, () => []);
  for (const node of nodes) columns[depth.get(node)].push(Object.assign(node, { width: NODE_WIDTH, height: NODE_HEIGHT, stacked: false }));
  const neighbours = new Map(nodes.map((node) => [node, []]));
  for (const link of links) {
    link.via = addWaypoints(link, depth, columns);
    if (link.kind === "queued" && link.via.length === 0) continue; // it does not influence the order within the column
    for (const [one, other] of pairs([link.from, ...link.via, link.to])) {
      neighbours.set(one, [...(neighbours.get(one) ?? []), other]);
      neighbours.set(other, [...(neighbours.get(other) ?? []), one]);
    }
  }
  for (const column of columns) {
    column.sort((a, b) => a.since - b.since || Number(a.collapsed !== undefined) - Number(b.collapsed !== undefined));
    for (const [row, item] of column.entries()) item.y = row * (NODE_HEIGHT + ROW_GAP);
  }
  for (let round = 0; round < ALIGNMENT_ROUNDS; round += 1) {
    for (const column of round % 2 ? columns : columns.toReversed()) alignColumn(column, neighbours);
  }
  const items = columns.flat();
  const top = Math.min(...items.map((item) => item.y));
  for (const [index, column] of columns.entries()) {
    for (const item of column) {
      item.x = (maxDepth - index) * (NODE_WIDTH + COLUMN_GAP);
      item.y = Math.round(item.y - top);
    }
  }
  return {
    width: (maxDepth + 1) * NODE_WIDTH + maxDepth * COLUMN_GAP,
    height: Math.max(...items.map((item) => item.y + item.height)),
  };
}

/** Lay out one group in a single column of at most `maxWidth` px: waiting requests below their holders. Returns its size. */
function layoutStacked({ nodes, links }, maxWidth) {
  const depth = depths(nodes, links);
  for (const link of links) link.via = [];
  for (const [row, node] of topologicalOrder(nodes, links).entries()) {
    const x = Math.max(0, Math.min(depth.get(node) * INDENT, maxWidth - MIN_STACKED_WIDTH));
    Object.assign(node, { x, y: row * (NODE_HEIGHT + ROW_GAP), width: Math.min(MAX_STACKED_WIDTH, maxWidth - x), stacked: true });
  }
  return { width: Math.max(...nodes.map((node) => node.x + node.width)), height: nodes.length * (NODE_HEIGHT + ROW_GAP) - ROW_GAP };
}

/**
 * Place the brackets of a group to its right, with their texts if there is room for them, and remove those without room.
 * A bracket extends from the first to the last of its nodes. Returns the width of the group with its brackets.
 */
function placeBrackets(group, width, maxWidth, textWidth) {
  const widthOf = (brackets, hasText) =>
    brackets.reduce((sum, bracket) => sum + BRACKET_GAP + BRACKET_WIDTH + (hasText ? BRACKET_TEXT_GAP + textWidth(bracket) : 0), width);
  const hasText = widthOf(group.brackets, true) <= maxWidth;
  while (widthOf(group.brackets, hasText) > maxWidth && group.brackets.length > 0) group.brackets.pop();
  for (const [index, bracket] of group.brackets.entries()) {
    const tops = bracket.members.map((node) => node.y);
    const [x, y] = [widthOf(group.brackets.slice(0, index), hasText) + BRACKET_GAP, Math.min(...tops)];
    const textX = hasText ? BRACKET_WIDTH + BRACKET_TEXT_GAP : undefined;
    Object.assign(bracket, { x, y, width: BRACKET_WIDTH, height: Math.max(...tops) + NODE_HEIGHT - y, textX });
  }
  return widthOf(group.brackets, hasText);
}

/** Sort nodes so that each comes after, and close to, its blockers; of several, the oldest first. */
function topologicalOrder(nodes, links) {
  const unplacedBlockers = new Map(nodes.map((node) => [node, new Set()]));
  for (const { from, to } of links) unplacedBlockers.get(from).add(to);
  const newestFirst = (items) => [...items].sort((a, b) => b.since - a.since);
  const unplaced = new Set(nodes);
  const ready = newestFirst(nodes.filter((node) => unplacedBlockers.get(node).size === 0));
  const order = [];
  while (unplaced.size > 0) {
    const next = ready.pop() ?? newestFirst(unplaced).at(-1); // no node is ready in a cycle, which the next response will not contain
    if (!unplaced.delete(next)) continue;
    order.push(next);
    const freed = [...unplaced].filter((node) => unplacedBlockers.get(node).delete(next) && unplacedBlockers.get(node).size === 0);
    ready.push(...newestFirst(freed));
  }
  return order;
}

/** Add a waypoint of a link to each column that it passes, so that it is not drawn across nodes. Returns the waypoints. */
function addWaypoints({ from, to }, depth, columns) {
  const waypoints = [];
  for (let index = depth.get(from) - 1; index > depth.get(to); index -= 1) {
    waypoints.push({ since: from.since, width: NODE_WIDTH, height: LANE_HEIGHT });
    columns[index].push(waypoints.at(-1));
  }
  return waypoints;
}

const pairs = (items) => items.slice(1).map((item, index) => [items[index], item]);

/** Return the depth of each node: the maximum number of `held` links on a path from it. */
function depths(nodes, links) {
  const depthByNode = new Map();
  const linksFrom = new Map(nodes.map((node) => [node, []]));
  for (const link of links) linksFrom.get(link.from).push(link);
  const computeDepth = (node, path) => {
    if (depthByNode.has(node)) return depthByNode.get(node);
    if (path.has(node)) return 0; // a cycle, which the next response will not contain
    path.add(node);
    let depth = 0;
    for (const { to, kind } of linksFrom.get(node)) depth = Math.max(depth, computeDepth(to, path) + (kind === "held" ? 1 : 0));
    path.delete(node);
    depthByNode.set(node, depth);
    return depth;
  };
  for (const node of nodes) computeDepth(node, new Set());
  return depthByNode;
}

/**
 * Move the items of a column towards the middle of their neighbours without overlaps. Items that would overlap form a
 * block, whose position is the mean of their target positions.
 */
function alignColumn(column, neighbours) {
  const middle = (item) => item.y + item.height / 2;
  const targetTop = new Map();
  for (const item of column) {
    const others = neighbours.get(item);
    const target = others.length ? others.reduce((sum, other) => sum + middle(other), 0) / others.length : middle(item);
    targetTop.set(item, target - item.height / 2);
  }
  // The sort is stable: requests of one queue stay in queue order.
  column.sort((a, b) => targetTop.get(a) + a.height / 2 - targetTop.get(b) - b.height / 2);
  const blocks = []; // {items, height, targetSum}: the sum of the tops that each item aims for, relative to the block
  const blockTop = (block) => block.targetSum / block.items.length;
  for (const item of column) {
    let block = { items: [item], height: item.height + ROW_GAP, targetSum: targetTop.get(item) };
    while (blocks.length && blockTop(blocks.at(-1)) + blocks.at(-1).height > blockTop(block)) {
      const upper = blocks.pop();
      block = {
        items: [...upper.items, ...block.items],
        height: upper.height + block.height,
        targetSum: upper.targetSum + block.targetSum - block.items.length * upper.height,
      };
    }
    blocks.push(block);
  }
  for (const block of blocks) {
    let y = blockTop(block);
    for (const item of block.items) {
      item.y = y;
      y += item.height + ROW_GAP;
    }
  }
}

/** Return the highest, then leftmost, position where a box of this size does not overlap the others. */
function findFreePosition(boxes, size, maxWidth) {
  const candidatesX = [0, ...boxes.map((box) => box.x + box.width + GROUP_GAP)].sort((a, b) => a - b);
  const candidatesY = [0, ...boxes.map((box) => box.y + box.height + GROUP_GAP)].sort((a, b) => a - b);
  for (const y of candidatesY) {
    for (const x of candidatesX) {
      const box = { x, y, ...size };
      if ((x === 0 || x + size.width <= maxWidth) && !boxes.some((other) => overlap(box, other))) return { x, y };
    }
  }
  return { x: 0, y: candidatesY.at(-1) };
}

/** Return whether two boxes overlap or are closer than `GROUP_GAP`. */
const overlap = (a, b) =>
  a.x < b.x + b.width + GROUP_GAP && b.x < a.x + a.width + GROUP_GAP && a.y < b.y + b.height + GROUP_GAP && b.y < a.y + a.height + GROUP_GAP;
