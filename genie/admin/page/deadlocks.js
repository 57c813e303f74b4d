// The latest deadlocks, each drawn as a ring of transactions with the resources on the arrows.

import { ARROW, html, setText, svg, updateChildren } from "./dom.js";
import { abbreviate, briefDuration, escapeInvisible, formatCount } from "./format.js";

const MAX_RINGS = 3;
const MAX_MEMBERS = 6; // nodes in a ring
const [WIDTH, HEIGHT] = [320, 212];
const [NODE_WIDTH, NODE_HEIGHT] = [104, 26];
const [MARGIN_BELOW_EVEN, MARGIN_BELOW_ODD] = [6, 36]; // px; in a ring of odd size an arrow with a text runs below the nodes
const MAX_NAME_LENGTH = 12;
const MAX_RESOURCE_LENGTH = 20;

export class DeadlockList {
  constructor(container, counter) {
    this.counter = counter;
    this.empty = html("p", { class: "empty" }, "None since the start of the server.");
    this.rings = html("div", { class: "rings" });
    this.omitted = html("p", { class: "quiet" });
    container.append(this.empty, this.rings, this.omitted);
  }

  /** Show the response of /api/deadlocks. */
  show({ deadlocks, total }, now) {
    const shown = deadlocks.slice(0, MAX_RINGS);
    this.empty.hidden = shown.length > 0;
    const updateAge = (figure, deadlock) => setText(figure.querySelector("time"), `${briefDuration(now - deadlock.at)} ago`);
    updateChildren(this.rings, shown, (deadlock) => `${deadlock.at} ${deadlock.id}`, makeRing, updateAge);
    setText(this.counter, total > 0 ? `${formatCount(total)} since the start` : "");
    this.omitted.hidden = total <= shown.length;
    setText(this.omitted, `and ${formatCount(total - shown.length)} more`);
  }
}

function makeRing(deadlock) {
  const members = layoutRing(deadlock);
  const victim = escapeInvisible(deadlock.transactionName ?? `#${deadlock.id}`);
  const lowest = Math.max(...members.map((member) => member.y));
  const marginBelow = members.length % 2 ? MARGIN_BELOW_ODD : MARGIN_BELOW_EVEN;
  const height = Math.min(HEIGHT, lowest + NODE_HEIGHT / 2 + marginBelow);
  const steps = deadlock.waits.map((step, index) => `${deadlock.cycle[index]} waits for ${waitText(step)}`);
  const label = `Deadlock of ${deadlock.cycle.length}: ${steps.join(", ")}`;
  return html(
    "figure",
    { class: "ring", "data-id": deadlock.id },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label }, ...makeArrows(members), ...members.map(makeMember)),
    html(
      "figcaption",
      {},
      html("bdi", { class: "name", title: victim }, victim),
      html("span", { class: "quiet" }, " was the victim, "),
      html("time", { class: "quiet" }),
    ),
  );
}

/** Return what a wait of a deadlock is for: a resource, of a counted resource with the units, as in `2/10:NAME`. */
const waitText = ({ resource, units, of }) => (units === undefined ? resource : `${units}/${of}:${resource}`);

/** Return the transactions of a cycle with their positions. In a long cycle, the members before the last are collapsed. */
function layoutRing({ cycle, waits }) {
  const all = cycle.map((name, index) => ({ name, victim: index === 0, resource: waitText(waits[index]) }));
  const collapsed = all.length > MAX_MEMBERS ? all.length - MAX_MEMBERS + 1 : 0;
  const members = collapsed
    ? [...all.slice(0, MAX_MEMBERS - 2), { name: `${collapsed} more`, collapsed: true, resource: all.at(-2).resource }, all.at(-1)]
    : all;
  const [radiusX, radiusY] = [(WIDTH - NODE_WIDTH) / 2 - 4, (HEIGHT - NODE_HEIGHT) / 2 - 8];
  return members.map((member, index) => {
    const angle = (2 * Math.PI * index) / members.length - Math.PI / 2;
    return { ...member, angle, x: WIDTH / 2 + radiusX * Math.cos(angle), y: HEIGHT / 2 + radiusY * Math.sin(angle) };
  });
}

function makeMember({ name, victim, collapsed, x, y }) {
  return svg(
    "g",
    { class: `member${victim ? " victim" : ""}${collapsed ? " collapsed" : ""}`, transform: `translate(${x - NODE_WIDTH / 2} ${y - NODE_HEIGHT / 2})` },
    svg("title", {}, escapeInvisible(victim ? `${name}, the victim` : name)),
    svg("rect", { width: NODE_WIDTH, height: NODE_HEIGHT, rx: NODE_HEIGHT / 2 }),
    svg("text", { x: NODE_WIDTH / 2, y: NODE_HEIGHT / 2 + 4 }, abbreviate(name, MAX_NAME_LENGTH)),
  );
}

/** Return the arrows from each member to the next, curved outwards, and the names of the resources above all arrows. */
function makeArrows(members) {
  const arrows = members.map((from, index) => {
    const to = members[(index + 1) % members.length];
    const toAngle = index + 1 === members.length ? to.angle + 2 * Math.PI : to.angle;
    const middleAngle = (from.angle + toAngle) / 2;
    const curvature = members.length === 2 ? 0.9 : 1.12;
    const control = {
      x: WIDTH / 2 + Math.cos(middleAngle) * (WIDTH / 2 - NODE_WIDTH / 2) * curvature,
      y: HEIGHT / 2 + Math.sin(middleAngle) * (HEIGHT / 2 - NODE_HEIGHT / 2) * curvature,
    };
    const [start, end] = [borderPoint(from, control, 2), borderPoint(to, control, 5)];
    const midpoint = (p, q, r) => 0.25 * p + 0.5 * q + 0.25 * r; // of a quadratic Bézier curve
    const path = `M${start.x} ${start.y}Q${control.x} ${control.y} ${end.x} ${end.y}`;
    return [
      svg("path", { class: "link ring-link", d: path, "marker-end": ARROW }),
      svg(
        "text",
        { class: "wanted", x: midpoint(start.x, control.x, end.x), y: midpoint(start.y, control.y, end.y) + 4 },
        abbreviate(from.resource, MAX_RESOURCE_LENGTH),
        svg("title", {}, escapeInvisible(from.resource)),
      ),
    ];
  });
  return [...arrows.map(([path]) => path), ...arrows.map(([, text]) => text)];
}

/** Return where the line from the centre of a node to `target` crosses the border of the node, `gap` px further out. */
function borderPoint(node, target, gap) {
  const [dx, dy] = [target.x - node.x, target.y - node.y];
  const fraction = Math.min(Math.abs((NODE_WIDTH / 2 + gap) / (dx || 1e-9)), Math.abs((NODE_HEIGHT / 2 + gap) / (dy || 1e-9)));
  return { x: node.x + dx * Math.min(fraction, 1), y: node.y + dy * Math.min(fraction, 1) };
}
