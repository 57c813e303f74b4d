// Blocks of work under locks: their ends, transactions, and jobs that run once.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { connect, DeadlockError, LockLostError, once, UnavailableError } from '../src/index.js';
import { aborted, connected, FakeServer, GenieServer, type FakeConnection } from './support.js';

const silent = { warn: () => {}, debug() {} };

/** A logger that keeps its warnings. */
function recorder(): { warnings: string[]; logger: typeof silent } {
  const warnings: string[] = [];
  return { warnings, logger: { ...silent, warn: (message?: string) => void warnings.push(message!) } };
}

async function confirm(connection: FakeConnection, reason = 'success'): Promise<number> {
  const { id, ref } = await connection.expect('release');
  connection.send('released', { id, reason, ref });
  return id;
}

test('work that has succeeded returns its result, although its release is not confirmed', async () => {
  const { warnings, logger } = recorder();
  await using fake = await connected({ responseTimeout: 50, logger });
  const { client, connection } = fake;
  const done = client.using('a', () => 'the result');
  await connection.grant(1);
  assert.equal(await done, 'the result');
  assert.match(warnings[0]!, /the end of lock 1 is not confirmed/);
  const block = (async () => {
    await using lock = await client.acquire('b');
    return lock.id;
  })();
  await connection.expect('release');
  await connection.grant(2);
  assert.equal(await block, 2);
  connection.socket.destroy();
  const next = await fake.server.accept();
  await next.handshake({ resumed: true });
  assert.deepEqual([await confirm(next), await confirm(next)], [1, 2]); // the releases go on
});

test('an explicit release rejects, and a second one waits again', async () => {
  await using fake = await connected({ responseTimeout: 50 });
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  await assert.rejects(lock.release(), UnavailableError);
  const again = lock.release();
  await confirm(connection);
  await confirm(connection);
  await again;
  await lock.release();
  assert.equal(lock.error, undefined);
});

test('using rejects with the loss that its release reports', async () => {
  await using fake = await connected();
  const failed = assert.rejects(fake.client.using('a', () => 'done'), LockLostError);
  await fake.connection.grant(1);
  await confirm(fake.connection, 'transaction-timeout');
  await failed;
});

test('a lock that is granted in the tick of its abort is released', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const controller = new AbortController();
  const held = client.acquire('a');
  const { ref: heldRef } = await connection.grant(1);
  (await held).signal.addEventListener('abort', () => controller.abort());
  const acquired = client.acquire('b', { signal: controller.signal });
  const { ref } = await connection.expect('request');
  const lines = [
    { command: 'released', payload: { id: 1, reason: 'success', ref: heldRef } },
    { command: 'locked', payload: { id: 2, fence: 1, ref } },
  ];
  connection.socket.write(lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
  await assert.rejects(acquired, { name: 'AbortError' });
  assert.equal(await confirm(connection), 2);
});

test('close waits for locks, releases them, or warns of the locks that stay held', async () => {
  const { warnings, logger } = recorder();
  await using fake = await connected({ logger });
  const { client, connection } = fake;
  const acquired = Promise.all([client.acquire('a'), client.acquire('b'), client.acquire('c', { onDisconnect: 'release' })]);
  for (const id of [1, 2, 3]) await connection.grant(id);
  const [lock] = await acquired;
  const closing = client.close({ drain: 100, release: true });
  await assert.rejects(client.acquire('d'), { code: 'closed' });
  const released = lock.release();
  assert.equal(await confirm(connection), 1);
  await released;
  assert.deepEqual([await confirm(connection), await confirm(connection)], [2, 3]);
  connection.send('bye', await connection.expect('bye'));
  await closing;
  assert.deepEqual(warnings, []);
  await using other = await connected({ logger });
  const kept = other.client.acquire('a');
  await other.connection.grant(7);
  await kept;
  other.connection.socket.destroy();
  await other.client.close();
  assert.match(warnings[0]!, /locks that stay held: 7 \(exclusive:a\)/);
});

test('a transaction takes all names in one request after a deadlock, and releases everything at its end', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const runs: number[] = [];
  const done = client.transaction(async (tx) => {
    const source = await tx.lock('shared:a');
    await tx.lock(['b', 'shared:c']);
    runs.push(tx.fence);
    assert.equal(await tx.lock('shared:c'), source);
    assert.notEqual(await tx.lock('a'), source);
    return 'moved';
  }, { transactionTimeout: 5_000, attempts: 3 });
  const first = await connection.grant(1);
  assert.match(first.transactionName, /^tx-[0-9a-f]{16}$/);
  const second = await connection.expect('request');
  assert.deepEqual([second.transactionName, second.transactionTimeout], [first.transactionName, 5_000]);
  connection.send('released', { id: 2, reason: 'deadlock', cycle: ['x', 'y'], waits: [], ref: second.ref });
  assert.equal(await confirm(connection), 1);
  const all = await connection.expect('request');
  assert.deepEqual(all.resources, ['shared:a', 'exclusive:b', 'shared:c']);
  connection.send('locked', { id: 3, fence: 30, ref: all.ref });
  const upgrade = await connection.expect('request'); // `a` was only asked for shared
  assert.deepEqual(upgrade.resources, ['exclusive:a']);
  connection.send('locked', { id: 4, fence: 31, ref: upgrade.ref });
  assert.deepEqual([await confirm(connection), await confirm(connection), await done], [3, 4, 'moved']);
  assert.deepEqual(runs, [30]);
});

test('the strongest modes of all attempts are requested, and only deadlocks are retried, up to a limit', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  let runs = 0;
  const failed = client.transaction(async (tx) => {
    runs++;
    await tx.lock('shared:a');
    await tx.lock('a');
  }, { attempts: 2, name: 't' });
  await connection.grant(1);
  const deadlock = async (): Promise<any> => {
    const { ref, resources } = await connection.expect('request');
    connection.send('released', { id: 2, reason: 'deadlock', cycle: ['t', 'y'], waits: [], ref });
    return resources;
  };
  assert.deepEqual(await deadlock(), ['exclusive:a']);
  await confirm(connection);
  assert.deepEqual(await deadlock(), ['exclusive:a']); // the whole request of the second attempt
  await assert.rejects(failed, DeadlockError);
  assert.equal(runs, 1);
  const other = assert.rejects(client.transaction(() => Promise.reject(new Error('work'))), /work/);
  await other;
});

test('after a deadlock the units of all calls are locked at once, and each call takes its part of them', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const done = client.transaction(async (tx) => {
    await tx.lock('2/10:a');
    await tx.lock(['1/10:a', '2/10:a']);
    await tx.lock('b');
    await tx.lock('1/10:a');
  });
  const deadlock = async (resources: string[]): Promise<void> => {
    const { ref, resources: asked } = await connection.expect('request');
    assert.deepEqual(asked, resources);
    connection.send('released', { id: 9, reason: 'deadlock', cycle: ['t', 'y'], waits: [], ref });
  };
  await connection.grant(1);
  await connection.grant(2);
  await deadlock(['exclusive:b']);
  assert.deepEqual([await confirm(connection), await confirm(connection)], [1, 2]);
  const all = await connection.expect('request');
  assert.deepEqual(all.resources, ['5/10:a', 'exclusive:b']);
  connection.send('locked', { id: 3, fence: 30, ref: all.ref });
  await deadlock(['1/10:a']); // beyond what the first attempt has asked for
  assert.equal(await confirm(connection), 3);
  const more = await connection.expect('request'); // what was locked first is not asked for twice
  assert.deepEqual(more.resources, ['6/10:a', 'exclusive:b']);
  connection.send('locked', { id: 4, fence: 31, ref: more.ref });
  assert.equal(await confirm(connection), 4);
  await done;
});

test('a lost lock aborts the signal of its transaction, which rejects with the loss', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  let onLocked = (): void => {};
  const locked = new Promise<void>((resolve) => (onLocked = resolve));
  const failed = client.transaction(async (tx, signal) => {
    await tx.lock('a');
    onLocked();
    await aborted(signal);
    assert.ok(signal.reason instanceof LockLostError);
    throw new Error('rolled back');
  }).catch((error: unknown) => error);
  const { ref } = await connection.grant(1);
  await locked;
  connection.send('released', { id: 1, reason: 'success', ref });
  const error = await failed;
  assert.ok(error instanceof LockLostError);
  assert.equal((error.cause as Error).message, 'rolled back');
});

test('a request that a transaction does not wait for is cancelled at its end', async () => {
  await using fake = await connected();
  const controller = new AbortController();
  let pending: Promise<unknown> = Promise.resolve();
  await fake.client.transaction((tx) => {
    pending = tx.lock('a', { signal: controller.signal }).catch((error: unknown) => error);
    void tx.lock('b').catch(() => {});
  }, { signal: AbortSignal.timeout(60_000) });
  assert.equal(((await pending) as LockLostError).code, 'released');
});

test('a lock that is granted in the read in which its transaction ends is released', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const other = client.acquire('other');
  const { ref: otherRef } = await connection.expect('request');
  let last: Promise<unknown> = Promise.resolve();
  const done = client.transaction(async (tx) => {
    await tx.lock('a');
    last = tx.lock('b').catch((error: unknown) => error);
    return other;
  });
  await connection.grant(1);
  const { ref } = await connection.expect('request');
  const lines = [
    { command: 'locked', payload: { id: 2, fence: 2, ref } },
    { command: 'released', payload: { id: 3, reason: 'queue-timeout', ref: otherRef } },
  ];
  connection.socket.write(lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
  await assert.rejects(done, { code: 'queue-timeout' });
  assert.equal(((await last) as LockLostError).code, 'released');
  assert.deepEqual([await confirm(connection), await confirm(connection)].sort(), [1, 2]);
});

test('a lock that is granted while the locks of its transaction are released is released, too', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  let last: Promise<unknown> = Promise.resolve();
  let finish = (): void => {};
  const done = client.transaction(async (tx) => {
    await tx.lock('a');
    last = tx.lock('b').catch((error: unknown) => error);
    await new Promise<void>((resolve) => (finish = resolve));
  });
  await connection.grant(1);
  const { ref } = await connection.expect('request');
  finish();
  const first = await connection.expect('release');
  connection.send('locked', { id: 2, fence: 2, ref });
  const second = await connection.expect('release');
  assert.deepEqual(new Set([first, second].map(({ id, ref }) => id ?? ref)), new Set([1, ref]));
  for (const { id = 2, ref } of [first, second]) connection.send('released', { id, reason: 'success', ref });
  await done;
  assert.equal(((await last) as LockLostError).code, 'released');
});

test('transactions in opposite orders need at most two attempts', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  let most = 0;
  let deadlocks = 0;
  const clerk = async (order: string[]): Promise<void> => {
    for (let round = 0; round < 8; round++) {
      let attempts = 0;
      await client.transaction(async (tx) => {
        attempts++;
        for (const name of order) {
          await tx.lock(name);
          await sleep(1);
        }
      });
      most = Math.max(most, attempts);
      deadlocks += attempts - 1;
    }
  };
  await Promise.all([['a', 'b'], ['b', 'a'], ['a', 'b'], ['b', 'a']].map(clerk));
  assert.ok(deadlocks > 0 && most === 2, `${deadlocks} deadlocks, at most ${most} attempts`);
  assert.equal((await client.inspect()).holdersTotal, 0);
});

test('the leader of an election is known, and a lock knows when it expires', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  assert.equal(await client.leader('leader/x'), undefined);
  await client.elect('leader/x', async (leadership) => {
    const leader = await client.leader('leader/x');
    assert.deepEqual([leader!.id, leader!.note], [leadership.id, 'me']);
    assert.ok(Math.abs(leadership.expiresAt - Date.now() - 60_000) < 10_000);
  }, { note: 'me', transactionTimeout: 60_000 });
});

test('once keeps its lock after a job that has succeeded, also if the connection is lost then', async () => {
  await using server = await FakeServer.start();
  const { warnings, logger } = recorder();
  const report = once('jobs/report', 60_000, () => 'the report', { host: server.host, token: '', responseTimeout: 50, logger });
  const running = report();
  const connection = await server.accept();
  await connection.handshake();
  const { queueTimeout, transactionTimeout } = await connection.grant(1);
  assert.deepEqual([queueTimeout, transactionTimeout], [0, 60_000]);
  assert.equal((await connection.expect('extend')).transactionTimeout, 60_000);
  connection.socket.destroy();
  assert.equal(await running, 'the report');
  assert.match(warnings.join(), /the end of lock 1 is not confirmed/);
});

test('once skips a job that has run, releases after a failure, and reports a loss', async () => {
  await using server = await GenieServer.start();
  const options = { host: server.host };
  await using client = await connect(options);
  const report = once('jobs/report', 60_000, () => 'the report', options);
  assert.deepEqual([await report(), await report()], ['the report', undefined]);
  await assert.rejects(once('jobs/failing', 60_000, () => Promise.reject(new Error('job')), options)(), /job/);
  assert.deepEqual((await client.inspect()).holders.map(({ resources }) => resources), [['exclusive:jobs/report']]);
  const lost = once('jobs/lost', 60_000, async (signal) => {
    await client.release((await client.leader('jobs/lost'))!.id);
    await aborted(signal);
  }, options);
  await assert.rejects(lost(), LockLostError);
});
