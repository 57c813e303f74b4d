// The connection of a client: finds the leader among several servers, reconnects, and batches what is written.
import { connect as connectTcp, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { debuglog } from 'node:util';
import { formatAddress, parseAddress, type Address } from './config.js';
import { UnavailableError, type RejectedError } from './errors.js';
import type { Session } from './session.js';
import { MessageReader } from './wire.js';

/** Prints to standard error if the environment variable NODE_DEBUG contains `genie`. @internal */
export const log = debuglog('genie');

const MAX_ATTEMPT_TIME = 5_000;
const KEEPALIVE_IDLE_TIME = 5_000;
/** Redirects to a leader that are followed in one round over the addresses. */
const MAX_REDIRECTS = 3;
/** A connection that has lasted for this time (ms) resets the backoff, even if no command was answered. */
const STABLE_TIME = 2_000;
/** Nothing is written while more bytes than these wait for the server to read. */
const MAX_UNSENT_BYTES = 1 << 20;

/** Delays in ms that double from 50 to 2,000, each multiplied by a random number from 0.5 to 1. @internal */
export class Backoff {
  #next = 50;

  next(): number {
    const delay = this.#next * (0.5 + Math.random() / 2);
    this.#next = Math.min(2 * this.#next, 2_000);
    return delay;
  }

  reset(): void {
    this.#next = 50;
  }
}

/** @internal */
export class Connection {
  /** When the last bytes arrived, by `performance.now()`. */
  lastReceivedAt = 0;
  /** When the handshake was completed; 0: not connected. */
  #upSince = 0;
  #hasBeenUp = false;
  #addresses: Address[];
  readonly #session: Session;
  readonly #attemptTimeout: number;
  readonly #backoff = new Backoff();
  #isConnecting = false;
  #closed = false;
  #socket: Socket | undefined;
  #address: Address | undefined;
  /** Completes the current attempt to connect. */
  #settle: ((isUp: boolean) => void) | undefined;
  /** Ends the wait before the next round. */
  #wake = (): void => {};
  /** The address of the leader, from the last error of a server. */
  #leader: string | undefined;
  /** The final error of the last attempt. */
  #rejection: RejectedError | undefined;
  #lastFailure = 'no answer';
  #output = '';
  #isFlushScheduled = false;

  constructor(addresses: Address[], connectTimeout: number, session: Session) {
    this.#addresses = addresses;
    this.#attemptTimeout = Math.min(MAX_ATTEMPT_TIME, connectTimeout / addresses.length);
    this.#session = session;
  }

  /** Connects, unless there is a connection or an attempt. */
  start(): void {
    if (!this.#isConnecting && !this.#socket && !this.#closed) void this.#connect();
  }

  /** The handshake is complete. */
  established(): void {
    this.#upSince = performance.now();
    this.#hasBeenUp = true;
    this.#settle?.(true);
  }

  /** Ends the connection or attempt. The next one goes to `leader`, if it is given. `rejection`: the server's final error. */
  drop(reason: string, leader?: string, rejection?: RejectedError): void {
    const socket = this.#socket;
    if (!socket) return;
    this.#leader = leader;
    this.#rejection = rejection;
    this.#onClose(socket, reason);
    socket.destroy();
  }

  close(): void {
    this.#closed = true;
    this.#wake();
    this.drop('the client was closed');
  }

  /** A server has executed a command: the next reconnect begins with the shortest delay. */
  confirm(): void {
    this.#backoff.reset();
  }

  /** Writes a line together with all others of this tick, after the handshake. */
  write(line: string): void {
    this.#output += line;
    if (this.#isFlushScheduled) return;
    this.#isFlushScheduled = true;
    // A tick that a microtask schedules comes after all microtasks: after all callers that were woken by one read.
    queueMicrotask(() => process.nextTick(() => this.#flush()));
  }

  #flush(): void {
    this.#isFlushScheduled = false;
    const output = this.#output;
    this.#output = '';
    if (!output) return;
    this.#socket?.write(output);
    this.#session.onDrain(); // there is no `drain` event if the kernel has taken everything at once
  }

  /** Whether too many bytes wait for the server to read. `Session.onDrain` follows. */
  get congested(): boolean {
    return this.#output.length + (this.#socket?.writableLength ?? 0) > MAX_UNSENT_BYTES;
  }

  unavailableError(): UnavailableError {
    const servers = this.#addresses.map(formatAddress).join(', ');
    return new UnavailableError(this.#upSince ? 'the server does not answer' : `no server at ${servers}: ${this.#lastFailure}`);
  }

  /** Tries all addresses in rounds, until a server accepts this client, all reject it for good, or it is closed. */
  async #connect(): Promise<void> {
    this.#isConnecting = true;
    let isDelayed = this.#hasBeenUp;
    while (!this.#closed) {
      if (isDelayed) await this.#delay(this.#backoff.next());
      isDelayed = true;
      const rejections: (RejectedError | undefined)[] = [];
      for (const address of this.#round()) {
        if (this.#closed) break;
        if (await this.#attempt(address)) {
          this.#isConnecting = false;
          return this.start(); // only if the connection was lost again before this function continued
        }
        rejections.push(this.#rejection);
      }
      const rejection = rejections.at(-1);
      if (rejection && !rejections.includes(undefined)) {
        this.#isConnecting = false;
        return this.#session.onRejected(rejection);
      }
    }
    this.#isConnecting = false;
  }

  /** Yields each address at most once. After an error that names the leader, the leader is next. */
  *#round(): Generator<Address> {
    const remaining = [...this.#addresses];
    const tried = new Set<string>();
    for (let redirects = 0; ; ) {
      const leader = redirects < MAX_REDIRECTS ? this.#takeLeader() : undefined;
      const isRedirect = leader && !tried.has(formatAddress(leader));
      const address = isRedirect ? leader : remaining.shift();
      if (!address) return;
      if (isRedirect) redirects++;
      if (tried.has(formatAddress(address))) continue;
      tried.add(formatAddress(address));
      yield address;
    }
  }

  /** The leader is reached with the TLS options of the server that has named it. */
  #takeLeader(): Address | undefined {
    const leader = this.#leader;
    this.#leader = undefined;
    try {
      return leader ? parseAddress(leader, undefined, this.#address?.tls) : undefined;
    } catch {
      return undefined;
    }
  }

  /** Returns whether the server has accepted this client. */
  #attempt(address: Address): Promise<boolean> {
    const { host, port, tls } = address;
    const socket = tls ? connectTls({ ...tls, host, port }) : connectTcp({ host, port });
    this.#socket = socket;
    this.#address = address;
    this.#rejection = undefined;
    socket.setNoDelay(true);
    socket.setKeepAlive(true, KEEPALIVE_IDLE_TIME);
    socket.once(tls ? 'secureConnect' : 'connect', () => {
      if (socket === this.#socket) socket.write(this.#session.onOpen());
    });
    const reader = new MessageReader();
    socket.on('data', (chunk: Buffer) => this.#onData(socket, reader, chunk));
    socket.on('drain', () => this.#session.onDrain());
    socket.on('error', (error: NodeJS.ErrnoException) => this.#onClose(socket, error.message || error.code || error.name));
    socket.on('end', () => socket.destroy()); // everything was read
    socket.on('close', () => this.#onClose(socket, 'the server closed the connection'));
    return new Promise((resolve) => {
      const timer = setTimeout(() => this.drop('no answer to hello'), this.#attemptTimeout);
      this.#settle = (isUp) => {
        clearTimeout(timer);
        this.#settle = undefined;
        resolve(isUp);
      };
    });
  }

  #onData(socket: Socket, reader: MessageReader, chunk: Buffer): void {
    if (socket !== this.#socket) return;
    this.lastReceivedAt = performance.now();
    try {
      reader.read(chunk, (message) => {
        this.#session.onMessage(message);
        return socket === this.#socket;
      });
    } catch (error) {
      this.drop(`the server sent ${(error as Error).message}`);
    }
  }

  #onClose(socket: Socket, reason: string): void {
    if (socket !== this.#socket) return;
    const { host, port } = this.#address!;
    log('disconnected from %s:%d: %s', host, port, reason);
    this.#socket = undefined;
    this.#output = '';
    this.#lastFailure = reason;
    if (this.#upSince) {
      if (performance.now() - this.#upSince > STABLE_TIME) this.#backoff.reset();
      // The next round begins with the server after this one. A leader that was named by a server may not be listed.
      const next = this.#addresses.findIndex((address) => address.host === host && address.port === port) + 1;
      this.#addresses = [...this.#addresses.slice(next), ...this.#addresses.slice(0, next)];
    }
    this.#upSince = 0;
    this.#session.onClose();
    if (this.#settle) this.#settle(false);
    else this.start();
  }

  #delay(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
