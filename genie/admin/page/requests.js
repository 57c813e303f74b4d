// The list of held locks, and the search for requests by resource, transaction or note.

import { html, setText, updateChildren } from "./dom.js";
import { escapeInvisible, formatDuration, pluralize, requestLabel, splitResource } from "./format.js";
import { nameButton } from "./tables.js";

export class RequestTable {
  /** `select(selection)` shows details; `release(request)` opens the dialog; `onSearch()` is called when the text changes. */
  constructor(table, counter, search, select, release, onSearch) {
    this.counter = counter;
    this.search = search;
    this.select = select;
    this.release = release;
    this.empty = html("caption", { class: "empty" });
    this.heading = table.closest(".card").querySelector("h2");
    const titles = ["Resource", "Transaction", "Note", "For", ""];
    this.head = html("thead", {}, html("tr", {}, ...titles.map((title) => html("th", { scope: "col", class: title === "For" && "number" }, title))));
    this.body = html("tbody");
    table.append(this.empty, this.head, this.body);
    search.addEventListener("input", onSearch);
  }

  get text() {
    return this.search.value.trim();
  }

  /** Show the response of /api/requests, unless the text was changed since the request. */
  show({ text, held, waiting, complete }, now) {
    if (text !== this.text) return;
    const rows = [...held.map((row) => ({ ...row, state: "held" })), ...waiting.map((row) => ({ ...row, state: "queued" }))];
    setText(this.heading, text === "" ? "Held locks" : "Held locks and waiting requests");
    setText(this.empty, text === "" ? "No locks are held." : "No request matches.");
    this.empty.hidden = rows.length > 0;
    this.head.hidden = rows.length === 0;
    updateChildren(
      this.body,
      rows,
      (row) => `${row.id} ${row.state}`,
      (row) => this.makeRow(row),
      (element, row) => setText(element.querySelector("time"), formatDuration(now - row.since)),
    );
    const more = complete ? "" : " or more";
    setText(this.counter, rows.length === 0 ? "" : `${pluralize(rows.length, "request")}${more}${text === "" ? ", the oldest first" : ""}`);
  }

  makeRow(row) {
    const { mode, name } = splitResource(row.resources[0]);
    const units = mode.includes("/") ? html("span", { class: "quiet" }, `${mode} `) : undefined;
    const others = row.resourcesTotal > 1 ? html("span", { class: "quiet" }, ` +${row.resourcesTotal - 1}`) : undefined;
    const waits = row.state === "held" ? undefined : html("span", { class: "quiet" }, " waits");
    const release = html("button", { class: "link release", type: "button", click: () => this.release(row) }, row.state === "held" ? "Force release…" : "End the wait…");
    return html(
      "tr",
      { "data-id": row.id },
      html("td", {}, units, nameButton(name, () => this.select({ resource: name })), others),
      html("td", {}, nameButton(requestLabel(row), () => this.select({ request: row.id, of: name })), waits),
      html("td", { class: "text" }, html("bdi", {}, escapeInvisible(row.note ?? ""))),
      html("td", { class: "number" }, html("time")),
      html("td", {}, release),
    );
  }
}
