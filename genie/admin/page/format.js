// Numbers, times and names as people read them.

const WHOLE = new Intl.NumberFormat("en");

const HIDDEN = /[\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/gu;

export const count = (number) => WHOLE.format(number);

export const some = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** A rate: two digits where it is small. */
export function rate(number) {
  if (number === 0) return "0";
  if (number < 10) return number.toFixed(1);
  return count(Math.round(number));
}

/** Milliseconds, as `420 ms`, `3.2 s`, `4 min 12 s`, `3 h 2 min` or `5 d 1 h`. */
export function duration(ms) {
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

/** The same in one unit and at most six letters, where a name beside it must keep its room: `420 ms`, `3.2 s`, `4 min`. */
export function briefly(ms) {
  const whole = duration(ms).split(" ");
  if (ms < 1000) return `${Math.min(999, Math.round(Math.max(0, ms)))} ms`;
  return whole.slice(0, 2).join(" ");
}

/** A text without characters that nobody sees, or that turn others around: one name must not look like another. */
export const visible = (text) =>
  text.replace(HIDDEN, (letter) => `‹${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

/** A long text without its middle: names differ most at their ends. */
export function cut(text, most) {
  const letters = Array.from(visible(text));
  if (letters.length <= most) return letters.join("");
  const end = Math.floor((most - 1) / 2);
  return `${letters.slice(0, most - 1 - end).join("")}…${letters.slice(-end).join("")}`;
}

/** `MODE:NAME` in its parts. */
export function parts(resource) {
  const colon = resource.indexOf(":");
  return { mode: resource.slice(0, colon), name: resource.slice(colon + 1) };
}

/** How a request is called: by its transaction, else by its id. */
export const called = ({ transactionName, id }) => (transactionName === undefined || transactionName === null ? `#${id}` : visible(transactionName));

/** The upper bound of the bucket below which `share` of the values are; null where there are none. */
export function quantile(share, bounds, counts) {
  const all = counts.reduce((sum, each) => sum + each, 0);
  if (all === 0) return null;
  let seen = 0;
  for (const [place, each] of counts.entries()) {
    seen += each;
    if (seen >= share * all) return bounds[place] ?? Infinity;
  }
  return Infinity;
}
