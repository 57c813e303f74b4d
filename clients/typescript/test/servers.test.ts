// Tests with real servers: GENIE_COMMAND, redis-server and openssl must be there.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { copyFileSync, mkdtempSync, rmSync } from 'node:fs';
import { connect as connectTcp, createServer, type AddressInfo, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { connect, DeadlockError, InsufficientError, LockLostError, QueueTimeoutError, RejectedError, TransactionTimeoutError } from '../src/index.js';
import { aborted, GenieServer, RedisServer, within } from './support.js';

test('locks, queues, deadlocks, choices, and inspections', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  await using other = await connect({ host: server.host });
  const lock = await client.acquire(['a', 'shared:b'], { transactionName: 't-1', note: 'test' });
  assert.equal(await other.tryAcquire('a'), null);
  const timeout = await other.acquire('a', { queueTimeout: 20 }).catch((error: unknown) => error);
  assert.ok(timeout instanceof QueueTimeoutError);
  assert.deepEqual(timeout.blockers.map(({ id, note }) => [id, note]), [[lock.id, 'test']]);
  const second = await other.acquire('c', { transactionName: 't-2' });
  const waiting = client.acquire('c', { transactionName: 't-1' });
  assert.equal((await client.inspect()).queueTotal, 1); // so this request waits before the other one arrives
  const deadlock = await other.acquire('a', { transactionName: 't-2' }).catch((error: unknown) => error);
  assert.ok(deadlock instanceof DeadlockError);
  assert.deepEqual(deadlock.cycle, ['t-2', 't-1']);
  const { holders, queue } = await client.inspect();
  assert.deepEqual(holders.map(({ id, fence }) => [id, fence]), [[lock.id, lock.fence], [second.id, second.fence]]);
  assert.deepEqual(queue.map(({ blockers }) => blockers[0]!.id), [second.id]);
  await second.release();
  const third = await waiting;
  assert.ok(third.fence > second.fence);
  await lock.extend(60_000);
  const options = { target: 3, weights: [2, 2, 2] };
  await assert.rejects(other.acquireAny(['a', 'b', 'c'], options), InsufficientError);
  const chosen = await other.acquireAny(['a', 'x', 'y'], options);
  assert.deepEqual(chosen.resources, ['exclusive:x', 'exclusive:y']);
  assert.equal(await other.release(lock.id), 'success');
  assert.ok((await aborted(lock.signal)) instanceof LockLostError);
  await assert.rejects(client.extend(lock.id, 1000), LockLostError);
  await assert.rejects(client.release(1), { code: 'unknown-id' });
  await assert.rejects(client.acquire('a', { transactionName: '' }), RejectedError);
  const misspelt = { transactionTimout: 1 } as object;
  await assert.rejects(client.acquire('a', misspelt), /did you mean 'transactionTimeout'/);
});

test('a request is cancelled by its signal, and its lock never stays held', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  for (let round = 0; round < 200; round++) {
    const controller = new AbortController();
    const acquired = client.acquire('a', { signal: controller.signal }).catch(() => undefined);
    // At any moment: before the request is written, while it waits, and when the lock has been granted.
    for (let step = 0; step < round % 5; step++) await new Promise(setImmediate);
    controller.abort();
    await (await acquired)?.release();
  }
  await client.ping();
  const { holdersTotal, queueTotal } = await client.inspect();
  assert.deepEqual([holdersTotal, queueTotal], [0, 0]);
});

/** Forwards connections to a server, and cuts each of them after a number of bytes in both directions together. */
async function cuttingProxy(port: number, bytes: () => number): Promise<Server> {
  const proxy = createServer((client) => {
    const server = connectTcp({ host: '127.0.0.1', port });
    let left = bytes();
    const forward = (from: Socket, to: Socket): void => {
      from.on('error', () => {});
      from.on('close', () => to.destroy());
      from.on('data', (chunk) => {
        to.write(chunk.subarray(0, left));
        left -= chunk.length;
        if (left <= 0) {
          to.end();
          setTimeout(() => from.destroy(), 5);
        }
      });
    };
    forward(client, server);
    forward(server, client);
  });
  await once(proxy.listen(0, '127.0.0.1'), 'listening');
  return proxy;
}

test('no lock is lost or left behind if connections are cut after any number of bytes', async () => {
  await using server = await GenieServer.start();
  let bytes = 700; // enough for the handshake
  let connections = 0;
  const proxy = await cuttingProxy(server.port, () => (connections++, bytes));
  const host = `127.0.0.1:${(proxy.address() as AddressInfo).port}`;
  await using client = await connect({ host, responseTimeout: 30_000 });
  await using direct = await connect({ host: server.host });
  const work = async (name: string): Promise<void> => {
    const lock = await client.acquire(name, { transactionTimeout: 60_000 });
    await lock.extend(50_000);
    await lock.release();
    assert.equal(lock.error, undefined, name);
  };
  for (let cut = 1_600; cut < 3_200; cut += 61) {
    bytes = cut; // of the next connections
    await Promise.all(['a', 'b', 'c'].map((name) => work(`${name}/${cut}`)));
  }
  assert.ok(connections > 20, String(connections));
  bytes = Infinity;
  await client.ping();
  const { holdersTotal, queueTotal } = await direct.inspect();
  assert.deepEqual([holdersTotal, queueTotal], [0, 0]);
  proxy.close();
});

test('the watchdog keeps a lock, and a lock without it times out', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  const kept = await client.acquire('a', { transactionTimeout: 200, watchdog: true });
  const lost = await client.acquire('b', { transactionTimeout: 500 });
  assert.ok((await aborted(lost.signal)) instanceof TransactionTimeoutError);
  assert.equal(kept.held, true);
  assert.deepEqual((await client.inspect({ only: 'holders', resource: 'a' })).holders.map(({ id }) => id), [kept.id]);
  await kept.release();
});

test('a watch follows the locks', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host });
  const first = await client.acquire('t/1');
  const changes: string[] = [];
  const reported = (async () => {
    for await (const { state, resource } of client.watch('t/')) if (changes.push(`${state} ${resource}`) === 4) break;
  })();
  await client.ping();
  const second = await client.acquire(['shared:t/2', 'u']);
  await first.release();
  await second.release();
  await within(reported, 'the changes');
  assert.deepEqual(changes, ['locked t/1', 'locked t/2', 'unlocked t/1', 'unlocked t/2']);
});

test('a token, a namespace, and TLS with a certificate of the client', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'genie-tls-'));
  const path = (name: string): string => join(folder, name);
  const openssl = (args: string): Buffer => execFileSync('openssl', args.split(' '), { stdio: ['ignore', 'pipe', 'ignore'] });
  const names = 'subjectAltName=DNS:localhost,IP:127.0.0.1';
  openssl(`req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext ${names} -keyout ${path('key.pem')} -out ${path('cert.pem')}`);
  const ca = path('cert.pem');
  const token = 'a-secret-of-the-tests';
  await using server = await GenieServer.start({
    TLS_CERT: ca, TLS_KEY: path('key.pem'), TOKEN: token, NAMESPACE: 'billing',
  });
  try {
    process.env.GENIE_TLS_CA = ca;
    const host = `genies://localhost:${server.port}`;
    await using client = await connect({ host, token, namespace: 'billing' });
    await (await client.acquire('a')).release();
    await using byOptions = await connect({ host: server.host, token, tls: { ca: execFileSync('cat', [ca]) } });
    await byOptions.ping();
    await assert.rejects(connect({ host, token: 'wrong' }), { code: 'unauthorized' });
    await assert.rejects(connect({ host, token, namespace: 'other' }), { code: 'unknown-namespace' });
    delete process.env.GENIE_TLS_CA;
    await assert.rejects(connect({ host, token, connectTimeout: 500 }), /self-signed certificate/);
    // Files are read for each connection: a lazy client connects as soon as they are right.
    openssl(`req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other -keyout ${path('other.pem')} -out ${path('ca.pem')}`);
    process.env.GENIE_TLS_CA = path('ca.pem');
    await using renewed = await connect({ host, token, lazy: true, responseTimeout: 60_000 });
    await assert.rejects(renewed.ping({ signal: AbortSignal.timeout(200) }), { name: 'TimeoutError' });
    copyFileSync(ca, path('ca.pem'));
    await renewed.ping();
  } finally {
    delete process.env.GENIE_TLS_CA;
    rmSync(folder, { recursive: true });
  }
});

test('locks, requests and releases survive the death of the leader', async () => {
  await using redis = await RedisServer.start();
  const settings = { REDIS_URL: redis.url, LEASE: '1' };
  await using first = await GenieServer.start(settings);
  await using second = await GenieServer.start(settings);
  const servers = [first, second];
  await using client = await connect({ host: servers.map(({ host }) => host), responseTimeout: 60_000 });
  await using other = await connect({ host: servers.map(({ host }) => host), responseTimeout: 60_000 });
  const held = await client.acquire('a', { transactionTimeout: 60_000 });
  const watched = await client.acquire('w', { transactionTimeout: 30_000, watchdog: true });
  const waiting = other.acquire('a', { queueTimeout: 60_000 });
  await other.ping();
  for (let round = 0; round < 2; round++) {
    const leader = servers[round]!;
    await leader.kill();
    await client.ping();
    await leader.restart();
    assert.deepEqual([held.held, watched.held], [true, true]);
  }
  await held.release();
  const lock = await waiting;
  assert.ok(lock.fence > held.fence);
  const released = lock.release();
  await redis.kill();
  await redis.restart();
  await released;
  await watched.release();
  const { holdersTotal, queueTotal } = await client.inspect();
  assert.deepEqual([holdersTotal, queueTotal], [0, 0]);
});

test('a restart of a server without a store loses the locks, and a paused leader is left', async () => {
  await using server = await GenieServer.start();
  await using client = await connect({ host: server.host, responseTimeout: 20_000 });
  const lock = await client.acquire('a', { transactionTimeout: 60_000 });
  const waiting = client.acquire('a', { queueTimeout: 60_000 });
  await client.ping();
  await server.kill();
  await server.restart();
  assert.ok((await aborted(lock.signal)) instanceof LockLostError);
  const second = await waiting; // is repeated on the new server
  server.pause(true);
  const pinged = client.ping();
  await new Promise((done) => setTimeout(done, 6_000)); // longer than the interval and the timeout of a ping
  server.pause(false);
  await pinged;
  assert.equal(second.held, true); // the session was resumed
  await second.release();
});
