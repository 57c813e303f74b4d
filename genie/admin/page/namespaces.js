// The selection of a namespace, if the server has several. It is part of the URL, so that it can be bookmarked and shared.

import { html, replaceIfChanged } from "./dom.js";

export class NamespaceSelect {
  constructor(select) {
    this.select = select;
    this.shown = "";
    select.addEventListener("change", () => this.open(select.value));
  }

  open(namespace) {
    this.select.value = this.shown; // the browser restores this value if the user comes back to this page
    location.assign(`?${new URLSearchParams({ namespace })}`);
  }

  /** `namespaces` are those of /api/state, `shown` is the name of the one that the page shows. */
  show(namespaces, shown) {
    this.shown = shown;
    this.select.hidden = namespaces.length < 2;
    replaceIfChanged(this.select, [namespaces, shown], () => namespaces.map((each) => option(each, shown)));
  }
}

function option({ namespace, role }, shown) {
  const suffix = role === "leader" ? "" : ` (${role})`;
  return html("option", { value: namespace, selected: namespace === shown }, `${namespace}${suffix}`);
}
