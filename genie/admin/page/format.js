// Format numbers, durations and names.

const INTEGER = new Intl.NumberFormat("en");

// The same characters as in genie/text.py: U+2800 is the empty pattern of Braille.
const INVISIBLE = /[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]|[^\P{Zs} ]/gu;

export const formatCount = (number) => INTEGER.format(number);

/** Format a number with its noun: `1 request`, `2 requests`. */
export const pluralize = (number, singular, plural = `${singular}s`) => `${formatCount(number)} ${number === 1 ? singular : plural}`;

/** Format a rate, with one decimal below 10. */
export function formatRate(number) {
  if (number === 0) return "0";
  if (number < 10) return number.toFixed(1);
  return formatCount(Math.round(number));
}

/** Format milliseconds as `420 ms`, `3.2 s`, `4 min 12 s`, `3 h 2 min` or `5 d 1 h`. */
export function formatDuration(ms) {
  if (ms < 0) ms = 0;
  if (ms < 10) return `${Number(ms.toFixed(1))} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  const min = Math.floor(s / 60);
  if (min < 60) return `${min} min ${Math.floor(s % 60)} s`;
  const h = Math.floor(min / 60);
  if (h < 24) return `${h} h ${min % 60} min`;
  return `${Math.floor(h / 24)} d ${h % 24} h`;
}

/** Format milliseconds in one unit and at most six characters: `420 ms`, `3.2 s`, `4 min`. */
export function briefDuration(ms) {
  if (ms < 1000) return `${Math.min(999, Math.round(Math.max(0, ms)))} ms`;
  return formatDuration(ms).split(" ").slice(0, 2).join(" ");
}

/** Escape characters that are invisible or change the writing direction: one name must not look like another. */
export const escapeInvisible = (text) =>
  text.replace(INVISIBLE, (character) => `‹${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

/** Shorten a text to `maxLength` characters by omitting its middle: names differ most at their ends. */
export function abbreviate(text, maxLength) {
  const characters = Array.from(escapeInvisible(text));
  if (characters.length <= maxLength) return characters.join("");
  const end = Math.floor((maxLength - 1) / 2);
  return `${characters.slice(0, maxLength - 1 - end).join("")}…${characters.slice(-end).join("")}`;
}

/** Return the mode of a blocker, or its units and their limit: `2/10`. */
export const modeText = ({ mode, units, of }) => (units === undefined ? mode : `${units}/${of}`);

/** Split `MODE:NAME`, or `2/10:NAME` for 2 of at most 10 units: then the mode is `2/10`. */
export function splitResource(resource) {
  const colon = resource.indexOf(":");
  return { mode: resource.slice(0, colon), name: resource.slice(colon + 1) };
}

/** Return whether a resource is a subtree: all names below it. */
export const isSubtree = (name) => name === "**" || name.endsWith("/**");

/** Return whether a subtree contains a name, which may be a subtree itself. */
export const containsName = (subtree, name) => isSubtree(subtree) && name !== subtree && name.startsWith(subtree.slice(0, -2));

/** Return whether two resources are the same, or one is a subtree that contains the other. */
export const overlap = (one, other) => one === other || containsName(one, other) || containsName(other, one);

/** Return the transaction of a request, or its id if it has none. */
export const requestLabel = ({ transactionName, id }) =>
  transactionName === undefined || transactionName === null ? `#${id}` : escapeInvisible(transactionName);

/** Return the upper bound of the histogram bucket that contains a quantile; null if the histogram is empty. */
export function quantile(share, bounds, counts) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  let cumulative = 0;
  for (const [bucket, count] of counts.entries()) {
    cumulative += count;
    if (cumulative >= share * total) return bounds[bucket] ?? Infinity;
  }
  return Infinity;
}
