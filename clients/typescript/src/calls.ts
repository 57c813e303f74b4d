// The commands that wait for an answer, and the locks that result from requests. Times are ms of `performance.now()`.
import type { LockLostError } from './errors.js';
import type { Lock } from './lock.js';
import type { Watch } from './watch.js';
import { encode } from './wire.js';

/**
 * `waiting`: without an answer. The other states are those of a request. `held`: granted. `releasing`: its release by id has
 * no answer yet. `cancelling`: its caller no longer waits, and its release by `ref` has no answer yet. `detached`: granted,
 * and no longer managed by this client. @internal
 */
export type CallState = 'waiting' | 'held' | 'releasing' | 'cancelling' | 'detached' | 'ended';

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
  constructor(ref: string, readonly name: string, payload: object, readonly request?: Request, readonly watch?: Watch) {
    super(ref, encode(name, payload, ref));
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
export class Request extends Call<Lock> {
  id = 0;
  fence = 0;
  /** Whether the server has confirmed on this connection that the lock is held. */
  isConfirmed = false;
  /** When the lock times out. */
  expiresAt = Infinity;
  /** While disconnected: when the server may end the session, and with it the lock. */
  sessionEndsAt = Infinity;
  /** When the watchdog extends the lock. */
  renewAt = Infinity;
  /** The last release by id. */
  release: Command | undefined;
  /** Why the lock is lost. */
  error: LockLostError | undefined;
  #controller: AbortController | undefined;

  constructor(ref: string, payload: object, readonly options: RequestOptions) {
    super(ref, encode('request', payload, ref));
  }

  /** When the lock ends by the clock of this client. */
  get endsAt(): number {
    return Math.min(this.expiresAt, this.sessionEndsAt);
  }

  override get timerAt(): number {
    return this.state === 'held' ? Math.min(this.endsAt, this.renewAt) : this.deadline;
  }

  /** Is made on demand, since most callers never ask for it. */
  get signal(): AbortSignal {
    if (!this.#controller) {
      this.#controller = new AbortController();
      if (this.error) this.#controller.abort(this.error);
    }
    return this.#controller.signal;
  }

  /** The lock is lost. Its signal is aborted after the current message, because listeners may call the client. */
  lose(error: LockLostError): void {
    this.error = error;
    queueMicrotask(() => this.#controller?.abort(error));
  }
}
