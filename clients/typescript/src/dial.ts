// How a client finds the leader: attempts to connect to all addresses of all servers, staggered as in RFC 8305.
import type { LookupAddress } from 'node:dns';
import { lookup } from 'node:dns/promises';
import { connect as connectTcp, isIP, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { formatAddress, parseLeader, tlsOptions, type Address } from './config.js';
import { fromReply } from './errors.js';
import type { ConnectOptions } from './options.js';
import { MessageReader, type Message, type Welcome } from './wire.js';

/** Time (ms) after which the next attempt begins, although the last one still runs. */
const STAGGER = 250;
/** Time (ms) after which `hello` is sent on another connection, although the last one has no answer. */
const HELLO_STAGGER = 1_000;
const MAX_ATTEMPT_TIME = 5_000;
const KEEPALIVE_IDLE_TIME = 5_000;

/** What the attempts need of their client. @internal */
export interface Dialer {
  readonly options: ConnectOptions;
  /** The lookups that were too late for the last round, by name: the next round gets their results. */
  readonly lateLookups: Map<string, Promise<LookupAddress[]>>;
  /** Returns the first lines of a connection. */
  hello(): Promise<string>;
  /** A server has accepted `hello`, which ends all other attempts. Throws if the client does not accept the server. */
  onWelcome(attempt: Attempt, welcome: Welcome): void;
  /** All attempts have failed. */
  onFailed(errors: readonly Error[]): void;
}

/** One connection, which is an attempt until its `hello` is answered. @internal */
export class Attempt {
  helloSentAt = 0;
  /** The leader that the server has named. */
  leader: string | undefined;
  /** Whether no other attempt had sent a `hello` without an answer, which may still take over the session. */
  isAlone = true;
  readonly #reader = new MessageReader();
  readonly #timer: NodeJS.Timeout;
  #failure = new Error('the server closed the connection');
  /** Handle what happens on the connection. */
  onConnected = (): void => {};
  onBytes = (): void => {};
  onMessage: (message: Message) => void = () => {};
  onClose: (failure: Error) => void = () => {};

  /** `address` is that of the configuration, whose host may be a name. */
  constructor(readonly address: Address, readonly socket: Socket, readonly hello: string) {
    this.#timer = setTimeout(() => socket.destroy(new Error('no answer to hello')), MAX_ATTEMPT_TIME);
    // A failed write does not destroy the socket: the reader finds its end, but first the last messages of the server.
    const write = socket._write.bind(socket);
    const writeAll = socket._writev!.bind(socket);
    socket._write = (chunk, encoding, done) => write(chunk, encoding, () => done());
    socket._writev = (chunks, done) => writeAll(chunks, () => done());
    socket.setNoDelay(true);
    socket.setKeepAlive(true, KEEPALIVE_IDLE_TIME);
    socket.once(address.isSecure ? 'secureConnect' : 'connect', () => this.onConnected());
    socket.on('data', (chunk: Buffer) => this.#onData(chunk));
    socket.on('end', () => socket.destroy()); // everything was read
    socket.on('error', (error) => (this.#failure = error));
    socket.on('close', () => {
      clearTimeout(this.#timer);
      this.onClose(this.#failure);
    });
  }

  /** The attempt has succeeded, and has no limit any more. */
  established(): void {
    clearTimeout(this.#timer);
  }

  sendHello(): void {
    this.helloSentAt = performance.now();
    this.socket.write(this.hello);
  }

  #onData(chunk: Buffer): void {
    this.onBytes();
    try {
      this.#reader.read(chunk, (message) => {
        this.onMessage(message);
        return !this.socket.destroyed;
      });
    } catch (error) {
      this.socket.destroy(error as Error);
    }
  }
}

/** Tries each address once, and a leader that a server names next, until a server accepts `hello`. @internal */
export class Dial {
  readonly #dialer: Dialer;
  readonly #queue: [address: Address, ip: string][];
  readonly #tried = new Set<string>();
  readonly #errors: Error[] = [];
  readonly #attempts = new Set<Attempt>();
  /** The attempts and look-ups that have not ended. */
  #running = 0;
  /** The connections that wait to send `hello`. */
  readonly #connected: Attempt[] = [];
  #greeting: Attempt | undefined;
  #isDone = false;
  #timer: NodeJS.Timeout | undefined;
  #helloTimer: NodeJS.Timeout | undefined;
  /** The timers of `#limit`. */
  readonly #limits = new Set<NodeJS.Timeout>();

  constructor(addresses: readonly Address[], dialer: Dialer) {
    this.#dialer = dialer;
    this.#queue = addresses.map((address) => [address, address.host]);
    this.#next();
  }

  /** Ends all attempts but one. */
  end(winner?: Attempt): void {
    this.#isDone = true;
    clearTimeout(this.#timer);
    clearTimeout(this.#helloTimer);
    for (const timer of this.#limits) clearTimeout(timer); // they would keep the process running
    for (const attempt of this.#attempts) if (attempt !== winner) attempt.socket.destroy();
  }

  #next(): void {
    clearTimeout(this.#timer);
    const [address, ip] = this.#queue.shift() ?? [];
    if (!address || !ip) {
      if (!this.#running) this.#dialer.onFailed(this.#errors);
      return;
    }
    const key = formatAddress({ ...address, host: ip });
    if (this.#tried.has(key)) return this.#next();
    this.#tried.add(key);
    this.#running++;
    this.#timer = setTimeout(() => this.#next(), STAGGER);
    (isIP(ip) ? this.#connect(address, ip) : this.#lookUp(address)).catch((error: Error) => this.#onFailed(address, error));
  }

  async #lookUp(address: Address): Promise<void> {
    const { host } = address;
    const { lateLookups } = this.#dialer;
    const late = lateLookups.get(host);
    lateLookups.delete(host);
    const running = late ?? lookup(host, { all: true });
    // The system asks its second name server after 5 s. Each lookup occupies a thread until it ends.
    const keep = (): unknown => late ?? lateLookups.set(host, running);
    const found = await this.#limit(running, 'the lookup of the name', keep);
    // Alternately of both families, so that a network without one of them costs one step.
    const rank = found.map(({ family }, index) => found.slice(0, index).filter((other) => other.family === family).length);
    const order = [...found.keys()].sort((a, b) => rank[a]! - rank[b]!);
    this.#queue.unshift(...order.map((index): [Address, string] => [address, found[index]!.address]));
    this.#running--;
    if (!this.#isDone) this.#next();
  }

  async #connect(address: Address, host: string): Promise<void> {
    const hello = await this.#limit(this.#dialer.hello(), 'the source of the token');
    if (this.#isDone) return;
    const { port, isSecure } = address;
    const servername = isIP(address.host) ? undefined : address.host;
    const socket = isSecure ? connectTls({ servername, ...tlsOptions(this.#dialer.options), host, port }) : connectTcp({ host, port });
    const attempt = new Attempt(address, socket, hello);
    this.#attempts.add(attempt);
    attempt.onConnected = () => {
      this.#connected.push(attempt);
      if (!this.#greeting) this.#greet();
    };
    attempt.onMessage = (message) => this.#onAnswer(attempt, message);
    attempt.onClose = (failure) => {
      this.#attempts.delete(attempt);
      if (this.#connected.includes(attempt)) this.#connected.splice(this.#connected.indexOf(attempt), 1);
      if (this.#greeting === attempt) this.#greet();
      this.#onFailed(address, failure, attempt.leader);
    };
  }

  /** Waits for a function of the user or of the system, whose promise may never be settled, as long as for an attempt. */
  async #limit<T>(promise: Promise<T>, source: string, onLate = (): unknown => undefined): Promise<T> {
    let timer!: NodeJS.Timeout;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        onLate();
        reject(new Error(`${source} takes too long`));
      }, MAX_ATTEMPT_TIME);
    });
    this.#limits.add(timer);
    try {
      return await Promise.race([promise, late]);
    } finally {
      clearTimeout(timer);
      this.#limits.delete(timer);
    }
  }

  /** Sends one `hello` after the other: if two connections lead to one server, the later takes over the session. */
  #greet(): void {
    clearTimeout(this.#helloTimer);
    this.#greeting = this.#isDone ? undefined : this.#connected.shift();
    if (!this.#greeting) return;
    this.#greeting.sendHello();
    this.#helloTimer = setTimeout(() => this.#greet(), HELLO_STAGGER);
  }

  #onAnswer(attempt: Attempt, { command, payload }: Message): void {
    if (command === 'error') {
      attempt.leader = payload.leader;
      attempt.socket.destroy(fromReply(payload));
    } else if (command === 'pong') {
      attempt.socket.destroy(new Error('the server did not answer hello'));
    } else if (command === 'welcome') {
      attempt.isAlone = [...this.#attempts].every((other) => other === attempt || !other.helloSentAt);
      this.#dialer.onWelcome(attempt, payload);
      this.end(attempt);
    }
  }

  #onFailed(address: Address, error: Error, leader?: string): void {
    if (this.#isDone) return;
    this.#running--;
    // The error of a look-up or of a socket may have no message.
    this.#errors.push(error.message ? error : new Error(String((error as NodeJS.ErrnoException).code), { cause: error }));
    const next = parseLeader(leader, address.isSecure);
    if (next) this.#queue.unshift([next, next.host]);
    this.#next();
  }
}
