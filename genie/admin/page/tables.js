// Tables of resources, and what became of requests.

import { el, keyed, renew, say } from "./dom.js";
import { briefly, called, count, cut, duration, some, visible } from "./format.js";

const MOST = 20;
const HOLDER = 30; // letters of a holder's name

/** A name that is shown as far as there is room, whole where one points at it. */
export function named(name, press) {
  return el("button", { class: "link name", type: "button", title: visible(name), click: press }, el("bdi", {}, visible(name)));
}

class Table {
  /** `columns`: {title, text(row, now), number}; the first one is the resource, and selects it. */
  constructor(table, columns, empty, select) {
    this.columns = columns;
    this.select = select;
    this.empty = el("caption", { class: "empty" }, empty);
    this.head = el("thead", {}, el("tr", {}, ...columns.map(({ title, number }) => el("th", { scope: "col", class: number && "number" }, title))));
    this.body = el("tbody");
    table.append(this.empty, this.head, this.body);
  }

  rows(rows, now) {
    this.empty.hidden = rows.length > 0;
    this.head.hidden = rows.length === 0;
    keyed(this.body, rows.slice(0, MOST), (row) => row.resource, (row) => this.make(row), (line, row) => {
      for (const [place, column] of this.columns.entries()) if (place > 0) say(line.children[place], column.text(row, now));
    });
  }

  make({ resource }) {
    const [, ...others] = this.columns;
    const name = el("td", {}, named(resource, () => this.select({ resource })));
    return el("tr", { "data-resource": resource }, name, ...others.map(({ number, title }) => el("td", { class: number ? "number" : "text", "data-title": title })));
  }
}

export class Lines extends Table {
  constructor(table, counter, select) {
    const columns = [
      { title: "Resource" },
      { title: "Waiting", text: (line) => count(line.waiting), number: true },
      { title: "Longest", text: (line, now) => duration(now - line.since), number: true },
      { title: "Holders", text: (line) => count(line.holders), number: true },
      { title: "Held by", text: heldBy },
    ];
    super(table, columns, "No requests wait.", select);
    this.counter = counter;
  }

  show(state) {
    this.rows(state.queues, state.now);
    const most = state.queues.length >= MOST ? `the ${MOST} longest` : "";
    say(this.counter, state.queuesComplete ? most : "among the oldest waiters only");
  }
}

/** The first holder of a line, and how many more there are. */
function heldBy(line) {
  if (line.holder === null) return "–";
  const others = line.holders > 1 ? ` +${count(line.holders - 1)}` : "";
  return cut(called({ ...line, id: line.holder }), HOLDER) + others;
}

export class Hot extends Table {
  constructor(table, counter, select) {
    const columns = [
      { title: "Resource" },
      { title: "Waited", text: (hot) => briefly(hot.waited), number: true },
      { title: "Conflicts", text: (hot) => count(hot.conflicts), number: true },
      { title: "Now", text: (hot) => count(hot.waiting), number: true },
    ];
    super(table, columns, "No contention in the last minutes.", select);
    this.counter = counter;
  }

  show({ resources }, now) {
    this.rows(resources, now);
    say(this.counter, resources.length ? "last 5 to 10 minutes" : "");
  }
}

const OUTCOMES = {
  granted: "granted immediately",
  waited: "granted after a wait",
  cancelled: "cancelled while waiting",
};

/** What became of requests, and which commands were refused. */
export function outcomes(container, state) {
  const rows = [
    ...Object.entries(state.outcomes).map(([key, number]) => [OUTCOMES[key] ?? key, number, "outcome"]),
    ...Object.entries(state.errors).map(([key, number]) => [`error: ${key}`, number, "error"]),
    ["queues rearranged", state.rearrangements, "outcome"],
    ["store errors", state.storeErrors, "error"],
  ].filter(([, number]) => number > 0);
  renew(container, rows, () => {
    if (rows.length === 0) return [el("p", { class: "empty" }, "None yet.")];
    const most = Math.max(...rows.map(([, number]) => number));
    const lines = rows.map(([name, number, kind]) => {
      const bar = el("span", { class: `bar ${kind}` });
      bar.style.width = `${Math.max(1, (100 * number) / most)}%`;
      return el("li", {}, el("span", { class: "what" }, name), el("span", { class: "number" }, count(number)), bar);
    });
    return [el("ul", { class: "bars" }, ...lines)];
  });
}

export const more = (shown, total) => (total > shown ? el("p", { class: "quiet" }, `and ${some(total - shown, "more", "more")}`) : undefined);
