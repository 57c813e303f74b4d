// The orders of locks that can deadlock, each with an example for each direction.

import { html, setText, updateChildren } from "./dom.js";
import { briefDuration, escapeInvisible, formatCount } from "./format.js";

const MAX_INVERSIONS = 5;

export class InversionList {
  constructor(container, counter) {
    this.counter = counter;
    this.empty = html("p", { class: "empty" }, "No two transactions that were seen can deadlock.");
    this.items = html("div", { class: "inversions" });
    this.omitted = html("p", { class: "quiet" });
    container.append(this.empty, this.items, this.omitted);
  }

  /** Show the response of /api/order; null if the server has found no inversion. */
  show(order, now) {
    const { inversions, total } = order ?? { inversions: [], total: 0 };
    const shown = inversions.slice(0, MAX_INVERSIONS);
    this.empty.hidden = shown.length > 0;
    const updateAge = (item, inversion) => setText(item.querySelector("time"), `found ${briefDuration(now - inversion.at)} ago`);
    updateChildren(this.items, shown, (inversion) => `${inversion.kind} ${inversion.classes.join(" ")} ${inversion.offender}`, makeInversion, updateAge);
    setText(this.counter, total > 0 ? `${formatCount(total)} since the start` : "");
    this.omitted.hidden = total <= shown.length;
    setText(this.omitted, `and ${formatCount(total - shown.length)} more: genie order`);
  }
}

function makeInversion(inversion) {
  return html(
    "article",
    { class: "inversion" },
    html("p", {}, html("bdi", { class: "description" }, escapeInvisible(inversion.description)), " ", html("time", { class: "quiet" })),
    html("ul", {}, ...inversion.edges.map(makeExample)),
  );
}

function makeExample({ heldMode, askedMode, example }) {
  const { transactionName, held, asked, note } = example;
  const text = `${transactionName} held ${heldMode}:${held} and asked for ${askedMode}:${asked}`;
  return html("li", { class: "quiet" }, html("bdi", {}, escapeInvisible(note === undefined ? text : `${text} (${note})`)));
}
