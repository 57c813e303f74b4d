// What is selected: a request with who is in its way, or a resource with its holders and its line.

import { el, renew } from "./dom.js";
import { called, count, duration, parts } from "./format.js";
import { more, named } from "./tables.js";

const MOST = 20;

export class Details {
  /** `select(what)` selects something else, or nothing (null); `release(request)` asks whether it shall be ended. */
  constructor(card, select, release) {
    this.card = card;
    this.select = select;
    this.release = release;
    this.last = null;
  }

  /**
   * Show `selected`: {request: id} or {resource: name}. `waits` is the latest answer; `resource` that for the resource in
   * question, null before it came, or an Error.
   */
  show(selected, waits, resource, now) {
    this.card.hidden = selected === null;
    if (selected === null) return;
    const found = selected.request === undefined ? this.ofResource(selected.resource, resource) : this.ofRequest(selected.request, waits, resource);
    renew(this.card, found.content, () => [this.closing(), ...found.make()]);
    for (const time of this.card.querySelectorAll("[data-since]")) {
      const text = duration(now - Number(time.dataset.since));
      if (time.textContent !== text) time.textContent = text;
    }
    for (const time of this.card.querySelectorAll("[data-ends]")) time.textContent = duration(Number(time.dataset.ends) - now);
  }

  closing() {
    return el("button", { class: "close", type: "button", "aria-label": "Close the details", click: () => this.select(null) }, "×");
  }

  ofRequest(id, waits, resource) {
    const node = waits.nodes.find((each) => each.id === id);
    const rows = resource === null || resource instanceof Error ? [] : [...resource.holders, ...resource.queue];
    const row = rows.find((each) => each.id === id);
    const held = node === undefined ? resource?.holders?.some((each) => each.id === id) : node.state === "held";
    if (node !== undefined || row !== undefined) {
      this.last = { ...row, ...node, id, state: held ? "held" : "queued", expiresIn: undefined };
      this.ends = row === undefined || resource.asked === undefined ? undefined : resource.asked + row.expiresIn;
    }
    const request = this.last?.id === id ? this.last : null;
    const there = node !== undefined || row !== undefined;
    const blockers = waits.edges.filter((edge) => edge.waiter === id);
    const waiters = waits.edges.filter((edge) => edge.blocker === id);
    const names = Object.fromEntries(waits.nodes.map((each) => [each.id, each.transactionName]));
    const shown = [...blockers, ...waiters].map((edge) => [names[edge.waiter], names[edge.blocker]]);
    return {
      content: ["request", id, there, request, blockers, waiters, shown],
      make: () => this.request(id, request, there, blockers, waiters, names),
    };
  }

  request(id, request, there, blockers, waiters, names) {
    if (request === null) return [el("h2", {}, `Request ${id}`), el("p", { class: "empty" }, "It is not among those that are known here: it may have ended.")];
    const held = request.state === "held";
    const resources = request.resources.map((each) => this.resource(each));
    const facts = [
      ["Id", el("code", {}, `${id}`)],
      ["Transaction", request.transactionName === undefined ? "none" : el("bdi", {}, request.transactionName)],
      [held ? "Held for" : "Waits for", since(request.since)],
      ["Since", el("time", {}, clock(request.since))],
      ...(this.ends === undefined || !there ? [] : [[held ? "Ends in" : "Gives up in", ends(this.ends)]]),
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
      ...(held || !there ? [] : this.inTheWay(request, blockers, names)),
      ...(waiters.length ? this.behind(waiters, names) : []),
      there ? el("button", { class: "danger", type: "button", click: () => this.release(request) }, held ? "Force release…" : "End the wait…") : undefined,
    ].filter((part) => part !== undefined);
  }

  inTheWay(request, blockers, names) {
    const rows = blockers.slice(0, MOST).map((edge) =>
      el(
        "li",
        {},
        this.other(edge.blocker, names),
        el("span", { class: "quiet" }, edge.state === "held" ? ` holds ${edge.mode} ` : ` is ahead for ${edge.mode} `),
        this.bare(edge.resource),
        el("span", { class: "quiet" }, ", ", since(edge.since)),
      ),
    );
    const total = Math.max(request.blockersTotal ?? 0, blockers.length);
    return [el("h3", {}, "In its way"), el("ul", { class: "list in-the-way" }, ...rows), more(rows.length, total)];
  }

  behind(waiters, names) {
    const ids = [...new Set(waiters.map((edge) => edge.waiter))];
    const rows = ids.slice(0, MOST).map((id) => el("li", {}, this.other(id, names)));
    return [el("h3", {}, "Waits for this"), el("ul", { class: "list waits-for-this" }, ...rows), more(rows.length, ids.length)];
  }

  ofResource(name, resource) {
    return {
      content: ["resource", name, resource instanceof Error ? resource.message : resource && [resource.holders, resource.queue, resource.holdersTotal, resource.queueTotal].map(timeless)],
      make: () => this.whole(name, resource),
    };
  }

  whole(name, resource) {
    const head = [el("p", { class: "badge" }, "resource"), el("h2", { title: name }, el("bdi", {}, name))];
    if (resource === null) return [...head, el("p", { class: "empty" }, "…")];
    if (resource instanceof Error) return [...head, el("p", { class: "empty" }, resource.message)];
    const list = (rows, kind) => el("ol", { class: `list ${kind}` }, ...rows.slice(0, MOST).map((row) => this.row(row, name)));
    const holders = resource.holders.length ? list(resource.holders, "holders") : el("p", { class: "empty" }, "Nobody.");
    const queue = resource.queue.length ? list(resource.queue, "queue") : el("p", { class: "empty" }, "Nobody.");
    return [
      ...head,
      el("h3", {}, `Held by ${count(resource.holdersTotal)}`),
      holders,
      more(Math.min(MOST, resource.holders.length), resource.holdersTotal),
      el("h3", {}, `Line of ${count(resource.queueTotal)}`),
      queue,
      more(Math.min(MOST, resource.queue.length), resource.queueTotal),
    ].filter((part) => part !== undefined);
  }

  row(row, name) {
    const mode = row.resources.map(parts).find((each) => each.name === name)?.mode;
    const request = named(called(row), () => this.select({ request: row.id, resource: undefined, of: name }));
    return el("li", {}, request, el("span", { class: "quiet" }, mode === undefined ? " " : ` ${mode}, `, since(row.since)));
  }

  other(id, names) {
    return named(names[id] ?? `#${id}`, () => this.select({ request: id }));
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

const ends = (at) => el("time", { "data-ends": at });

const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

/** Rows without what changes although nothing happens. */
const timeless = (rows) => (Array.isArray(rows) ? rows.map((row) => ({ ...row, expiresIn: undefined, blockers: undefined })) : rows);
