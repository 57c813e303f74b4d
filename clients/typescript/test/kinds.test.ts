// Counted locks and subtrees: resources, errors and watches.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { connect, DeadlockError, QueueTimeoutError, subtree, units, type Change } from '../src/index.js';
import { GenieServer } from './support.js';

test('units and subtrees are written as on the wire', () => {
  assert.equal(units('licences/cad', 2, 10), '2/10:licences/cad');
  assert.equal(subtree('accounts/'), 'exclusive:accounts/**');
  assert.equal(subtree('accounts/', { shared: true }), 'shared:accounts/**');
  assert.equal(subtree(''), 'exclusive:**');
  for (const [count, of] of [[3, 2], [0, 2], [1.5, 2], [1, 1_000_001]] as const) {
    assert.throws(() => units('a', count, of), RangeError);
  }
  assert.throws(() => subtree('accounts'), /must end with '\/'/);
});

test('a deadlock says what each transaction waits for', () => {
  const waits = [
    { resource: 'licences/cad', waiter: 9, holder: 3, units: 2, of: 10 },
    { resource: 'accounts/**', waiter: 4, holder: 5 },
  ];
  const text = 't would wait for 2/10:licences/cad of u, which waits for accounts/** of t';
  assert.equal(new DeadlockError(9, ['t', 'u'], waits).message, `request 9 would deadlock: ${text}`);
  assert.equal(new DeadlockError(9, ['t', 'u'], []).message, 'request 9 would deadlock: t → u → t');
});

test('units are granted up to their limit, and a blocker says how many it has', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  const most = await client.acquire([units('pool', 6, 10), units('pool', 3, 10)]);
  const last = await client.tryAcquire(units('pool', 1, 10));
  assert.deepEqual(last?.resources, ['1/10:pool']);
  await last.release();
  const error: unknown = await client.acquire(units('pool', 2, 10), { queueTimeout: 0 }).catch((caught: unknown) => caught);
  assert.ok(error instanceof QueueTimeoutError);
  const [{ id, mode, units: count, of }] = error.blockers as [QueueTimeoutError['blockers'][number]];
  assert.deepEqual([id, mode, count, of], [most.id, 'units', 9, 10]);
  assert.match(error.message, / holds 9\/10:pool$/);
  await assert.rejects(client.acquire('3/2:pool'), { code: 'bad-request' });
});

test('a subtree excludes the names below it, and the watches of names below it report it', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  await using watch = client.watch('accounts/2/');
  const books = await client.acquire(subtree('accounts/'));
  assert.equal(await client.tryAcquire('accounts/2'), null);
  assert.ok(await client.tryAcquire('accounts'));
  await books.release();
  const changes: Change[] = [(await watch.next()).value!, (await watch.next()).value!];
  const seen = changes.map(({ state, resource, mode, id }) => [state, resource, mode, id]);
  assert.deepEqual(seen, [['locked', 'accounts/**', 'exclusive', books.id], ['unlocked', 'accounts/**', 'exclusive', books.id]]);
});
