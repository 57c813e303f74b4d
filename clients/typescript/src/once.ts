import { connect } from './client.js';
import type { ConnectOptions } from './options.js';

/**
 * Returns a function for a scheduler, which skips a job that another process runs now, or has completed within the last
 * `hold` ms. It resolves with the result of the job; undefined: it was skipped. The job is passed a signal that is aborted if
 * the lock on `name` is lost: then the function rejects with a `LockLostError`. The lock is released if the job fails. After
 * a job that has succeeded it stays held, also if the connection is lost then, which is logged.
 */
export function once<T>(
  name: string, hold: number, job: (signal: AbortSignal) => Promise<T> | T, options: ConnectOptions = {},
): () => Promise<T | undefined> {
  return async () => {
    const client = await connect(options);
    try {
      const lock = await client.tryAcquire(name, { transactionTimeout: hold, watchdog: true, onDisconnect: 'keep' });
      if (!lock) return undefined;
      return await client.block([lock], () => job(lock.signal), async () => {
        await lock.extend(hold).finally(() => lock.held && lock.detach());
      });
    } finally {
      await client.close();
    }
  };
}
