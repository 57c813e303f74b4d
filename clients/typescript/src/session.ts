// The session of a client across its successive connections: which commands wait for an answer, which locks are held.
//
// Each command has a `ref`, by which its answer is matched. The `ref` of a request identifies the request until it ends.
// Each connection begins with `hello` and `ping`. Before it answers this `ping`, the server sends the state of the requests
// of the session. Then the client sends again what has no answer yet, in the order in which it was first sent.
import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { createSecureContext } from 'node:tls';
import { Command, onAbort, Request, type Lease, type RequestOptions, type Subscriber } from './calls.js';
import { DEFAULT_LOGGER, defaultNote, parseAddresses, resolveToken, tlsOptions } from './config.js';
import { Backoff, Connection, type ConnectionHandler } from './connection.js';
import { ClosedError, fromReply, lost, notGranted, type GenieError } from './errors.js';
import type { CloseOptions, ConnectOptions, Logger } from './options.js';
import { encode, MAX_TIMEOUT } from './wire.js';
import type { ErrorReply, Extended, Inspection, Locked, Message, Released, Watching, Welcome } from './wire.js';

type Call = Request | Command;

const PROTOCOL = 1;
const CLIENT = 'genie-typescript/1.0.0-rc.1';
const RESUME_REF = 'resume';
const DEFAULT_PING_INTERVAL = 2_000;
const MIN_PING_INTERVAL = 100;
const MAX_PING_INTERVAL = 5_000;
/** The commands that each message may answer, besides `error`. An `extend` without its time would hold a lock for ever. */
const ANSWERED: Readonly<Record<string, readonly string[]>> = {
  released: ['release', 'extend'], pong: ['ping'], extended: ['extend'], inspected: ['inspect'], watching: ['watch'],
  unwatched: ['unwatch'], bye: ['bye'],
};
/** After so many take-overs in a row, another process uses the secret of the session. */
const MAX_TAKEOVERS = 3;
/**
 * After a silence of 3 steps, each of half a ping interval, the keepalive sends a `ping`. If 3 steps of a second are silent
 * after it, the server hangs. The keepalive counts steps, because a client that was suspended first has to read.
 */
const STEPS_TO_PING = 3;
const STEPS_TO_DROP = 6;
const STEP_AFTER_PING = 1_000;
/** After a wait in the queue of more than this share of its `transactionTimeout`, a lock is extended. */
const LONG_WAIT = 0.1;
/** After a wait of more than this share, `acquire` waits until the lock is extended. */
const VERY_LONG_WAIT = 0.5;
/** If less than this share of the session timeout remains when a bound lock is granted, the lock is extended first. */
const MIN_LEASE = 0.5;
const BYE_TIMEOUT = 3_000;
/** Maximum number of unanswered releases of locks that this client has not requested. */
const MAX_UNKNOWN_LOCKS = 1_000;
const DRAIN_STEP = 20;
/** Minimum time (ms) between two scans of all calls, per call: bounds the share of CPU time that scans take. */
const MIN_SCAN_INTERVAL = 0.001;

/** Returns a timeout that JSON can represent. The server checks the rest of its range. @internal */
export function checkTimeout(name: string, value: number): number {
  if (typeof value === 'number' && value >= 0 && value <= MAX_TIMEOUT) return value;
  throw new RangeError(`${name} must be a number of ms, at most ${MAX_TIMEOUT}, not ${value}`);
}

/** Waits for a promise, until the signal is aborted: then calls `cancel`, and rejects with the reason of the signal. */
function abortable<T>(promise: Promise<T>, signal: AbortSignal | undefined, cancel = (): void => {}): Promise<T> {
  if (!signal) return promise;
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      cancel();
      reject(signal.reason);
    };
    const stopListening = onAbort(signal, stop);
    if (signal.aborted) stop();
    // Before the caller continues: from then on the signal has no effect.
    promise.finally(stopListening).then(resolve, reject);
  });
}

/** @internal */
export class Session implements ConnectionHandler {
  readonly #connection: Connection;
  readonly #options: ConnectOptions;
  readonly logger: Logger;
  readonly #responseTimeout: number;
  readonly #sessionTimeout: number;
  readonly #namespace: string | undefined;
  readonly #secret = randomBytes(24).toString('base64url');
  /** The requests that have not ended, and the other commands without an answer, by `ref`, in the order of their calls. */
  readonly #calls = new Map<string, Call>();
  /** The requests whose id is known, and that have not ended. Is made when a call by id needs it. */
  #byId: Map<number, Request> | undefined;
  readonly #watches = new Set<Subscriber>();
  /** Each answer renews the session, from the sending of the command that was answered. */
  readonly #lease: Lease = { endsAt: -Infinity };
  /** When to look whether the lease needs a `ping`. */
  #leaseCheckAt = Infinity;
  /** What is to be written on this connection. */
  readonly #queue = new Set<Call>();
  /** After an answer `unavailable`: when the client writes again. */
  #retryAt = Infinity;
  readonly #retryBackoff = new Backoff();
  #lastRef = 0;
  /** The releases of locks that this client has not requested. At the limit, those with an answer are removed. */
  #unknownReleases: Command[] = [];
  /** The number of waiting requests. */
  #waiting = 0;
  #phase: 'down' | 'resuming' | 'up' = 'down';
  #helloSentAt = 0;
  #closing: Promise<void> | undefined;
  #closed = false;
  /** Why the client has ended by itself. */
  #fatal: GenieError | undefined;
  #takeovers = 0;
  #bye: Command | undefined;
  #pingInterval = DEFAULT_PING_INTERVAL;
  /** The steps of the keepalive since bytes have arrived. */
  silentSteps = 0;
  /** When the next step follows. */
  #keepaliveAt = Infinity;
  #timer: NodeJS.Timeout | undefined;
  #timerAt = Infinity;

  constructor(options: ConnectOptions) {
    const { responseTimeout = 1_000, sessionTimeout = 10_000 } = options;
    this.#options = options;
    this.logger = options.logger ?? DEFAULT_LOGGER;
    this.#responseTimeout = checkTimeout('responseTimeout', responseTimeout);
    this.#sessionTimeout = checkTimeout('sessionTimeout', sessionTimeout);
    this.#namespace = options.namespace ?? (process.env.GENIE_NAMESPACE || undefined);
    const addresses = parseAddresses(options);
    // What is read again for each connection is checked here, so that a wrong option is no error of the connection.
    if (typeof options.token !== 'function') this.#encodeHello(resolveToken(options.token));
    if (addresses.some(({ isSecure }) => isSecure)) createSecureContext(tlsOptions(options));
    this.#connection = new Connection(addresses, options, this.logger, this);
    void this.#connection.run();
  }

  // -- calls ----------------------------------------------------------------------------------------------------------

  /** Sends a request, and resolves with it when it is granted. */
  request(payload: object, options: RequestOptions, signal: AbortSignal | undefined): Promise<Request> {
    this.#checkOpen(signal);
    if (this.#closing) throw new ClosedError();
    const request = new Request(this.#nextRef(), payload, options, this.#lease);
    this.#waiting++;
    this.#submit(request, options.queueTimeout < MAX_TIMEOUT ? options.queueTimeout + this.#responseTimeout : Infinity);
    if (options.isBoundToSession && this.#phase === 'up') this.#arm((this.#leaseCheckAt = 0));
    return abortable(request.promise, signal, () => {
      if (request.state === 'held') this.release(request, undefined).catch(() => {}); // granted in this tick
      else this.#cancel(request);
    });
  }

  /**
   * Returns whether a lock is held. A lock whose time is over is lost first: a timer is late if the event loop was blocked.
   * So the members of a lock never contradict each other.
   */
  isHeld(request: Request): boolean {
    if (request.state === 'held' && request.endsAt <= performance.now()) this.#expire(request);
    request.abort();
    return request.state === 'held';
  }

  /** Sends another command, and resolves with the payload of its answer. `request`: the lock that it is about. */
  call(name: string, payload: object, signal?: AbortSignal, request?: Request, timeout?: number): Promise<object> {
    this.#checkOpen(signal);
    return abortable(this.#command(name, payload, request, timeout).promise, signal);
  }

  /** Releases a lock of this client. An aborted signal ends the wait for the answer, not the release. */
  async release(request: Request, signal: AbortSignal | undefined): Promise<void> {
    const isHeld = this.isHeld(request);
    // The release of a caller that no longer waits is repeated in the background: another one tells when it is confirmed.
    if (isHeld || (request.state === 'releasing' && request.release?.deadline === Infinity)) {
      this.#checkOpen();
      request.state = 'releasing';
      request.release = this.#command('release', { id: request.id }, request);
    }
    if (request.release) await abortable(request.release.promise, signal);
  }

  /** Releases a lock, or cancels a waiting request, of any client. Returns the reason for which it has ended. */
  async releaseId(id: number, signal: AbortSignal | undefined): Promise<string> {
    this.#checkOpen(signal);
    const own = this.#find(id);
    // This client does not know the ids of its waiting requests, and the server does not notify a client of the end of a
    // request that the client itself has released. So if a waiting request is released, it may be one of them.
    const isQueued = !own && this.#waiting > 0 ? this.#isQueued(id) : undefined;
    const command = this.#command('release', { id }, own);
    command.isQueued = isQueued;
    // The server may execute the release, and grant the lock to another client, although no answer arrives.
    if (own?.state === 'held') this.#lose(own, 'success');
    return ((await abortable(command.promise, signal)) as Released).reason;
  }

  /** Returns whether a request of any client waits; true if this client may not inspect. */
  async #isQueued(id: number): Promise<boolean> {
    const query = this.call('inspect', { id, only: 'queue' }) as Promise<Inspection>;
    return query.then(({ queueTotal }) => queueTotal > 0, () => true);
  }

  /** Extends a lock of any client. */
  async extend(id: number, transactionTimeout: number, signal?: AbortSignal, own = this.#find(id)): Promise<void> {
    checkTimeout('transactionTimeout', transactionTimeout);
    const answer = await this.call('extend', { id, transactionTimeout }, signal, own);
    if (own?.error) throw own.error;
    if ('reason' in answer) throw lost(id, (answer as Released).reason);
  }

  /** Sends a `watch` command. Its answer is a snapshot of the held locks; the events of all later changes follow. */
  subscribe(watch: Subscriber): Command {
    this.#checkOpen();
    this.#watches.add(watch);
    const command = new Command(this.#nextRef(), 'watch', { prefix: watch.prefix }, undefined, watch);
    command.promise.catch((error: unknown) => watch.end(error));
    this.#submit(command, Infinity);
    return command;
  }

  /** Ends a watch. `command` is its last `watch` command. */
  unsubscribe(watch: Subscriber, command: Command): void {
    this.#watches.delete(watch);
    this.#end(command);
    const { prefix } = watch;
    if (this.#phase !== 'up' || [...this.#watches].some((other) => other.prefix === prefix)) return;
    // It is not one of the calls, which are sent again: a watch ends with its connection.
    this.#enqueue(new Command(this.#nextRef(), 'unwatch', { prefix }));
  }

  close(options: CloseOptions): Promise<void> {
    return (this.#closing ??= this.#close(options));
  }

  async #close({ drain = 0, release = false }: CloseOptions): Promise<void> {
    const isOpen = ({ state }: Request): boolean => state === 'waiting' || state === 'held' || state === 'releasing';
    for (const end = performance.now() + drain; this.#requests().some(isOpen) && performance.now() < end; ) await sleep(DRAIN_STEP);
    const held = this.#requests().filter((request) => this.isHeld(request));
    if (release) await Promise.allSettled(held.map((request) => this.release(request, undefined)));
    // Without a connection, what was released last may stay held, too.
    const isLeft = (state: string): boolean => state === 'held' || (state === 'releasing' && this.#phase !== 'up');
    const left = this.#requests().filter(({ state, options }) => isLeft(state) && !options.isBoundToSession);
    const texts = left.map(({ id, options }) => `${id} (${options.resources.slice(0, 3).join(', ')})`);
    if (left.length) this.logger.warn(`the client was closed with locks that stay held: ${texts.join(', ')}`);
    this.#closed = true;
    for (const watch of this.#watches) watch.end();
    for (const request of this.#requests()) {
      if (request.state === 'waiting') this.#fail(request, new ClosedError());
      // The server ends the lock when it executes `bye`. The other locks stay held until they are released by id or time out:
      // then their signals are aborted.
      else if (request.options.isBoundToSession && request.state === 'held') this.#lose(request, 'disconnected');
    }
    if (this.#phase !== 'down') {
      this.#bye = this.#command('bye', {}, undefined, Math.min(BYE_TIMEOUT, this.#responseTimeout));
      await this.#bye.promise.catch(() => {});
    }
    this.#connection.close();
    for (const call of this.#calls.values()) if (call instanceof Command) this.#fail(call, new ClosedError());
  }

  // -- requests and commands ------------------------------------------------------------------------------------------

  #checkOpen(signal?: AbortSignal): void {
    if (this.#closed) throw this.#fatal ?? new ClosedError();
    signal?.throwIfAborted();
  }

  #nextRef(): string {
    return String(++this.#lastRef);
  }

  #requests(): Request[] {
    return [...this.#calls.values()].filter((call) => call instanceof Request);
  }

  #find(id: number): Request | undefined {
    this.#byId ??= new Map(this.#requests().map((each) => [each.id, each]));
    const request = this.#byId.get(id);
    return request?.state === 'held' || request?.state === 'detached' ? request : undefined;
  }

  /** Sends a command whose caller waits for `timeout` ms. */
  #command(name: string, payload: object, request?: Request, timeout = this.#responseTimeout): Command {
    const command = new Command(this.#nextRef(), name, payload, request);
    this.#submit(command, timeout);
    return command;
  }

  /** Sends a command in the background, until it is answered. */
  #send(name: string, payload: object, request?: Request): Command {
    const command = this.#command(name, payload, request, Infinity);
    command.promise.catch((error: Error) => this.logger.debug(`${name}: ${error.message}`));
    return command;
  }

  /** Cancels a request whose caller no longer waits. */
  #cancel(request: Request): void {
    if (request.state !== 'waiting') return;
    this.#end(request);
    if (!request.firstSentAt) return;
    request.state = 'cancelling';
    request.line = encode('release', {}, request.ref);
    this.#submit(request, Infinity);
  }

  /**
   * Rejects a call. A release is repeated until the server confirms it, although its caller no longer waits. An extension of a lock
   * waits for its answer on this connection: the server may execute it, and would hold the lock for longer than the client knows.
   */
  #fail(call: Call, error: Error): void {
    call.deadline = Infinity;
    if (call instanceof Request) this.#cancel(call);
    else if (this.#closed) this.#end(call);
    else if (call.name === 'extend' && call.request && this.#phase === 'up') call.isGivenUp = true;
    else if (call.name !== 'release') this.#end(call);
    call.reject(error);
  }

  #end(call: Call): void {
    this.#calls.delete(call.ref);
    if (call instanceof Request) {
      this.#byId?.delete(call.id);
      if (call.state === 'waiting') this.#waiting--;
    }
    call.state = 'ended';
  }

  /** The lock of a request has ended, not by its holder. */
  #lose(request: Request, reason: string): void {
    this.#end(request);
    request.lose(lost(request.id, reason));
  }

  #extendInBackground(request: Request): void {
    const { transactionTimeout } = request.options;
    this.#send('extend', { id: request.id, transactionTimeout }, request); // a late answer counts, too
  }

  // -- sending --------------------------------------------------------------------------------------------------------

  #submit(call: Call, timeout: number): void {
    this.#calls.set(call.ref, call);
    call.deadline = performance.now() + timeout;
    this.#arm(call.deadline);
    this.#enqueue(call);
  }

  /** Sends a command at the end of this tick. While disconnected, a pending call waits for the next connection. */
  #enqueue(call: Call): void {
    if (this.#phase !== 'up') return;
    this.#queue.add(call);
    this.#connection.flush();
  }

  /** Returns the lines to write next, of about `limit` characters. */
  takeOutput(limit: number): string {
    if (this.#phase !== 'up' || this.#retryAt < Infinity) return '';
    const now = performance.now();
    let output = '';
    for (const call of this.#queue) {
      if (output.length > limit) break;
      this.#queue.delete(call);
      if (!call.isPending) continue;
      call.firstSentAt ||= now;
      call.sentAt = now;
      if (call instanceof Command && call.request && call.transactionTimeout !== undefined) {
        call.request.lastExtend = call;
        this.#shorten(call.request, call);
      }
      output += call.line;
    }
    return output;
  }

  /** The server may execute an `extend` that shortens a lock although no answer arrives. */
  #shorten(request: Request, extend: Command): void {
    const endsAt = extend.sentAt + (extend.transactionTimeout || Infinity); // the server rejects 0
    if (request.state !== 'held' || endsAt >= request.expiresAt) return;
    request.expiresAt = endsAt;
    request.shortenedBy = extend;
    this.#arm(request.timerAt);
  }

  // -- timers ---------------------------------------------------------------------------------------------------------

  #arm(at: number): void {
    if (at >= this.#timerAt) return;
    clearTimeout(this.#timer);
    this.#timerAt = at;
    const delay = Math.min(Math.max(Math.ceil(at - performance.now()), 0), MAX_TIMEOUT);
    this.#timer = setTimeout(() => this.#onTimer(), delay).unref(); // the socket keeps the process running
  }

  #onTimer(): void {
    const now = performance.now();
    this.#timerAt = Infinity;
    if (this.#retryAt <= now) {
      this.#retryAt = Infinity;
      this.#connection.flush();
    }
    if (this.#keepaliveAt <= now) this.#keepAlive(now);
    if (this.#leaseCheckAt <= now) this.#keepLease(now);
    let next = Math.min(this.#retryAt, this.#keepaliveAt, this.#leaseCheckAt);
    for (const call of this.#calls.values()) {
      if (call.timerAt <= now && call instanceof Request && call.state === 'held') this.#onLockTimer(call, now);
      else if (call.timerAt <= now) this.#fail(call, this.#connection.unavailableError());
      next = Math.min(next, call.timerAt);
    }
    this.#arm(Math.max(next, now + MIN_SCAN_INTERVAL * this.#calls.size));
  }

  #onLockTimer(request: Request, now: number): void {
    if (request.endsAt <= now) return this.#expire(request);
    request.renewAt = now + request.options.transactionTimeout / 3;
    if (this.#phase === 'up' && !request.lastExtend?.isPending) this.#extendInBackground(request);
  }

  /** The time of a lock is over by the clock of this client. */
  #expire(request: Request): void {
    const { id, expiresAt, isConfirmed, lease, shortenedBy } = request;
    const isLeaseOver = lease.endsAt < expiresAt;
    // The server may keep the session longer than its lease. And time without a server does not count for the server, so it
    // may hold a lock longer that it has not confirmed on this connection, or whose shortening it may not have executed.
    if ((isLeaseOver || !isConfirmed || shortenedBy) && !this.#closed) this.#send('release', { id });
    this.#lose(request, isLeaseOver ? 'disconnected' : 'transaction-timeout');
  }

  /** Sends a `ping` if the lease was not renewed for long, while anything is bound to the session. */
  #keepLease(now: number): void {
    const isBound = ({ state, options }: Request): boolean => options.isBoundToSession && (state === 'waiting' || state === 'held');
    if (!this.#requests().some(isBound)) return void (this.#leaseCheckAt = Infinity);
    const interval = Math.min(this.#pingInterval, this.#sessionTimeout / 3);
    this.#leaseCheckAt = this.#lease.endsAt - this.#sessionTimeout + interval;
    if (this.#leaseCheckAt > now) return;
    this.#send('ping', {});
    this.#leaseCheckAt = now + interval;
  }

  #renewLease(sentAt: number): void {
    this.#lease.endsAt = Math.max(this.#lease.endsAt, sentAt + this.#sessionTimeout);
  }

  /** A step of the keepalive. It sends a `ping` after a silence, and ends the connection if the silence continues. */
  #keepAlive(now: number): void {
    const isExpecting = this.#calls.size > 0 || this.#watches.size > 0;
    this.silentSteps = isExpecting ? this.silentSteps + 1 : 0;
    if (this.silentSteps === STEPS_TO_PING) this.#send('ping', {});
    if (this.silentSteps === STEPS_TO_DROP) this.#connection.drop(new Error('the server does not answer'));
    const isPinged = this.silentSteps >= STEPS_TO_PING;
    this.#keepaliveAt = now + (isPinged ? Math.min(STEP_AFTER_PING, this.#responseTimeout) : this.#pingInterval / 2);
  }

  // -- events of the connection ---------------------------------------------------------------------------------------

  async hello(): Promise<string> {
    const { token } = this.#options;
    return this.#encodeHello(typeof token === 'function' ? await token() : resolveToken(token));
  }

  #encodeHello(token: string | undefined): string {
    const { note = defaultNote() } = this.#options;
    const fields = { client: CLIENT, quiet: true, sessionTimeout: this.#sessionTimeout, namespace: this.#namespace };
    const secrets = { session: this.#secret, token: token || undefined };
    const hello = { protocol: PROTOCOL, ...fields, note: note || undefined, ...secrets };
    return encode('hello', hello, 'hello') + encode('ping', {}, RESUME_REF);
  }

  onClose(reason: Error, isAlone: boolean): void {
    for (const call of this.#calls.values()) {
      if (call instanceof Request) call.isConfirmed = false;
      else if (call.isGivenUp) this.#end(call);
    }
    this.#phase = 'down';
    this.#queue.clear();
    this.#retryAt = this.#keepaliveAt = this.#leaseCheckAt = Infinity;
    for (const watch of this.#watches) watch.onLagged();
    if (this.#bye) this.#fail(this.#bye, new ClosedError());
    const isTakenOver = (reason as GenieError).code === 'session-taken-over';
    this.#takeovers = isTakenOver && isAlone ? this.#takeovers + 1 : 0;
    if (this.#takeovers < MAX_TAKEOVERS) return;
    this.#fatal = reason as GenieError;
    this.#closed = true;
    for (const watch of this.#watches) watch.end(reason);
    this.onRejected(reason);
    for (const request of this.#requests()) if (request.state === 'held') this.#lose(request, 'disconnected');
    this.#connection.close();
  }

  /** All servers have rejected this client, maybe only until its token is renewed: the client tries again. */
  onRejected(error: Error): void {
    for (const call of this.#calls.values()) if (!(call instanceof Command && call.watch)) this.#fail(call, error);
  }

  onMessage(message: Message): void {
    const { command, payload } = message;
    const { ref = '' } = payload as { ref?: string };
    const call = this.#calls.get(ref);
    if (this.#phase === 'up' && command !== 'error') {
      // The server executes commands: the next retry, and the next reconnect, begin with the shortest delay.
      this.#retryBackoff.reset();
      this.#connection.backoff.reset();
    }
    if (command === 'error') this.#onError(payload, call);
    else if (call instanceof Command && ANSWERED[command]?.includes(call.name)) this.#onAnswer(call, payload);
    else if (call instanceof Command) this.logger.debug(`ignored: ${command} ${ref} does not answer ${call.name}`);
    else if (command === 'locked') this.#onLocked(payload, call);
    else if (command === 'released' && call) this.#onReleased(payload, call);
    else if (command === 'event') for (const watch of this.#watches) watch.onEvent(payload);
    else if (command === 'pong' && ref === RESUME_REF && this.#phase === 'resuming') this.#onResumed(true);
    else this.logger.debug(`ignored: ${command} ${ref}`); // not needed, such as `queued` and a second `released`, or of a newer server
  }

  onWelcome({ protocol, namespace, resumed, pingInterval }: Welcome, helloSentAt: number): void {
    if (protocol !== PROTOCOL || (this.#namespace ?? namespace) !== namespace) {
      throw new Error(`the server has protocol ${protocol} and the namespace ${namespace}`);
    }
    this.#phase = 'resuming';
    this.#helloSentAt = helloSentAt;
    this.#renewLease(helloSentAt);
    this.#pingInterval = Math.min(Math.max(pingInterval ?? DEFAULT_PING_INTERVAL, MIN_PING_INTERVAL), MAX_PING_INTERVAL);
    if (resumed) return;
    // The server does not know the session: its locks are lost, and may still block other requests.
    for (const request of this.#requests()) {
      const { id, state } = request;
      if (state === 'held') this.#lose(request, 'lost');
      else if (state === 'cancelling' || state === 'detached') this.#end(request); // their `ref` is forgotten
      if (id && state !== 'releasing' && state !== 'detached') this.#send('release', { id });
      if (state !== 'waiting') continue;
      this.#byId?.delete(id);
      request.id = 0; // it is queued again
    }
  }

  /** The server has sent the state of all requests of the session. */
  #onResumed(isAvailable: boolean): void {
    // In the order of the calls, so that a request is before the commands about it. Added commands are visited, too.
    for (const call of this.#calls.values()) {
      if (call instanceof Request) this.#onRequestResumed(call);
      else if (call.name === 'ping' && isAvailable) this.#onAnswer(call, {}); // the server has just answered a `ping`
      else if (call.name === 'extend' && call.request && call.request.state !== 'held') {
        this.#fail(call, call.request.error ?? lost(call.request.id, 'lost'));
      }
      if (call.isPending) this.#queue.add(call);
    }
    this.#phase = 'up';
    this.#connection.established();
    this.#connection.flush();
    this.#keepaliveAt = this.#leaseCheckAt = 0;
    this.#arm(0);
  }

  #onRequestResumed(request: Request): void {
    if (request.state !== 'held') return;
    if (!request.isConfirmed) {
      this.#lose(request, 'lost'); // the server may hold it without a session
      this.#send('release', { id: request.id });
    } else if (request.options.watchdog) {
      request.renewAt = 0; // the last extension may have been lost with the connection
      this.#arm(0);
    }
  }

  // -- messages -------------------------------------------------------------------------------------------------------

  #onLocked({ id, fence, expiresIn, resources }: Locked, request: Request | undefined): void {
    if (!request) return this.#releaseUnknown(id);
    const { options, isConfirmed } = request;
    request.id = id;
    this.#byId?.set(id, request);
    request.fence = fence;
    request.isConfirmed = true;
    if (resources) options.resources = choose(options.resources, resources);
    if (isConfirmed) return; // the answer to a repetition that was not needed
    if (expiresIn !== undefined) {
      this.#hold(request, this.#helloSentAt, expiresIn);
    } else if (request.state === 'waiting') {
      // The time counts from the sending of the request, because `locked` may have been on its way for long. That is
      // always safe, but leaves little time after a wait in the queue: then it counts from the sending of an `extend`.
      // A request that was sent before this connection may have been granted before it was sent again.
      const since = Math.max(request.firstSentAt, this.#helloSentAt);
      const now = performance.now();
      const waited = (now - since) / options.transactionTimeout;
      const isLeaseShort = request.lease.endsAt - now < MIN_LEASE * this.#sessionTimeout;
      if (waited > LONG_WAIT || isLeaseShort) this.#extendInBackground(request);
      if (waited < VERY_LONG_WAIT && !isLeaseShort) this.#hold(request, since, options.transactionTimeout);
    }
  }

  /** Releases a lock that this client has not requested. Ends the connection if too many releases have no answer. */
  #releaseUnknown(id: number): void {
    if (this.#unknownReleases.length >= MAX_UNKNOWN_LOCKS) {
      this.#unknownReleases = this.#unknownReleases.filter(({ isPending }) => isPending);
    }
    if (this.#unknownReleases.length >= MAX_UNKNOWN_LOCKS) {
      return this.#connection.drop(new Error(`the server sent more than ${MAX_UNKNOWN_LOCKS} locks that were not requested`));
    }
    this.#unknownReleases.push(this.#send('release', { id }));
  }

  /** The server has granted or confirmed a lock, which ends `duration` ms after `since`. */
  #hold(request: Request, since: number, duration: number): void {
    if (request.state !== 'waiting' && request.state !== 'held') return;
    if (request.state === 'waiting') {
      this.#waiting--;
      request.resolve(request);
    }
    request.state = 'held';
    request.deadline = Infinity;
    request.expiresAt = since + duration;
    if (request.options.watchdog) request.renewAt = since + duration / 3;
    this.#arm(request.timerAt);
  }

  #onReleased(released: Released, request: Request): void {
    if (request.state === 'held' || (request.state === 'releasing' && released.reason !== 'success')) {
      this.#lose(request, released.reason); // after a success, the answer to the release follows
    } else if (request.state !== 'releasing') {
      this.#end(request);
      request.reject(notGranted(released)); // only `acquire` still waits
    }
  }

  #onAnswer(command: Command, payload: object): void {
    const { watch } = command;
    // A release by id may cross the grant of this client's own request: the server notifies it of the grant only.
    const request = command.request ?? ('reason' in payload ? this.#find((payload as Released).id) : undefined);
    this.#end(command);
    this.#renewLease(command.sentAt);
    watch?.onSnapshot(payload as Watching);
    if (request && 'reason' in payload) this.#onLockEnded(request, payload as Released);
    else if (request) this.#onExtended(request, command, payload as Extended);
    command.resolve(payload);
    // Also if its caller has given up. The answer to a repetition is the reason.
    void command.isQueued?.then((isQueued) => {
      if (isQueued) for (const waiting of this.#requests()) if (waiting.state === 'waiting') this.#enqueue(waiting);
    });
  }

  /** A lock was released by this client, or had ended before its `release` or `extend`. */
  #onLockEnded(request: Request, released: Released): void {
    const { state, error } = request;
    if (error || state === 'ended') return; // it was lost or released before
    if (state === 'detached' || (state === 'releasing' && released.reason === 'success')) return this.#end(request);
    this.#lose(request, released.reason);
    request.reject(request.error); // if `acquire` still waits
  }

  #onExtended(request: Request, command: Command, { transactionTimeout }: Extended): void {
    request.options.transactionTimeout = transactionTimeout;
    request.shortenedBy = undefined;
    this.#hold(request, command.sentAt, transactionTimeout);
    if (request.lastExtend?.isPending) {
      for (const call of this.#calls.values()) {
        if (call instanceof Command && call.request === request && call.sentAt) this.#shorten(request, call);
      }
    }
    if (request.error) this.#send('release', { id: request.id }); // it had ended before by the clock of this client
  }

  #onError(payload: ErrorReply, call: Call | undefined): void {
    const { code, ref = '', leader } = payload;
    const error = fromReply(payload);
    if (code === 'unavailable' && leader) {
      this.#connection.drop(error, leader);
    } else if (ref === RESUME_REF && this.#phase === 'resuming') {
      this.#onResumed(false); // the state of the requests is complete, also if the server cannot reach its store
    } else if (code === 'unavailable' && call && !(call instanceof Command && call.isGivenUp)) {
      this.#queue.add(call);
      if (this.#retryAt === Infinity) this.#retryAt = performance.now() + this.#retryBackoff.next();
      this.#arm(this.#retryAt);
    } else if (call instanceof Command && call.request && code === 'unknown-id') {
      // A release that was sent on an earlier connection may have been executed there.
      const isExecuted = call.name === 'release' && call.firstSentAt < this.#helloSentAt;
      this.#onAnswer(call, { id: call.request.id, reason: isExecuted ? 'success' : code });
    } else if (code === 'session-taken-over' && !call) {
      this.#connection.drop(error);
    } else if (call?.isPending) {
      this.#end(call);
      if (call instanceof Command && call.request?.release === call) call.request.state = 'held';
      call.reject(error); // a cancelled request has no caller any more
    } else {
      this.logger.debug(`error without a command: ${error.message}`);
    }
  }
}

/** Returns the resources that the server has locked. `names` have no modes. */
function choose(resources: readonly string[], names: readonly string[]): readonly string[] {
  const chosen = new Set(names);
  return resources.filter((resource) => chosen.has(resource.slice(resource.indexOf(':') + 1)));
}
