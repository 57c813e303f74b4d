// Tests with a scripted server: what the client sends, and what its callers get.
import assert from 'node:assert/strict';
import { getEventListeners, once } from 'node:events';
import { test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  ClosedError, connect, DeadlockError, DisconnectedError, InsufficientError, LockLostError, QueueTimeoutError,
  RejectedError, TransactionTimeoutError, UnavailableError, type Lock,
} from '../src/index.js';
import { Watch } from '../src/watch.js';
import { aborted, connected, FakeServer, within } from './support.js';

test('commands of one tick are sent in one write', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const locks = Array.from({ length: 50 }, (_, id) => client.acquire(`r${id}`));
  for (let id = 1; id <= 50; id++) await connection.grant(id);
  assert.equal(connection.chunks, 1);
  connection.chunks = 0;
  // The callers continue at different times, but all after the same read of the client.
  connection.socket.pause();
  const released = locks.map(async (lock) => (await lock).release());
  connection.socket.resume();
  for (let id = 1; id <= 50; id++) {
    const release = await connection.expect('release');
    connection.send('released', { id: release.id, reason: 'success', ref: release.ref });
  }
  await Promise.all(released);
});

test('a request contains the options as on the wire', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire(['shared:a', 'b'], {
    queueTimeout: Infinity, transactionTimeout: 500.5, transactionName: 't-1', priority: 3, onDisconnect: 'release', note: 'n',
  });
  const { ref, ...payload } = await connection.grant(7);
  assert.deepEqual(payload, {
    resources: ['shared:a', 'exclusive:b'], queueTimeout: 2147483647, transactionTimeout: 500.5, transactionName: 't-1',
    priority: 3, onDisconnect: 'release', note: 'n',
  });
  const lock = await acquired;
  assert.deepEqual([lock.id, lock.fence, lock.resources, lock.held], [7, 107, ['shared:a', 'exclusive:b'], true]);
});

test('wrong arguments reject without being sent', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  await assert.rejects(client.acquire('a', { transactionTimeout: NaN }), RangeError);
  await assert.rejects(client.acquire('a', { queueTimeout: -1 }), RangeError);
  await assert.rejects(client.acquire('a', { priority: Infinity }), RangeError);
  await assert.rejects(client.acquire('exclusiv:a'), TypeError);
  await assert.rejects(client.acquire('exclusive:\ud800'), TypeError);
  await assert.rejects(client.acquire('x'.repeat(1 << 20)), RangeError);
  await assert.rejects(connect({ host: fake.server.host, token: '\ud800' }), TypeError);
  const literal = client.acquire('exclusive:\\ud800'); // a backslash and letters
  assert.equal((await connection.grant(1)).resources[0], 'exclusive:\\ud800');
  await literal;
  assert.equal(connection.unread, 0);
});

test('errors have the details of the server', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const fail = async (payload: object): Promise<unknown> => {
    const failed = client.acquire('a').catch((error: unknown) => error);
    const { ref } = await connection.expect('request');
    connection.send('released', { id: 5, ref, ...payload });
    return failed;
  };
  const blocker = { id: 4, resource: 'a', mode: 'exclusive', state: 'held', since: 1, transactionName: 't', note: 'n' };
  const timeout = await fail({ reason: 'queue-timeout', waited: 20, blockers: [blocker], blockersTotal: 3 });
  assert.ok(timeout instanceof QueueTimeoutError);
  assert.deepEqual([timeout.id, timeout.waited, timeout.blockers, timeout.blockersTotal], [5, 20, [blocker], 3]);
  assert.match(timeout.message, /4 of 't' \(n\) holds exclusive:a and 2 more/);
  const deadlock = await fail({ reason: 'deadlock', cycle: ['x', 'y'], waits: [{ resource: 'a', waiter: 5, holder: 4 }] });
  assert.ok(deadlock instanceof DeadlockError);
  assert.deepEqual([deadlock.cycle, deadlock.waits.length, deadlock.code], [['x', 'y'], 1, 'deadlock']);
  const insufficient = await fail({ reason: 'insufficient', free: '9007199254740993', locked: 1 });
  assert.ok(insufficient instanceof InsufficientError);
  assert.deepEqual([insufficient.free, insufficient.locked], [9007199254740993n, 1n]);
  const unknown = (await fail({ reason: 'of-tomorrow' })) as LockLostError;
  assert.equal(unknown.code, 'of-tomorrow');
});

test('tryAcquire resolves with null if the lock is not free', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const tried = client.tryAcquire('a');
  const request = await connection.expect('request');
  assert.equal(request.queueTimeout, 0);
  connection.send('released', { id: 1, reason: 'queue-timeout', waited: 0, blockers: [], blockersTotal: 0, ref: request.ref });
  assert.equal(await tried, null);
});

test('acquireAny sends great weights as strings and keeps the chosen resources', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const small = client.acquireAny(['a', 'shared:b', 'c'], { target: 2, weights: [1, 1, 1] });
  const request = await connection.expect('request');
  assert.deepEqual([request.anyOf, request.target, request.weights], [['exclusive:a', 'shared:b', 'exclusive:c'], 2, [1, 1, 1]]);
  connection.send('locked', { id: 1, fence: 1, ref: request.ref, resources: ['c', 'b'] });
  assert.deepEqual((await small).resources, ['shared:b', 'exclusive:c']);
  const great = client.acquireAny(['a'], { target: 5, weights: [2n ** 70n] });
  const sent = await connection.grant(2);
  assert.deepEqual([sent.target, sent.weights], ['5', [String(2n ** 70n)]]);
  await great;
});

test('an aborted acquire is released by its ref, and rejects with the reason of the signal', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const controller = new AbortController();
  const acquired = client.acquire('a', { signal: controller.signal });
  const { ref } = await connection.expect('request');
  controller.abort(new Error('enough'));
  await assert.rejects(acquired, /enough/);
  assert.deepEqual(await connection.expect('release'), { ref });
  await assert.rejects(client.acquire('b', { signal: controller.signal }), /enough/);
  await assert.rejects(client.ping({ signal: controller.signal }), /enough/);
  assert.equal(connection.unread, 0);
});

test('a request that is aborted in the tick of its call is not sent', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const controller = new AbortController();
  connection.socket.destroy();
  const connection2 = await fake.server.accept();
  const acquired = client.acquire('a', { signal: controller.signal });
  controller.abort();
  await assert.rejects(acquired, { name: 'AbortError' });
  await connection2.handshake();
  const other = client.acquire('b');
  assert.deepEqual((await connection2.grant(1)).resources, ['exclusive:b']);
  await other;
});

test('many calls share a signal without a warning, and leave no listener', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const warnings: Error[] = [];
  const onWarning = (warning: Error): number => warnings.push(warning);
  process.on('warning', onWarning);
  const controller = new AbortController();
  const { signal } = controller;
  const watch = client.watch('', { signal });
  await connection.expect('watch');
  const calls = Array.from({ length: 20 }, () => client.ping({ signal }));
  for (const _ of calls) connection.send('pong', await connection.expect('ping'));
  await Promise.all(calls);
  await watch.return();
  assert.equal(getEventListeners(signal, 'abort').length, 0);
  await sleep(0);
  process.off('warning', onWarning);
  assert.deepEqual(warnings, []);
});

test('an aborted release, extend, inspect and ping stop waiting', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  const controller = new AbortController();
  const { signal } = controller;
  const calls = [lock.extend(50_000, { signal }), client.inspect({}, { signal }), client.ping({ signal }), lock.release({ signal })];
  for (const command of ['extend', 'inspect', 'ping', 'release']) await connection.expect(command);
  controller.abort();
  for (const call of calls) await assert.rejects(call, { name: 'AbortError' });
});

test('an aborted signal does not prevent a release, and a second release waits for the first', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  await assert.rejects(lock.release({ signal: AbortSignal.abort() }), { name: 'AbortError' });
  const release = await connection.expect('release');
  let isReleased = false;
  const second = lock.release().then(() => (isReleased = true));
  const pinged = client.ping();
  connection.send('pong', await connection.expect('ping'));
  await pinged;
  assert.equal(isReleased, false);
  connection.send('released', { id: 1, reason: 'success', ref: release.ref });
  await second;
  assert.equal(connection.unread, 0);
});

test('an extension that is repeated after the release reports no loss', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  const extended = assert.rejects(lock.extend(5000), LockLostError);
  const extend = await connection.expect('extend');
  const released = lock.release();
  const release = await connection.expect('release');
  connection.send('error', { code: 'unavailable', message: 'no store', id: 1, ref: extend.ref });
  connection.send('released', { id: 1, reason: 'success', ref: release.ref });
  await released;
  assert.deepEqual(await connection.expect('extend'), extend);
  connection.send('released', { id: 1, reason: 'success', ref: extend.ref });
  await extended;
  assert.deepEqual([lock.error, lock.signal.aborted], [undefined, false]);
});

test('an error in reply to an extension does not affect a release that is on its way', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  const extended = assert.rejects(lock.extend(5000), RejectedError);
  const extend = await connection.expect('extend');
  const released = lock.release();
  const release = await connection.expect('release');
  connection.send('error', { code: 'unauthorized', message: 'no', id: 1, ref: extend.ref });
  connection.send('released', { id: 1, reason: 'success', ref: release.ref });
  await Promise.all([extended, released]);
  assert.deepEqual([lock.error, lock.signal.aborted], [undefined, false]);
});

test('a lock of this client that it releases by id is not held from then on', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  const { signal } = lock;
  const waiting = client.acquire('a');
  const { ref } = await connection.expect('request');
  const released = client.release(1);
  const release = await connection.expect('release');
  assert.deepEqual([lock.held, signal.aborted], [false, true]); // the server may have executed it, although no answer arrives
  connection.socket.destroy();
  const next = await fake.server.accept();
  await next.handshake({ resumed: true, state: [['locked', { id: 2, fence: 102, expiresIn: 5_000, ref }]] });
  assert.equal((await waiting).held, true);
  const repeated = await next.expect('release');
  assert.deepEqual([repeated.id, repeated.ref], [1, release.ref]);
  next.send('released', { id: 1, reason: 'success', ref: release.ref });
  assert.equal(await released, 'success');
  assert.ok(lock.error instanceof LockLostError);
});

test('a release by id repeats the waiting requests only if a waiting request was released', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const waiting = assert.rejects(client.acquire('a'), { code: 'released' });
  const request = await connection.expect('request');
  const release = async (id: number, inspected: object): Promise<void> => {
    const released = client.release(id);
    const inspect = await connection.expect('inspect');
    assert.deepEqual([inspect.id, inspect.only], [id, 'queue']);
    const { ref } = await connection.expect('release');
    connection.send('code' in inspected ? 'error' : 'inspected', { ...inspected, ref: inspect.ref });
    connection.send('released', { id, reason: 'success', ref });
    assert.equal(await released, 'success');
  };
  const none = { holders: [], holdersTotal: 1, queue: [], queueTotal: 0 };
  await release(98, none); // a lock of another client
  await release(99, { code: 'unauthorized', message: 'no' }); // it may wait
  assert.deepEqual(await connection.expect('request'), request);
  await release(1, { ...none, queueTotal: 1 });
  assert.deepEqual(await connection.expect('request'), request);
  connection.send('released', { id: 1, reason: 'success', ref: request.ref });
  await waiting;
  const acquired = client.acquire('b');
  const { ref } = await connection.grant(2);
  connection.send('locked', { id: 2, fence: 102, expiresIn: 0, ref }); // the answer to a repetition that crossed the grant
  const lock = await acquired;
  const pinged = client.ping();
  connection.send('pong', await connection.expect('ping'));
  await pinged;
  assert.equal(lock.held, true);
});

test('a release by id whose caller has given up repeats the waiting requests, too', async () => {
  await using fake = await connected({ responseTimeout: 50 });
  const { client, connection } = fake;
  const waiting = assert.rejects(client.acquire('a', { queueTimeout: Infinity }), { code: 'released' });
  const request = await connection.expect('request');
  const released = client.release(1);
  await connection.expect('inspect');
  const { ref } = await connection.expect('release');
  await assert.rejects(released, UnavailableError);
  connection.send('released', { id: 1, reason: 'success', ref });
  assert.deepEqual(await connection.expect('request'), request);
  connection.send('released', { id: 1, reason: 'success', ref: request.ref });
  await waiting;
});

test('a release by id that crosses the grant of the own request ends its lock', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  const request = await connection.expect('request');
  const released = client.release(1);
  const { ref: inspectRef } = await connection.expect('inspect');
  const { ref } = await connection.expect('release');
  connection.send('locked', { id: 1, fence: 101, ref: request.ref });
  const lock = await acquired;
  connection.send('inspected', { holders: [], holdersTotal: 1, queue: [], queueTotal: 0, ref: inspectRef });
  connection.send('released', { id: 1, reason: 'success', ref });
  assert.equal(await released, 'success');
  assert.equal(lock.held, false);
  assert.equal(lock.error!.code, 'released');
});

test('extend and release by id do not look through all requests', async (context) => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = Promise.all(['a', 'b'].map((name) => client.acquire(name)));
  for (const id of [1, 2]) await connection.grant(id);
  await acquired;
  void client.extend(1, 5_000).catch(() => {}); // makes the index
  const scans = [Map.prototype.values, Map.prototype.entries].map((scan) => context.mock.method(Map.prototype, scan.name as 'values'));
  void client.extend(2, 5_000).catch(() => {});
  void client.release(1).catch(() => {});
  assert.deepEqual(scans.map((scan) => scan.mock.callCount()), [0, 0]);
  assert.deepEqual([(await connection.expect('extend')).id, (await connection.expect('extend')).id], [1, 2]);
});

test('a leader leads under a lock without a queue timeout, which is extended', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const led = client.elect('leader/a:b', async (leadership) => {
    await aborted(leadership.signal);
    return 'unreachable, because the leadership is lost';
  }, { transactionTimeout: 150, note: 'n', onDisconnect: 'keep' });
  const { ref, ...payload } = await connection.grant(1);
  assert.deepEqual(payload, { resources: ['exclusive:leader/a:b'], transactionTimeout: 150, note: 'n', onDisconnect: 'keep', queueTimeout: 2147483647 });
  assert.equal((await connection.expect('extend')).transactionTimeout, 150);
  const rejected = assert.rejects(led, { code: 'released' });
  connection.send('released', { id: 1, reason: 'success', ref });
  await rejected;
});

test('using releases at the end, also if the work fails', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const done = client.using('a', async (lock) => {
    await sleep(0);
    return lock.id;
  });
  await connection.grant(3);
  const release = await connection.expect('release');
  connection.send('released', { id: 3, reason: 'success', ref: release.ref });
  assert.equal(await done, 3);
  const failed = assert.rejects(client.using('a', () => Promise.reject(new Error('work'))), /work/);
  await connection.grant(4);
  assert.equal((await connection.expect('release')).id, 4);
  await failed;
});

test('using aborts the signal when the lock is lost, and rejects after the end of the work', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  let isEnded = false;
  let onStart = (): void => {};
  const started = new Promise<void>((resolve) => (onStart = resolve));
  const done = client.using('a', async (lock) => {
    onStart();
    await aborted(lock.signal);
    isEnded = true;
    throw new Error('rolled back');
  });
  const { ref } = await connection.grant(3);
  await started;
  connection.send('released', { id: 3, reason: 'transaction-timeout', held: 10, ref });
  const error = await done.catch((caught: unknown) => caught);
  assert.ok(error instanceof TransactionTimeoutError && isEnded);
  assert.equal((error.cause as Error).message, 'rolled back');
});

test('a lock that is lost at once rejects the call', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = assert.rejects(client.acquire('a'), LockLostError);
  const { ref } = await connection.expect('request');
  const lines = [{ command: 'locked', payload: { id: 4, fence: 1, ref } }, { command: 'released', payload: { id: 4, reason: 'success', ref } }];
  connection.socket.write(lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
  await acquired;
});

test('await using releases at the end of the block', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const work = (async () => {
    await using lock = await client.acquire('a');
    return lock.id;
  })();
  await connection.grant(3);
  const release = await connection.expect('release');
  connection.send('released', { id: 3, reason: 'success', ref: release.ref });
  assert.equal(await work, 3);
});

test('a release that crosses a timeout reports the loss', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  const { ref } = await connection.grant(3);
  const lock = await acquired;
  const released = lock.release();
  const release = await connection.expect('release');
  connection.send('released', { id: 3, reason: 'transaction-timeout', held: 10, ref });
  connection.send('released', { id: 3, reason: 'transaction-timeout', ref: release.ref });
  await released;
  assert.ok((await aborted(lock.signal)) instanceof TransactionTimeoutError);
  await lock.release(); // does nothing
  assert.equal(connection.unread, 0);
});

test('a lock times out by the clock of the client', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a', { transactionTimeout: 80 });
  await connection.grant(3);
  const lock = await acquired;
  assert.ok((await aborted(lock.signal)) instanceof TransactionTimeoutError);
  assert.equal(lock.held, false);
  await assert.rejects(lock.extend(1000), TransactionTimeoutError);
});

test('the time of a lock counts from its request, and after a long wait from an extend', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a', { transactionTimeout: 300 });
  const request = await connection.expect('request');
  await sleep(100);
  connection.send('locked', { id: 3, fence: 1, ref: request.ref });
  const lock = await acquired;
  const extend = await connection.expect('extend');
  assert.deepEqual([extend.id, extend.transactionTimeout], [3, 300]);
  connection.send('released', { id: 3, reason: 'transaction-timeout', ref: extend.ref });
  assert.ok((await aborted(lock.signal)) instanceof TransactionTimeoutError);
});

test('a lock that may have timed out on its way is not granted before it is extended', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const late = async (): Promise<[Promise<Lock>, string]> => {
    const acquired = client.acquire('a', { transactionTimeout: 100 });
    const { ref } = await connection.expect('request');
    await sleep(120);
    connection.send('locked', { id: 3, fence: 1, ref });
    return [acquired, ref];
  };
  const [lost] = await late();
  const extend = await connection.expect('extend');
  const rejected = assert.rejects(lost, TransactionTimeoutError);
  connection.send('released', { id: 3, reason: 'transaction-timeout', ref: extend.ref });
  await rejected;
  const [acquired] = await late();
  connection.send('extended', { id: 3, transactionTimeout: 100, ref: (await connection.expect('extend')).ref });
  assert.equal((await acquired).held, true);
  const [interrupted, ref] = await late();
  await connection.expect('extend');
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: true, state: [['locked', { id: 3, fence: 1, expiresIn: 5_000, ref }]] });
  const lock = await interrupted;
  assert.equal(lock.held, true);
  const again = await next.expect('extend');
  next.send('extended', { id: 3, transactionTimeout: 5_000, ref: again.ref });
  await sleep(120);
  assert.equal(lock.held, true);
});

test('an extension in the background counts although its answer takes longer than responseTimeout', async () => {
  await using fake = await connected({ responseTimeout: 50 });
  const { client, connection } = fake;
  const acquired = client.acquire('a', { transactionTimeout: 1_000, queueTimeout: Infinity });
  const request = await connection.expect('request');
  await sleep(600);
  connection.send('locked', { id: 3, fence: 1, ref: request.ref });
  const { ref } = await connection.expect('extend');
  await sleep(100);
  connection.send('extended', { id: 3, transactionTimeout: 1_000, ref });
  assert.equal((await within(acquired, 'the grant')).held, true);
});

test('an extension whose caller has given up counts, and is not repeated', async () => {
  await using fake = await connected({ responseTimeout: 50 });
  const { client, connection } = fake;
  const acquired = client.acquire('a', { transactionTimeout: 400 });
  await connection.grant(3);
  const lock = await acquired;
  await assert.rejects(lock.extend(60_000), UnavailableError);
  connection.send('extended', { id: 3, transactionTimeout: 60_000, ref: (await connection.expect('extend')).ref });
  await assert.rejects(lock.extend(50_000), UnavailableError);
  const { ref } = await connection.expect('extend');
  connection.send('error', { code: 'unavailable', message: 'no store', ref });
  await sleep(500);
  assert.equal(lock.held, true);
  assert.equal(connection.unread, 0);
});

test('an extension by 0 ms, which the server rejects, does not end the lock', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  await connection.grant(3);
  const lock = await acquired;
  const rejected = assert.rejects(lock.extend(0), RejectedError);
  const { ref } = await connection.expect('extend');
  connection.send('error', { code: 'bad-request', message: 'at least 1', ref });
  await rejected;
  assert.ok(lock.held);
});

test('the watchdog extends a lock until it is released', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a', { transactionTimeout: 150, watchdog: true });
  await connection.grant(3);
  const lock = await acquired;
  for (let round = 0; round < 4; round++) {
    const extend = await connection.expect('extend');
    connection.send('extended', { id: 3, transactionTimeout: 150, ref: extend.ref });
  }
  assert.equal(lock.held, true);
  const released = lock.release();
  for (;;) {
    const { command, payload } = await connection.next();
    if (command === 'extend') continue;
    connection.send('released', { id: 3, reason: 'success', ref: payload.ref });
    break;
  }
  await released;
  assert.equal(lock.signal.aborted, false);
});

test('a detached lock is neither extended nor released nor reported', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const acquired = client.acquire('a', { transactionTimeout: 60, watchdog: true });
  const { ref } = await connection.grant(3);
  const lock = await acquired;
  assert.equal(lock.detach(), 3);
  await lock.release();
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: true, state: [['locked', { id: 3, fence: 1, expiresIn: 50, ref }]] });
  await sleep(100);
  next.send('released', { id: 3, reason: 'transaction-timeout', ref });
  const pinged = client.ping();
  next.send('pong', await next.expect('ping')); // the first command
  await pinged;
  assert.deepEqual([lock.held, lock.signal.aborted], [false, false]);
  const bound = client.acquire('b', { onDisconnect: 'release' });
  await next.grant(4);
  const boundLock = await bound;
  assert.throws(() => boundLock.detach(), TypeError);
});

test('messages that arrive byte by byte are understood', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('ä→😀');
  const { ref, resources } = await connection.expect('request');
  assert.deepEqual(resources, ['exclusive:ä→😀']);
  const lines = [
    { command: 'of-tomorrow', payload: { text: 'ä→😀' } },
    { command: 'locked', payload: { id: 1, fence: 2, ref, unknown: '😀' } },
  ];
  const bytes = Buffer.from(lines.map((line) => `${JSON.stringify(line)}\r\n\n`).join(''));
  for (const byte of bytes) {
    connection.socket.write(Buffer.of(byte));
    await new Promise(setImmediate);
  }
  assert.equal((await acquired).fence, 2);
});

test('a connection that is cut after any number of bytes loses no lock', async () => {
  await using fake = await connected();
  const { client, server } = fake;
  let { connection } = fake;
  const line = JSON.stringify({ command: 'locked', payload: { id: 1, fence: 2, ref: 'REF' } });
  for (let cut = 1; cut < line.length; cut += 3) {
    const acquired = client.acquire('a');
    const { ref, ...payload } = await connection.expect('request');
    connection.socket.end(line.slice(0, cut));
    connection = await server.accept();
    await connection.handshake({ resumed: true });
    assert.deepEqual(await connection.expect('request'), { ...payload, ref });
    connection.send('locked', { id: cut, fence: cut, ref });
    const lock = await acquired;
    const released = lock.release();
    const release = await connection.expect('release');
    connection.socket.destroy();
    connection = await server.accept();
    await connection.handshake({ resumed: true });
    assert.deepEqual(await connection.expect('release'), release);
    connection.send('error', { code: 'unknown-id', message: 'forgotten', id: cut, ref: release.ref });
    await released;
    assert.equal(lock.error, undefined);
  }
});

test('a server that sends many unknown locks and answers no release is left', async () => {
  await using fake = await connected();
  const { connection, server } = fake;
  for (let id = 1; id <= 2_000; id++) { // without end if the server answers
    connection.send('locked', { id, fence: id, ref: 'unknown' });
    const { ref } = await connection.expect('release');
    connection.send('released', { id, reason: 'success', ref });
  }
  for (let id = 1; id <= 1_001; id++) connection.send('locked', { id, fence: id, ref: 'unknown' });
  await connection.closed();
  const next = await server.accept();
  await next.handshake({ resumed: true });
  for (let id = 1; id <= 1_000; id++) assert.equal((await next.expect('release')).id, id); // and no others are added
  next.send('locked', { id: 1_001, fence: 1, ref: 'unknown' });
  await next.closed();
  assert.equal(next.unread, 0);
  const refusing = await server.accept();
  const { ref } = await refusing.expect('hello');
  refusing.send('error', { code: 'unauthorized', message: 'no', ref }); // fails the callers; the releases have no answer yet
  const last = await server.accept();
  await last.handshake({ resumed: true });
  last.send('locked', { id: 1_001, fence: 1, ref: 'unknown' });
  await last.closed();
});

test('what has no answer is sent again in its order', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const held = client.acquire('held');
  const { ref: heldRef } = await connection.grant(1);
  const lock = await held;
  const waiting = client.acquire('waiting');
  const extended = lock.extend(5_000);
  const inspected = client.inspect({ resource: 'held' });
  const cancelling = new AbortController();
  const cancelled = client.acquire('cancelled', { signal: cancelling.signal });
  for (const command of ['request', 'extend', 'inspect', 'request']) await connection.expect(command);
  cancelling.abort();
  await assert.rejects(cancelled);
  await connection.expect('release');
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: true, state: [['locked', { id: 1, fence: 101, expiresIn: 4000, ref: heldRef }]] });
  const sent = [await next.next(), await next.next(), await next.next(), await next.next()];
  assert.deepEqual(sent.map(({ command }) => command), ['request', 'extend', 'inspect', 'release']);
  next.send('locked', { id: 2, fence: 2, ref: sent[0]!.payload.ref });
  next.send('extended', { id: 1, transactionTimeout: 5000, ref: sent[1]!.payload.ref });
  next.send('inspected', { holders: [], holdersTotal: 0, queue: [], queueTotal: 0, ref: sent[2]!.payload.ref });
  await Promise.all([waiting, extended, inspected]);
});

test('locks that a resumed session does not report are lost, and then released', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lost = aborted((await acquired).signal);
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: true });
  assert.ok((await lost) instanceof LockLostError); // the server may hold it without a session
  assert.equal((await next.expect('release')).id, 1);
});

test('locks of a forgotten session are lost and released, and requests are repeated', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const held = client.acquire('a');
  await connection.grant(1);
  const lock = await held;
  const waiting = client.acquire('b');
  const request = await connection.expect('request');
  const extended = lock.extend(1000).catch((error: unknown) => error);
  await connection.expect('extend');
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: false });
  assert.ok((await aborted(lock.signal)) instanceof LockLostError);
  assert.ok((await extended) instanceof LockLostError);
  assert.deepEqual(await next.expect('request'), request);
  assert.equal((await next.expect('release')).id, 1);
  next.send('locked', { id: 2, fence: 2, ref: request.ref });
  await waiting;
});

test('a lock that is bound to its session ends when the session may have ended', async () => {
  await using fake = await connected({ sessionTimeout: 80 });
  const { client, connection, server } = fake;
  const acquired = client.acquire('a', { onDisconnect: 'release' });
  await connection.grant(1);
  const lock = await acquired;
  server.server.close();
  connection.socket.destroy();
  assert.ok((await aborted(lock.signal)) instanceof DisconnectedError);
});

test('a command that is answered with unavailable is repeated on the same connection', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const acquired = client.acquire('a');
  const request = await connection.expect('request');
  connection.send('error', { code: 'unavailable', message: 'no store', ref: request.ref });
  assert.deepEqual(await connection.expect('request'), request);
  connection.send('locked', { id: 1, fence: 1, ref: request.ref });
  const lock = await acquired;
  const extended = lock.extend(5000);
  const extend = await connection.expect('extend');
  connection.send('error', { code: 'unavailable', message: 'no store', id: 1, ref: extend.ref });
  assert.deepEqual(await connection.expect('extend'), extend);
  connection.send('extended', { id: 1, transactionTimeout: 5000, ref: extend.ref });
  await extended;
});

test('the client follows the leader', async () => {
  await using follower = await FakeServer.start();
  await using leader = await FakeServer.start();
  const connecting = connect({ host: follower.host, token: '' });
  const refused = await follower.accept();
  const hello = await refused.expect('hello');
  refused.send('error', { code: 'unavailable', message: 'follower', leader: leader.host, ref: hello.ref });
  const connection = await leader.accept();
  assert.equal((await connection.handshake()).session, hello.session);
  const client = await connecting;
  connection.socket.destroy();
  await (await follower.accept()).closed;
  await leader[Symbol.asyncDispose]();
  await client.close();
});

test('a server that hangs is left after a ping without an answer', async () => {
  await using fake = await connected({ responseTimeout: 100, pingInterval: 100 });
  const { client, connection, server } = fake;
  const waiting = client.acquire('a').catch((error: unknown) => error);
  await connection.expect('request');
  await connection.expect('ping');
  await connection.closed();
  const next = await server.accept();
  await next.handshake({ resumed: true });
  await next.expect('request');
  await client.close();
  assert.ok((await waiting) instanceof ClosedError);
});

test('a final rejection by all servers fails the callers, and the client tries again', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const waiting = client.acquire('a').catch((error: unknown) => error);
  await connection.expect('request');
  connection.socket.destroy();
  const refusing = await server.accept();
  const hello = await refusing.expect('hello');
  refusing.send('error', { code: 'unauthorized', message: 'unknown token', ref: hello.ref });
  const error = await waiting;
  assert.ok(error instanceof RejectedError);
  assert.equal(error.code, 'unauthorized');
  const next = await server.accept();
  await next.handshake({ resumed: true });
  assert.deepEqual(Object.keys(await next.expect('release')), ['ref']); // of the request that has failed
  const pinged = client.ping();
  next.send('pong', await next.expect('ping'));
  await pinged;
});

test('connect rejects if no server answers, if it is aborted, and if the server rejects it', async () => {
  await using server = await FakeServer.start();
  const silent = connect({ host: server.host, token: '', connectTimeout: 100 });
  await assert.rejects(silent, (error) => error instanceof UnavailableError && error.message.includes(server.host));
  const controller = new AbortController();
  const aborting = connect({ host: server.host, token: '', signal: controller.signal });
  await (await server.accept()).closed();
  const waiting = await server.accept();
  controller.abort(new Error('enough'));
  await assert.rejects(aborting, /enough/);
  await waiting.closed();
  const rejected = connect({ host: server.host, token: 'wrong' });
  const connection = await server.accept();
  assert.equal((await connection.expect('hello')).token, 'wrong');
  connection.send('error', { code: 'unauthorized', message: 'unknown token' });
  await assert.rejects(rejected, RejectedError);
});

test('callers give up when no server answers for responseTimeout', async () => {
  await using fake = await connected({ responseTimeout: 150 });
  const { client, connection, server } = fake;
  const acquired = client.acquire('a');
  await connection.grant(1);
  const lock = await acquired;
  server.server.close();
  connection.socket.destroy();
  await once(connection.socket, 'close');
  await assert.rejects(client.acquire('b', { queueTimeout: 50 }), UnavailableError);
  const unavailable = await client.ping().catch((error: unknown) => error);
  assert.ok(unavailable instanceof UnavailableError);
  assert.equal((unavailable.cause as NodeJS.ErrnoException).code, 'ECONNREFUSED');
  await assert.rejects(lock.extend(1000), UnavailableError);
  await assert.rejects(lock.release(), UnavailableError);
});

test('close says bye and fails what waits', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const bound = client.acquire('a', { onDisconnect: 'release' });
  await connection.grant(1);
  const lock = await bound;
  const waiting = client.acquire('b').catch((error: unknown) => error);
  await connection.expect('request');
  const watch = client.watch('');
  await connection.expect('watch');
  const closing = client.close();
  assert.ok((await waiting) instanceof ClosedError);
  assert.deepEqual(await watch.next(), { done: true, value: undefined });
  for (let sent = ''; sent !== 'bye'; ) {
    const { command, payload } = await connection.next();
    sent = command;
    if (command === 'bye') connection.send('bye', payload);
  }
  await closing;
  await connection.closed();
  assert.ok((await aborted(lock.signal)) instanceof DisconnectedError);
  await assert.rejects(client.acquire('c'), ClosedError);
  assert.throws(() => client.watch(''), ClosedError);
  await client.close();
});

test('close during a resumption says bye after it', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const waiting = client.acquire('a').catch((error: unknown) => error);
  const { ref } = await connection.expect('request');
  connection.socket.destroy();
  const next = await server.accept();
  await next.expect('hello');
  const ping = await next.expect('ping');
  next.send('welcome', { protocol: 1, pingInterval: 30_000, namespace: 'genie', quiet: true, resumed: true });
  await sleep(100);
  const closing = client.close();
  assert.ok((await waiting) instanceof ClosedError);
  next.send('pong', ping);
  assert.equal((await next.expect('release')).ref, ref);
  next.send('bye', await next.expect('bye'));
  await closing;
});

test('requests wait while the server does not read, and are sent in order when it reads', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  connection.socket.pause();
  const note = 'n'.repeat(250);
  const count = 40_000; // 12 MB, more than the kernel buffers
  const options = { note, queueTimeout: 60_000, transactionTimeout: 600_000 };
  const locks = Array.from({ length: count }, (_, id) => client.acquire(`r${id}`, options));
  await sleep(100);
  const heldBack = connection.unread;
  connection.socket.resume();
  for (let id = 1; id <= count; id++) {
    const { resources, ref } = await connection.expect('request');
    assert.deepEqual(resources, [`exclusive:r${id - 1}`]);
    connection.send('locked', { id, fence: id, ref });
  }
  await within(Promise.all(locks), 'the grants');
  assert.ok(heldBack < count);
});

test('a watch reports a snapshot, events, and after a reconnect the difference', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const row = (resource: string, id: number, mode = 'exclusive'): object => ({ resource, mode, id });
  const changes: string[] = [];
  const watch = client.watch('t/');
  const take = async (count: number): Promise<void> => {
    for (let taken = 0; taken < count; taken++) {
      const { value, done } = await within(watch.next(), 'a change');
      assert.ok(!done);
      changes.push(`${value.state} ${value.resource} ${value.id}`);
    }
  };
  const first = await connection.expect('watch');
  connection.send('watching', { prefix: 't/', held: [row('t/1', 1), row('t/2', 2)], truncated: false, ref: first.ref });
  connection.send('event', { state: 'unlocked', ...row('t/1', 1) });
  connection.send('event', { state: 'locked', ...row('other', 9) });
  connection.send('event', { state: 'locked', ...row('t/3', 3, 'shared') });
  await take(4);
  const waiting = take(2);
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: false });
  const second = await next.expect('watch');
  next.send('watching', { prefix: 't/', held: [row('t/3', 3, 'shared'), row('t/4', 4)], truncated: false, ref: second.ref });
  await waiting;
  assert.deepEqual(changes, [
    'locked t/1 1', 'locked t/2 2', 'unlocked t/1 1', 'locked t/3 3', 'unlocked t/2 2', 'locked t/4 4',
  ]);
  next.send('event', { state: 'lagged' });
  const lagging = take(1);
  const third = await next.expect('watch');
  next.send('watching', { prefix: 't/', held: [row('t/4', 5)], truncated: true, ref: third.ref });
  await lagging; // a conflicting lock ends the one that a truncated snapshot left out
  assert.equal(changes.at(-1), 'unlocked t/4 4');
  assert.equal(watch.truncated, true);
  await watch.return();
  await next.expect('unwatch');
});

test('a watch is resumed before the calls, whose answers it follows', async () => {
  await using fake = await connected();
  const { client, connection, server } = fake;
  const watch = client.watch('t/');
  const inspected = client.inspect();
  await connection.expect('watch');
  await connection.expect('inspect');
  connection.socket.destroy();
  const next = await server.accept();
  await next.handshake({ resumed: true });
  await next.expect('watch');
  const { ref } = await next.expect('inspect');
  next.send('inspected', { holders: [], holdersTotal: 0, queue: [], queueTotal: 0, ref });
  await inspected;
  await watch.return();
});

test('a watch that is rejected or aborted reports it once, and then ends', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const rejected = client.watch('secret/');
  const { ref } = await connection.expect('watch');
  connection.send('error', { code: 'unauthorized', message: 'no', ref });
  await assert.rejects(rejected.next(), RejectedError);
  assert.equal((await rejected.next()).done, true);
  const controller = new AbortController();
  const watch = client.watch('', { signal: controller.signal });
  const waiting = watch.next();
  controller.abort(new Error('enough'));
  await assert.rejects(waiting, /enough/);
});

test('a watch that is answered with unavailable is repeated, and ended ones are not watched any more', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const watch = client.watch('t/');
  const sent = await connection.expect('watch');
  connection.send('error', { code: 'unavailable', message: 'no store', ref: sent.ref });
  assert.deepEqual(await connection.expect('watch'), sent);
  const other = client.watch('t/');
  await connection.expect('watch');
  await watch.return(); // the prefix is still watched
  await other.return();
  assert.equal((await connection.expect('unwatch')).prefix, 't/');
  assert.equal(connection.unread, 0);
});

test('the locks that truncated snapshots do not list are bounded', async () => {
  const session = { subscribe: () => ({}), unsubscribe: () => {} };
  const watch = new Watch(session as unknown as ConstructorParameters<typeof Watch>[0], '');
  const held = Array.from({ length: 100_002 }, (_, i) => ({ resource: `a/${i}`, mode: 'exclusive' as const, id: i + 1 }));
  watch.onSnapshot({ held, truncated: false });
  watch.onSnapshot({ held: [], truncated: true });
  const start = performance.now();
  for (let i = 0; i < held.length; i++) await watch.next();
  const taken = performance.now() - start;
  assert.ok(taken < 4_000, `the event loop was blocked for ${taken} ms`);
  const ends = [await watch.next(), await watch.next()].map(({ value }) => [value!.state, value!.id]);
  assert.deepEqual(ends, [['unlocked', 1], ['unlocked', 2]]);
  watch.end();
  assert.equal((await watch.next()).done, true);
});

test('a slow consumer of a watch asks for a snapshot when it continues', async () => {
  await using fake = await connected();
  const { client, connection } = fake;
  const watch = client.watch('');
  const { ref } = await connection.expect('watch');
  connection.send('watching', { prefix: '', held: [], truncated: false, ref });
  for (let id = 1; id <= 10_050; id++) connection.send('event', { state: 'locked', resource: `r${id}`, mode: 'exclusive', id });
  const pinged = client.ping();
  connection.send('pong', await connection.expect('ping')); // all events have arrived
  await pinged;
  for (let id = 1; id <= 10_000; id++) assert.equal((await watch.next()).value!.id, id);
  const waiting = watch.next();
  const second = await connection.expect('watch');
  const held = [{ resource: 'r1', mode: 'exclusive', id: 1 }];
  connection.send('watching', { prefix: '', held, truncated: false, ref: second.ref });
  const { value } = await waiting;
  assert.deepEqual([value!.state, value!.resource], ['unlocked', 'r2']);
});
