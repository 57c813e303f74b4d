// The connection of a client: finds the leader among several servers, reconnects, and batches what is written.
import { connect as connectTcp, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { setTimeout as sleep } from 'node:timers/promises';
import { debuglog } from 'node:util';
import { formatAddress, parseAddress, type Address } from './config.js';
import { RejectedError, UnavailableError } from './errors.js';
import { MessageReader, type Message } from './wire.js';

/** Prints to standard error if the environment variable NODE_DEBUG contains `genie`. @internal */
export const log = debuglog('genie');

const MAX_ATTEMPT_TIME = 5_000;
const KEEPALIVE_IDLE_TIME = 5_000;
/** A connection that has lasted for this time (ms) resets the backoff, even if no command was answered. */
const STABLE_TIME = 2_000;
/** Nothing is written while more bytes than these wait for the server to read. */
const MAX_UNSENT_BYTES = 1 << 20;
/** Errors in reply to `hello` that another attempt with the same server would not change. */
const FINAL_ERRORS = ['unauthorized', 'unknown-namespace', 'unsupported-protocol'];

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

/** What happens on the connection of a client. @internal */
export interface ConnectionHandler {
  /** The steps of the keepalive since bytes have arrived. */
  silentSteps: number;
  /** Returns the first lines of a new connection. */
  onOpen(): string;
  onMessage(message: Message): void;
  onClose(): void;
  /** All servers have rejected this client for good. */
  onRejected(error: Error): void;
  /** Returns the lines to write next, of about `limit` characters. */
  takeOutput(limit: number): string;
}

/** @internal */
export class Connection {
  /** The delays before reconnects. */
  readonly backoff = new Backoff();
  readonly #handler: ConnectionHandler;
  readonly #attemptTimeout: number;
  readonly #closing = new AbortController();
  #addresses: readonly Address[];
  #isRunning = false;
  #isFirstRound = true;
  /** The connection or attempt, its server, and the limit of the attempt. */
  #socket: Socket | undefined;
  #address: Address | undefined;
  #attemptTimer: NodeJS.Timeout | undefined;
  /** When the handshake was completed; 0: not connected. */
  #upSince = 0;
  /** Why the last connection or attempt has ended. */
  #failure = new Error('no answer');
  /** The leader that the last server has named. */
  #leader: Address | undefined;
  #isFlushScheduled = false;

  constructor(addresses: readonly Address[], connectTimeout: number, handler: ConnectionHandler) {
    this.#addresses = addresses;
    this.#attemptTimeout = Math.min(MAX_ATTEMPT_TIME, connectTimeout / addresses.length);
    this.#handler = handler;
  }

  /** Connects, unless there is a connection or an attempt. */
  start(): void {
    if (!this.#isRunning && !this.#closing.signal.aborted) void this.#run();
  }

  /** The handshake is complete. */
  established(): void {
    this.#upSince = performance.now();
    clearTimeout(this.#attemptTimer);
  }

  /** Ends the connection or attempt. The next one goes to `leader`, if it is given. */
  drop(reason: Error, leader?: string): void {
    try {
      // The leader is reached with the TLS options of the server that has named it.
      if (leader) this.#leader = parseAddress(leader, undefined, this.#address?.tls);
    } catch (error) {
      log('%s', error);
    }
    this.#socket?.destroy(reason);
  }

  close(): void {
    this.#closing.abort();
    this.drop(new Error('the client was closed'));
  }

  /** Writes what the session has to send, together with what it adds in this tick. */
  flush(): void {
    if (this.#isFlushScheduled) return;
    this.#isFlushScheduled = true;
    // A tick that a microtask schedules comes after all microtasks: after all callers that were woken by one read.
    queueMicrotask(() => process.nextTick(() => this.#write()));
  }

  /** Writes until too many bytes wait for the server to read. Then a `drain` event follows. */
  #write(): void {
    this.#isFlushScheduled = false;
    while (this.#socket && this.#socket.writableLength <= MAX_UNSENT_BYTES) {
      const output = this.#handler.takeOutput(MAX_UNSENT_BYTES);
      if (!output) return;
      this.#socket.write(output);
    }
  }

  unavailableError(): UnavailableError {
    if (this.#upSince) return new UnavailableError('the server does not answer');
    const servers = this.#addresses.map(formatAddress).join(', ');
    return new UnavailableError(`no server at ${servers}: ${this.#failure.message}`, { cause: this.#failure });
  }

  /** Keeps a connection, until all servers reject this client for good, or it is closed. */
  async #run(): Promise<void> {
    const { signal } = this.#closing;
    this.#isRunning = true;
    let isRejected = false;
    while (!isRejected && !signal.aborted) {
      if (!this.#isFirstRound) await sleep(this.backoff.next(), undefined, { signal }).catch(() => {});
      this.#isFirstRound = false;
      isRejected = await this.#round();
    }
    this.#isRunning = false;
    if (isRejected) this.#handler.onRejected(this.#failure);
  }

  /** Tries each address once, until a connection was established and has ended. Returns whether all errors are final. */
  async #round(): Promise<boolean> {
    const tried = new Set<string>();
    let isRejected = true;
    while (!this.#closing.signal.aborted) {
      const address = [this.#leader, ...this.#addresses].find((next) => next && !tried.has(formatAddress(next)));
      this.#leader = undefined;
      if (!address) return isRejected;
      tried.add(formatAddress(address));
      if (await this.#converse(address)) return false;
      isRejected &&= this.#failure instanceof RejectedError && FINAL_ERRORS.includes(this.#failure.code);
    }
    return false;
  }

  /** Connects to a server. Resolves when the connection has ended, with whether it was established. */
  #converse(address: Address): Promise<boolean> {
    const { host, port, tls } = address;
    const socket = tls ? connectTls({ ...tls, host, port }) : connectTcp({ host, port });
    this.#socket = socket;
    this.#address = address;
    this.#attemptTimer = setTimeout(() => this.drop(new Error('no answer to hello')), this.#attemptTimeout);
    socket.setNoDelay(true);
    socket.setKeepAlive(true, KEEPALIVE_IDLE_TIME);
    socket.once(tls ? 'secureConnect' : 'connect', () => socket.write(this.#handler.onOpen()));
    const reader = new MessageReader();
    socket.on('data', (chunk: Buffer) => this.#onData(socket, reader, chunk));
    socket.on('drain', () => this.#write());
    socket.on('end', () => socket.destroy()); // everything was read
    let failure = new Error('the server closed the connection');
    socket.on('error', (error: NodeJS.ErrnoException) => {
      // The error of several attempts, to IPv6 and IPv4, has no message.
      failure = error.message ? error : new Error(error.code, { cause: error });
    });
    return new Promise((resolve) => socket.on('close', () => resolve(this.#onClose(address, failure))));
  }

  #onData(socket: Socket, reader: MessageReader, chunk: Buffer): void {
    this.#handler.silentSteps = 0;
    try {
      reader.read(chunk, (message) => {
        this.#handler.onMessage(message);
        return !socket.destroyed;
      });
    } catch (error) {
      this.drop(new Error(`the server sent ${(error as Error).message}`, { cause: error }));
    }
  }

  #onClose(address: Address, failure: Error): boolean {
    const wasUp = this.#upSince > 0;
    log('disconnected from %s: %s', formatAddress(address), failure.message);
    clearTimeout(this.#attemptTimer);
    this.#socket = undefined;
    this.#failure = failure;
    if (wasUp) {
      if (performance.now() - this.#upSince > STABLE_TIME) this.backoff.reset();
      // The next round begins with the server after this one. A leader that was named by a server may not be listed.
      const next = this.#addresses.findIndex(({ host, port }) => address.host === host && address.port === port) + 1;
      this.#addresses = [...this.#addresses.slice(next), ...this.#addresses.slice(0, next)];
    }
    this.#upSince = 0;
    this.#handler.onClose();
    return wasUp;
  }
}
