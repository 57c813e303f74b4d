// Create and update elements. Clients choose names of resources: they become text nodes and attributes, never markup, and
// what a person reads of them is escaped.

import { escapeInvisible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

const READ = new Set(["title", "aria-label"]); // attributes that a person reads; the others keep their exact values

/** The arrow head for `marker-end`, defined in index.html. */
export const ARROW = "url(#arrow)";

/** Create an HTML element. Attributes that are functions become listeners; undefined and false ones are omitted. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element, like `html`. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : READ.has(name) ? escapeInvisible(`${value}`) : value);
  }
  element.append(...children.filter((child) => child !== undefined).map((child) => (child instanceof Node ? child : escapeInvisible(`${child}`))));
  return element;
}

/** Set the text of an element, escaped, unless it is equal already: so a selection of the user is kept. */
export function setText(element, text) {
  const shown = escapeInvisible(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/**
 * Make `parent` have one child for each item, in order. A child is created by `make(item)`, updated by
 * `update(child, item)`, and reused while its key exists: so it keeps the focus, and a click in progress.
 */
export function updateChildren(parent, items, key, make, update) {
  const childByKey = (parent.childByKey ??= new Map());
  const keys = new Set(items.map(key));
  for (const [childKey, child] of childByKey) {
    if (!keys.has(childKey)) {
      child.remove();
      childByKey.delete(childKey);
    }
  }
  let previous = null;
  for (const item of items) {
    let child = childByKey.get(key(item));
    if (child === undefined) {
      child = make(item);
      childByKey.set(key(item), child);
    }
    const atPosition = previous === null ? parent.firstChild : previous.nextSibling;
    if (atPosition !== child) parent.insertBefore(child, atPosition);
    update(child, item);
    previous = child;
  }
}

/** Replace the children of an element by those of `make()` if `content`, any JSON value, differs from the last call. */
export function replaceIfChanged(element, content, make) {
  const serialized = JSON.stringify(content);
  if (element.lastContent === serialized) return;
  element.lastContent = serialized;
  element.replaceChildren(...make());
}
