// The connection of a client: reconnects to the leader, and batches what is written.
import type { LookupAddress } from 'node:dns';
import { setTimeout as sleep } from 'node:timers/promises';
import { formatAddress, parseLeader, type Address } from './config.js';
import { Dial, type Attempt, type Dialer } from './dial.js';
import { RejectedError, UnavailableError } from './errors.js';
import type { ConnectOptions, ConnectionEvent, Logger } from './options.js';
import type { Message, Welcome } from './wire.js';

/** A connection that has lasted for this time (ms) resets the backoff, even if no command was answered. */
const STABLE_TIME = 2_000;
/** Nothing is written while more bytes than these wait for the server to read. */
const MAX_UNSENT_BYTES = 1 << 20;
/** Errors in reply to `hello` that another attempt with the same server would not change soon. */
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
  hello(): Promise<string>;
  /** The server has accepted `hello`. Throws if the client does not accept the server. */
  onWelcome(welcome: Welcome, helloSentAt: number): void;
  onMessage(message: Message): void;
  /** `isAlone`: that of the attempt. */
  onClose(reason: Error, isAlone: boolean): void;
  /** All servers have rejected this client for good, as far as they know. */
  onRejected(error: Error): void;
  /** Returns the lines to write next, of about `limit` characters. */
  takeOutput(limit: number): string;
}

/** @internal */
export class Connection implements Dialer {
  /** The delays before reconnects. */
  readonly backoff = new Backoff();
  readonly lateLookups = new Map<string, Promise<LookupAddress[]>>();
  readonly #logger: Logger;
  readonly #handler: ConnectionHandler;
  readonly #closing = new AbortController();
  #addresses: readonly Address[];
  #dial: Dial | undefined;
  /** The connection whose server has accepted `hello`. */
  #current: Attempt | undefined;
  /** When the handshake was completed; 0: not connected. */
  #upSince = 0;
  /** The server of the last connection. */
  #lastServer = '';
  /** Why the last connection or attempt has ended. */
  #failure = new Error('no answer');
  /** The leader that the last server has named. */
  #leader: Address | undefined;
  #isFlushScheduled = false;
  /** Ends a round: the connection has ended, or no attempt has succeeded. */
  #onRoundEnd = (): void => {};

  constructor(addresses: readonly Address[], readonly options: ConnectOptions, logger: Logger, handler: ConnectionHandler) {
    this.#addresses = addresses;
    this.#logger = logger;
    this.#handler = handler;
  }

  /** Keeps a connection until it is closed. */
  async run(): Promise<void> {
    const { signal } = this.#closing;
    while (!signal.aborted) {
      await this.#round();
      await sleep(this.backoff.next(), undefined, { signal }).catch(() => {});
    }
  }

  hello(): Promise<string> {
    return this.#handler.hello();
  }

  /** The handshake is complete. */
  established(): void {
    this.#upSince = performance.now();
    this.#current!.established();
    const server = formatAddress(this.#current!.address);
    this.#report({ type: 'up', server });
    if (this.#lastServer && this.#lastServer !== server) this.#report({ type: 'leader', server });
    this.#lastServer = server;
  }

  /** Ends the connection. The next attempt goes to `leader`, if it is given. */
  drop(reason: Error, leader?: string): void {
    if (this.#current) this.#current.leader = leader;
    this.#current?.socket.destroy(reason);
  }

  close(): void {
    this.#closing.abort();
    this.#dial?.end();
    this.drop(new Error('the client was closed'));
    if (!this.#current) this.#onRoundEnd();
  }

  /** Writes what the handler has to send, together with what it adds in this tick. */
  flush(): void {
    if (this.#isFlushScheduled) return;
    this.#isFlushScheduled = true;
    // A tick that a microtask schedules comes after all microtasks: after all callers that were woken by one read.
    queueMicrotask(() => process.nextTick(() => this.#write()));
  }

  /** Writes until too many bytes wait for the server to read. Then a `drain` event follows. */
  #write(): void {
    this.#isFlushScheduled = false;
    const socket = this.#current?.socket;
    while (socket && socket.writableLength <= MAX_UNSENT_BYTES) {
      const output = this.#handler.takeOutput(MAX_UNSENT_BYTES);
      if (!output) return;
      socket.write(output);
    }
  }

  unavailableError(): UnavailableError {
    if (this.#upSince) return new UnavailableError('the server does not answer');
    const servers = this.#addresses.map(formatAddress).join(', ');
    return new UnavailableError(`no server at ${servers}: ${this.#failure.message}`, { cause: this.#failure });
  }

  /** Connects, and resolves when the connection has ended, or all attempts have failed. */
  #round(): Promise<void> {
    return new Promise((resolve) => {
      this.#onRoundEnd = resolve;
      this.#dial = new Dial([...(this.#leader ? [this.#leader] : []), ...this.#addresses], this);
    });
  }

  onFailed(errors: readonly Error[]): void {
    this.#leader = undefined;
    this.#failure = errors.at(-1) ?? this.#failure;
    this.#logger.debug(`no server at ${this.#addresses.map(formatAddress).join(', ')}: ${this.#failure.message}`);
    const isFinal = (error: Error): boolean => error instanceof RejectedError && FINAL_ERRORS.includes(error.code);
    if (errors.every(isFinal)) this.#handler.onRejected(this.#failure);
    this.#onRoundEnd();
  }

  onWelcome(attempt: Attempt, welcome: Welcome): void {
    this.#handler.onWelcome(welcome, attempt.helloSentAt);
    this.#current = attempt;
    this.lateLookups.clear(); // the next round may be much later
    attempt.onMessage = (message) => this.#handler.onMessage(message);
    attempt.onClose = (failure) => this.#onClose(attempt, failure);
    attempt.onBytes = () => (this.#handler.silentSteps = 0);
    attempt.socket.on('drain', () => this.#write());
  }

  #onClose({ address, leader, isAlone }: Attempt, error: Error): void {
    const server = formatAddress(address);
    this.#logger.debug(`disconnected from ${server}: ${error.message}`);
    this.#current = undefined;
    this.#failure = error;
    if (this.#upSince) {
      if (performance.now() - this.#upSince > STABLE_TIME) this.backoff.reset();
      // The next round begins with the server after this one. A leader that was named by a server may not be listed.
      const next = this.#addresses.findIndex(({ host, port }) => address.host === host && address.port === port) + 1;
      this.#addresses = [...this.#addresses.slice(next), ...this.#addresses.slice(0, next)];
      this.#report({ type: 'down', server, error });
    }
    this.#upSince = 0;
    this.#leader = parseLeader(leader, address.isSecure);
    this.#handler.onClose(error, isAlone);
    this.#onRoundEnd();
  }

  /** Calls the user's handler after the current message, because it may call the client. */
  #report(event: ConnectionEvent): void {
    if (this.options.onEvent) process.nextTick(this.options.onEvent, event);
  }
}
