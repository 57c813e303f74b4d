// A CommonJS program of a user, which pages.test.ts compiles with full checks of the package's types.
import { connect, DeadlockError, type Change, type Client, type Lock } from 'genie-lock';

export async function transfer(client: Client): Promise<bigint | string> {
  const lock: Lock | null = await client.tryAcquire(['shared:a', 'b'], { signal: AbortSignal.timeout(10) });
  const watch = client.watch('a');
  const { value } = await watch.next();
  const change: Change | undefined = value;
  // @ts-expect-error: a change may be missing at the end, so its type is not `any`.
  value.resource.toUpperCase();
  // @ts-expect-error: only the client makes locks.
  new Lock();
  return change?.resource ?? lock?.resources[0] ?? '';
}

export async function main(): Promise<void> {
  await using client = await connect({ host: ['a', 'b'], tls: { rejectUnauthorized: true } });
  try {
    await transfer(client);
  } catch (error) {
    if (error instanceof DeadlockError) throw new Error(error.cycle.join(), { cause: error });
  }
}
