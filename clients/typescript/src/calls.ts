// The commands that wait for an answer, and the locks that result from requests. Times are ms of `performance.now()`.
import type { LockLostError } from './errors.js';
import { encode, type Change, type Watching } from './wire.js';

/**
 * `waiting`: without an answer. The other states are those of a request. `held`: granted. `releasing`: its
 * release by id has no answer yet. `cancelling`: its caller no longer waits, and its release by `ref` has no answer yet.
 * `detached`: granted, and no longer managed by this client.
 * @internal
 */
export type CallState = 'waiting' | 'held' | 'releasing' | 'cancelling' | 'detached' | 'ended';

/** What receives the events of a `watch` command. @internal */
export interface Subscriber {
  readonly prefix: string;
  onSnapshot(snapshot: Watching): void;
  onEvent(event: Change | { state: 'lagged' }): void;
  onLagged(): void;
  end(error?: unknown): void;
}

/** How long the server certainly keeps a session, and the locks that are bound to it. @internal */
export interface Lease {
  endsAt: number;
}

const NO_LEASE: Lease = { endsAt: Infinity };
const waiting = new WeakMap<AbortSignal, Set<() => void>>();

function runCallbacks(this: AbortSignal): void {
  for (const callback of [...waiting.get(this)!]) callback();
}

/**
 * Calls back when a signal is aborted, until the returned function is called. All calls share one listener of the signal,
 * because Node warns of more than ten. @internal
 */
export function onAbort(signal: AbortSignal, callback: () => void): () => void {
  const callbacks = waiting.get(signal) ?? new Set();
  if (!callbacks.size) {
    waiting.set(signal, callbacks);
    signal.addEventListener('abort', runCallbacks);
  }
  callbacks.add(callback);
  return () => {
    callbacks.delete(callback);
    if (!callbacks.size) signal.removeEventListener('abort', runCallbacks);
  };
}

/** Returns a controller whose signal calls `check` before it says whether it is aborted. @internal */
export function checkedController(check: () => void): AbortController {
  const controller = new AbortController();
  for (const name of ['aborted', 'reason', 'throwIfAborted'] as const) {
    const { get, value } = Object.getOwnPropertyDescriptor(AbortSignal.prototype, name)!;
    const checked = (): unknown => (check(), (get ?? value).call(controller.signal));
    Object.defineProperty(controller.signal, name, get ? { get: checked } : { value: checked });
  }
  return controller;
}

/** A command that expects an answer, which settles its promise. @internal */
export abstract class Call<T> {
  state: CallState = 'waiting';
  /** When the command was sent first; 0: never. */
  firstSentAt = 0;
  /** When the command was sent last. */
  sentAt = 0;
  /** When the caller gives up. */
  deadline = Infinity;
  readonly promise: Promise<T>;
  resolve!: (value: T) => void;
  reject!: (error: unknown) => void;

  constructor(readonly ref: string, public line: string) {
    this.promise = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
  }

  /** Whether the server has to answer. */
  get isPending(): boolean {
    return this.state === 'waiting' || this.state === 'cancelling';
  }

  /** When the state of the call changes by itself. */
  get timerAt(): number {
    return this.deadline;
  }
}

/** A command other than `request`. `request` and `watch` are what it is about, if they are of this client. @internal */
export class Command extends Call<object> {
  /** What an `extend` sets. */
  readonly transactionTimeout: number | undefined;
  /** Of an extension: its caller has got an error, so it is not repeated. */
  isGivenUp = false;
  /** Of a release by id: whether the released request may be a waiting one of this client. */
  isQueued: Promise<boolean> | undefined;

  constructor(ref: string, readonly name: string, payload: object, readonly request?: Request, readonly watch?: Subscriber) {
    super(ref, encode(name, payload, ref));
    this.transactionTimeout = (payload as { transactionTimeout?: number }).transactionTimeout;
  }
}

/** How a request is handled by this client: what is in its payload only, the client does not know. @internal */
export interface RequestOptions {
  resources: readonly string[];
  queueTimeout: number;
  transactionTimeout: number;
  watchdog: boolean;
  isBoundToSession: boolean;
}

/** A request, and the lock that results from it. @internal */
export class Request extends Call<Request> {
  id = 0;
  fence = 0;
  /** Whether the server has confirmed on this connection that the lock is held. */
  isConfirmed = false;
  /** When the lock times out. */
  expiresAt = Infinity;
  /** Ends a lock that is bound to the session. */
  readonly lease: Lease;
  /** When the watchdog extends the lock. */
  renewAt = Infinity;
  /** The `extend` that was sent last. */
  lastExtend: Command | undefined;
  /** The last `extend` that shortens the lock, unless it was answered. */
  shortenedBy: Command | undefined;
  /** The last release by id. */
  release: Command | undefined;
  /** Why the lock is lost. */
  error: LockLostError | undefined;
  #controller: AbortController | undefined;

  constructor(ref: string, payload: object, readonly options: RequestOptions, lease: Lease) {
    super(ref, encode('request', payload, ref));
    this.lease = options.isBoundToSession ? lease : NO_LEASE;
  }

  /** When the lock ends by the clock of this client. */
  get endsAt(): number {
    return Math.min(this.expiresAt, this.lease.endsAt);
  }

  override get timerAt(): number {
    return this.state === 'held' ? Math.min(this.endsAt, this.renewAt) : this.deadline;
  }

  /** Is made on demand, since most callers never ask for it. Calls `check`, since a timer is late after a blocked event loop. */
  signal(check: () => void): AbortSignal {
    this.#controller ??= checkedController(check);
    check();
    return this.#controller.signal;
  }

  /** The lock is lost. Its signal is aborted after the current message, because listeners may call the client. */
  lose(error: LockLostError): void {
    this.error = error;
    queueMicrotask(() => this.abort());
  }

  /** Aborts the signal of a lost lock. */
  abort(): void {
    if (this.error) this.#controller?.abort(this.error);
  }
}
