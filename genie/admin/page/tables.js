// The tables of the longest queues and of hot resources, and the bars of outcomes.

import { html, replaceIfChanged, setText, updateChildren } from "./dom.js";
import { abbreviate, briefDuration, escapeInvisible, formatCount, formatDuration, pluralize, requestLabel } from "./format.js";

const MAX_ROWS = 20;
const MAX_HOLDER_LENGTH = 30;

/** A button with a name; CSS truncates it to the available width, the tooltip contains all of it. */
export function nameButton(name, onClick) {
  return html("button", { class: "link name", type: "button", title: escapeInvisible(name), click: onClick }, html("bdi", {}, escapeInvisible(name)));
}

class Table {
  /** `columns`: {title, text(row, now), number}. The first column is the resource; a click calls `select({resource})`. */
  constructor(table, columns, emptyText, select) {
    this.columns = columns;
    this.select = select;
    this.empty = html("caption", { class: "empty" }, emptyText);
    const headers = columns.map(({ title, number }) => html("th", { scope: "col", class: number && "number" }, title));
    this.head = html("thead", {}, html("tr", {}, ...headers));
    this.body = html("tbody");
    table.append(this.empty, this.head, this.body);
  }

  showRows(rows, now) {
    this.empty.hidden = rows.length > 0;
    this.head.hidden = rows.length === 0;
    updateChildren(
      this.body,
      rows.slice(0, MAX_ROWS),
      (row) => row.resource,
      (row) => this.makeRow(row),
      (element, row) => {
        for (const [index, column] of this.columns.entries()) if (index > 0) setText(element.children[index], column.text(row, now));
      },
    );
  }

  makeRow({ resource }) {
    const [, ...otherColumns] = this.columns;
    const name = html("td", {}, nameButton(resource, () => this.select({ resource })));
    const cells = otherColumns.map(({ number, title }) => html("td", { class: number ? "number" : "text", "data-title": title }));
    return html("tr", { "data-resource": resource }, name, ...cells);
  }
}

export class QueueTable extends Table {
  constructor(table, counter, select) {
    const columns = [
      { title: "Resource" },
      { title: "Waiting", text: (queue) => formatCount(queue.waiting), number: true },
      { title: "Longest", text: (queue, now) => formatDuration(now - queue.since), number: true },
      { title: "Holders", text: (queue) => formatCount(queue.holders), number: true },
      { title: "Held by", text: formatHolders },
    ];
    super(table, columns, "No requests wait.", select);
    this.counter = counter;
  }

  show(state) {
    this.showRows(state.queues, state.now);
    const limit = state.queues.length >= MAX_ROWS ? `the ${MAX_ROWS} longest` : "";
    setText(this.counter, state.queuesComplete ? limit : "among the oldest waiters only");
  }
}

/** Return the first holder of a queue, and the number of the others. */
function formatHolders(queue) {
  if (queue.holder === null) return "–";
  const others = queue.holders > 1 ? ` +${formatCount(queue.holders - 1)}` : "";
  return abbreviate(requestLabel({ ...queue, id: queue.holder }), MAX_HOLDER_LENGTH) + others;
}

export class HotTable extends Table {
  constructor(table, counter, select) {
    const columns = [
      { title: "Resource" },
      { title: "Waited", text: (hot) => briefDuration(hot.waited), number: true },
      { title: "Conflicts", text: (hot) => formatCount(hot.conflicts), number: true },
      { title: "Now", text: (hot) => formatCount(hot.waiting), number: true },
    ];
    super(table, columns, "No contention in the last minutes.", select);
    this.counter = counter;
  }

  show({ resources }, now) {
    this.showRows(resources, now);
    setText(this.counter, resources.length ? "last 5 to 10 minutes" : "");
  }
}

const OUTCOME_LABELS = {
  granted: "granted immediately",
  waited: "granted after a wait",
  cancelled: "cancelled while waiting",
};

/** Show requests by outcome and rejected commands by error code, as bars. */
export function showOutcomes(container, state) {
  const rows = [
    ...Object.entries(state.outcomes).map(([key, number]) => [OUTCOME_LABELS[key] ?? key, number, "outcome"]),
    ...Object.entries(state.errors).map(([key, number]) => [`error: ${key}`, number, "error"]),
    ["queues rearranged", state.rearrangements, "outcome"],
    ["store errors", state.storeErrors, "error"],
  ].filter(([, number]) => number > 0);
  replaceIfChanged(container, rows, () => {
    if (rows.length === 0) return [html("p", { class: "empty" }, "None yet.")];
    const maximum = Math.max(...rows.map(([, number]) => number));
    const items = rows.map(([label, number, kind]) => {
      const bar = html("span", { class: `bar ${kind}` });
      bar.style.width = `${Math.max(1, (100 * number) / maximum)}%`;
      return html("li", {}, html("span", { class: "label" }, label), html("span", { class: "number" }, formatCount(number)), bar);
    });
    return [html("ul", { class: "bars" }, ...items)];
  });
}

/** Return a paragraph with the number of rows that are not shown; undefined if all are. */
export const omittedNote = (shown, total) =>
  total > shown ? html("p", { class: "quiet" }, `and ${pluralize(total - shown, "more", "more")}`) : undefined;
