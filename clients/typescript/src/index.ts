export { connect } from './client.js';
export type { AcquireOptions, AnyOptions, CallOptions, Client, ElectOptions, InspectQuery, TryOptions } from './client.js';
export type { ConnectOptions } from './config.js';
export { ClosedError, DeadlockError, DisconnectedError, GenieError, InsufficientError, LockError } from './errors.js';
export { LockLostError, QueueTimeoutError, RejectedError, TransactionTimeoutError, UnavailableError } from './errors.js';
export type { Blocker, Wait } from './errors.js';
export type { Lock } from './lock.js';
export type { Watch } from './watch.js';
export type { Change, Holder, Inspection, Waiter } from './wire.js';
