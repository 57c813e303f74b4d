// Elements, made and kept. Names come from whoever may connect: they become text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** The head of an arrow, for `marker-end`; it is in the document once. */
export const ARROW = "url(#arrow)";

/** An element. `attributes` with a function are listeners; undefined and false ones are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

/** Set the text only where it is another one: what a reader has marked stays marked. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Let `parent` have one child for each item, in their order. A child is made once for each key and kept as long as its
 * key is there, so that it keeps the focus and a click that has begun. `make(item)` returns an element; `update` is
 * called each time.
 */
export function keyed(parent, items, key, make, update) {
  const kept = (parent.kept ??= new Map());
  const keys = new Set(items.map(key));
  for (const [known, child] of kept) {
    if (!keys.has(known)) {
      child.remove();
      kept.delete(known);
    }
  }
  let before = null;
  for (const item of items) {
    let child = kept.get(key(item));
    if (child === undefined) {
      child = make(item);
      kept.set(key(item), child);
    }
    const place = before === null ? parent.firstChild : before.nextSibling;
    if (place !== child) parent.insertBefore(child, place);
    update(child, item);
    before = child;
  }
}

/** Replace what is in `element` where `content` (anything JSON) differs from the last; `make()` returns children. */
export function renew(element, content, make) {
  const written = JSON.stringify(content);
  if (element.written === written) return;
  element.written = written;
  element.replaceChildren(...make());
}
