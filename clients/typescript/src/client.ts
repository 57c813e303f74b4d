import { runBlock, type Work } from './block.js';
import { QueueTimeoutError } from './errors.js';
import { Lock } from './lock.js';
import type { AcquireOptions, AnyOptions, CallOptions, CloseOptions, ConnectOptions, ElectOptions, InspectQuery } from './options.js';
import type { TransactionOptions, TryOptions } from './options.js';
import { checkTimeout, Session } from './session.js';
import { runTransaction, type Transaction } from './transaction.js';
import { Watch } from './watch.js';
import { MAX_TIMEOUT, withMode, type Holder, type Inspection } from './wire.js';

type Resources = string | readonly string[];

/**
 * A client with one connection to the leader, for any number of concurrent calls. Locks stay held and requests keep their
 * queue positions while the client is disconnected.
 */
export class Client implements AsyncDisposable {
  readonly #session: Session;
  readonly #defaults: AcquireOptions | undefined;

  /** @internal */
  constructor(session: Session, defaults?: AcquireOptions) {
    this.#session = session;
    this.#defaults = defaults;
  }

  /**
   * Waits until all of the resources can be locked at once. A resource is `exclusive:NAME`, `shared:NAME`, or a NAME
   * without a colon, which is exclusive; `units` and `subtree` return further ones.
   *
   * Rejects with `QueueTimeoutError`, `DeadlockError`, `RejectedError`, `ClosedError`, or with `UnavailableError` if no
   * server has responded for `queueTimeout` plus `responseTimeout`.
   */
  acquire(resources: Resources, options: AcquireOptions = {}): Promise<Lock> {
    return this.#request(typeof resources === 'string' ? [resources] : resources, options);
  }

  /** Locks the resources if they are free; resolves with null if they are not. */
  tryAcquire(resources: Resources, options: TryOptions = {}): Promise<Lock | null> {
    return this.acquire(resources, { ...options, queueTimeout: 0 }).catch((error: unknown) => {
      if (error instanceof QueueTimeoutError) return null;
      throw error;
    });
  }

  /**
   * Locks free resources, in the given order, until their weights reach `target`. `lock.resources` are the locked ones.
   * Rejects with `InsufficientError` if the free resources do not reach the target: then nothing is locked.
   */
  async acquireAny(resources: readonly string[], { target, weights, ...options }: AnyOptions): Promise<Lock> {
    const total = (weights ?? []).reduce<bigint>((sum, weight) => sum + BigInt(weight), BigInt(target));
    // JSON numbers beyond 2^53 are not exact, neither in the request nor in the sums of the answer.
    const toWire = total > Number.MAX_SAFE_INTEGER ? String : Number;
    return this.#request(resources, options, { target: toWire(target), weights: weights?.map((value) => toWire(value)) });
  }

  /**
   * Holds a lock while `work` runs, and releases it at the end. If the lock is lost, `lock.signal` is aborted; when `work`
   * has ended, this call rejects with the `LockLostError`, whose cause is the error of `work`. If the server does not confirm
   * the release, the result is returned nevertheless: the client repeats the release, and logs a warning.
   */
  async using<T>(resources: Resources, work: (lock: Lock) => Promise<T> | T, options: AcquireOptions = {}): Promise<T> {
    const lock = await this.acquire(resources, options);
    return this.block([lock], () => work(lock));
  }

  /** @internal */
  block<T>(locks: readonly Lock[], work: Work<T>, giveBack?: (lock: Lock) => Promise<void>): Promise<T> {
    return runBlock(locks, work, this.#session.logger, giveBack);
  }

  /**
   * Runs `work`, which locks what it needs step by step with `tx.lock`, and releases all locks at its end. If `work` rejects
   * with a `DeadlockError`, all locks are released, and `work` runs again after a random pause. Before that, all names that
   * it has asked for are locked in one request, which cannot deadlock. So `work` must be able to start over: it writes after
   * it has all locks, or undoes what it has written. `signal` is aborted when a lock is lost: then this call rejects with the
   * `LockLostError`, whose cause is the error of `work`.
   */
  transaction<T>(work: (tx: Transaction, signal: AbortSignal) => Promise<T> | T, options: TransactionOptions = {}): Promise<T> {
    return runTransaction(work, options, (resources, each) => this.acquire(resources, each), this.#session.logger);
  }

  /**
   * Leads while `work` runs: waits without a limit for an exclusive lock on `name`, which the client extends until `work`
   * has ended. If the leadership is lost, `leadership.signal` is aborted; when `work` has ended, this call rejects with the
   * `LockLostError`.
   */
  elect<T>(name: string, work: (leadership: Lock) => Promise<T> | T, options: ElectOptions = {}): Promise<T> {
    return this.using(`exclusive:${name}`, work, { ...options, queueTimeout: Infinity, watchdog: true });
  }

  /** Returns the present leader of an election: its `id`, `note`, `fence`, and `since` when it leads; undefined: none. */
  async leader(name: string, { signal }: CallOptions = {}): Promise<Holder | undefined> {
    return (await this.inspect({ resource: name, only: 'holders', limit: 1 }, { signal })).holders[0];
  }

  /** Watches the locks on resources whose names begin with `prefix`. The watch begins at once, also without a `next`. */
  watch(prefix: string, { signal }: CallOptions = {}): Watch {
    return new Watch(this.#session, prefix, signal);
  }

  /** Lists held locks and waiting requests. */
  async inspect(query: InspectQuery = {}, { signal }: CallOptions = {}): Promise<Inspection> {
    return (await this.#session.call('inspect', query, signal)) as Inspection;
  }

  /** Checks that the leader executes commands. */
  async ping({ signal }: CallOptions = {}): Promise<void> {
    await this.#session.call('ping', {}, signal);
  }

  /** Releases a lock, or cancels a waiting request, of any client. Resolves with the reason for which it has ended. */
  release(id: number, { signal }: CallOptions = {}): Promise<string> {
    return this.#session.releaseId(id, signal);
  }

  /** Sets the remaining time of a lock of any client to `transactionTimeout` ms from now. */
  extend(id: number, transactionTimeout: number, { signal }: CallOptions = {}): Promise<void> {
    return this.#session.extend(id, transactionTimeout, signal);
  }

  /**
   * Ends the session and the connection. Waiting calls reject with `ClosedError`. Held locks with `onDisconnect: 'release'`
   * are released. The others stay held until they are released by id or time out, which is logged; `release` releases them,
   * too. `drain` first waits for that many ms until the locks are released by their holders.
   */
  close(options: CloseOptions = {}): Promise<void> {
    return this.#session.close(options);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #request(names: readonly string[], options: AcquireOptions, anyOf?: object): Promise<Lock> {
    const { signal, watchdog = false, ...wire } = this.#defaults ? { ...this.#defaults, ...options } : options;
    const { transactionTimeout = 10_000, queueTimeout = 10_000, onDisconnect, priority = 0 } = wire;
    const wait = queueTimeout === Infinity ? MAX_TIMEOUT : queueTimeout;
    checkTimeout('queueTimeout', wait);
    checkTimeout('transactionTimeout', transactionTimeout);
    if (!Number.isFinite(priority)) throw new RangeError(`priority must be a finite number, not ${priority}`);
    const resources = names.map(withMode);
    // All other options are sent as they are: the server rejects an unknown or wrong one, and says what would be right.
    const payload = { ...(anyOf ? { anyOf: resources } : { resources }), ...wire, ...anyOf };
    if (wait !== queueTimeout) payload.queueTimeout = wait;
    const isBoundToSession = onDisconnect === 'release';
    const handling = { resources, queueTimeout: anyOf ? 0 : wait, transactionTimeout, watchdog, isBoundToSession };
    const request = await this.#session.request(payload, handling, signal);
    if (request.error) throw request.error; // lost at once, before the caller could continue
    return new Lock(this.#session, request);
  }
}

/**
 * Connects to the leader. Rejects with `UnavailableError` after `connectTimeout`, or with `RejectedError` if all servers
 * reject the client. With `lazy` it resolves at once.
 */
export async function connect(options: ConnectOptions = {}): Promise<Client> {
  const { signal, lazy = false, connectTimeout = 10_000 } = options;
  signal?.throwIfAborted();
  const timeout = checkTimeout('connectTimeout', connectTimeout);
  const session = new Session(options);
  try {
    if (!lazy) await session.call('ping', {}, signal, undefined, timeout);
  } catch (error) {
    await session.close({});
    throw error;
  }
  return new Client(session, options.defaults);
}
