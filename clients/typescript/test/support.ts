// Servers for tests: a scripted one, and real processes of Genie and Redis on free ports of the loopback.
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { createServer, connect as connectTcp, type AddressInfo, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { connect, type Client, type ConnectOptions } from '../src/index.js';

/** A generous limit (ms) for anything that must happen, so that slow machines do not fail. */
const WAIT = 60_000;
/** The command that starts a server, with its arguments separated by spaces. */
const GENIE_COMMAND = process.env.GENIE_COMMAND ?? findGenie();

function findGenie(): string {
  const installed = resolve(__dirname, '../../../../.venv/bin/genie');
  return existsSync(installed) ? installed : 'genie';
}

/** Rejects if a promise takes longer than anything may take. */
export async function within<T>(promise: Promise<T>, what: string): Promise<T> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${what}: nothing happened within ${WAIT} ms`)), WAIT);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** Resolves when a signal is aborted, with its reason. */
export function aborted(signal: AbortSignal): Promise<unknown> {
  return within(
    new Promise((done) => {
      if (signal.aborted) done(signal.reason);
      else signal.addEventListener('abort', () => done(signal.reason));
    }),
    'the signal',
  );
}

// -- a scripted server ------------------------------------------------------------------------------------------------

export interface Sent {
  command: string;
  payload: any;
}

/** One connection to a scripted server. */
export class FakeConnection {
  /** The number of reads of the server since the handshake. */
  chunks = 0;
  readonly #lines: Sent[] = [];
  #position = 0;
  #wake = (): void => {};
  #buffered = '';

  constructor(readonly socket: Socket) {
    socket.setNoDelay(true);
    socket.setEncoding('utf8');
    socket.on('error', () => {});
    socket.on('data', (text: string) => {
      this.chunks++;
      const lines = (this.#buffered + text).split('\n');
      this.#buffered = lines.pop()!;
      this.#lines.push(...lines.map((line) => JSON.parse(line) as Sent));
      this.#wake();
    });
    socket.on('close', () => this.#wake());
  }

  /** Returns the payload of the next command, which must be this one. */
  async expect(command: string): Promise<any> {
    const sent = await this.next();
    if (sent.command !== command) throw new Error(`expected ${command}, but the client sent ${JSON.stringify(sent)}`);
    return sent.payload;
  }

  async next(): Promise<Sent> {
    while (!this.unread) {
      if (this.socket.destroyed) throw new Error('the client has closed the connection');
      await within(new Promise<void>((done) => (this.#wake = done)), 'a command of the client');
    }
    return this.#lines[this.#position++]!;
  }

  get unread(): number {
    return this.#lines.length - this.#position;
  }

  send(command: string, payload: object): void {
    this.socket.write(`${JSON.stringify({ command, payload })}\n`);
  }

  /** Accepts `hello`, sends the state of the requests, and answers the `ping`. Returns the payload of `hello`. */
  async handshake({ resumed = false, state = [], pingInterval = 30_000 } = {} as Handshake): Promise<any> {
    const hello = await this.expect('hello');
    const ping = await this.expect('ping');
    const welcome = { protocol: 1, server: 'fake/1', features: [], pingInterval, namespace: 'genie', quiet: true };
    this.send('welcome', { ...welcome, resumed, ref: hello.ref });
    for (const [command, payload] of state) this.send(command, payload);
    this.send('pong', ping);
    this.chunks = 0;
    return hello;
  }

  /** Grants the next request. Returns its payload. */
  async grant(id: number): Promise<any> {
    const request = await this.expect('request');
    this.send('locked', { id, fence: id + 100, ref: request.ref });
    return request;
  }

  async closed(): Promise<void> {
    if (!this.socket.closed) await within(once(this.socket, 'close'), 'the end of the connection');
  }
}

export interface Handshake {
  resumed?: boolean;
  state?: [string, object][];
  pingInterval?: number;
}

/** A server that does what the test tells it. */
export class FakeServer implements AsyncDisposable {
  readonly #accepted: FakeConnection[] = [];
  readonly #sockets = new Set<Socket>();
  #wake = (): void => {};

  private constructor(readonly server: Server) {
    server.on('connection', (socket) => {
      this.#sockets.add(socket);
      this.#accepted.push(new FakeConnection(socket));
      this.#wake();
    });
  }

  static async start(port = 0): Promise<FakeServer> {
    const server = createServer().listen(port, '127.0.0.1');
    const fake = new FakeServer(server);
    await once(server, 'listening');
    return fake;
  }

  get port(): number {
    return (this.server.address() as AddressInfo).port;
  }

  get host(): string {
    return `127.0.0.1:${this.port}`;
  }

  async accept(): Promise<FakeConnection> {
    while (!this.#accepted.length) {
      await within(new Promise<void>((done) => (this.#wake = done)), 'a connection of the client');
    }
    return this.#accepted.shift()!;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    this.server.close();
    await once(this.server, 'close');
  }
}

export interface Connected extends AsyncDisposable {
  server: FakeServer;
  connection: FakeConnection;
  client: Client;
}

/** A client that is connected to a scripted server. */
export async function connected(options: ConnectOptions & Handshake = {}): Promise<Connected> {
  const { pingInterval, ...others } = options;
  const server = await FakeServer.start();
  const connecting = connect({ host: server.host, token: '', responseTimeout: 60_000, ...others });
  const connection = await server.accept();
  await connection.handshake(pingInterval === undefined ? {} : { pingInterval });
  const client = await connecting;
  return {
    server, connection, client,
    async [Symbol.asyncDispose]() {
      await server[Symbol.asyncDispose](); // first, so that `close` does not wait for an answer
      await client.close();
    },
  };
}

// -- real servers -----------------------------------------------------------------------------------------------------

const FIRST_PORT = 20_000;
const PORTS = 12_000;
let nextPort = Math.floor(Math.random() * PORTS);

/** Returns a free port that the kernel gives to no outgoing connection, so that it stays free while its server is down. */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = FIRST_PORT + (nextPort++ % PORTS);
    const server = createServer();
    const isFree = await new Promise<boolean>((done) => {
      server.once('error', () => done(false));
      server.listen(port, '127.0.0.1', () => done(true));
    });
    if (!isFree) continue;
    await new Promise((done) => server.close(done));
    return port;
  }
}

/** Forwards connections to a server, and makes them half-open: the server's side is reset, the client's side stays silent. */
export class HalfOpenProxy implements AsyncDisposable {
  /** The port of the server. */
  target = 0;
  readonly #pairs = new Map<Socket, Socket>();

  private constructor(private readonly server: Server) {
    server.on('connection', (client) => {
      const upstream = connectTcp({ host: '127.0.0.1', port: this.target });
      this.#pairs.set(client, upstream);
      for (const [from, to] of [[client, upstream], [upstream, client]] as const) {
        from.on('error', () => {});
        from.on('data', (data) => to.write(data));
        // A half-open pair is not in the map any more.
        from.on('close', () => (from === client || this.#pairs.has(client)) && to.destroy());
      }
      client.on('close', () => this.#pairs.delete(client));
    });
  }

  static async start(): Promise<HalfOpenProxy> {
    const server = createServer().listen(await freePort(), '127.0.0.1');
    await once(server, 'listening');
    return new HalfOpenProxy(server);
  }

  get host(): string {
    return `127.0.0.1:${(this.server.address() as AddressInfo).port}`;
  }

  /** Makes about half of the connections half-open. */
  halfOpen(): void {
    for (const [client, upstream] of this.#pairs) {
      if (Math.random() < 0.5) continue;
      this.#pairs.delete(client);
      upstream.resetAndDestroy();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const sockets of this.#pairs) for (const socket of sockets) socket.destroy();
    this.server.close();
  }
}

async function ended(child: ChildProcess): Promise<void> {
  if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
}

/** A `genie serve` process. `settings` are its environment variables without the prefix GENIE_. */
export class GenieServer implements AsyncDisposable {
  #process: ChildProcess | undefined;

  private constructor(readonly port: number, private readonly settings: Record<string, string>) {}

  static async start(settings: Record<string, string> = {}): Promise<GenieServer> {
    const server = new GenieServer(await freePort(), settings);
    await server.restart();
    return server;
  }

  get host(): string {
    return `127.0.0.1:${this.port}`;
  }

  async restart(): Promise<void> {
    const own = Object.entries(this.settings).map(([name, value]) => [`GENIE_${name}`, value]);
    const inherited = Object.entries(process.env).filter(([name]) => !name.startsWith('GENIE_'));
    const env = Object.fromEntries([...inherited, ['GENIE_PORT', String(this.port)], ['GENIE_ADMIN_PORT', ''], ...own]);
    const child = spawn(GENIE_COMMAND, ['serve'], { env, stdio: ['ignore', 'pipe', 'inherit'] });
    this.#process = child;
    const lines = createInterface({ input: child.stdout! });
    const listening = new Promise<void>((done, fail) => {
      lines.on('line', (line) => line.includes('"event":"listening"') && done());
      child.once('exit', () => fail(new Error('the server has ended')));
    });
    await within(listening, 'the start of a server');
  }

  async kill(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    this.#process!.kill(signal);
    await ended(this.#process!);
  }

  /** Stops the process without ending it, or lets it continue. */
  pause(isPaused: boolean): void {
    this.#process!.kill(isPaused ? 'SIGSTOP' : 'SIGCONT');
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#process) await this.kill();
  }
}

/** A redis-server whose data survives a kill of the process. */
export class RedisServer implements AsyncDisposable {
  #process: ChildProcess | undefined;
  readonly #folder = mkdtempSync(join(tmpdir(), 'genie-redis-'));

  private constructor(readonly port: number) {}

  static async start(): Promise<RedisServer> {
    const redis = new RedisServer(await freePort());
    await redis.restart();
    return redis;
  }

  get url(): string {
    return `redis://127.0.0.1:${this.port}/0`;
  }

  async restart(): Promise<void> {
    const options = ['--bind', '127.0.0.1', '--save', '', '--appendonly', 'yes', '--appendfsync', 'no'];
    const args = ['--port', String(this.port), '--dir', this.#folder, ...options];
    this.#process = spawn('redis-server', args, { stdio: 'ignore' });
    const end = performance.now() + WAIT;
    while (!(await this.#answers())) {
      if (performance.now() > end || this.#process.exitCode !== null) throw new Error('redis-server did not start');
      await new Promise((done) => setTimeout(done, 20));
    }
  }

  #answers(): Promise<boolean> {
    return new Promise((done) => {
      const socket = connectTcp({ host: '127.0.0.1', port: this.port }, () => socket.write('PING\r\n'));
      socket.on('error', () => done(false));
      socket.on('data', (data) => {
        socket.destroy();
        done(String(data).startsWith('+PONG'));
      });
    });
  }

  async kill(): Promise<void> {
    this.#process!.kill('SIGKILL');
    await ended(this.#process!);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#process) await this.kill();
    rmSync(this.#folder, { recursive: true });
  }
}
