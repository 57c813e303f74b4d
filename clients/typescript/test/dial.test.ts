// How a client enters and reconnects: addresses, names, tokens, and what its calls do meanwhile.
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { writeFileSync, mkdtempSync, rmSync } from 'node:fs';
import dns from 'node:dns/promises';
import { createServer, type AddressInfo, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { mock, test } from 'node:test';
import { connect, RejectedError, UnavailableError, type ConnectionEvent } from '../src/index.js';
import { connected, FakeServer, freePort, within } from './support.js';

/** A server whose connections are accepted by the kernel, and never read. */
async function silentServer(): Promise<Server & AsyncDisposable> {
  const server = createServer({ pauseOnConnect: true }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  const sockets = new Set<{ destroy(): void }>();
  server.on('connection', (socket) => sockets.add(socket.on('error', () => {})));
  return Object.assign(server, {
    async [Symbol.asyncDispose]() {
      for (const socket of sockets) socket.destroy();
      server.close();
    },
  });
}

const hostOf = (server: Server): string => `127.0.0.1:${(server.address() as AddressInfo).port}`;

test('a silent first server delays the second for less than an attempt', async () => {
  await using silent = await silentServer();
  await using server = await FakeServer.start();
  const connecting = connect({ host: [hostOf(silent), server.host], token: '', connectTimeout: 4_000 });
  await (await server.accept()).handshake();
  await (await connecting).close();
});

test('hello is sent on one connection after the other', async () => {
  await using slow = await FakeServer.start();
  await using other = await FakeServer.start();
  const connecting = connect({ host: [slow.host, other.host], token: '' });
  const first = await slow.accept();
  await first.expect('hello');
  const second = await other.accept(); // after 250 ms
  const { ref } = await first.expect('ping');
  assert.equal(second.unread, 0);
  first.send('welcome', { protocol: 1, namespace: 'genie', resumed: false });
  await second.closed();
  assert.equal(second.unread, 0);
  first.send('pong', { ref });
  const client = await connecting;
  first.socket.destroy();
  await client.close();
});

test('all addresses of a name are tried', async () => {
  await using server = await FakeServer.start();
  const found = [['::2', 6], ['::3', 6], ['127.0.0.1', 4]].map(([address, family]) => ({ address, family }));
  mock.method(dns, 'lookup', async () => found);
  const connecting = connect({ host: `genie.test:${server.port}`, token: '' }).finally(() => mock.restoreAll());
  const connection = await server.accept();
  await connection.handshake();
  const client = await connecting;
  connection.socket.destroy();
  await client.close();
});

test('a client may come before its server, and a lazy one returns at once', async () => {
  const port = await freePort();
  const events: ConnectionEvent[] = [];
  const entering = connect({ port, token: '' });
  await using lazy = await connect({ port, token: '', lazy: true, responseTimeout: 50, onEvent: (event) => events.push(event) });
  await assert.rejects(lazy.tryAcquire('a'), UnavailableError);
  await using server = await FakeServer.start(port);
  const connections = [await server.accept(), await server.accept()];
  await Promise.all(connections.map((connection) => connection.handshake()));
  await entering;
  const { type } = await within(new Promise<ConnectionEvent>((done) => {
    const timer = setInterval(() => events[0] && (clearInterval(timer), done(events[0])), 5);
  }), 'an event');
  assert.equal(type, 'up');
  for (const { socket } of connections) socket.destroy();
  await (await entering).close();
});

test('calls that never wait fail within responseTimeout when no server answers', async () => {
  await using fake = await connected({ responseTimeout: 50 });
  const { client } = fake;
  const calls = [
    client.tryAcquire('a'), client.acquireAny(['a'], { target: 1 }), client.acquire('a', { queueTimeout: 10 }),
    client.extend(1, 1000), client.release(2), client.ping(), client.inspect(),
  ];
  await Promise.all(calls.map((call) => assert.rejects(call, UnavailableError)));
});

test('a rejection at a reconnect fails the calls, and the token is read again', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'genie-token-'));
  const path = join(folder, 'token');
  writeFileSync(path, 'first');
  process.env.GENIE_TOKEN_FILE = path;
  try {
    await using server = await FakeServer.start();
    const connecting = connect({ host: server.host, responseTimeout: 60_000 });
    const connection = await server.accept();
    assert.equal((await connection.handshake()).token, 'first');
    const client = await connecting;
    const watch = client.watch('');
    const waiting = client.acquire('a').catch((error: unknown) => error);
    await connection.expect('watch');
    await connection.expect('request');
    writeFileSync(path, 'second');
    connection.socket.destroy();
    const refusing = await server.accept();
    const hello = await refusing.expect('hello');
    assert.equal(hello.token, 'second');
    refusing.send('error', { code: 'unauthorized', message: 'unknown token', ref: hello.ref });
    assert.ok((await waiting) instanceof RejectedError);
    const next = await server.accept();
    await next.handshake();
    await next.expect('watch'); // the client continues
    await watch.return();
    next.socket.destroy();
    await client.close();
  } finally {
    delete process.env.GENIE_TOKEN_FILE;
    rmSync(folder, { recursive: true });
  }
});

test('a token may be a function, which is called for each connection', async () => {
  let calls = 0;
  await using fake = await connected({ token: async () => `token-${++calls}` });
  fake.connection.socket.destroy();
  assert.equal((await (await fake.server.accept()).handshake({ resumed: true })).token, 'token-2');
});

test('a token function whose promise is never settled fails one attempt', async () => {
  await using server = await FakeServer.start();
  let calls = 0;
  const token = (): Promise<string> => (calls++ ? Promise.resolve('late') : new Promise(() => {}));
  const connecting = connect({ host: server.host, token, connectTimeout: 60_000 });
  const hello = await (await server.accept()).handshake();
  assert.equal(hello.token, 'late');
  await (await connecting).close();
});

test('a name whose lookup does not end fails one attempt', async () => {
  await using server = await FakeServer.start();
  let calls = 0;
  mock.method(dns, 'lookup', () => (calls++ ? Promise.resolve([{ address: '127.0.0.1', family: 4 }]) : new Promise(() => {})));
  const connecting = connect({ host: `genie.test:${server.port}`, token: '', connectTimeout: 60_000 });
  await (await server.accept()).handshake();
  mock.restoreAll();
  await (await connecting).close();
});

test('a lookup that is too late for its round is for the next one', async () => {
  await using server = await FakeServer.start();
  let calls = 0;
  const found = [{ address: '127.0.0.1', family: 4 }];
  mock.method(dns, 'lookup', () => new Promise((resolve) => (calls++, setTimeout(resolve, 5_010, found))));
  const connecting = connect({ host: `genie.test:${server.port}`, token: '', connectTimeout: 9_000 }).finally(() => mock.restoreAll());
  await (await server.accept()).handshake();
  await (await connecting).close();
  assert.equal(calls, 1);
});

test('an exception of tls.connect is an error of the attempt', async () => {
  await using server = await FakeServer.start();
  const tls = { secureContext: {} as never, ALPNProtocols: 5 as never };
  const failed = await connect({ host: server.host, token: '', tls, connectTimeout: 200 }).catch((error: unknown) => error);
  assert.ok(failed instanceof UnavailableError && failed.cause instanceof TypeError, String(failed));
});

test('the note of the client is sent once, in hello', async () => {
  await using fake = await connected();
  fake.connection.socket.destroy();
  const hello = await (await fake.server.accept()).handshake({ resumed: true });
  assert.match(hello.note, new RegExp(`^dial\\.test\\.js ${process.pid}@.+`));
  await using own = await FakeServer.start();
  for (const note of ['billing', '']) {
    const connecting = connect({ host: own.host, token: '', note });
    const connection = await own.accept();
    assert.equal((await connection.handshake()).note, note || undefined);
    const client = await connecting;
    connection.socket.destroy();
    await client.close();
  }
});

test('the third take-over of the session in a row ends the client', async () => {
  await using fake = await connected();
  let { connection } = fake;
  const acquired = fake.client.acquire('held');
  const { ref } = await connection.grant(1);
  const lock = await acquired;
  const waiting = fake.client.acquire('a').catch((error: unknown) => error);
  const state: [string, object][] = [['locked', { id: 1, fence: 1, expiresIn: 5_000, ref }]];
  for (let round = 0; round < 3; round++) {
    connection.send('error', { code: 'session-taken-over', message: 'another connection has resumed this session' });
    if (round < 2) await (connection = await fake.server.accept()).handshake({ resumed: true, state });
  }
  const error = await waiting;
  assert.ok(error instanceof RejectedError);
  assert.equal(error.code, 'session-taken-over');
  await assert.rejects(fake.client.ping(), { code: 'session-taken-over' });
  assert.deepEqual([lock.held, lock.error!.code], [false, 'disconnected']);
});

test('the take-over of a session by another attempt of the client does not end it', async () => {
  await using one = await FakeServer.start();
  await using other = await FakeServer.start();
  const client = await connect({ host: `${one.host},${other.host}`, token: '', lazy: true });
  for (let round = 0; round < 4; round++) {
    const connections = [await one.accept(), await other.accept()];
    const first = await Promise.race(connections.map(async (each) => (await each.expect('hello'), each)));
    const second = connections.find((each) => each !== first)!;
    await second.expect('hello'); // because the first one has no answer for long
    first.send('welcome', { protocol: 1, server: 'fake/1', features: [], pingInterval: 30_000, namespace: 'genie', quiet: true, resumed: false });
    first.send('pong', { ref: 'resume' });
    await second.closed();
    first.send('error', { code: 'session-taken-over', message: 'another connection has resumed this session' });
    await first.closed();
  }
  assert.ok(await Promise.race([one.accept(), other.accept()]), 'the client connects again');
  await client.close();
});

test('a failed write does not hide the error that the server sent before', async () => {
  let onDown = (_: Error): void => {};
  const down = new Promise<Error>((done) => (onDown = done));
  await using fake = await connected({ onEvent: (event) => void (event.type === 'down' && onDown(event.error)) });
  const { client, connection } = fake;
  connection.send('error', { code: 'session-taken-over', message: 'another connection has resumed this session' });
  connection.socket.resetAndDestroy();
  client.ping().catch(() => {}); // is written in this tick, so before the error is read
  const error = await within(down, 'the end of the connection');
  assert.equal((error as RejectedError).code, 'session-taken-over');
});

test('defaults of the client are options of its requests', async () => {
  await using fake = await connected({ defaults: { queueTimeout: 5, transactionTimeout: 6_000, transactionName: 't' } });
  const { client, connection } = fake;
  const acquired = client.acquire('a', { queueTimeout: 7, traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01' });
  const { ref, ...payload } = await connection.grant(1);
  assert.deepEqual(payload, {
    resources: ['exclusive:a'], queueTimeout: 7, transactionTimeout: 6_000, transactionName: 't',
    traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01',
  });
  await acquired;
});

test('events say when the connection is up and down, and at another leader', async () => {
  await using first = await FakeServer.start();
  await using second = await FakeServer.start();
  const events: string[] = [];
  const connecting = connect({ host: [first.host, second.host], token: '', onEvent: ({ type, server }) => events.push(`${type} ${server}`) });
  const connection = await first.accept();
  await connection.handshake();
  const client = await connecting;
  connection.socket.destroy();
  const next = await second.accept();
  await next.handshake({ resumed: true });
  await client.ping(); // the handshake answers it
  await new Promise(setImmediate);
  assert.deepEqual(events, [`up ${first.host}`, `down ${first.host}`, `up ${second.host}`, `leader ${second.host}`]);
  next.socket.destroy();
  await client.close();
});
