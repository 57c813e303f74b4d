import type { Session } from './session.js';
import type { Change, Watching } from './wire.js';

/** A watch with more unconsumed changes ignores events, and asks for a snapshot later. One snapshot may exceed it. */
const MAX_BUFFERED_CHANGES = 10_000;

type Result = IteratorResult<Change, undefined>;

/**
 * The changes of the locks on resources with a prefix: `for await (const change of client.watch('token/'))`.
 *
 * The iteration begins with a `locked` change for each held lock. After a reconnect, or if changes arrive faster than they
 * are consumed, the watch compares a snapshot of the held locks with the changes that it has reported, and reports the
 * difference. So a consumer that applies all changes has the current state, but may miss a lock that was held only briefly.
 */
export class Watch implements AsyncIterator<Change, undefined>, AsyncDisposable {
  /** The `ref` of the last `watch` command. @internal */
  ref: string | undefined;
  /** Whether the server sends events for this watch on the current connection. @internal */
  isSubscribed = false;
  readonly #session: Session;
  readonly #signal: AbortSignal | undefined;
  /** `lagging`: the watch needs a snapshot, and ignores events until it arrives. */
  #state: 'lagging' | 'requested' | 'live' | 'ended' = 'lagging';
  /** Whether no snapshot has arrived yet. A later one is requested when the consumer waits. */
  #isNew = true;
  #truncated = false;
  #error: unknown;
  #changes: Change[] = [];
  /** The locks that are held after all `#changes`, by resource and id. */
  readonly #held = new Map<string, Map<number, Change>>();
  #consumers: { resolve: (result: Result) => void; reject: (error: unknown) => void }[] = [];
  readonly #onAbort = (): void => this.end(this.#signal?.reason);

  /** @internal */
  constructor(session: Session, readonly prefix: string, signal?: AbortSignal) {
    this.#session = session;
    this.#signal = signal;
    signal?.throwIfAborted();
    session.addWatch(this);
    signal?.addEventListener('abort', this.#onAbort);
  }

  /** Whether the last snapshot left out held locks, because there are more than the server lists. */
  get truncated(): boolean {
    return this.#truncated;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** Waits for the next change. */
  next(): Promise<Result> {
    return new Promise((resolve, reject) => {
      this.#consumers.push({ resolve, reject });
      this.#deliver();
      if (this.needsSnapshot) this.#session.sendWatches();
    });
  }

  /** Ends the watch. Leaving a `for await` loop calls this method. */
  async return(): Promise<Result> {
    this.end();
    return { done: true, value: undefined };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.end();
  }

  /** Whether the `watch` command must be sent now. @internal */
  get needsSnapshot(): boolean {
    return this.#state === 'lagging' && (this.#isNew || this.#consumers.length > 0);
  }

  /** The `watch` command is sent with this `ref`. @internal */
  onRequested(ref: string): void {
    this.ref = ref;
    this.#state = 'requested';
    this.isSubscribed = true;
  }

  /** The server sends no events any more, so the watch needs a snapshot. @internal */
  onUnsubscribed(): void {
    this.isSubscribed = false;
    if (this.#state !== 'ended') this.#state = 'lagging';
  }

  /** Reports what leads from the locks that were reported to those of a snapshot. @internal */
  onSnapshot({ held, truncated }: Watching): void {
    if (this.#state !== 'requested') return;
    this.#state = 'live';
    this.#isNew = false;
    this.#truncated = truncated;
    const present = new Set(held.map(({ id, resource }) => `${id} ${resource}`));
    for (const { id, resource } of [...this.#held.values()].flatMap((locks) => [...locks.values()])) {
      if (!truncated && !present.has(`${id} ${resource}`)) this.#unlock(resource, id);
    }
    for (const row of held) this.#lock({ state: 'locked', ...row });
    this.#deliver();
  }

  /** @internal */
  onEvent(event: Change): void {
    if (this.#state !== 'live' || !event.resource.startsWith(this.prefix)) return;
    if (this.#changes.length >= MAX_BUFFERED_CHANGES) this.#state = 'lagging';
    else if (event.state === 'locked') this.#lock(event);
    else if (event.state === 'unlocked') this.#unlock(event.resource, event.id);
    this.#deliver();
  }

  /** Ends the watch, with an error for the consumer. @internal */
  end(error?: unknown): void {
    if (this.#state === 'ended') return;
    this.#state = 'ended';
    this.#error = error;
    this.#changes = [];
    this.#held.clear();
    this.#signal?.removeEventListener('abort', this.#onAbort);
    this.#session.removeWatch(this);
    this.#deliver();
  }

  /** Reports a lock, unless it was reported before. A reported lock that conflicts with it must have ended. */
  #lock(change: Change): void {
    const locks = this.#held.get(change.resource) ?? new Map<number, Change>();
    if (locks.has(change.id)) return;
    for (const other of [...locks.values()]) if (conflict(change, other)) this.#unlock(other.resource, other.id);
    locks.set(change.id, change);
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

  /** Gives changes, and then the end, to the consumers that wait. */
  #deliver(): void {
    while (this.#consumers.length && (this.#changes.length || this.#state === 'ended')) {
      const { resolve, reject } = this.#consumers.shift()!;
      const change = this.#changes.shift();
      if (change) {
        resolve({ done: false, value: change });
      } else if (this.#error !== undefined) {
        reject(this.#error); // once: the iteration has ended
        this.#error = undefined;
      } else {
        resolve({ done: true, value: undefined });
      }
    }
  }
}

function conflict(a: Change, b: Change): boolean {
  if (a.transactionName !== undefined && a.transactionName === b.transactionName) return false;
  return a.mode === 'exclusive' || b.mode === 'exclusive';
}
