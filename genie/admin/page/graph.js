// The wait graph as a picture: nodes are buttons, links are arrows from who waits to whom it waits for.

import { choose } from "./choose.js";
import { ARROW, el, keyed, say, svg } from "./dom.js";
import { briefly, called, count, cut, duration, parts, some, visible } from "./format.js";
import { HEIGHT, LANE, place } from "./layout.js";

const MARGIN = 6;
const BENDS = 26; // room for links within the first column, to its left
const AGES = [1_000, 10_000]; // ms of waiting, from which on a node is shown as late
const [TEXT_LEFT, TEXT_RIGHT] = [18, 9]; // px between the sides of a node and its texts
const TIME = "000 ms"; // the longest brief time: its room is kept, so that what is beside it does not change with the time
const GAP = 4; // px between a resource and the time

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
    this.picture = svg("svg", { role: "group", "aria-label": "Wait-for graph" }, this.links, this.nodes);
    this.empty = el("p", { class: "empty" }, "No requests wait.");
    container.append(this.empty, this.picture);
    for (const [kind, text] of LEGEND) legend.append(el("li", {}, sample(kind), text));
    new ResizeObserver(() => this.last && this.show(...this.last)).observe(container);
  }

  /** Draw `waits` as of `now` (the server's, unix ms), and mark what is selected. */
  show(waits, lines, now, selected) {
    this.last = [waits, lines, now, selected];
    const { groups, left } = choose(waits, lines);
    const size = place(groups, this.container.clientWidth - 2 * MARGIN - BENDS);
    const nodes = groups.flatMap((group) => group.nodes);
    const links = groups.flatMap((group) => group.links);
    const near = neighbours(links, selected);
    this.empty.hidden = nodes.length > 0;
    this.picture.toggleAttribute("hidden", nodes.length === 0);
    this.picture.setAttribute("width", size.width + 2 * MARGIN + BENDS);
    this.picture.setAttribute("height", size.height + 2 * MARGIN);
    this.picture.classList.toggle("dimmed", near.size > 0);
    const make = (node) => this.button(node);
    keyed(this.nodes, nodes, (node) => node.key, make, (group, node) => draw(group, node, now, selected, near));
    keyed(this.links, links, (link) => link.key, line, (path, link) => {
      path.setAttribute("d", course(link));
      path.classList.toggle("near", near.has(link.from.key) && near.has(link.to.key) && touches(link, selected));
    });
    say(this.counter, told(waits.queueTotal, left));
  }

  button(node) {
    const choice = () => this.select(node.folds === undefined ? { request: node.request.id } : { resource: node.resources[0] });
    const press = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choice();
    };
    return svg(
      "g",
      {
        class: `node ${node.state}${node.folds === undefined ? "" : " fold"}`,
        role: "button",
        tabindex: 0,
        "data-id": node.request?.id,
        click: choice,
        keydown: press,
      },
      svg("title"),
      svg("rect", { height: HEIGHT, rx: 7 }),
      svg("rect", { class: "edge-mark", width: 4, height: HEIGHT - 14, x: 6, y: 7, rx: 2 }),
      svg("text", { class: "name", x: TEXT_LEFT, y: 17 }),
      svg("text", { class: "resource", x: TEXT_LEFT, y: 33 }),
      svg("text", { class: "time", y: 33 }),
    );
  }
}

function told(total, left) {
  if (total === 0) return "";
  const waiting = some(total, "request waits", "requests wait");
  return left > 0 ? `${waiting}; ${count(left)} of them not drawn` : waiting;
}

function draw(group, node, now, selected, near) {
  const [title, box, , name, resource, time] = group.children;
  const age = now - node.since;
  const chosen = node.request !== undefined && node.request.id === selected?.request;
  const what = node.resources[0] ?? parts(node.request.resources[0]).name;
  const several = (node.request?.resourcesTotal ?? node.resources.length) - 1;
  const room = node.width - TEXT_LEFT - TEXT_RIGHT;
  const beside = node.folds === undefined ? textWidth(time, TIME) + GAP : 0;
  box.setAttribute("width", node.width);
  time.setAttribute("x", node.width - TEXT_RIGHT);
  say(resource, fitting(resource, what, several > 0 ? ` +${count(several)}` : "", room - beside));
  if (node.folds === undefined) {
    say(name, fitting(name, called(node.request), "", room));
    say(time, briefly(age));
    const verb = node.state === "held" ? "holds" : "waits for";
    const text = `${called(node.request)} ${verb} ${visible(node.request.resources.join(", "))} since ${duration(age)}`;
    say(title, text);
    group.setAttribute("aria-label", text);
  } else {
    const text = `${count(node.folds)} more ${node.state === "held" ? "hold it" : "wait"}`;
    say(name, text);
    say(title, `${text}: ${visible(node.resources.join(", "))}`);
    group.setAttribute("aria-label", `${text}: ${visible(node.resources.join(", "))}`);
  }
  group.setAttribute("transform", `translate(${node.x + MARGIN + BENDS} ${node.y + MARGIN})`);
  group.setAttribute("aria-pressed", chosen);
  group.classList.toggle("chosen", chosen);
  group.classList.toggle("near", near.has(node.key));
  group.classList.toggle("late", node.state === "queued" && age >= AGES[0]);
  group.classList.toggle("very-late", node.state === "queued" && age >= AGES[1]);
}

const pen = document.createElement("canvas").getContext("2d");
const fonts = new Map();

/** Px that a text takes in the font of an element in the document. Elements of one class have one font. */
function textWidth(element, text) {
  const kind = element.getAttribute("class");
  if (!fonts.has(kind)) fonts.set(kind, getComputedStyle(element).font);
  pen.font = fonts.get(kind);
  return pen.measureText(text).width;
}

/** As much of a text as there is room for, and all of `end`. */
function fitting(element, text, end, room) {
  let letters = Array.from(visible(text)).length;
  while (letters > 1 && textWidth(element, cut(text, letters) + end) > room) letters -= 1;
  return cut(text, letters) + end;
}

/** The selected node and those that it is linked with, by key. */
function neighbours(links, selected) {
  const found = new Set();
  if (selected?.request === undefined) return found;
  for (const link of links) {
    if (!touches(link, selected)) continue;
    found.add(link.from.key);
    found.add(link.to.key);
  }
  return found;
}

const touches = ({ from, to }, selected) => [from.key, to.key].includes(`${selected?.request}`);

function line({ kind, from, to, resources }) {
  return svg(
    "path",
    {
      class: `link ${kind}`,
      "marker-end": kind === "same" ? undefined : ARROW,
      "data-from": from.key,
      "data-to": to.key,
    },
    svg("title", {}, visible([...resources].join(", "))),
  );
}

/** The path of a link between two placed nodes. */
function course({ from, to, kind, via }) {
  const [y1, y2] = [from.y + HEIGHT / 2 + MARGIN, to.y + HEIGHT / 2 + MARGIN];
  const [left, right] = [from.x + MARGIN + BENDS, to.x + MARGIN + BENDS];
  const gap = kind === "same" ? 0 : 2;
  const fromEnd = left + from.width;
  const toEnd = right + to.width;
  if (from.x === to.x && kind === "same" && Math.abs(y2 - y1) < 2 * HEIGHT) {
    const half = (Math.sign(y2 - y1) * HEIGHT) / 2;
    return `M${left + 26} ${y1 + half}V${y2 - half}`;
  }
  if (from.x === to.x || from.stacked) {
    const bend = Math.min(left, right) - 10 - Math.min(20, Math.abs(y2 - y1) / 8);
    return `M${left} ${y1}C${bend} ${y1} ${bend} ${y2 + 6} ${right - gap} ${y2 + 6}`;
  }
  if (from.x > to.x) return `M${left} ${y1}${swing(left, y1, toEnd + gap, y2)}`;
  let [x, y, path] = [fromEnd, y1, `M${fromEnd} ${y1}`];
  for (const bend of via) {
    const [begin, level] = [bend.x + MARGIN + BENDS, bend.y + LANE / 2 + MARGIN];
    path += `${swing(x, y, begin, level)}H${begin + bend.width}`;
    [x, y] = [begin + bend.width, level];
  }
  return path + swing(x, y, right - gap, y2);
}

/** A curve on to (x2, y2) that begins and ends level. */
function swing(x1, y1, x2, y2) {
  const pull = Math.sign(x2 - x1) * Math.max(20, Math.abs(x2 - x1) / 2);
  return `C${x1 + pull} ${y1} ${x2 - pull} ${y2} ${x2} ${y2}`;
}

function sample(kind) {
  const path = svg("path", { class: `link ${kind}`, d: "M1 6H29", "marker-end": kind === "same" ? undefined : ARROW });
  return svg("svg", { width: 32, height: 12, "aria-hidden": "true" }, path);
}
