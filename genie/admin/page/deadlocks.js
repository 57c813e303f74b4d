// Deadlocks that were found and ended: each a ring of transactions, with the resources on the arrows.

import { ARROW, el, keyed, say, svg } from "./dom.js";
import { briefly, count, cut, visible } from "./format.js";

const MOST = 3; // rings
const IN_RING = 6; // nodes of one
const [WIDTH, HEIGHT] = [320, 212];
const [NODE_WIDTH, NODE_HEIGHT] = [104, 26];
const [BELOW_EVEN, BELOW_ODD] = [6, 36]; // px below the lowest nodes; in an odd ring an arrow with its resource runs there
const NAME = 12;
const RESOURCE = 20;

export class Deadlocks {
  constructor(container, counter) {
    this.container = container;
    this.counter = counter;
    this.empty = el("p", { class: "empty" }, "None since the start of the server.");
    this.rings = el("div", { class: "rings" });
    this.more = el("p", { class: "quiet" });
    container.append(this.empty, this.rings, this.more);
  }

  show({ deadlocks, total }, now) {
    const shown = deadlocks.slice(0, MOST);
    this.empty.hidden = shown.length > 0;
    keyed(this.rings, shown, (row) => `${row.at} ${row.id}`, ring, (figure, row) => {
      say(figure.querySelector("time"), `${briefly(now - row.at)} ago`);
    });
    say(this.counter, total > 0 ? `${count(total)} since the start` : "");
    this.more.hidden = total <= shown.length;
    say(this.more, `and ${count(total - shown.length)} more`);
  }
}

function ring(row) {
  const nodes = members(row);
  const victim = row.transactionName ?? `#${row.id}`;
  const lowest = Math.max(...nodes.map((each) => each.y));
  const height = Math.min(HEIGHT, lowest + NODE_HEIGHT / 2 + (nodes.length % 2 ? BELOW_ODD : BELOW_EVEN));
  const label = `Deadlock of ${row.cycle.length}: ${row.waits.map((step, place) => `${row.cycle[place]} waits for ${step.resource}`).join(", ")}`;
  return el(
    "figure",
    { class: "ring", "data-id": row.id },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...links(nodes), ...nodes.map(node)),
    el("figcaption", {}, el("bdi", { class: "name", title: visible(victim) }, visible(victim)), el("span", { class: "quiet" }, " was the victim, "), el("time", { class: "quiet" })),
  );
}

/** The transactions of a cycle with their places; of a long one the last, before the victim, and a node for the others. */
function members({ cycle, waits }) {
  const all = cycle.map((name, place) => ({ name, victim: place === 0, wants: waits[place].resource }));
  const folds = all.length > IN_RING ? all.length - IN_RING + 1 : 0;
  const nodes = folds ? [...all.slice(0, IN_RING - 2), { name: `${folds} more`, folded: true, wants: all.at(-2).wants }, all.at(-1)] : all;
  const [a, b] = [(WIDTH - NODE_WIDTH) / 2 - 4, (HEIGHT - NODE_HEIGHT) / 2 - 8];
  return nodes.map((each, place) => {
    const angle = (2 * Math.PI * place) / nodes.length - Math.PI / 2;
    return { ...each, angle, x: WIDTH / 2 + a * Math.cos(angle), y: HEIGHT / 2 + b * Math.sin(angle) };
  });
}

function node({ name, victim, folded, x, y }) {
  return svg(
    "g",
    { class: `member${victim ? " victim" : ""}${folded ? " fold" : ""}`, transform: `translate(${x - NODE_WIDTH / 2} ${y - NODE_HEIGHT / 2})` },
    svg("title", {}, visible(victim ? `${name}, the victim` : name)),
    svg("rect", { width: NODE_WIDTH, height: NODE_HEIGHT, rx: NODE_HEIGHT / 2 }),
    svg("text", { x: NODE_WIDTH / 2, y: NODE_HEIGHT / 2 + 4 }, cut(name, NAME)),
  );
}

/** An arrow from each to the next, bent outwards, and in its middle what is waited for. */
function links(nodes) {
  const drawn = nodes.map((from, place) => {
    const to = nodes[(place + 1) % nodes.length];
    const turn = place + 1 === nodes.length ? to.angle + 2 * Math.PI : to.angle;
    const middle = (from.angle + turn) / 2;
    const out = nodes.length === 2 ? 0.9 : 1.12;
    const control = {
      x: WIDTH / 2 + Math.cos(middle) * (WIDTH / 2 - NODE_WIDTH / 2) * out,
      y: HEIGHT / 2 + Math.sin(middle) * (HEIGHT / 2 - NODE_HEIGHT / 2) * out,
    };
    const [start, end] = [border(from, control, 2), border(to, control, 5)];
    const at = (p, q, r) => 0.25 * p + 0.5 * q + 0.25 * r;
    return [
      svg("path", { class: "link ring-link", d: `M${start.x} ${start.y}Q${control.x} ${control.y} ${end.x} ${end.y}`, "marker-end": ARROW }),
      svg("text", { class: "wanted", x: at(start.x, control.x, end.x), y: at(start.y, control.y, end.y) + 4 }, cut(from.wants, RESOURCE), svg("title", {}, visible(from.wants))),
    ];
  });
  return [...drawn.map(([path]) => path), ...drawn.map(([, text]) => text)];
}

/** Where a straight line from a node to `target` leaves the node, and `gap` beyond. */
function border(from, target, gap) {
  const [dx, dy] = [target.x - from.x, target.y - from.y];
  const reach = Math.min(Math.abs((NODE_WIDTH / 2 + gap) / (dx || 1e-9)), Math.abs((NODE_HEIGHT / 2 + gap) / (dy || 1e-9)));
  return { x: from.x + dx * Math.min(reach, 1), y: from.y + dy * Math.min(reach, 1) };
}
