export { connect } from './client.js';
export type { AcquireOptions, AnyOptions, Client, ElectOptions, InspectQuery, TryOptions } from './client.js';
export type { ConnectOptions } from './config.js';
export { ClosedError, DeadlockError, DisconnectedError, GenieError, InsufficientError, LockError } from './errors.js';
export { LockLostError, QueueTimeoutError, RejectedError, TransactionTimeoutError, UnavailableError } from './errors.js';
export type { ErrorCode } from './errors.js';
export type { CallOptions, Lock } from './lock.js';
export type { Watch } from './watch.js';
export type { Blocker, Change, Holder, Inspection, Wait, Waiter } from './wire.js';
