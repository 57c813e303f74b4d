// Transactions that lock one resource after the other, and start over after a deadlock.
import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { runBlock } from './block.js';
import { checkedController, onAbort } from './calls.js';
import { DeadlockError, LockError } from './errors.js';
import type { Lock } from './lock.js';
import type { AcquireOptions, Logger, TransactionOptions } from './options.js';
import { addTo, split, withMode } from './wire.js';

const DEFAULT_ATTEMPTS = 10;
/** The greatest pause (ms) after a deadlock, which doubles each time. */
const FIRST_PAUSE = 50;
const MAX_PAUSE = 2_000;

type Acquire = (resources: readonly string[], options: AcquireOptions) => Promise<Lock>;
/** What the attempts of a transaction share. `wanted`: what they have asked for, one resource for each name. */
type Shared = { name: string; options: AcquireOptions; wanted: Map<string, string>; acquire: Acquire };

/** One attempt of a transaction. */
export class Transaction {
  /** The `transactionName` of its requests. */
  readonly name: string;
  /** @internal */
  readonly locks: Lock[] = [];
  readonly #shared: Shared;
  /** What this attempt has asked for, one resource for each name. Units are added up. */
  readonly #asked = new Map<string, string>();
  /** The units, by name, that `begin` has locked, and `work` has not asked for yet. */
  readonly #reserved = new Map<string, { units: number; of: number }>();
  readonly #controller = checkedController(() => void this.locks.some((lock) => !lock.held));
  readonly #stopListening;

  /** @internal */
  constructor(shared: Shared) {
    this.#shared = shared;
    this.name = shared.name;
    const { signal } = shared.options;
    this.#stopListening = signal && onAbort(signal, () => this.#controller.abort(signal.reason));
  }

  /** Is aborted when a lock of the transaction is lost, and at its end. @internal */
  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** The greatest fencing token of its locks so far; 0: it has none. */
  get fence(): number {
    return Math.max(0, ...this.locks.map(({ fence }) => fence));
  }

  /**
   * Locks resources, all at once, for the rest of the transaction. Resolves at once if it has a lock that includes them; but
   * each call locks further units.
   * Rejects as `acquire` does; let a `DeadlockError` leave the work, so that the transaction starts over.
   */
  async lock(resources: string | readonly string[], options: Omit<AcquireOptions, 'transactionName'> = {}): Promise<Lock> {
    const names = (typeof resources === 'string' ? [resources] : resources).map(withMode);
    const { acquire, options: common } = this.#shared;
    const merged = new Map<string, string>();
    for (const resource of names) addTo(merged, resource, true);
    for (const resource of merged.values()) addTo(this.#asked, resource, true);
    const found = this.locks.find((lock) => lock.held && [...merged.values()].every((resource) => this.#includes(lock, resource)));
    if (found) {
      for (const resource of merged.values()) this.#useReserved(resource);
      return found;
    }
    const signal = options.signal ? AbortSignal.any([options.signal, this.signal]) : this.signal;
    const lock = await acquire(names, { ...common, ...options, signal, transactionName: this.name });
    if (this.signal.aborted) { // after the grant, before this function could continue: nothing else would release the lock
      lock.release().catch(() => {});
      throw this.signal.reason;
    }
    this.locks.push(lock);
    onAbort(lock.signal, () => this.#controller.abort(lock.error));
    return lock;
  }

  /** Locks everything that earlier attempts have asked for in one request, which cannot deadlock. @internal */
  async begin(): Promise<void> {
    const resources = [...this.#shared.wanted.values()];
    if (!resources.length) return;
    await this.lock(resources);
    this.#asked.clear(); // `work` asks for the same units again
    for (const { name, units, of } of resources.map(split)) if (of) this.#reserved.set(name, { units, of });
  }

  /** Returns whether a lock has a resource in this mode or a stronger one, or `begin` has locked its units. */
  #includes(lock: Lock, resource: string): boolean {
    const { name, units, of } = split(resource);
    if (lock.resources.includes(`exclusive:${name}`)) return true;
    if (!of) return lock.resources.includes(resource);
    const left = this.#reserved.get(name);
    return lock === this.locks[0] && left !== undefined && units <= left.units && left.of <= of;
  }

  #useReserved(resource: string): void {
    const { name, units } = split(resource);
    const left = this.#reserved.get(name);
    if (left) left.units -= units;
  }

  /** Cancels the requests that still wait, and keeps what was asked for. @internal */
  end(): void {
    for (const resource of this.#asked.values()) addTo(this.#shared.wanted, resource, false);
    this.#stopListening?.();
    this.#controller.abort(new LockError('released', `the transaction ${this.name} has ended`, 0));
  }
}

/** Runs `work` as a transaction, again after each deadlock. @internal */
export async function runTransaction<T>(
  work: (tx: Transaction, signal: AbortSignal) => Promise<T> | T, options: TransactionOptions, acquire: Acquire, logger: Logger,
): Promise<T> {
  const { name = `tx-${randomBytes(8).toString('hex')}`, attempts = DEFAULT_ATTEMPTS, ...others } = options;
  const shared = { name, options: others, wanted: new Map<string, string>(), acquire };
  for (let attempt = 1; ; attempt++) {
    others.signal?.throwIfAborted();
    const tx = new Transaction(shared);
    try {
      // The transaction ends before its locks are released: otherwise a lock that is granted meanwhile would never be released.
      return await runBlock(tx.locks, () => tx.begin().then(() => work(tx, tx.signal)).finally(() => tx.end()), logger);
    } catch (error) {
      if (!(error instanceof DeadlockError) || attempt >= attempts) throw error;
    }
    const limit = Math.min(FIRST_PAUSE * 2 ** (attempt - 1), MAX_PAUSE);
    await sleep(Math.random() * limit, undefined, { signal: others.signal }).catch(() => {});
  }
}
