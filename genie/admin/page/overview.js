// The server at a glance: figures, and what happened lately as small lines.

import { el, keyed, say, svg } from "./dom.js";
import { count, duration, quantile, rate, some } from "./format.js";

const REMEMBERED = 60; // answers, of which the small lines are drawn
const WINDOW = 60; // answers, of which the recent quantiles are taken
const [WIDTH, HEIGHT] = [100, 24];

const ms = (value) => (value === null ? "–" : value === Infinity ? "long" : duration(value));
const bound = (value) => (value === null ? "–" : value === Infinity ? "very long" : `≤ ${duration(value)}`);

const FIGURES = [
  { key: "locks", name: "Locks held", value: (s) => s.locks, text: count, note: (s) => `by ${some(s.held, "request")}` },
  {
    key: "waiting",
    name: "Requests waiting",
    value: (s) => s.waiting,
    text: count,
    note: (s) => (s.queues.length ? `in ${s.queues.length}${s.queues.length < 20 && s.queuesComplete ? "" : " or more"} ${s.queues.length === 1 ? "queue" : "queues"}` : "no queues"),
  },
  {
    key: "longest",
    name: "Longest wait",
    value: (s) => s.longestWait,
    text: (value) => (value ? duration(value) : "–"),
    note: () => "of the waiting requests",
    alarm: (value) => (value >= 10_000 ? "bad" : value >= 1_000 ? "warm" : ""),
  },
  {
    key: "waits",
    name: "Waits, median",
    value: (s) => s.waitP50,
    text: ms,
    note: (s) => (s.waitP50 === null ? "none in the last minute" : `p99 ${ms(s.waitP99)}, last minute`),
  },
  {
    key: "connections",
    name: "Connections",
    value: (s) => s.connections,
    text: count,
    note: (s) => some(s.sessions, "session"),
  },
  {
    key: "lag",
    name: "Loop lag, p99",
    value: (s, recent) => recent.lag,
    text: bound,
    note: (s, recent) => (recent.commits === null ? "no recent commits" : `commits, p99 ${bound(recent.commits)}`),
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

export class Overview {
  constructor(figures, rates) {
    this.figures = figures;
    this.rates = rates;
    this.past = new Map();
    this.states = [];
  }

  /** Show what `/api/state` answered. */
  show(state) {
    const latest = this.states.at(-1);
    if (latest !== undefined && latest.now - latest.uptime < state.now - state.uptime - 5000) this.states = [];
    this.states = [...this.states, state].slice(-WINDOW);
    const recent = { lag: this.recent("lag"), commits: this.recent("commits") };
    keyed(this.figures, FIGURES, (figure) => figure.key, tile, (element, figure) => {
      const value = figure.value(state, recent);
      const [, number, note, picture] = element.children;
      say(number, figure.text(value));
      say(note, figure.note(state, recent));
      element.dataset.alarm = figure.alarm?.(value) ?? "";
      spark(picture, this.remember(figure.key, value));
    });
    keyed(this.rates, RATES, (figure) => figure.key, cell, (element, { key, alarm }) => {
      const value = state.rates[key];
      const [, number, picture] = element.children;
      say(number.firstChild, rate(value));
      element.dataset.alarm = value > 0 && alarm !== undefined ? alarm : "";
      spark(picture, this.remember(`rate ${key}`, value));
    });
  }

  remember(key, value) {
    const past = this.past.get(key) ?? [];
    past.push(Number.isFinite(value) ? value : 0);
    if (past.length > REMEMBERED) past.shift();
    this.past.set(key, past);
    return past;
  }

  /** The p99 of what was counted since the oldest answer that is kept, or since the start, where it is the only one. */
  recent(name) {
    const [now, before] = [this.states.at(-1)[name], this.states[0][name]];
    const fresh = this.states.length > 1 ? now.counts.map((each, place) => each - before.counts[place]) : now.counts;
    return quantile(0.99, now.bounds, fresh);
  }
}

function tile({ key, name }) {
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(svg("path", { class: "area" }), svg("path", { class: "stroke" }));
  return el(
    "div",
    { class: "card tile", "data-figure": key },
    el("h3", {}, name),
    el("strong"),
    el("span", { class: "quiet" }),
    picture,
  );
}

function cell({ key, name }) {
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(svg("path", { class: "area" }), svg("path", { class: "stroke" }));
  return el("div", { "data-rate": key }, el("h3", {}, name), el("p", {}, el("strong"), el("span", { class: "quiet" }, "/s")), picture);
}

/** A line of the past values, from the right, as high as the greatest of them. */
function spark(picture, past) {
  const top = Math.max(...past, 0);
  const step = WIDTH / (REMEMBERED - 1);
  const y = (value) => (top === 0 ? HEIGHT - 1 : HEIGHT - 1 - (value / top) * (HEIGHT - 3)).toFixed(1);
  const first = WIDTH - (past.length - 1) * step;
  const points = past.map((value, place) => `${(first + place * step).toFixed(1)} ${y(value)}`);
  const [area, stroke] = picture.children;
  stroke.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${first.toFixed(1)} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
}
