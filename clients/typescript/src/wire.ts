// The messages of the wire protocol (protocol.md), and how they are encoded and split into lines.

/**
 * A request that blocked another request: it held `resource` (a name without a mode, maybe a subtree such as `accounts/**`),
 * or was ahead in its queue. With the mode `units` it has or asks for `units` of at most `of`.
 */
export interface Blocker {
  readonly id: number;
  readonly resource: string;
  readonly mode: 'shared' | 'exclusive' | 'units';
  readonly units?: number;
  readonly of?: number;
  readonly state: 'held' | 'queued';
  /** Unix time in ms: of the grant if `held`, of the arrival if `queued`. */
  readonly since: number;
  readonly transactionName?: string;
  readonly note?: string;
  readonly traceparent?: string;
}

/**
 * One edge of a deadlock's cycle: the request `waiter` waits for `resource`, which the request `holder` holds. If it waits for
 * `units` of at most `of`, `holder` is one of the requests that use them.
 */
export interface Wait {
  readonly resource: string;
  readonly waiter: number;
  readonly holder: number;
  readonly units?: number;
  readonly of?: number;
  readonly note?: string;
}

/** A lock on `resource` (a name without a mode) was granted (`locked`) or has ended (`unlocked`). */
export interface Change {
  readonly state: 'locked' | 'unlocked';
  readonly resource: string;
  readonly mode: 'shared' | 'exclusive' | 'units';
  readonly units?: number;
  readonly of?: number;
  /** The id of the lock. A resource may be locked under several ids, by shared locks or by one transaction. */
  readonly id: number;
  readonly transactionName?: string;
}

/** A held lock. `resources` are the first ten of `resourcesTotal`, exclusive ones first. */
export interface Holder {
  readonly id: number;
  readonly resources: readonly string[];
  readonly resourcesTotal: number;
  readonly priority: number;
  /** Unix time of the grant in ms. */
  readonly since: number;
  /** Time until the lock times out, in ms. */
  readonly expiresIn: number;
  readonly fence: number;
  readonly transactionName?: string;
  readonly note?: string;
  readonly traceparent?: string;
}

/** A waiting request. `since` is the time of its arrival. `expiresIn` is missing if it waits without a limit. */
export interface Waiter extends Omit<Holder, 'fence' | 'expiresIn'> {
  readonly expiresIn?: number;
  readonly blockers: readonly Blocker[];
  readonly blockersTotal: number;
}

/** The result of `inspect`. The totals count all matches, also those beyond the `limit`. */
export interface Inspection {
  readonly holders: readonly Holder[];
  readonly holdersTotal: number;
  readonly queue: readonly Waiter[];
  readonly queueTotal: number;
}

/** @internal */
export type Locked = { id: number; fence: number; ref?: string; expiresIn?: number; resources?: string[] };

/** @internal */
export type Released = { id: number; reason: string; ref?: string; free?: number | string; locked?: number | string } & {
  waited?: number;
  blockers?: Blocker[];
  blockersTotal?: number;
  cycle?: string[];
  waits?: Wait[];
};

/** @internal */
export type Extended = { id: number; transactionTimeout: number };

/** @internal */
export type ErrorReply = { code: string; message: string; ref?: string; leader?: string };

/** @internal */
export type Watching = { held: Omit<Change, 'state'>[]; truncated: boolean };

/** @internal */
export type Welcome = { protocol: number; namespace: string; resumed: boolean; pingInterval?: number };

/** @internal */
export type Message =
  | { command: 'welcome'; payload: Welcome }
  | { command: 'locked'; payload: Locked }
  | { command: 'released'; payload: Released }
  | { command: 'watching'; payload: Watching }
  | { command: 'extended' | 'pong' | 'inspected' | 'bye'; payload: object }
  | { command: 'event'; payload: Change | { state: 'lagged' } }
  | { command: 'error'; payload: ErrorReply };

/** The greatest timeout of the protocol, in ms. As a queue timeout it means that there is no limit. @internal */
export const MAX_TIMEOUT = 2 ** 31 - 1;

const MAX_LINE_TO_SERVER = 1 << 20;
const MAX_LINE_FROM_SERVER = 2 << 20; // as the protocol advises
const LINE_FEED = 10;

/** Encodes a command as a line. Throws if it is a line to which the server could not answer with its `ref`. @internal */
export function encode(command: string, payload: object, ref: string): string {
  const fields = JSON.stringify(payload).slice(1, -1);
  const line = `{"command":"${command}","payload":{${fields ? `${fields},` : ''}"ref":"${ref}"}}\n`;
  // A character has at most 3 bytes in UTF-8.
  if (line.length * 3 > MAX_LINE_TO_SERVER && Buffer.byteLength(line) > MAX_LINE_TO_SERVER) {
    throw new RangeError(`${command}: a command must have at most ${MAX_LINE_TO_SERVER} bytes`);
  }
  // JSON.stringify escapes a lone surrogate, which the server rejects. The text may also be a backslash of the caller.
  if (line.includes('\\ud')) {
    JSON.parse(line, (_, value: unknown) => {
      if (typeof value === 'string' && !value.isWellFormed()) throw new TypeError('a string must be well-formed Unicode');
    });
  }
  return line;
}

/** Splits received bytes into messages. @internal */
export class MessageReader {
  #parts: Buffer[] = [];
  #size = 0;

  /** Calls `receive` for each complete message, until it returns false. Throws if a line is not a message. */
  read(chunk: Buffer, receive: (message: Message) => boolean): void {
    const rest = chunk.length - (chunk.lastIndexOf(LINE_FEED) + 1);
    this.#parts.push(chunk);
    this.#size += chunk.length;
    if (this.#size > MAX_LINE_FROM_SERVER) throw new Error(`the server sent a line of more than ${MAX_LINE_FROM_SERVER} bytes`);
    if (rest === chunk.length) return;
    // All complete lines are decoded at once: a line feed is never a part of a longer UTF-8 sequence.
    const bytes = this.#parts.length === 1 ? chunk : Buffer.concat(this.#parts);
    const text = bytes.toString('utf8', 0, bytes.length - rest);
    this.#parts = rest ? [chunk.subarray(-rest)] : [];
    this.#size = rest;
    for (let start = 0, stop = 0; start < text.length; start = stop + 1) {
      stop = text.indexOf('\n', start);
      const line = text.slice(start, stop);
      if (line.trim() && !receive(parse(line))) return;
    }
  }
}

type Check = (value: unknown) => boolean;

const isText: Check = (value) => typeof value === 'string';
const isNumber: Check = Number.isFinite;
const isObject: Check = (value) => typeof value === 'object' && value !== null;
const isList = (isItem: Check): Check => (value) => Array.isArray(value) && value.every(isItem);
/** A sum of weights: at most as many weights of 78 digits as a request may have names. */
const isSum: Check = (value) => Number.isSafeInteger(value) || (typeof value === 'string' && /^[0-9]{1,100}$/.test(value));
const isOptional = (check: Check): Check => (value) => value === undefined || value === null || check(value);
const maybeText = isOptional(isText);
const maybeNumber = isOptional(isNumber);

/**
 * The fields of the messages that the client computes with. A lock with a text as its `expiresIn` would never end, and a request
 * would have no answer if its end has a sum that is no number.
 */
const FIELDS: Readonly<Record<string, Readonly<Record<string, Check>>>> = {
  welcome: { pingInterval: maybeNumber },
  locked: { ref: maybeText, id: isNumber, fence: isNumber, expiresIn: maybeNumber, resources: isOptional(isList(isText)) },
  released: {
    ref: maybeText, id: isNumber, reason: isText, waited: maybeNumber, blockers: isOptional(isList(isObject)),
    cycle: isOptional(isList(isText)), waits: isOptional(isList(isObject)), free: isOptional(isSum), locked: isOptional(isSum),
  },
  extended: { ref: maybeText, transactionTimeout: isNumber },
  watching: { ref: maybeText, held: isList((row) => isObject(row) && isText((row as Change).resource)) },
  event: { state: isText, resource: maybeText },
  error: { ref: maybeText, code: isText, message: isText, leader: maybeText },
};
const REF: Readonly<Record<string, Check>> = { ref: maybeText };

function isMessage(message: { command: string; payload: Record<string, unknown> }): boolean {
  const fields = FIELDS[message.command] ?? REF;
  for (const name in fields) if (!fields[name]!(message.payload[name])) return false;
  return true;
}

function parse(line: string): Message {
  try {
    const message = JSON.parse(line);
    if (isText(message?.command) && isObject(message.payload) && isMessage(message)) return message as Message;
  } catch {
    // Reported below.
  }
  throw new Error(`the server sent an invalid message: ${line.slice(0, 80)}`);
}

const MODE = /^(?:exclusive|shared|[0-9]{1,7}\/[0-9]{1,7}):/;
const MAX_UNITS = 1_000_000;

/** Returns the resource as on the wire. A mistyped mode must not become a part of the name. @internal */
export function withMode(resource: string): string {
  if (MODE.test(resource)) return resource;
  if (!resource.includes(':')) return `exclusive:${resource}`;
  throw new TypeError(`'${resource}': a resource is shared:NAME, exclusive:NAME, 2/10:NAME or a NAME without a colon`);
}

/** Returns the resource `count/of:NAME`: `count` units of a resource of which at most `of` are in use at once. */
export function units(name: string, count: number, of: number): string {
  const isValid = Number.isInteger(count) && Number.isInteger(of) && count >= 1 && count <= of && of <= MAX_UNITS;
  if (!isValid) throw new RangeError(`units must be 1 <= count <= of <= ${MAX_UNITS}, not ${count}/${of}`);
  return `${count}/${of}:${name}`;
}

/** Returns the resource of all names that begin with `prefix`, which ends with `/`, or is empty for all names. */
export function subtree(prefix: string, { shared = false } = {}): string {
  if (prefix && !prefix.endsWith('/')) throw new TypeError(`a subtree must end with '/', or be '' for all names, not '${prefix}'`);
  return `${shared ? 'shared' : 'exclusive'}:${prefix}**`;
}

/** Splits a resource with a mode. `units` and `of` are 0 if the mode is not that of units. @internal */
export function split(resource: string): { name: string; mode: string; units: number; of: number } {
  const end = resource.indexOf(':');
  const mode = resource.slice(0, end);
  const [count = 0, of = 0] = mode.includes('/') ? mode.split('/').map(Number) : [];
  return { name: resource.slice(end + 1), mode, units: count, of };
}

/** Adds a resource to the one of the same name. `isSum`: units are added up; otherwise the greater number counts. @internal */
export function addTo(byName: Map<string, string>, resource: string, isSum: boolean): void {
  const one = split(resource);
  const present = byName.get(one.name);
  byName.set(one.name, present === undefined ? resource : strongest(one, split(present), isSum));
}

function strongest(a: ReturnType<typeof split>, b: ReturnType<typeof split>, isSum: boolean): string {
  if (!a.of || !b.of) return `${a.mode === b.mode ? a.mode : 'exclusive'}:${a.name}`;
  const greater = a.units > b.units || (a.units === b.units && a.of > b.of) ? a : b;
  const of = isSum ? Math.min(a.of, b.of) : greater.of;
  return `${isSum ? Math.min(a.units + b.units, of) : greater.units}/${of}:${a.name}`;
}
