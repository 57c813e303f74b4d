// The commands that wait for an answer, and the locks that result from requests. Times are ms of `performance.now()`.
import type { LockLostError } from './errors.js';
import type { Lock } from './lock.js';
import type { Watch } from './watch.js';
import { encode } from './wire.js';

/** A command that expects an answer, which settles its promise. @internal */
export abstract class Call<T> {
  /** When the command was last sent; 0: never. */
  sentAt = 0;
  /** The number of the connection on which the command was first sent; 0: never sent. */
  firstConnection = 0;
  readonly promise: Promise<T>;
  resolve!: (value: T) => void;
  reject!: (error: unknown) => void;

  /** `order` is the position among all commands of the client. `deadline` is when the caller gives up. */
  constructor(public line: string, public order: number, public deadline: number) {
    this.promise = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
  }

  /** Whether the command must be sent again on a new connection. */
  abstract get unanswered(): boolean;
  /** When the state of the call changes by itself. */
  abstract get timerAt(): number;

  /** Rejects with the reason of the signal when it is aborted, and calls `cancel`. */
  abortOn(signal: AbortSignal | undefined, cancel: () => void): void {
    if (!signal) return;
    const onAbort = (): void => {
      cancel();
      this.reject(signal.reason);
    };
    signal.addEventListener('abort', onAbort);
    const stop = (): void => signal.removeEventListener('abort', onAbort);
    this.promise.then(stop, stop);
  }
}

/** The calls without an answer. Not a Map, which allocates for each change, and in V8 prolongs the life of its entries. @internal */
export class CallTable<C extends { readonly ref: string }> {
  readonly #slots: (C | undefined)[] = [];
  readonly #freeSlots: number[] = [];

  /** Returns the `ref` for the next call that is added, which begins with the number of its slot. */
  nextRef(order: number): string {
    return `${this.#freeSlots.at(-1) ?? this.#slots.length}-${order}`;
  }

  add(call: C): void {
    this.#slots[this.#freeSlots.pop() ?? this.#slots.length] = call;
  }

  get(ref: string): C | undefined {
    const call = this.#slots[parseInt(ref, 10)];
    return call?.ref === ref ? call : undefined;
  }

  delete(call: C): void {
    if (!this.get(call.ref)) return;
    const slot = parseInt(call.ref, 10);
    this.#slots[slot] = undefined;
    this.#freeSlots.push(slot);
  }

  get size(): number {
    return this.#slots.length - this.#freeSlots.length;
  }

  all(): C[] {
    return this.#slots.filter((call) => call !== undefined);
  }
}

/** A command other than `request`. `subject` is the lock or the watch of this client that it is about. @internal */
export class Command extends Call<object> {
  unanswered = true;

  constructor(
    readonly name: string, readonly ref: string, readonly payload: object,
    order: number, deadline: number, readonly subject?: Request | Watch,
  ) {
    super(encode(name, payload, ref), order, deadline);
  }

  override get timerAt(): number {
    return this.deadline;
  }
}

/**
 * `waiting`: not granted yet. `releasing`: its release by id has no answer yet. `cancelling`: its caller no longer waits,
 * and its release by `ref` has no answer yet. `detached`: granted, and no longer managed by this client. @internal
 */
export type RequestState = 'waiting' | 'held' | 'releasing' | 'cancelling' | 'detached' | 'ended';

/** A request, and the lock that results from it. @internal */
export class Request extends Call<Lock> {
  state: RequestState = 'waiting';
  id = 0;
  fence = 0;
  /** The number of the last connection on which the server has confirmed that the lock is held. */
  confirmedOn = 0;
  /** When the lock times out. */
  expiresAt = Infinity;
  /** While disconnected: when the server may end the session, and with it the lock. */
  sessionEndsAt = Infinity;
  /** When the watchdog extends the lock. */
  renewAt = Infinity;
  /** Why the lock is lost. */
  error: LockLostError | undefined;
  #controller: AbortController | undefined;

  constructor(
    readonly ref: string, payload: object, public resources: readonly string[], public transactionTimeout: number,
    readonly watchdog: boolean, readonly isBoundToSession: boolean, order: number, deadline: number,
  ) {
    super(encode('request', payload, ref), order, deadline);
  }

  override get unanswered(): boolean {
    return this.state === 'waiting' || this.state === 'cancelling';
  }

  /** When the lock ends by the clock of this client. */
  get endsAt(): number {
    return Math.min(this.expiresAt, this.sessionEndsAt);
  }

  override get timerAt(): number {
    return this.state === 'held' ? Math.min(this.endsAt, this.renewAt) : this.state === 'waiting' ? this.deadline : Infinity;
  }

  /** Is made on demand, since most callers never ask for it. */
  get signal(): AbortSignal {
    if (!this.#controller) {
      this.#controller = new AbortController();
      if (this.error) this.#controller.abort(this.error);
    }
    return this.#controller.signal;
  }

  /** The server has granted or confirmed the lock: it ends `duration` ms after `since`. */
  hold(since: number, duration: number): void {
    this.state = 'held';
    this.expiresAt = since + duration;
    this.sessionEndsAt = Infinity;
    if (this.watchdog) this.renewAt = since + duration / 3;
  }

  /** The lock is lost. Its signal is aborted after the current message, because listeners may call the client. */
  lose(error: LockLostError): void {
    this.state = 'ended';
    this.error = error;
    queueMicrotask(() => this.#controller?.abort(error));
  }
}
