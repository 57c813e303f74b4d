// What is selected: a request with who is in its way, or a resource with its holders and its line.

import { el, renew } from "./dom.js";
import { called, count, duration, parts, visible } from "./format.js";
import { more, named } from "./tables.js";

const MOST = 20;

export class Details {
  /** `select(what)` selects something else, or nothing (null); `release(request)` asks whether it shall be ended. */
  constructor(card, select, release) {
    this.card = card;
    this.select = select;
    this.release = release;
    this.last = null; // the request that was shown last: what it was is shown also when it has ended
    this.ends = undefined; // unix ms
  }

  /**
   * Show `selected`: {request: id} or {resource: name}. `waits` is the latest answer; `resource` that for the resource in
   * question, null before it came, or an Error.
   */
  show(selected, waits, resource, now) {
    this.card.hidden = selected === null;
    if (selected === null) return;
    const found = selected.request === undefined ? this.ofResource(selected.resource, resource) : this.ofRequest(selected.request, waits, resource, now);
    renew(this.card, found.content, () => [this.closing(), ...found.make()]);
    for (const time of this.card.querySelectorAll("[data-since]")) {
      const text = duration(now - Number(time.dataset.since));
      if (time.textContent !== text) time.textContent = text;
    }
    const ends = this.card.querySelector(".ends");
    if (ends !== null && this.ends !== undefined) ends.textContent = duration(this.ends - now);
  }

  closing() {
    return el("button", { class: "close", type: "button", "aria-label": "Close the details", click: () => this.select(null) }, "×");
  }

  ofRequest(id, waits, resource, now) {
    const node = waits.nodes.find((each) => each.id === id);
    const known = resource instanceof Error ? null : resource;
    const holder = known?.holders.find((each) => each.id === id);
    const row = holder ?? known?.queue.find((each) => each.id === id);
    const there = node !== undefined || row !== undefined;
    if (there) this.last = { ...row, ...node, id, state: node?.state ?? (holder ? "held" : "queued") };
    this.ends = row?.expiresIn === undefined ? undefined : now + row.expiresIn;
    const request = this.last?.id === id ? this.last : null;
    const names = new Map(waits.nodes.map((each) => [each.id, each.transactionName]));
    const edges = waits.edges.filter((edge) => edge.waiter === id);
    const blockers = edges.length
      ? edges.map((edge) => ({ ...edge, id: edge.blocker, transactionName: names.get(edge.blocker) }))
      : (row?.blockers ?? []);
    const behind = new Set(waits.edges.filter((edge) => edge.blocker === id).map((edge) => edge.waiter));
    const waiters = [...behind].map((each) => ({ id: each, transactionName: names.get(each) }));
    const { expiresIn, ...lasting } = request ?? {};
    return {
      content: ["request", id, there, { ...lasting, blockers: [] }, blockers, waiters, this.ends === undefined],
      make: () => this.request(id, request, there, blockers, waiters),
    };
  }

  request(id, request, there, blockers, waiters) {
    if (request === null) return [el("h2", {}, `Request ${id}`), el("p", { class: "empty" }, "No longer in the graph: it may have ended.")];
    const held = request.state === "held";
    const resources = request.resources.map((each) => this.resource(each));
    const facts = [
      ["Id", el("code", {}, `${id}`)],
      ["Transaction", request.transactionName === undefined ? "none" : el("bdi", {}, called(request))],
      ...(request.note === undefined ? [] : [["Note", el("bdi", {}, visible(request.note))]]),
      [held ? "Held for" : "Waits for", since(request.since)],
      ["Since", el("time", {}, clock(request.since))],
      ...(this.ends === undefined || !there ? [] : [[held ? "Ends in" : "Gives up in", el("time", { class: "ends" })]]),
      ...(request.fence === undefined ? [] : [["Fence", el("code", {}, `${request.fence}`)]]),
      ...(request.priority ? [["Priority", `${request.priority}`]] : []),
    ];
    return [
      el("p", { class: `badge ${there ? request.state : "over"}` }, there ? (held ? "holds" : "waits") : "has ended"),
      el("h2", { title: called(request) }, el("bdi", {}, called(request))),
      el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("h3", {}, held ? "Holds" : "Asks for"),
      el("ul", { class: "list" }, ...resources),
      more(request.resources.length, request.resourcesTotal),
      ...(held || !there ? [] : this.inTheWay(request, blockers)),
      ...(waiters.length ? this.behind(waiters) : []),
      there ? el("button", { class: "danger", type: "button", click: () => this.release(request) }, held ? "Force release…" : "End the wait…") : undefined,
    ].filter((part) => part !== undefined);
  }

  inTheWay(request, blockers) {
    const rows = blockers.slice(0, MOST).map((blocker) => {
      const verb = blocker.state === "held" ? "holds" : "is ahead in the queue for";
      const what = el("span", { class: "quiet" }, ` ${verb} ${blocker.mode} `);
      return el("li", {}, this.other(blocker), what, this.bare(blocker.resource), el("span", { class: "quiet" }, ", ", since(blocker.since)));
    });
    const total = Math.max(request.blockersTotal ?? 0, blockers.length);
    return [el("h3", {}, "Blocked by"), el("ul", { class: "list in-the-way" }, ...rows), more(rows.length, total)];
  }

  behind(waiters) {
    const rows = waiters.slice(0, MOST).map((each) => el("li", {}, this.other(each)));
    return [el("h3", {}, "Blocks"), el("ul", { class: "list waits-for-this" }, ...rows), more(rows.length, waiters.length)];
  }

  ofResource(name, resource) {
    return {
      content: ["resource", name, resource instanceof Error ? resource.message : resource && [resource.holders, resource.queue, resource.holdersTotal, resource.queueTotal].map(timeless)],
      make: () => this.whole(name, resource),
    };
  }

  whole(name, resource) {
    const head = [el("p", { class: "badge" }, "resource"), el("h2", { title: visible(name) }, el("bdi", {}, visible(name)))];
    if (resource === null) return [...head, el("p", { class: "empty" }, "…")];
    if (resource instanceof Error) return [...head, el("p", { class: "empty" }, resource.message)];
    const list = (rows, kind) => el("ol", { class: `list ${kind}` }, ...rows.slice(0, MOST).map((row) => this.row(row, name)));
    const holders = resource.holders.length ? list(resource.holders, "holders") : el("p", { class: "empty" }, "None.");
    const queue = resource.queue.length ? list(resource.queue, "queue") : el("p", { class: "empty" }, "None.");
    return [
      ...head,
      el("h3", {}, `Held by ${count(resource.holdersTotal)}`),
      holders,
      more(Math.min(MOST, resource.holders.length), resource.holdersTotal),
      el("h3", {}, `Queue of ${count(resource.queueTotal)}`),
      queue,
      more(Math.min(MOST, resource.queue.length), resource.queueTotal),
    ].filter((part) => part !== undefined);
  }

  row(row, name) {
    const mode = row.resources.map(parts).find((each) => each.name === name)?.mode;
    const request = named(called(row), () => this.select({ request: row.id, of: name }));
    return el("li", { "data-id": row.id }, request, el("span", { class: "quiet" }, mode === undefined ? " " : ` ${mode}, `, since(row.since)));
  }

  other(request) {
    return named(called(request), () => this.select({ request: request.id }));
  }

  resource(text) {
    const { mode, name } = parts(text);
    return el("li", {}, el("span", { class: `mode ${mode}` }, mode), " ", this.bare(name));
  }

  bare(name) {
    return named(name, () => this.select({ resource: name }));
  }
}

const since = (at) => el("time", { "data-since": at });

const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

/** Rows without what changes although nothing happens. */
const timeless = (rows) => (Array.isArray(rows) ? rows.map((row) => ({ ...row, expiresIn: undefined, blockers: undefined })) : rows);
