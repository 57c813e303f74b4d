// Transactions that lock one resource after the other, and start over after a deadlock.
import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { runBlock } from './block.js';
import { checkedController, onAbort } from './calls.js';
import { DeadlockError, LockError } from './errors.js';
import type { Lock } from './lock.js';
import type { AcquireOptions, Logger, TransactionOptions } from './options.js';
import { withMode } from './wire.js';

const DEFAULT_ATTEMPTS = 10;
/** The greatest pause (ms) after a deadlock, which doubles each time. */
const FIRST_PAUSE = 50;
const MAX_PAUSE = 2_000;

type Acquire = (resources: readonly string[], options: AcquireOptions) => Promise<Lock>;
/** What the attempts of a transaction share. `wanted`: the names that they have asked for; true: exclusively. */
type Shared = { name: string; options: AcquireOptions; wanted: Map<string, boolean>; acquire: Acquire };

/** One attempt of a transaction. */
export class Transaction {
  /** The `transactionName` of its requests. */
  readonly name: string;
  /** @internal */
  readonly locks: Lock[] = [];
  readonly #shared: Shared;
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
   * Locks resources, all at once, for the rest of the transaction. Resolves at once if it has a lock that includes them.
   * Rejects as `acquire` does; let a `DeadlockError` leave the work, so that the transaction starts over.
   */
  async lock(resources: string | readonly string[], options: Omit<AcquireOptions, 'transactionName'> = {}): Promise<Lock> {
    const names = (typeof resources === 'string' ? [resources] : resources).map(withMode);
    const { wanted, acquire, options: common } = this.#shared;
    for (const resource of names) {
      const name = resource.slice(resource.indexOf(':') + 1);
      wanted.set(name, resource.startsWith('exclusive:') || wanted.get(name) === true);
    }
    const isIncluded = (held: readonly string[]) => (resource: string) =>
      held.includes(resource) || held.includes(resource.replace(/^shared:/, 'exclusive:'));
    const found = this.locks.find((lock) => lock.held && names.every(isIncluded(lock.resources)));
    if (found) return found;
    const signal = options.signal ? AbortSignal.any([options.signal, this.signal]) : this.signal;
    const lock = await acquire(names, { ...common, ...options, signal, transactionName: this.name });
    this.locks.push(lock);
    onAbort(lock.signal, () => this.#controller.abort(lock.error));
    return lock;
  }

  /** Locks all names that earlier attempts have asked for in one request, which cannot deadlock. @internal */
  async begin(): Promise<void> {
    const names = [...this.#shared.wanted].map(([name, isExclusive]) => `${isExclusive ? 'exclusive' : 'shared'}:${name}`);
    if (names.length) await this.lock(names);
  }

  /** Cancels the requests that still wait. @internal */
  end(): void {
    this.#stopListening?.();
    this.#controller.abort(new LockError('released', `the transaction ${this.name} has ended`, 0));
  }
}

/** Runs `work` as a transaction, again after each deadlock. @internal */
export async function runTransaction<T>(
  work: (tx: Transaction, signal: AbortSignal) => Promise<T> | T, options: TransactionOptions, acquire: Acquire, logger: Logger,
): Promise<T> {
  const { name = `tx-${randomBytes(8).toString('hex')}`, attempts = DEFAULT_ATTEMPTS, ...others } = options;
  const shared = { name, options: others, wanted: new Map<string, boolean>(), acquire };
  for (let attempt = 1; ; attempt++) {
    others.signal?.throwIfAborted();
    const tx = new Transaction(shared);
    try {
      return await runBlock(tx.locks, () => tx.begin().then(() => work(tx, tx.signal)), logger);
    } catch (error) {
      if (!(error instanceof DeadlockError) || attempt >= attempts) throw error;
    } finally {
      tx.end();
    }
    const limit = Math.min(FIRST_PAUSE * 2 ** (attempt - 1), MAX_PAUSE);
    await sleep(Math.random() * limit, undefined, { signal: others.signal }).catch(() => {});
  }
}
