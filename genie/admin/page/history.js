// A Gantt chart of the requests for a resource: when each one waited and held it.

import { html, svg } from "./dom.js";
import { formatDuration, requestLabel } from "./format.js";

const MAX_ROWS = 20;
const WIDTH = 320;
const ROW = 30;

/** Draw the latest requests of a response of /api/history. A request without an end lasts until `now` (unix ms). */
export function drawHistory(history, now) {
  const requests = history.requests.slice(-MAX_ROWS);
  if (requests.length === 0) return html("p", { class: "empty" }, history.beginsAt === null ? "Nothing is recorded yet." : `No request is recorded since ${dateOf(history.beginsAt)}.`);
  const begins = Math.min(...requests.map(beginOf));
  const ends = Math.max(...requests.map((each) => lastOf(each, now)));
  const x = (at) => ((at - begins) / Math.max(1, ends - begins)) * WIDTH;
  const rows = requests.map((each, index) => drawRow(each, index * ROW, x, now));
  const chart = svg("svg", { class: "gantt", viewBox: `0 0 ${WIDTH} ${requests.length * ROW}`, role: "img", "aria-label": "Who waited for it and held it" }, ...rows);
  const span = `${timeOfDay(begins)} to ${timeOfDay(ends)}${history.more || history.requests.length > MAX_ROWS ? ", earlier requests: genie history" : ""}`;
  const gaps = history.gaps > 0 ? html("p", { class: "quiet" }, `Events are missing in ${history.gaps} places, because the disk was too slow, or the history was full.`) : undefined;
  return html("div", {}, chart, html("p", { class: "quiet" }, span), gaps);
}

function drawRow(request, y, x, now) {
  const end = lastOf(request, now);
  const { askedAt, grantedAt } = request;
  const waited = askedAt !== undefined && askedAt !== grantedAt;
  const state = grantedAt === undefined ? "waits" : "holds";
  const ending = request.reason ?? (request.recordEndsAt === undefined ? state : "its end is not recorded");
  const times = [waited && `waited ${formatDuration((grantedAt ?? end) - askedAt)}`, grantedAt !== undefined && `held ${formatDuration(end - grantedAt)}`, ending];
  const label = requestLabel(request);
  return svg(
    "g",
    {},
    svg("title", {}, `${label}: ${times.filter(Boolean).join(", ")}`),
    svg("text", { x: 0, y: y + 11 }, label.length > 40 ? `${label.slice(0, 39)}…` : label),
    waited ? bar("wait", x(askedAt), x(grantedAt ?? end), y + 18) : undefined,
    grantedAt === undefined ? undefined : bar(request.mode, x(grantedAt), x(end), y + 18),
    request.reason === undefined || request.reason === "success" ? undefined : bar("lost", x(end) - 2, x(end), y + 18),
  );
}

const bar = (kind, left, right, y) => svg("rect", { class: kind, x: Math.max(0, left), y, width: Math.max(1, right - left), height: 7 });

const beginOf = (request) => request.askedAt ?? request.grantedAt;

const lastOf = (request, now) => request.endedAt ?? request.recordEndsAt ?? now;

const dateOf = (at) => new Date(at).toLocaleString("en-GB");

const timeOfDay = (at) => new Date(at).toLocaleTimeString("en-GB");
