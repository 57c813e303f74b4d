// The drawing of the wait-for graph: nodes are buttons, links are arrows from a waiting request to its blocker.

import { ARROW, html, setText, svg, updateChildren } from "./dom.js";
import { abbreviate, briefDuration, escapeInvisible, formatCount, formatDuration, pluralize, requestLabel } from "./format.js";
import { LANE_HEIGHT, layoutGraph, NODE_HEIGHT } from "./layout.js";
import { simplifyGraph } from "./simplify.js";

const MARGIN = 6;
const LEFT_MARGIN = 26; // for links within the first column, which run to its left
const [LATE_MS, VERY_LATE_MS] = [1_000, 10_000]; // waiting times from which on a node is highlighted
const [TEXT_LEFT, TEXT_RIGHT] = [18, 9]; // px between the sides of a node and its texts
const WIDEST_TIME = "000 ms"; // its width is reserved, so that the text beside does not change with the time
const TEXT_GAP = 4; // px between a resource and the time
const UNITS_BAR = { y: NODE_HEIGHT - 5, height: 2.5, rx: 1.25 };
const MAX_BRACKET_TEXT = 24; // characters

const LEGEND = [
  ["held", "waits for the holder"],
  ["queued", "waits for the request ahead in the queue"],
  ["same", "same transaction"],
];

/** `select({request: id})` or `select({resource: name})` is called on a click. */
export class Graph {
  constructor(container, counter, legend, select) {
    this.container = container;
    this.counter = counter;
    this.select = select;
    this.links = svg("g");
    this.nodes = svg("g");
    this.brackets = svg("g");
    this.picture = svg("svg", { role: "group", "aria-label": "Wait-for graph" }, this.brackets, this.links, this.nodes);
    this.bracketFont = svg("text", { class: "subtree", hidden: "" }); // measured, never shown
    this.picture.append(this.bracketFont);
    this.empty = html("p", { class: "empty" }, "No requests wait.");
    container.append(this.empty, this.picture);
    for (const [kind, text] of LEGEND) legend.append(html("li", {}, makeLegendLine(kind), text));
    this.unitsLegend = html("li", {}, makeLegendBar(), "units, and how many may be in use");
    this.subtreeLegend = html("li", {}, makeLegendBracket(), "names below a subtree");
    legend.append(this.unitsLegend, this.subtreeLegend);
    new ResizeObserver(() => this.lastArguments && this.show(...this.lastArguments)).observe(container);
  }

  /** Draw the graph `waits` at the server's time `now` (unix ms), and highlight the selected request. */
  show(waits, queues, now, selected) {
    this.lastArguments = [waits, queues, now, selected];
    const { groups, omitted } = simplifyGraph(waits, queues);
    const bracketTextWidth = ({ subtree }) => Math.ceil(textWidth(this.bracketFont, abbreviate(subtree, MAX_BRACKET_TEXT)));
    const size = layoutGraph(groups, this.container.clientWidth - 2 * MARGIN - LEFT_MARGIN, bracketTextWidth);
    const nodes = groups.flatMap((group) => group.nodes);
    const links = groups.flatMap((group) => group.links);
    const brackets = groups.flatMap((group) => group.brackets);
    this.unitsLegend.hidden = !nodes.some((node) => unitsOf(node) !== null);
    this.subtreeLegend.hidden = brackets.length === 0;
    const highlighted = neighbourKeys(links, selected);
    this.empty.hidden = nodes.length > 0;
    this.picture.toggleAttribute("hidden", nodes.length === 0);
    this.picture.setAttribute("width", size.width + 2 * MARGIN + LEFT_MARGIN);
    this.picture.setAttribute("height", size.height + 2 * MARGIN);
    this.picture.classList.toggle("dimmed", highlighted.size > 0);
    updateChildren(
      this.nodes,
      nodes,
      (node) => node.key,
      (node) => this.makeNode(node),
      (element, node) => updateNode(element, node, now, selected, highlighted),
    );
    updateChildren(
      this.links,
      links,
      (link) => link.key,
      makeLink,
      (path, link) => {
        path.setAttribute("d", linkPath(link));
        path.classList.toggle("near", touches(link, selected));
      },
    );
    updateChildren(
      this.brackets,
      brackets,
      (bracket) => bracket.key,
      (bracket) => this.makeBracket(bracket),
      updateBracket,
    );
    setText(this.counter, describeCount(waits.queueTotal, omitted));
  }

  makeBracket({ subtree }) {
    const text = svg("text", { class: "subtree", click: () => this.select({ resource: subtree }) }, abbreviate(subtree, MAX_BRACKET_TEXT));
    return svg("g", { class: "bracket", "data-subtree": subtree }, svg("title", {}, escapeInvisible(subtree)), svg("path"), text);
  }

  makeNode(node) {
    const isCollapsed = node.collapsed !== undefined;
    const onClick = () => this.select(isCollapsed ? { resource: node.resources[0] } : { request: node.request.id });
    const onKeyDown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      onClick();
    };
    return svg(
      "g",
      {
        class: `node ${node.state}${isCollapsed ? " collapsed" : ""}`,
        role: "button",
        tabindex: 0,
        "data-id": node.request?.id,
        click: onClick,
        keydown: onKeyDown,
      },
      svg("title"),
      svg("rect", { height: NODE_HEIGHT, rx: 7 }),
      svg("rect", { class: "edge-mark", width: 4, height: NODE_HEIGHT - 14, x: 6, y: 7, rx: 2 }),
      svg("text", { class: "name", x: TEXT_LEFT, y: 17 }),
      svg("text", { class: "resource", x: TEXT_LEFT, y: 33 }),
      svg("text", { class: "time", y: 33 }),
      svg("rect", { class: "units", x: TEXT_LEFT, ...UNITS_BAR }),
      svg("rect", { class: "units used", x: TEXT_LEFT, ...UNITS_BAR }),
    );
  }
}

function describeCount(total, omitted) {
  if (total === 0) return "";
  const waiting = pluralize(total, "request waits", "requests wait");
  return omitted > 0 ? `${waiting}; ${formatCount(omitted)} of them not drawn` : waiting;
}

/** Set texts, position and highlighting of a node. */
function updateNode(element, node, now, selected, highlighted) {
  const [title, box, , name, resource, time, limitBar, unitsBar] = element.children;
  const isCollapsed = node.collapsed !== undefined;
  const age = now - node.since;
  const units = unitsOf(node);
  const otherResources = (node.request?.resourcesTotal ?? node.resources.length) - 1;
  const textWidthAvailable = node.width - TEXT_LEFT - TEXT_RIGHT;
  const timeWidth = isCollapsed ? 0 : textWidth(time, WIDEST_TIME) + TEXT_GAP;
  box.setAttribute("width", node.width);
  time.setAttribute("x", node.width - TEXT_RIGHT);
  const suffix = otherResources > 0 ? ` +${formatCount(otherResources)}` : "";
  const prefix = units === null ? "" : `${node.lock.mode} `;
  setText(resource, prefix + fitText(resource, node.lock.name, suffix, textWidthAvailable - timeWidth - textWidth(resource, prefix)));
  for (const bar of [limitBar, unitsBar]) bar.toggleAttribute("hidden", units === null);
  limitBar.setAttribute("width", textWidthAvailable);
  unitsBar.setAttribute("width", textWidthAvailable * (units ?? 0));
  const description = isCollapsed ? describeCollapsed(node) : describeRequest(node, age);
  if (isCollapsed) setText(name, collapsedLabel(node));
  else {
    setText(name, fitText(name, ownerLabel(node.request), "", textWidthAvailable));
    setText(time, briefDuration(age));
  }
  setText(title, description);
  const isSelected = node.request !== undefined && node.request.id === selected?.request;
  element.setAttribute("aria-label", description);
  element.setAttribute("transform", `translate(${node.x + MARGIN + LEFT_MARGIN} ${node.y + MARGIN})`);
  element.setAttribute("aria-pressed", isSelected);
  element.classList.toggle("chosen", isSelected);
  element.classList.toggle("near", highlighted.has(node.key));
  element.classList.toggle("late", node.state === "queued" && age >= LATE_MS);
  element.classList.toggle("very-late", node.state === "queued" && age >= VERY_LATE_MS);
}

/** Return how large a part of the limit the units of a node are; null if it has none. */
function unitsOf({ lock, collapsed }) {
  const parts = collapsed === undefined ? /^([0-9]+)\/([0-9]+)$/.exec(lock.mode) : null;
  return parts === null ? null : Number(parts[1]) / Number(parts[2]);
}

function updateBracket(element, { x, y, width, height, textX }) {
  const [, path, text] = element.children;
  element.setAttribute("transform", `translate(${x + MARGIN + LEFT_MARGIN} ${y + MARGIN})`);
  path.setAttribute("d", `M0 1H${width}V${height - 1}H0`);
  text.toggleAttribute("hidden", textX === undefined);
  text.setAttribute("x", textX ?? 0);
  text.setAttribute("y", height / 2 + 4);
}

/** Return the transaction of a request. Without one, return its note in parentheses, or its id if it has no note either. */
function ownerLabel(request) {
  const isNoted = request.transactionName === undefined && request.note !== undefined;
  return isNoted ? `(${escapeInvisible(request.note)})` : requestLabel(request);
}

function describeRequest({ request, state }, age) {
  const verb = state === "held" ? "holds" : "waits for";
  return `${ownerLabel(request)} ${verb} ${escapeInvisible(request.resources.join(", "))} since ${formatDuration(age)}`;
}

const collapsedLabel = ({ collapsed, state }) => `${formatCount(collapsed)} more ${state === "held" ? "hold it" : "wait"}`;

const describeCollapsed = (node) => `${collapsedLabel(node)}: ${escapeInvisible(node.resources.join(", "))}`;

const canvas = document.createElement("canvas").getContext("2d");
const fontByClass = new Map();

/** Return the width in px of a text in the font of an element. Elements of one class have the same font. */
function textWidth(element, text) {
  const className = element.getAttribute("class");
  if (!fontByClass.has(className)) fontByClass.set(className, getComputedStyle(element).font);
  canvas.font = fontByClass.get(className);
  return canvas.measureText(text).width;
}

/** Abbreviate a text so that it fits `maxWidth` px together with `suffix`, which is kept. */
function fitText(element, text, suffix, maxWidth) {
  let length = Array.from(escapeInvisible(text)).length;
  while (length > 1 && textWidth(element, abbreviate(text, length) + suffix) > maxWidth) length -= 1;
  return abbreviate(text, length) + suffix;
}

/** Return the keys of the selected node and of its neighbours. */
function neighbourKeys(links, selected) {
  return new Set(links.filter((link) => touches(link, selected)).flatMap((link) => [link.from.key, link.to.key]));
}

const touches = ({ from, to }, selected) => selected?.request !== undefined && [from.key, to.key].includes(`${selected.request}`);

function makeLink({ kind, from, to, resources }) {
  return svg(
    "path",
    {
      class: `link ${kind}`,
      "marker-end": kind === "same" ? undefined : ARROW,
      "data-from": from.key,
      "data-to": to.key,
    },
    svg("title", {}, escapeInvisible([...resources].join(", "))),
  );
}

/** Return the path of a link between two nodes, as the attribute `d`. */
function linkPath({ from, to, kind, via }) {
  const [y1, y2] = [from.y + NODE_HEIGHT / 2 + MARGIN, to.y + NODE_HEIGHT / 2 + MARGIN];
  const [fromLeft, toLeft] = [from.x + MARGIN + LEFT_MARGIN, to.x + MARGIN + LEFT_MARGIN];
  const gap = kind === "same" ? 0 : 2;
  const [fromRight, toRight] = [fromLeft + from.width, toLeft + to.width];
  if (from.x === to.x && kind === "same" && Math.abs(y2 - y1) < 2 * NODE_HEIGHT) {
    const half = (Math.sign(y2 - y1) * NODE_HEIGHT) / 2;
    return `M${fromLeft + 26} ${y1 + half}V${y2 - half}`;
  }
  if (from.x === to.x || from.stacked) {
    const bend = Math.min(fromLeft, toLeft) - 10 - Math.min(20, Math.abs(y2 - y1) / 8);
    return `M${fromLeft} ${y1}C${bend} ${y1} ${bend} ${y2 + 6} ${toLeft - gap} ${y2 + 6}`;
  }
  if (from.x > to.x) return `M${fromLeft} ${y1}${curve(fromLeft, y1, toRight + gap, y2)}`;
  let [x, y, path] = [fromRight, y1, `M${fromRight} ${y1}`];
  for (const waypoint of via) {
    const [left, level] = [waypoint.x + MARGIN + LEFT_MARGIN, waypoint.y + LANE_HEIGHT / 2 + MARGIN];
    path += `${curve(x, y, left, level)}H${left + waypoint.width}`;
    [x, y] = [left + waypoint.width, level];
  }
  return path + curve(x, y, toLeft - gap, y2);
}

/** Return a curve to (x2, y2) that starts and ends horizontally. */
function curve(x1, y1, x2, y2) {
  const pull = Math.sign(x2 - x1) * Math.max(20, Math.abs(x2 - x1) / 2);
  return `C${x1 + pull} ${y1} ${x2 - pull} ${y2} ${x2} ${y2}`;
}

const makeLegendBar = () =>
  svg(
    "svg",
    { class: "node held", width: 32, height: 12, "aria-hidden": "true" },
    svg("rect", { class: "units", x: 1, width: 28, ...UNITS_BAR, y: 5 }),
    svg("rect", { class: "units used", x: 1, width: 11, ...UNITS_BAR, y: 5 }),
  );

const makeLegendBracket = () =>
  svg("svg", { class: "bracket", width: 12, height: 12, "aria-hidden": "true" }, svg("path", { d: "M2 1H8V11H2" }));

function makeLegendLine(kind) {
  const path = svg("path", { class: `link ${kind}`, d: "M1 6H29", "marker-end": kind === "same" ? undefined : ARROW });
  return svg("svg", { width: 32, height: 12, "aria-hidden": "true" }, path);
}
