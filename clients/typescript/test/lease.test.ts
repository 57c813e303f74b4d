// The lease of the session, and what a lock says when the event loop was blocked: with a clock that the tests move.
import assert from 'node:assert/strict';
import { afterEach, beforeEach, mock, test } from 'node:test';
import { DisconnectedError, LockLostError, TransactionTimeoutError, type Lock } from '../src/index.js';
import { aborted, connected } from './support.js';

let skipped = 0;

beforeEach(() => {
  skipped = 0;
  const now = performance.now.bind(performance);
  mock.method(performance, 'now', () => now() + skipped);
});

afterEach(() => mock.restoreAll());

/** What the members of a lock say, each asked first in one of the rounds. */
function views(lock: Lock): boolean[] {
  return [lock.held, !lock.signal.aborted, lock.error === undefined];
}

test('the members of a lock agree right after the event loop was blocked', async () => {
  for (const first of ['held', 'error', 'signal', 'throwIfAborted'] as const) {
    await using fake = await connected();
    const { client, connection } = fake;
    const acquired = client.acquire('a', { transactionTimeout: 5_000 });
    await connection.grant(1);
    const lock = await acquired;
    const { signal } = lock;
    assert.deepEqual(views(lock), [true, true, true]);
    skipped += 6_000; // no timer has fired
    if (first === 'throwIfAborted') assert.throws(() => signal.throwIfAborted(), TransactionTimeoutError);
    else if (first === 'signal') assert.ok(signal.aborted && signal.reason instanceof TransactionTimeoutError);
    else assert.equal(Boolean(lock[first]), first === 'error');
    assert.deepEqual(views(lock), [false, false, false]);
    assert.equal(signal.reason, lock.error);
  }
});

test('using rejects with the loss after a blocked event loop, with the error of the work as its cause', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const block = (): void => void (skipped += 20_000);
  const failed = client.using('a', () => (block(), Promise.reject(new Error('work')))).catch((error: unknown) => error);
  await connection.grant(1);
  const error = await failed;
  assert.ok(error instanceof TransactionTimeoutError);
  assert.equal((error.cause as Error).message, 'work');
  const done = assert.rejects(client.using('a', block), TransactionTimeoutError);
  await connection.grant(2);
  await done;
});

test('a lock is lost and its signal aborted before a caller of the same read can see one without the other', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  const { ref } = await connection.grant(1);
  const lock = await acquired;
  const { signal } = lock;
  const seen = client.ping().then(() => [signal.aborted, lock.held]);
  const ping = await connection.expect('ping');
  const lines = [{ command: 'pong', payload: ping }, { command: 'released', payload: { id: 1, reason: 'success', ref } }];
  connection.socket.write(lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
  assert.deepEqual(await seen, [true, false]);
});

test('a lock that a resumed session does not report is never half lost', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  const { signal } = lock;
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: true });
  await next.expect('release'); // its answer would be the reason
  assert.deepEqual(views(lock), [false, false, false]);
  assert.ok(signal.reason instanceof LockLostError);
});

test('a bound lock ends when the session timeout has passed since the last answered command was sent', async () => {
  await using fake = await connected({ sessionTimeout: 10_000 });
  const { client, connection } = fake;
  const bound = client.acquire('a', { onDisconnect: 'release', transactionTimeout: 600_000 });
  await connection.grant(1);
  const lock = await bound;
  skipped += 6_000;
  const pinged = client.ping();
  const ping = await connection.expect('ping');
  skipped += 3_000; // the answer is late
  connection.send('pong', ping);
  await pinged;
  skipped += 6_500;
  assert.equal(lock.held, true);
  // Messages that answer no command do not renew the lease.
  connection.send('event', { state: 'locked', resource: 'x', mode: 'exclusive', id: 9 });
  skipped += 1_000;
  assert.equal(lock.held, false);
  assert.ok(lock.error instanceof DisconnectedError && lock.signal.aborted);
  assert.equal((await nextOf(connection, 'release')).id, 1); // the server may still hold it
});

test('a bound lock is extended before it is granted, if little of the lease remains', async () => {
  await using fake = await connected({ sessionTimeout: 10_000 });
  const { client, connection } = fake;
  const bound = client.acquire('a', { onDisconnect: 'release', transactionTimeout: 600_000 });
  const { ref } = await connection.expect('request');
  skipped += 6_000;
  connection.send('locked', { id: 1, fence: 1, ref });
  const extend = await nextOf(connection, 'extend');
  connection.send('extended', { id: 1, transactionTimeout: 600_000, ref: extend.ref });
  const lock = await bound;
  skipped += 9_000;
  assert.equal(lock.held, true);
});

test('the lease is renewed by pings while a lock is bound to the session, and only then', async () => {
  await using fake = await connected({ sessionTimeout: 300 });
  const { client, connection } = fake;
  const free = client.acquire('a');
  await connection.grant(1);
  const bound = client.acquire('b', { onDisconnect: 'release', transactionTimeout: 600_000 });
  await connection.grant(2);
  const [, lock] = await Promise.all([free, bound]);
  for (let round = 0; round < 6; round++) connection.send('pong', await connection.expect('ping'));
  assert.equal(lock.held, true);
  await connection.expect('ping'); // is not answered
  assert.ok((await aborted(lock.signal)) instanceof DisconnectedError);
});

async function nextOf(connection: Awaited<ReturnType<typeof connected>>['connection'], command: string): Promise<any> {
  for (;;) {
    const sent = await connection.next();
    if (sent.command === command) return sent.payload;
    assert.equal(sent.command, 'ping');
  }
}

test('a bound lock is lost before the server executes the bye', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a', { onDisconnect: 'release' });
  await connection.grant(1);
  const lock = await acquired;
  const closed = client.close();
  const { ref } = await nextOf(connection, 'bye');
  assert.equal(lock.held, false);
  assert.ok(lock.error instanceof DisconnectedError);
  connection.send('bye', { ref });
  await closed;
});
