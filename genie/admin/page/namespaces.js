// Which namespace is shown, where the server has several: it stands in the address, so that it can be kept and sent.

import { el, renew } from "./dom.js";

export class Namespaces {
  constructor(select) {
    this.select = select;
    this.shown = "";
    select.addEventListener("change", () => this.open(select.value));
  }

  open(namespace) {
    this.select.value = this.shown; // whoever comes back to this page finds what it shows
    location.assign(`?${new URLSearchParams({ namespace })}`);
  }

  /** `all` are those of the state, `shown` is the name of one. */
  show(all, shown) {
    this.shown = shown;
    this.select.hidden = all.length < 2;
    renew(this.select, [all, shown], () => all.map((each) => this.option(each, shown)));
  }

  option({ namespace, role }, shown) {
    const more = role === "leader" ? "" : ` (${role})`;
    return el("option", { value: namespace, selected: namespace === shown }, `${namespace}${more}`);
  }
}
