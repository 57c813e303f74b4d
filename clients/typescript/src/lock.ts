import type { Request } from './calls.js';
import { LockLostError } from './errors.js';
import type { CallOptions } from './options.js';
import type { Session } from './session.js';

/** A granted lock. It is held until `release` or `detach`, or until it is lost. */
export class Lock implements AsyncDisposable {
  /** Any client can release the lock by this id. */
  readonly id: number;
  /** The fencing token, which grows with every grant: a data store can reject late writers by it. */
  readonly fence: number;
  /** The locked resources, as `shared:NAME`, `exclusive:NAME` or `2/10:NAME`. */
  readonly resources: readonly string[];
  readonly #session: Session;
  readonly #request: Request;

  /** @internal */
  constructor(session: Session, request: Request) {
    this.id = request.id;
    this.fence = request.fence;
    this.resources = request.options.resources;
    this.#session = session;
    this.#request = request;
  }

  /**
   * Whether the lock is held, by the clock of this client. On Linux that clock stands still while the whole machine is
   * suspended: only `fence` protects the data then.
   */
  get held(): boolean {
    return this.#session.isHeld(this.#request);
  }

  /** When the lock counts as lost unless it is extended, by the clock of this client: Unix time in ms. */
  get expiresAt(): number {
    return Date.now() + this.#request.endsAt - performance.now();
  }

  /** Why the lock is lost; undefined: it is not lost. */
  get error(): LockLostError | undefined {
    this.#session.isHeld(this.#request);
    return this.#request.error;
  }

  /** Is aborted, with the `LockLostError` as its reason, when the lock is lost, or has timed out by the client's clock. */
  get signal(): AbortSignal {
    return this.#request.signal(() => this.#session.isHeld(this.#request));
  }

  /**
   * Releases the lock, and waits until the server confirms. Does nothing if the lock was released before or is lost.
   * Rejects with `UnavailableError` after `responseTimeout`; the client then repeats the release in the background.
   * An aborted signal ends the wait, and not the release.
   */
  release({ signal }: CallOptions = {}): Promise<void> {
    return this.#session.release(this.#request, signal);
  }

  /** Sets the remaining time of the lock to `transactionTimeout` ms from now, which may also shorten it. */
  async extend(transactionTimeout: number, { signal }: CallOptions = {}): Promise<void> {
    this.#checkHeld();
    await this.#session.extend(this.id, transactionTimeout, signal, this.#request);
  }

  /**
   * Hands the lock over to another client: this client no longer extends or releases it, and does not report its end.
   * Returns the id, for `extend` and `release` of any client.
   */
  detach(): number {
    const { state, options } = this.#request;
    if (state === 'detached') return this.id;
    this.#checkHeld();
    if (options.isBoundToSession) throw new TypeError(`lock ${this.id} ends with this client, by its onDisconnect`);
    this.#request.state = 'detached';
    return this.id;
  }

  /** Releases the lock at the end of an `await using` block, which does not fail if the server has not confirmed that. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.release().catch((error: Error) => this.#session.logger.warn(`lock ${this.id}: ${error.message}`));
  }

  #checkHeld(): void {
    const text = `lock ${this.id} was released or detached`;
    if (!this.held) throw this.error ?? new LockLostError('lost', text, this.id);
  }
}
