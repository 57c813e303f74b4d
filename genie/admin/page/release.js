// The one thing that the page can do: end a request. It asks first, and tells what came of it.

import { api, Refused } from "./api.js";
import { el } from "./dom.js";
import { called, cut, some, visible } from "./format.js";

const MOST = 10;

export class Release {
  /** `done()` is called when a request was ended. */
  constructor(dialog, done) {
    this.dialog = dialog;
    this.done = done;
  }

  /** Ask whether `request` shall end. Nothing happens unless that is confirmed. */
  ask(request) {
    const held = request.state === "held";
    const cancel = el("button", { type: "button", click: () => this.dialog.close() }, "Keep it");
    const confirm = el("button", { type: "button", class: "danger confirm" }, held ? "Release it" : "Cancel the request");
    const result = el("p", { class: "result", role: "status" });
    confirm.addEventListener("click", () => this.carryOut(request, confirm, cancel, result));
    const resources = request.resources.slice(0, MOST).map((each) => el("li", {}, el("bdi", { class: "name", title: visible(each) }, visible(each))));
    const left = request.resourcesTotal - resources.length;
    this.dialog.replaceChildren(
      el("h2", { id: "release-title" }, held ? "Release this lock by force?" : "Cancel this request?"),
      el("dl", {}, el("dt", {}, "Id"), el("dd", {}, el("code", {}, `${request.id}`)), el("dt", {}, "Transaction"), el("dd", {}, el("bdi", { title: called(request) }, request.transactionName === undefined ? "none" : cut(request.transactionName, 80)))),
      el("h3", {}, held ? "It holds" : "It waits for"),
      el("ul", { class: "list" }, ...resources, ...(left > 0 ? [el("li", { class: "quiet" }, `and ${some(left, "more", "more")}`)] : [])),
      el("p", {}, held ? WARNING : NOTE),
      result,
      el("div", { class: "buttons" }, cancel, confirm),
    );
    this.dialog.showModal();
    cancel.focus();
  }

  async carryOut(request, confirm, cancel, result) {
    confirm.disabled = true;
    result.textContent = "…";
    result.className = "result";
    try {
      const { reason } = await api.release(request.id);
      confirm.remove();
      cancel.textContent = "Close";
      cancel.focus();
      result.className = "result good";
      result.textContent = reason === "success" ? "Released." : `It had already ended: ${reason}.`;
      this.done();
    } catch (error) {
      confirm.disabled = false;
      result.className = "result bad";
      result.textContent = told(error);
    }
  }
}

const WARNING =
  "The holder is only notified that the lock was released. If it continues, it works without the lock. " +
  "Only fencing tokens reject its late writes.";
const NOTE = "The client is only notified that the request was released, as if it had cancelled it.";

function told(error) {
  if (!(error instanceof Refused)) return `The outcome is unknown: ${error.message}. The request may have been released.`;
  const right = error.status === 403 ? "Permission denied: " : error.status === 401 ? "Token rejected: " : "";
  return `${right}${error.message}`;
}
