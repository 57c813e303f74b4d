// The key figures and the rates of the server, with sparklines of their recent values.

import { selectedNamespace } from "./api.js";
import { html, setText, svg, updateChildren } from "./dom.js";
import { formatCount, formatDuration, formatRate, pluralize, quantile } from "./format.js";

const MAX_POINTS = 60; // of a sparkline
const WINDOW = 60; // responses over which the recent quantiles are computed
const [WIDTH, HEIGHT] = [100, 24];

const formatMs = (value) => (value === null ? "–" : value === Infinity ? "long" : formatDuration(value));
const formatBound = (value) => (value === null ? "–" : value === Infinity ? "very long" : `≤ ${formatDuration(value)}`);

function describeQueues({ queues, queuesComplete }) {
  if (queues.length === 0) return "no queues";
  const more = queues.length < 20 && queuesComplete ? "" : " or more";
  return `in ${queues.length}${more} ${queues.length === 1 ? "queue" : "queues"}`;
}

const FIGURES = [
  { key: "locks", name: "Locks held", value: (s) => s.locks, text: formatCount, note: (s) => `by ${pluralize(s.held, "request")}` },
  {
    key: "waiting",
    name: "Requests waiting",
    value: (s) => s.waiting,
    text: formatCount,
    note: describeQueues,
  },
  {
    key: "longest",
    name: "Longest wait",
    value: (s) => s.longestWait,
    text: (value) => (value ? formatDuration(value) : "–"),
    note: () => "of the waiting requests",
    alarm: (value) => (value >= 10_000 ? "bad" : value >= 1_000 ? "warm" : ""),
  },
  {
    key: "waits",
    name: "Waits, median",
    value: (s) => s.waitP50,
    text: formatMs,
    note: (s) => (s.waitP50 === null ? "none in the last minute" : `p99 ${formatMs(s.waitP99)}, last minute`),
  },
  {
    key: "connections",
    name: "Connections",
    value: (s) => s.connections,
    text: formatCount,
    note: (s) => pluralize(s.sessions, "session"),
  },
  {
    key: "lag",
    name: "Loop lag, p99",
    value: (s, recent) => recent.lag,
    text: formatBound,
    note: (s, recent) => (s.store === "memory" ? "of the event loop" : recent.commits === null ? "no recent commits" : `commits, p99 ${formatBound(recent.commits)}`),
    alarm: (value) => (value > 250 ? "bad" : value > 50 ? "warm" : ""),
  },
];

const RATES = [
  { key: "grants", name: "Grants" },
  { key: "releases", name: "Releases" },
  { key: "waits", name: "Waits" },
  { key: "timeouts", name: "Timeouts", alarm: "warm" },
  { key: "deadlocks", name: "Deadlocks", alarm: "warm" },
  { key: "errors", name: "Errors", alarm: "bad" },
];

const VALUES_KEY = `genie-sparklines ${selectedNamespace ?? ""}`;
const MAX_AGE_MS = 60_000; // older values are not shown beside new ones

/** Return the values of the sparklines that the page had before it was reloaded. */
function loadValues() {
  const { at, values } = JSON.parse(sessionStorage.getItem(VALUES_KEY) ?? '{"at": 0}');
  return new Map(Date.now() - at < MAX_AGE_MS ? values : []);
}

export class Overview {
  constructor(figures, rates) {
    this.figures = figures;
    this.rates = rates;
    this.history = loadValues(); // recent values by key
    addEventListener("pagehide", () => sessionStorage.setItem(VALUES_KEY, JSON.stringify({ at: Date.now(), values: [...this.history] })));
    this.states = []; // recent responses, oldest first
  }

  /** Show the response of /api/state. */
  show(state) {
    const last = this.states.at(-1);
    const restarted = last !== undefined && last.now - last.uptime < state.now - state.uptime - 5000;
    this.states = [...(restarted ? [] : this.states), state].slice(-WINDOW);
    const recent = { lag: this.recentP99("lag"), commits: this.recentP99("commits") };
    updateChildren(this.figures, FIGURES, (figure) => figure.key, makeTile, (element, figure) => {
      const value = figure.value(state, recent);
      const [, number, note, sparkline] = element.children;
      setText(number, figure.text(value));
      setText(note, figure.note(state, recent));
      element.dataset.alarm = figure.alarm?.(value) ?? "";
      drawSparkline(sparkline, this.record(figure.key, value));
    });
    updateChildren(this.rates, RATES, (rate) => rate.key, makeRate, (element, { key, alarm }) => {
      const value = state.rates[key];
      const [, number, sparkline] = element.children;
      setText(number.firstChild, formatRate(value));
      element.dataset.alarm = value > 0 && alarm !== undefined ? alarm : "";
      drawSparkline(sparkline, this.record(`rate ${key}`, value));
    });
  }

  /** Append a value to the history of a key; return the history. */
  record(key, value) {
    const values = this.history.get(key) ?? [];
    values.push(Number.isFinite(value) ? value : 0);
    if (values.length > MAX_POINTS) values.shift();
    this.history.set(key, values);
    return values;
  }

  /** Return the p99 of a histogram within the window; with only one response, since the start of the server. */
  recentP99(name) {
    const [last, first] = [this.states.at(-1)[name], this.states[0][name]];
    const counts = this.states.length > 1 ? last.counts.map((count, bucket) => count - first.counts[bucket]) : last.counts;
    return quantile(0.99, last.bounds, counts);
  }
}

function makeTile({ key, name }) {
  return html("div", { class: "card tile", "data-figure": key }, html("h3", {}, name), html("strong"), html("span", { class: "quiet" }), makeSparkline());
}

function makeRate({ key, name }) {
  const number = html("p", {}, html("strong"), html("span", { class: "quiet" }, "/s"));
  return html("div", { "data-rate": key }, html("h3", {}, name), number, makeSparkline());
}

function makeSparkline() {
  const attributes = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  return svg("svg", attributes, svg("path", { class: "area" }), svg("path", { class: "stroke" }));
}

/** Draw values from left to right, the last one at the right edge, scaled to their maximum. */
function drawSparkline(sparkline, values) {
  const maximum = Math.max(...values, 0);
  const step = WIDTH / (MAX_POINTS - 1);
  const y = (value) => (maximum === 0 ? HEIGHT - 1 : HEIGHT - 1 - (value / maximum) * (HEIGHT - 3)).toFixed(1);
  const left = WIDTH - (values.length - 1) * step;
  const points = values.map((value, index) => `${(left + index * step).toFixed(1)} ${y(value)}`);
  const [area, stroke] = sparkline.children;
  stroke.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${left.toFixed(1)} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
}
