// The dialog that releases a lock or cancels a waiting request, after a confirmation.

import { api, RequestRejected } from "./api.js";
import { html, setText } from "./dom.js";
import { abbreviate, escapeInvisible, pluralize, requestLabel } from "./format.js";

const MAX_RESOURCES = 10;

export class ReleaseDialog {
  /** `onReleased()` is called when a request was released. */
  constructor(dialog, onReleased) {
    this.dialog = dialog;
    this.onReleased = onReleased;
  }

  /** Ask for confirmation to release `request`. */
  open(request) {
    const held = request.state === "held";
    const cancel = html("button", { type: "button", click: () => this.dialog.close() }, "Keep it");
    const confirm = html("button", { type: "button", class: "danger confirm" }, held ? "Release it" : "Cancel the request");
    const result = html("p", { class: "result", role: "status" });
    confirm.addEventListener("click", () => this.release(request, confirm, cancel, result));
    const resources = request.resources
      .slice(0, MAX_RESOURCES)
      .map((each) => html("li", {}, html("bdi", { class: "name", title: escapeInvisible(each) }, escapeInvisible(each))));
    const omitted = request.resourcesTotal - resources.length;
    const transaction = request.transactionName === undefined ? "none" : abbreviate(request.transactionName, 80);
    this.dialog.replaceChildren(
      html("h2", { id: "release-title" }, held ? "Release this lock by force?" : "Cancel this request?"),
      html(
        "dl",
        {},
        html("dt", {}, "Id"),
        html("dd", {}, html("code", {}, `${request.id}`)),
        html("dt", {}, "Transaction"),
        html("dd", {}, html("bdi", { title: requestLabel(request) }, transaction)),
      ),
      html("h3", {}, held ? "It holds" : "It waits for"),
      html("ul", { class: "list" }, ...resources, ...(omitted > 0 ? [html("li", { class: "quiet" }, `and ${pluralize(omitted, "more", "more")}`)] : [])),
      html("p", {}, held ? HOLDER_WARNING : WAITER_NOTE),
      result,
      html("div", { class: "buttons" }, cancel, confirm),
    );
    this.dialog.showModal();
    cancel.focus();
  }

  async release(request, confirm, cancel, result) {
    confirm.disabled = true;
    result.textContent = "…";
    result.className = "result";
    try {
      const { reason } = await api.release(request.id);
      confirm.remove();
      cancel.textContent = "Close";
      cancel.focus();
      result.className = "result good";
      setText(result, reason === "success" ? "Released." : `It had already ended: ${reason}.`);
      this.onReleased();
    } catch (error) {
      confirm.disabled = false;
      result.className = "result bad";
      setText(result, describeFailure(error));
    }
  }
}

const HOLDER_WARNING =
  "The holder is only notified that the lock was released. If it continues, it works without the lock. " +
  "Only fencing tokens reject its late writes.";
const WAITER_NOTE = "The client is only notified that the request was released, as if it had cancelled it.";

function describeFailure(error) {
  if (!(error instanceof RequestRejected)) return `The outcome is unknown: ${error.message}. The request may have been released.`;
  const prefix = error.status === 403 ? "Permission denied: " : error.status === 401 ? "Token rejected: " : "";
  return `${prefix}${error.message}`;
}
