import { onAbort, type Command } from './calls.js';
import type { Session } from './session.js';
import type { Change, Watching } from './wire.js';

/** A watch with more unconsumed changes ignores events, and asks for a snapshot later. One snapshot may exceed it. */
const MAX_BUFFERED_CHANGES = 10_000;
/** How many reported locks that are missing from a truncated snapshot still count as held. Their ends may have been missed. */
const MAX_UNLISTED_LOCKS = 100_000;

type Result = IteratorResult<Change, undefined>;

/**
 * The changes of the locks on resources with a prefix: `for await (const change of client.watch('token/'))`.
 *
 * The iteration begins with a `locked` change for each held lock. After a reconnect, or if changes arrive faster than they
 * are consumed, the watch compares a snapshot of the held locks with the changes that it has reported, and reports the
 * difference. So a consumer that applies all changes has the current state, but may miss a lock that was held only briefly.
 */
export class Watch implements AsyncIterator<Change, undefined>, AsyncDisposable {
  readonly #session: Session;
  #stopListening = (): void => {};
  /** `lagging`: the watch needs a snapshot, which it requests when its consumer waits. Only `live` follows the events. */
  #state: 'requested' | 'live' | 'lagging' | 'ended' = 'requested';
  /** The last `watch` command. */
  #command: Command;
  #truncated = false;
  #error: unknown;
  /** The changes that the consumer takes next, the first one at the end: to take it does not move the others. */
  #next: Change[] = [];
  /** The changes after `#next`. */
  #changes: Change[] = [];
  /** The locks that are held after all `#changes`, by resource and id. */
  readonly #held = new Map<string, HeldLocks>();
  readonly #iterator = this.#iterate();
  /** Continues the iteration. undefined: its consumer does not wait. */
  #wake: (() => void) | undefined;

  /** @internal */
  constructor(session: Session, readonly prefix: string, signal?: AbortSignal) {
    this.#session = session;
    signal?.throwIfAborted();
    this.#command = session.subscribe(this);
    if (signal) this.#stopListening = onAbort(signal, () => this.end(signal.reason));
  }

  /** Whether the last snapshot may lack held locks, because there are more than the server searches or lists. */
  get truncated(): boolean {
    return this.#truncated;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** Waits for the next change. */
  next(): Promise<Result> {
    return this.#iterator.next();
  }

  /** Ends the watch. Leaving a `for await` loop calls this method. */
  return(): Promise<Result> {
    this.end();
    return this.#iterator.return(undefined);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.end();
  }

  /** The server sends no events any more. @internal */
  onLagged(): void {
    if (this.#state === 'live') this.#state = 'lagging';
    this.#requestSnapshot();
  }

  /** Reports what leads from the locks that were reported to those of a snapshot. @internal */
  onSnapshot({ held, truncated }: Watching): void {
    this.#state = 'live';
    this.#truncated = truncated;
    const reported = [...this.#held.values()].flatMap((locks) => [...locks.values()]);
    if (!truncated || reported.length > MAX_UNLISTED_LOCKS) {
      const present = new Set(held.map(({ id, resource }) => `${id} ${resource}`));
      const missing = reported.filter(({ id, resource }) => !present.has(`${id} ${resource}`));
      if (truncated) missing.splice(-MAX_UNLISTED_LOCKS); // what is left are the oldest
      for (const { id, resource } of missing) this.#unlock(resource, id);
    }
    for (const row of held) this.#lock({ state: 'locked', ...row });
    this.#wake?.();
  }

  /** @internal */
  onEvent(event: Change | { state: 'lagged' }): void {
    if (event.state === 'lagged') return this.onLagged();
    if (this.#state !== 'live' || !matches(this.prefix, event.resource)) return;
    if (this.#next.length + this.#changes.length >= MAX_BUFFERED_CHANGES) this.#state = 'lagging';
    else if (event.state === 'locked') this.#lock(event);
    else if (event.state === 'unlocked') this.#unlock(event.resource, event.id);
    this.#wake?.();
  }

  /** Ends the watch, with an error for the consumer. @internal */
  end(error?: unknown): void {
    if (this.#state === 'ended') return;
    this.#state = 'ended';
    this.#error = error;
    this.#next = [];
    this.#changes = [];
    this.#held.clear();
    this.#stopListening();
    this.#session.unsubscribe(this, this.#command);
    this.#wake?.();
  }

  async *#iterate(): AsyncGenerator<Change, undefined> {
    while (this.#state !== 'ended') {
      if (!this.#next.length) [this.#next, this.#changes] = [this.#changes.reverse(), this.#next];
      const change = this.#next.pop();
      if (change) {
        yield change;
      } else {
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
          this.#requestSnapshot();
        });
        this.#wake = undefined;
      }
    }
    if (this.#error !== undefined) throw this.#error;
    return undefined;
  }

  #requestSnapshot(): void {
    if (this.#state !== 'lagging' || !this.#wake) return;
    this.#state = 'requested';
    this.#command = this.#session.subscribe(this);
  }

  /** Reports a lock, unless it was reported before. A reported lock that conflicts with it must have ended. */
  #lock(change: Change): void {
    const locks = this.#held.get(change.resource) ?? new HeldLocks();
    if (locks.has(change.id)) return;
    for (const other of locks.conflictingWith(change)) this.#unlock(other.resource, other.id);
    locks.add(change);
    this.#held.set(change.resource, locks);
    this.#changes.push(change);
  }

  #unlock(resource: string, id: number): void {
    const locks = this.#held.get(resource);
    const locked = locks?.get(id);
    if (!locks || !locked) return;
    locks.delete(id);
    if (!locks.size) this.#held.delete(resource);
    this.#changes.push({ ...locked, state: 'unlocked' });
  }
}

/**
 * The reported locks on one resource, by id, which do not conflict with each other. A resource may have thousands of shared locks.
 * So a new lock is compared with each of them only if not all have its mode, which is not exclusive, or its transaction.
 */
class HeldLocks extends Map<number, Change> {
  /** The mode and the transaction of all locks. undefined: they may have several. */
  #mode: string | undefined;
  #transaction: string | undefined;

  add(change: Change): void {
    if (!this.size) this.#mode = change.mode;
    if (!this.size) this.#transaction = change.transactionName;
    if (change.mode !== this.#mode) this.#mode = undefined;
    if (change.transactionName !== this.#transaction) this.#transaction = undefined;
    this.set(change.id, change);
  }

  conflictingWith(change: Change): Change[] {
    if (change.mode === this.#mode && change.mode !== 'exclusive') return [];
    if (change.transactionName !== undefined && change.transactionName === this.#transaction) return [];
    const all = [...this.values()];
    const first = all[0]; // locks may have ended since: the next call may be shorter
    this.#mode = all.every(({ mode }) => mode === first?.mode) ? first?.mode : undefined;
    const isOwn = ({ transactionName }: Change): boolean => transactionName === first?.transactionName;
    this.#transaction = all.every(isOwn) ? first?.transactionName : undefined;
    return all.filter((other) => conflict(change, other));
  }
}

/** Returns whether two locks on one resource conflict. Units exclude each other only by their number. */
function conflict(a: Change, b: Change): boolean {
  if (a.transactionName !== undefined && a.transactionName === b.transactionName) return false;
  return a.mode !== b.mode || a.mode === 'exclusive';
}

/** Returns whether a resource has the prefix, or is a subtree that contains all names with the prefix. */
function matches(prefix: string, resource: string): boolean {
  const isSubtree = resource === '**' || resource.endsWith('/**');
  return resource.startsWith(prefix) || (isSubtree && prefix.startsWith(resource.slice(0, -2)));
}
