// The details of what is selected: a request with its blockers and waiters, or a resource with its holders and its queue.

import { html, replaceIfChanged } from "./dom.js";
import { escapeInvisible, formatCount, formatDuration, modeText, overlap, pluralize, requestLabel, splitResource } from "./format.js";
import { drawHistory } from "./history.js";
import { nameButton, omittedNote } from "./tables.js";

const MAX_ROWS = 20;

export class Details {
  /**
   * `select(selection)` selects something else, or nothing (null); `release(request)` opens the dialog to release it;
   * `loadHistory(name)` returns the history of a resource.
   */
  constructor(card, select, release, loadHistory) {
    this.card = card;
    this.select = select;
    this.release = release;
    this.loadHistory = loadHistory;
    this.history = null; // {resource, response}: what was loaded last, the response of /api/history or an Error
    this.lastRequest = null; // shown after the request has ended
    this.timeoutAt = undefined; // unix ms
  }

  /**
   * Show `selection`: {request: id} or {resource: name}. `waits` is the latest wait-for graph, `resource` the response
   * about the resource of the selection: null before it has arrived, or an Error. `hasHistory`: whether the server records a history.
   */
  show(selection, waits, resource, now, hasHistory) {
    this.hasHistory = hasHistory;
    this.card.hidden = selection === null;
    if (selection === null) return;
    const view = selection.request === undefined ? this.resourceView(selection.resource, resource) : this.requestView(selection.request, waits, resource, now);
    replaceIfChanged(this.card, view.content, () => [this.closeButton(), ...view.make()]);
    for (const time of this.card.querySelectorAll("[data-since]")) {
      const text = formatDuration(now - Number(time.dataset.since));
      if (time.textContent !== text) time.textContent = text;
    }
    const remaining = this.card.querySelector(".ends");
    if (remaining !== null && this.timeoutAt !== undefined) remaining.textContent = formatDuration(this.timeoutAt - now);
  }

  closeButton() {
    return html("button", { class: "close", type: "button", "aria-label": "Close the details", click: () => this.select(null) }, "×");
  }

  /** Combine what the graph and the response about its resource contain of a request. */
  requestView(id, waits, resource, now) {
    const node = waits.nodes.find((each) => each.id === id);
    const response = resource instanceof Error ? null : resource;
    const holder = response?.holders.find((each) => each.id === id);
    const row = holder ?? response?.queue.find((each) => each.id === id);
    const exists = node !== undefined || row !== undefined;
    if (exists) this.lastRequest = { ...row, ...node, id, state: node?.state ?? (holder ? "held" : "queued") };
    this.timeoutAt = row?.expiresIn === undefined ? undefined : now + row.expiresIn;
    const request = this.lastRequest?.id === id ? this.lastRequest : null;
    const transactionById = new Map(waits.nodes.map((each) => [each.id, each.transactionName]));
    const edges = waits.edges.filter((edge) => edge.waiter === id);
    const blockers = edges.length
      ? edges.map((edge) => ({ ...edge, id: edge.blocker, transactionName: transactionById.get(edge.blocker) }))
      : (row?.blockers ?? []);
    const waiterIds = new Set(waits.edges.filter((edge) => edge.blocker === id).map((edge) => edge.waiter));
    const waiters = [...waiterIds].map((each) => ({ id: each, transactionName: transactionById.get(each) }));
    const { expiresIn, ...stable } = request ?? {};
    return {
      content: ["request", id, exists, { ...stable, blockers: [] }, blockers, waiters, this.timeoutAt === undefined],
      make: () => this.makeRequest(id, request, exists, blockers, waiters),
    };
  }

  makeRequest(id, request, exists, blockers, waiters) {
    if (request === null) {
      return [html("h2", {}, `Request ${id}`), html("p", { class: "empty" }, "No longer in the graph: it may have ended.")];
    }
    const held = request.state === "held";
    const resources = request.resources.map((each) => this.resourceItem(each));
    const facts = [
      ["Id", html("code", {}, `${id}`)],
      ["Transaction", request.transactionName === undefined ? "none" : html("bdi", {}, requestLabel(request))],
      ...(request.note === undefined ? [] : [["Note", html("bdi", {}, escapeInvisible(request.note))]]),
      ...(request.traceparent === undefined ? [] : [["Trace", html("code", {}, request.traceparent.split("-")[1])]]),
      [held ? "Held for" : "Waits for", elapsedTime(request.since)],
      ["Since", html("time", {}, timeOfDay(request.since))],
      ...(this.timeoutAt === undefined || !exists ? [] : [[held ? "Ends in" : "Times out in", html("time", { class: "ends" })]]),
      ...(request.fence === undefined ? [] : [["Fence", html("code", {}, `${request.fence}`)]]),
      ...(request.priority ? [["Priority", `${request.priority}`]] : []),
    ];
    const releaseLabel = held ? "Force release…" : "End the wait…";
    return [
      html("p", { class: `badge ${exists ? request.state : "over"}` }, exists ? (held ? "holds" : "waits") : "has ended"),
      html("h2", { title: requestLabel(request) }, html("bdi", {}, requestLabel(request))),
      exists ? html("button", { class: "danger", type: "button", click: () => this.release(request) }, releaseLabel) : undefined,
      html("dl", {}, ...facts.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)])),
      html("h3", {}, held ? "Holds" : "Requests"),
      html("ul", { class: "list" }, ...resources),
      omittedNote(request.resources.length, request.resourcesTotal),
      ...(held || !exists ? [] : this.makeBlockers(request, blockers)),
      ...(waiters.length ? this.makeWaiters(waiters) : []),
    ].filter((part) => part !== undefined);
  }

  makeBlockers(request, blockers) {
    const rows = blockers.slice(0, MAX_ROWS).map((blocker) => {
      const verb = blocker.state === "held" ? "holds" : "is ahead in the queue for";
      const relation = html("span", { class: "quiet" }, ` ${verb} ${modeText(blocker)} `);
      const age = html("span", { class: "quiet" }, ", ", elapsedTime(blocker.since));
      return html("li", {}, this.requestButton(blocker), relation, this.resourceButton(blocker.resource), age);
    });
    const total = Math.max(request.blockersTotal ?? 0, blockers.length);
    return [html("h3", {}, "Blocked by"), html("ul", { class: "list blockers" }, ...rows), omittedNote(rows.length, total)];
  }

  makeWaiters(waiters) {
    const rows = waiters.slice(0, MAX_ROWS).map((each) => html("li", {}, this.requestButton(each)));
    return [html("h3", {}, "Blocks"), html("ul", { class: "list waiters" }, ...rows), omittedNote(rows.length, waiters.length)];
  }

  resourceView(name, resource) {
    const stable =
      resource && [resource.holders, resource.queue, resource.holdersTotal, resource.queueTotal, resource.unitsInUse, resource.unitsLimit, resource.heldBelow, resource.complete].map(withoutVolatileFields);
    return {
      content: ["resource", name, resource instanceof Error ? resource.message : stable, this.history?.resource, this.history?.at, this.hasHistory],
      make: () => this.makeResource(name, resource),
    };
  }

  makeResource(name, resource) {
    const heading = html("h2", { title: escapeInvisible(name) }, html("bdi", {}, escapeInvisible(name)));
    const head = [html("p", { class: "badge" }, "resource"), heading];
    if (resource === null) return [...head, html("p", { class: "empty" }, "…")];
    if (resource instanceof Error) return [...head, html("p", { class: "empty" }, resource.message)];
    const list = (rows, kind) =>
      rows.length
        ? html("ol", { class: `list ${kind}` }, ...rows.slice(0, MAX_ROWS).map((row) => this.requestItem(row, name)))
        : html("p", { class: "empty" }, "None.");
    const more = resource.complete ? "" : " or more";
    return [
      ...head,
      ...makeUnits(resource),
      html("h3", {}, `Held by ${formatCount(resource.holdersTotal)}${more}`),
      list(resource.holders, "holders"),
      omittedNote(Math.min(MAX_ROWS, resource.holders.length), resource.holdersTotal),
      html("h3", {}, `Queue of ${formatCount(resource.queueTotal)}${more}`),
      list(resource.queue, "queue"),
      omittedNote(Math.min(MAX_ROWS, resource.queue.length), resource.queueTotal),
      ...(this.hasHistory ? [html("h3", {}, "History"), ...this.makeHistory(name)] : []),
    ].filter((part) => part !== undefined);
  }

  /** A button that loads the history: a search is too expensive to repeat it every second. */
  makeHistory(name) {
    const load = async () => {
      const response = await this.loadHistory(name).catch((error) => error);
      this.history = { resource: name, response, at: Date.now() };
    };
    const button = html("button", { class: "history", type: "button", click: load }, "Who held it before?");
    if (this.history?.resource !== name) return [button];
    return [this.history.response instanceof Error ? html("p", { class: "empty" }, this.history.response.message) : drawHistory(this.history.response, this.history.at), button];
  }

  requestItem(row, name) {
    const locks = row.resources.map(splitResource);
    const lock = locks.find((each) => each.name === name) ?? locks.find((each) => overlap(each.name, name));
    const button = nameButton(requestLabel(row), () => this.select({ request: row.id, of: name }));
    const mode = html("span", { class: "quiet" }, lock === undefined ? " " : ` ${lock.mode}`);
    const other = lock === undefined || lock.name === name ? undefined : this.resourceButton(lock.name);
    const age = html("span", { class: "quiet" }, lock === undefined ? "" : ", ", elapsedTime(row.since));
    return html("li", { "data-id": row.id }, button, mode, other && " ", other, age);
  }

  requestButton(request) {
    return nameButton(requestLabel(request), () => this.select({ request: request.id }));
  }

  resourceItem(text) {
    const { mode, name } = splitResource(text);
    return html("li", {}, html("span", { class: `mode ${mode}` }, mode), " ", this.resourceButton(name));
  }

  resourceButton(name) {
    return nameButton(name, () => this.select({ resource: name }));
  }
}

/** Return the units in use of a counted resource as a bar, or the number of locks below a subtree. */
function makeUnits({ unitsInUse, unitsLimit, heldBelow }) {
  if (heldBelow !== undefined) return [html("p", { class: "quiet" }, `All names below it; ${pluralize(heldBelow, "lock is", "locks are")} held there.`)];
  if (unitsInUse === undefined) return [];
  const label = `${formatCount(unitsInUse)} of ${formatCount(unitsLimit)} units in use`;
  return [html("meter", { class: "units", min: 0, max: unitsLimit, value: unitsInUse, "aria-label": label }), html("p", { class: "quiet" }, label)];
}

/** An element that `show` updates with the time since `at`. */
const elapsedTime = (at) => html("time", { "data-since": at });

const timeOfDay = (at) => new Date(at).toLocaleTimeString("en-GB");

/** Remove the fields of rows that change with time alone, so that the lists are not replaced every second. */
const withoutVolatileFields = (rows) => (Array.isArray(rows) ? rows.map((row) => ({ ...row, expiresIn: undefined, blockers: undefined })) : rows);
