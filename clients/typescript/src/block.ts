// The locks of a block: they are given back when its work has ended.
import type { Lock } from './lock.js';
import type { Logger } from './options.js';

/** A function that works under locks. @internal */
export type Work<T> = () => Promise<T> | T;

/**
 * Runs `work` under locks, to which it may add, and then gives them back. Rejects with the `LockLostError` if one was lost
 * during the work, with the error of the work as its cause. Work that has succeeded does not fail because the server has not
 * confirmed the end of a lock: that is logged. @internal
 */
export async function runBlock<T>(
  locks: readonly Lock[], work: Work<T>, logger: Logger, giveBack = (lock: Lock): Promise<void> => lock.release(),
): Promise<T> {
  const findLoss = (): Error | undefined => locks.find((lock) => lock.error)?.error;
  let result: T;
  try {
    result = await work();
  } catch (error) {
    const loss = findLoss();
    if (loss && loss !== error) loss.cause ??= error;
    // The error of the work is reported at once, also without a connection. The release continues in the background.
    for (const lock of locks) lock.release().catch(() => {});
    throw loss ?? error;
  }
  let loss = findLoss();
  const end = async (lock: Lock): Promise<void> => {
    await giveBack(lock).catch((error: Error) => {
      if (!lock.error) logger.warn(`the end of lock ${lock.id} is not confirmed: ${error.message}`);
    });
  };
  await Promise.all(locks.map(end));
  loss ??= findLoss();
  if (loss) throw loss;
  return result;
}
