import type { Blocker, ErrorReply, Released, Wait } from './wire.js';

/** The `code` of an error: of this client, of the end of a lock or request, or of an `error` of the server, which may be new. */
export type ErrorCode =
  | 'unavailable' | 'closed'
  | 'queue-timeout' | 'deadlock' | 'insufficient' | 'transaction-timeout' | 'disconnected' | 'released' | 'lost'
  | 'bad-json' | 'bad-message' | 'bad-request' | 'line-too-long' | 'ref-conflict' | 'too-many' | 'unauthorized'
  | 'session-taken-over' | 'unknown-command' | 'unknown-id' | 'unknown-namespace' | 'unsupported-protocol'
  | (string & {});

/** The base class of all errors of this package, except for wrong arguments. `code` identifies the kind of error. */
export class GenieError extends Error {
  constructor(readonly code: ErrorCode, message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The server rejected a command, which has changed nothing. `code` is the code of the server's `error`. */
export class RejectedError extends GenieError {}

/**
 * No server responds, none is the leader, or the leader cannot reach its store. Retry later. `cause` is the error of the
 * last connection.
 */
export class UnavailableError extends GenieError {
  constructor(message: string, options?: ErrorOptions) {
    super('unavailable', message, options);
  }
}

/** The client was closed. */
export class ClosedError extends GenieError {
  constructor() {
    super('closed', 'the client was closed');
  }
}

/** A lock request failed, or its lock was lost. `id` is the id of the request. */
export class LockError extends GenieError {
  constructor(code: ErrorCode, message: string, readonly id: number) {
    super(code, message);
  }
}

/** The request waited for `waited` ms and was not granted. `blockers` are the first ten of `blockersTotal` blockers. */
export class QueueTimeoutError extends LockError {
  constructor(id: number, readonly waited: number, readonly blockers: readonly Blocker[], readonly blockersTotal: number) {
    const more = blockersTotal > blockers.length ? ` and ${blockersTotal - blockers.length} more` : '';
    const list = blockers.length ? `: ${blockers.map(describe).join(', ')}${more}` : '';
    super('queue-timeout', `request ${id} was not granted within ${waited} ms${list}`, id);
  }
}

/**
 * The request would have closed a cycle of held locks. Release the locks of the transaction, wait, and start over.
 * `cycle` lists the transactions, beginning with that of this request: each waits for the next, the last for the first.
 */
export class DeadlockError extends LockError {
  constructor(id: number, readonly cycle: readonly string[], readonly waits: readonly Wait[]) {
    super('deadlock', `request ${id} would deadlock: ${describeCycle(cycle, waits)}`, id);
  }
}

/** Describes a deadlock: of each transaction what it would wait for, as `2/10:NAME` for units, and the transaction that holds it. */
function describeCycle(cycle: readonly string[], waits: readonly Wait[]): string {
  const closed = [...cycle, ...cycle.slice(0, 1)];
  if (cycle.length === 0 || waits.length !== cycle.length) return closed.join(' → ');
  const steps = waits.map(({ resource, units, of }, index) =>
    `${units === undefined ? resource : `${units}/${of}:${resource}`} of ${closed[index + 1]}`);
  return `${cycle[0]} would wait for ${steps.join(', which waits for ')}`;
}

/** The weights of the `free` resources do not reach the target of `acquireAny`. Nothing was locked. */
export class InsufficientError extends LockError {
  constructor(id: number, readonly free: bigint, readonly locked: bigint) {
    super('insufficient', `request ${id} locked nothing: ${free} is free, ${locked} is locked by others`, id);
  }
}

/** A granted lock is no longer held. Another client may hold it now: undo the work that the lock protected. */
export class LockLostError extends LockError {}

/** The lock was held for longer than its `transactionTimeout`. */
export class TransactionTimeoutError extends LockLostError {}

/** The session to which the lock was bound has ended. */
export class DisconnectedError extends LockLostError {}

/** Returns the error for a request that ended before it was granted. @internal */
export function notGranted(released: Released): LockError {
  const { id, reason, waited = 0, blockers = [], blockersTotal = blockers.length, free = 0, locked = 0 } = released;
  if (reason === 'queue-timeout') return new QueueTimeoutError(id, waited, blockers, blockersTotal);
  if (reason === 'deadlock') return new DeadlockError(id, released.cycle ?? [], released.waits ?? []);
  if (reason === 'insufficient') return new InsufficientError(id, BigInt(free), BigInt(locked));
  if (reason === 'transaction-timeout') return lost(id, reason); // granted, and expired while the client was disconnected
  if (reason === 'success') return new LockError('released', `request ${id} was released by its id`, id);
  return new LockError(reason, `request ${id} ended before it was granted: ${reason}`, id);
}

/** Returns the error for a granted lock that has ended before its release. `lost`: the server has forgotten it. @internal */
export function lost(id: number, reason: string): LockLostError {
  if (reason === 'transaction-timeout') {
    return new TransactionTimeoutError(reason, `lock ${id} was held for longer than its transaction timeout`, id);
  }
  if (reason === 'disconnected') return new DisconnectedError(reason, `lock ${id} ended with its session`, id);
  if (reason === 'success') return new LockLostError('released', `lock ${id} was released by its id, not by its holder`, id);
  const text = reason === 'lost' ? 'is lost: its session or the state of the server has ended' : `has ended: ${reason}`;
  return new LockLostError(reason, `lock ${id} ${text}`, id);
}

/** Converts an `error` of the server. @internal */
export function fromReply({ code, message, leader }: ErrorReply): GenieError {
  if (code !== 'unavailable') return new RejectedError(code, `${code}: ${message}`);
  return new UnavailableError(leader ? `${message} (the leader is ${leader})` : message);
}

function describe({ id, mode, units, of, resource, state, transactionName, note }: Blocker): string {
  const owner = (transactionName ? ` of '${transactionName}'` : '') + (note ? ` (${note})` : '');
  return `${id}${owner} ${state === 'held' ? 'holds' : 'waits for'} ${units ? `${units}/${of}` : mode}:${resource}`;
}
