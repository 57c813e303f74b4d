// The session of a client across its successive connections: which commands wait for an answer, which locks are held.
//
// Each command has a `ref`, by which its answer is matched. The `ref` of a request identifies the request until it ends.
// Each connection begins with `hello` and `ping`. Before it answers this `ping`, the server sends the state of the requests
// of the session. Then the client sends again what has no answer yet, in the order in which it was first sent.
import { randomBytes } from 'node:crypto';
import { Command, Request, type RequestOptions } from './calls.js';
import { parseAddresses, resolveToken, type ConnectOptions } from './config.js';
import { Backoff, Connection, log } from './connection.js';
import { ClosedError, fromReply, lost, notGranted } from './errors.js';
import { Lock } from './lock.js';
import type { Watch } from './watch.js';
import { encode, MAX_TIMEOUT } from './wire.js';
import type { Change, ErrorReply, Extended, Locked, Message, Released, Welcome } from './wire.js';

type Call = Request | Command;

const PROTOCOL = 1;
const CLIENT = 'genie-typescript/0.1.0';
const RESUME_REF = 'resume';
const DEFAULT_PING_INTERVAL = 2_000;
const MIN_PING_INTERVAL = 100;
/** A server hangs if it is silent for these steps after a `ping`. A suspended client first reads, before the next step. */
const PING_STEPS = 3;
const PING_STEP = 1_000;
/** After a wait in the queue of more than this share of its `transactionTimeout`, a lock is extended. */
const LONG_WAIT = 0.1;
/** After a wait of more than this share, `acquire` waits until the lock is extended. */
const VERY_LONG_WAIT = 0.5;
const BYE_TIMEOUT = 3_000;
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
    const onAbort = (): void => {
      cancel();
      reject(signal.reason);
    };
    signal.addEventListener('abort', onAbort);
    if (signal.aborted) onAbort();
    promise.then(resolve, reject).finally(() => signal.removeEventListener('abort', onAbort));
  });
}

/** @internal */
export class Session {
  readonly #connection: Connection;
  readonly #connectTimeout: number;
  readonly #hello: { sessionTimeout: number; namespace: string | undefined };
  /** The requests that have not ended, and the other commands without an answer, by `ref`, in the order of their calls. */
  readonly #calls = new Map<string, Call>();
  readonly #watches = new Set<Watch>();
  /** What is not written yet, because the server has not read enough. */
  #queue: Call[] = [];
  /** When the commands that were answered with `unavailable` are sent again. */
  #retryAt = Infinity;
  readonly #retryBackoff = new Backoff();
  #lastRef = 0;
  #phase: 'down' | 'hello' | 'resuming' | 'up' = 'down';
  /** The number of the current connection; the first one has the number 1. */
  #connectionNumber = 0;
  #helloSentAt = 0;
  #closing: Promise<void> | undefined;
  #onBye = (): void => {};
  #closed = false;
  #pingInterval = DEFAULT_PING_INTERVAL;
  /** When the keepalive acts next. Infinity: no message is expected from the server. */
  #pingAt = Infinity;
  #pingSteps = 0;
  /** When the last `ping` was sent, or the keepalive was started. */
  #silentSince = 0;
  #timer: NodeJS.Timeout | undefined;
  #timerAt = Infinity;

  constructor(options: ConnectOptions) {
    const { connectTimeout = 10_000, sessionTimeout = 10_000, namespace = process.env.GENIE_NAMESPACE || undefined } = options;
    this.#connectTimeout = checkTimeout('connectTimeout', connectTimeout);
    const secrets = { session: randomBytes(24).toString('base64url'), token: resolveToken(options.token) };
    const hello = { protocol: PROTOCOL, client: CLIENT, quiet: true, namespace, ...secrets };
    this.#hello = { ...hello, sessionTimeout: checkTimeout('sessionTimeout', sessionTimeout) };
    this.#connection = new Connection(parseAddresses(options), connectTimeout, this);
  }

  // -- calls ----------------------------------------------------------------------------------------------------------

  /** Sends a request, and resolves with the lock when it is granted. */
  request(payload: object, options: RequestOptions, signal: AbortSignal | undefined): Promise<Lock> {
    this.#checkOpen(signal);
    const request = new Request(this.#nextRef(), payload, options);
    this.#submit(request, options.queueTimeout < MAX_TIMEOUT ? options.queueTimeout + this.#connectTimeout : Infinity);
    return abortable(request.promise, signal, () => this.#cancel(request));
  }

  /** Sends another command, and resolves with the payload of its answer. `request`: the lock that it is about. */
  call(name: string, payload: object, signal?: AbortSignal, request?: Request): Promise<object> {
    this.#checkOpen(signal);
    return abortable(this.#command(name, payload, request, this.#connectTimeout).promise, signal);
  }

  /** Releases a lock of this client. An aborted signal ends the wait for the answer, not the release. */
  async release(request: Request, signal: AbortSignal | undefined): Promise<void> {
    if (request.state === 'held') {
      this.#checkOpen();
      request.state = 'releasing';
      request.release = this.#command('release', { id: request.id }, request, this.#connectTimeout);
    }
    if (request.release) await abortable(request.release.promise, signal);
  }

  /** Releases a lock, or cancels a waiting request, of any client. Returns the reason for which it has ended. */
  async releaseId(id: number, signal: AbortSignal | undefined): Promise<string> {
    const own = this.#find(id);
    const { reason } = (await this.call('release', { id }, signal, own)) as Released;
    if (!own && reason === 'success') this.#repeatWaiting();
    return reason;
  }

  /** Extends a lock of any client. */
  async extend(id: number, transactionTimeout: number, signal?: AbortSignal, own = this.#find(id)): Promise<void> {
    checkTimeout('transactionTimeout', transactionTimeout);
    const answer = await this.call('extend', { id, transactionTimeout }, signal, own);
    if (own?.error) throw own.error;
    if ('reason' in answer) throw lost(id, (answer as Released).reason);
  }

  /** Starts a watch, which asks for a snapshot of the held locks when it needs one. */
  addWatch(watch: Watch): void {
    this.#checkOpen();
    this.#watches.add(watch);
    this.sendWatches();
  }

  sendWatches(): void {
    if (this.#phase !== 'up') return this.#connection.start();
    for (const watch of this.#watches) {
      if (!watch.needsSnapshot) continue;
      watch.onRequested(this.#nextRef());
      this.#write('watch', { prefix: watch.prefix }, watch.ref);
    }
  }

  removeWatch(watch: Watch): void {
    if (!this.#watches.delete(watch) || !watch.isSubscribed || this.#closed) return;
    for (const other of this.#watches) if (other.prefix === watch.prefix) return;
    this.#write('unwatch', { prefix: watch.prefix });
  }

  close(): Promise<void> {
    return (this.#closing ??= this.#close());
  }

  async #close(): Promise<void> {
    this.#closed = true;
    for (const watch of [...this.#watches]) watch.end();
    for (const request of this.#requests()) if (request.state === 'waiting') this.#fail(request, new ClosedError());
    if (this.#phase === 'up') {
      for (const call of this.#queue) if (this.#isUnanswered(call)) this.#writeCall(call);
      this.#write('bye', {});
      const timer = setTimeout(() => this.#onBye(), Math.min(BYE_TIMEOUT, this.#connectTimeout));
      await new Promise<void>((resolve) => (this.#onBye = resolve));
      clearTimeout(timer);
    }
    this.#connection.close();
    for (const call of [...this.#calls.values()]) {
      if (call instanceof Command) this.#fail(call, new ClosedError());
      // The other locks stay held until they are released by id or time out: then their signals are aborted.
      else if (call.options.isBoundToSession && call.state === 'held') this.#lose(call, 'disconnected');
    }
  }

  // -- requests and commands ------------------------------------------------------------------------------------------

  #checkOpen(signal?: AbortSignal): void {
    if (this.#closed) throw new ClosedError();
    signal?.throwIfAborted();
  }

  #nextRef(): string {
    return String(++this.#lastRef);
  }

  #requests(): Request[] {
    return [...this.#calls.values()].filter((call) => call instanceof Request);
  }

  #find(id: number): Request | undefined {
    return this.#requests().find((request) => request.id === id && ['held', 'detached'].includes(request.state));
  }

  /** Sends a command whose caller waits for `timeout` ms. */
  #command(name: string, payload: object, request?: Request, timeout = Infinity): Command {
    const command = new Command(this.#nextRef(), name, payload, request);
    this.#submit(command, timeout);
    return command;
  }

  /** Sends a command in the background, until it is answered. */
  #send(name: string, payload: object, request?: Request, timeout?: number): void {
    this.#command(name, payload, request, timeout).promise.catch((error: Error) => log('%s: %s', name, error.message));
  }

  /** Cancels a request whose caller no longer waits. */
  #cancel(request: Request): void {
    if (request.state !== 'waiting') return;
    this.#end(request);
    if (request.sentAt === 0) return;
    request.state = 'cancelling';
    request.line = encode('release', {}, request.ref);
    this.#submit(request, Infinity);
  }

  /** Rejects a call. A release is repeated until the server confirms it, although its caller no longer waits. */
  #fail(call: Call, error: Error): void {
    call.deadline = Infinity;
    if (call instanceof Request) this.#cancel(call);
    else if (call.name !== 'release' || this.#closed) this.#calls.delete(call.ref);
    call.reject(error);
  }

  #end(request: Request): void {
    this.#calls.delete(request.ref);
    request.state = 'ended';
  }

  /** The lock of a request has ended, not by its holder. */
  #lose(request: Request, reason: string): void {
    this.#calls.delete(request.ref);
    request.lose(lost(request.id, reason));
  }

  /** The id of a waiting request is unknown, so a released id may be that of any. The answers to a repetition tell. */
  #repeatWaiting(): void {
    if (this.#phase !== 'up') return;
    for (const request of this.#requests()) {
      // Not a new sending: the request may be granted already, and its time counts from the first sending.
      if (request.state === 'waiting' && request.sentAt) this.#connection.write(request.line);
    }
  }

  #extendInBackground(request: Request): void {
    const { transactionTimeout } = request.options;
    this.#send('extend', { id: request.id, transactionTimeout }, request, this.#connectTimeout);
  }

  // -- sending --------------------------------------------------------------------------------------------------------

  /** Writes a command that is about this connection only. No caller waits for its answer. */
  #write(name: string, payload: object, ref = this.#nextRef()): void {
    this.#connection.write(encode(name, payload, ref));
  }

  /** Sends a call now, or on the next connection. */
  #submit(call: Call, timeout: number): void {
    this.#calls.set(call.ref, call);
    call.deadline = performance.now() + timeout;
    this.#arm(call.deadline);
    if (this.#phase !== 'up') this.#connection.start();
    else if (this.#queue.length || this.#connection.congested) this.#queue.push(call);
    else this.#writeCall(call);
  }

  #writeCall(call: Call): void {
    call.sentAt = performance.now();
    call.firstConnection ||= this.#connectionNumber;
    call.isRefused = false;
    this.#connection.write(call.line);
    if (this.#pingAt === Infinity) this.#startKeepalive(call.sentAt);
  }

  #isUnanswered(call: Call): boolean {
    const isPending = call instanceof Command || call.state === 'waiting' || call.state === 'cancelling';
    return isPending && this.#calls.has(call.ref);
  }

  /** The server has read enough: more may be written. */
  onDrain(): void {
    if (this.#phase !== 'up' || !this.#queue.length) return;
    let count = 0;
    for (const call of this.#queue) {
      if (this.#connection.congested) break;
      if (this.#isUnanswered(call)) this.#writeCall(call);
      count++;
    }
    this.#queue.splice(0, count);
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
    if (this.#retryAt <= now) this.#retry();
    if (this.#pingAt <= now) this.#keepAlive(now);
    let next = Math.min(this.#retryAt, this.#pingAt);
    for (const call of [...this.#calls.values()]) {
      if (call.timerAt <= now && call instanceof Request && call.state === 'held') this.#onLockTimer(call, now);
      else if (call.timerAt <= now) this.#fail(call, this.#connection.unavailableError());
      next = Math.min(next, call.timerAt);
    }
    this.#arm(Math.max(next, now + MIN_SCAN_INTERVAL * this.#calls.size));
  }

  #onLockTimer(request: Request, now: number): void {
    const { id, options } = request;
    if (request.endsAt > now) {
      request.renewAt = now + options.transactionTimeout / 3;
      if (this.#phase === 'up') this.#extendInBackground(request);
      return;
    }
    // Time without a server does not count for the server, so it may hold a lock longer that it has not confirmed here.
    const isConfirmed = this.#phase === 'up' && request.confirmedOn === this.#connectionNumber;
    if (!isConfirmed && !this.#closed) this.#send('release', { id });
    this.#lose(request, request.sessionEndsAt < request.expiresAt ? 'disconnected' : 'transaction-timeout');
  }

  #retry(): void {
    this.#retryAt = Infinity;
    for (const call of this.#calls.values()) if (call.isRefused && this.#isUnanswered(call)) this.#queue.push(call);
    this.onDrain();
    this.sendWatches();
  }

  #startKeepalive(now: number): void {
    this.#pingSteps = 0;
    this.#silentSince = now;
    this.#pingAt = now + this.#pingInterval;
    this.#arm(this.#pingAt);
  }

  /** Sends a `ping` after a silence, and ends the connection if the silence continues. */
  #keepAlive(now: number): void {
    const { lastReceivedAt } = this.#connection;
    if (this.#phase !== 'up' || !(this.#calls.size || this.#watches.size)) {
      this.#pingAt = Infinity;
    } else if (lastReceivedAt > this.#silentSince) {
      this.#pingSteps = 0;
      this.#silentSince = lastReceivedAt;
      this.#pingAt = Math.max(lastReceivedAt + this.#pingInterval, now);
    } else if (this.#pingSteps >= PING_STEPS) {
      this.#connection.drop(new Error('the server does not answer'));
    } else {
      if (this.#pingSteps++ === 0) {
        this.#silentSince = now;
        this.#write('ping', {});
      }
      this.#pingAt = now + Math.min(PING_STEP, this.#connectTimeout / 4);
    }
  }

  // -- events of the connection ---------------------------------------------------------------------------------------

  /** Returns the first lines of a new connection. */
  onOpen(): string {
    this.#phase = 'hello';
    this.#connectionNumber++;
    this.#helloSentAt = performance.now();
    return encode('hello', this.#hello, 'hello') + encode('ping', {}, RESUME_REF);
  }

  onClose(): void {
    const sessionEndsAt = performance.now() + this.#hello.sessionTimeout;
    for (const request of this.#requests()) {
      if (request.options.isBoundToSession) request.sessionEndsAt = Math.min(request.sessionEndsAt, sessionEndsAt);
    }
    this.#arm(sessionEndsAt);
    this.#phase = 'down';
    this.#queue = [];
    this.#retryAt = this.#pingAt = Infinity;
    for (const watch of this.#watches) watch.onUnsubscribed();
    this.#onBye();
  }

  /** All servers have rejected this client for good. The next call tries again. */
  onRejected(error: Error): void {
    for (const watch of [...this.#watches]) watch.end(error);
    for (const call of [...this.#calls.values()]) this.#fail(call, error);
  }

  onMessage(message: Message): void {
    const { command, payload } = message;
    if (this.#phase === 'hello') return this.#onHandshake(message);
    const { ref = '' } = payload as { ref?: string };
    const call = this.#calls.get(ref);
    if (this.#phase === 'up' && command !== 'error') {
      // The server executes commands: the next retry, and the next reconnect, begin with the shortest delay.
      this.#retryBackoff.reset();
      this.#connection.backoff.reset();
    }
    if (command === 'locked') this.#onLocked(payload, call);
    else if (command === 'released') this.#onReleased(payload, call);
    else if (command === 'error') this.#onError(payload, call);
    else if (command === 'event') this.#onEvent(payload);
    else if (command === 'watching') this.#findWatch(ref)?.onSnapshot(payload);
    else if (command === 'bye') this.#onBye();
    else if (command === 'pong' && ref === RESUME_REF && this.#phase === 'resuming') this.#onResumed(true);
    else if (call instanceof Command) this.#onAnswer(call, payload);
    else log('ignored: %j', message); // `queued`, which is not needed, or a message of a newer server
  }

  #onHandshake({ command, payload }: Message): void {
    if (command === 'error') {
      this.#connection.drop(fromReply(payload), payload.leader);
    } else if (command === 'welcome') {
      this.#onWelcome(payload);
    } else if (command === 'pong') {
      this.#connection.drop(new Error('the server did not answer hello'));
    }
  }

  #onWelcome({ protocol, namespace, resumed, pingInterval }: Welcome): void {
    if (protocol !== PROTOCOL || (this.#hello.namespace ?? namespace) !== namespace) {
      return this.#connection.drop(new Error(`the server speaks protocol ${protocol} and serves the namespace ${namespace}`));
    }
    this.#phase = 'resuming';
    const limit = this.#connectTimeout / 2;
    this.#pingInterval = Math.min(Math.max(pingInterval ?? DEFAULT_PING_INTERVAL, MIN_PING_INTERVAL), limit);
    if (resumed) return;
    // The server does not know the session: its locks are lost, and may still block other requests.
    for (const request of this.#requests()) {
      const { id, state } = request;
      if (state === 'held') this.#lose(request, 'lost');
      else if (state === 'cancelling' || state === 'detached') this.#end(request); // a release by `ref` has no effect any more
      if (id && state !== 'releasing' && state !== 'detached') this.#send('release', { id });
      if (state === 'waiting') request.id = 0; // it is queued again
    }
  }

  /** The server has sent the state of all requests of the session. */
  #onResumed(isAvailable: boolean): void {
    for (const request of this.#requests()) {
      if (request.state === 'held' && request.confirmedOn !== this.#connectionNumber) {
        this.#end(request);
        this.#send('release', { id: request.id }, request); // the answer contains the reason
      } else if (request.state === 'held' && request.options.watchdog) {
        request.renewAt = 0; // the last extension may have been lost with the connection
        this.#arm(0);
      }
    }
    for (const call of [...this.#calls.values()]) {
      if (!(call instanceof Command)) continue;
      const { name, request } = call;
      if (name === 'ping' && isAvailable) this.#onAnswer(call, {}); // the server has just answered a `ping`
      else if (name === 'extend' && request && request.state !== 'held') this.#fail(call, request.error ?? lost(request.id, 'lost'));
    }
    this.#phase = 'up';
    this.#connection.established();
    this.#startKeepalive(performance.now());
    this.#queue = [...this.#calls.values()].filter((call) => this.#isUnanswered(call));
    this.sendWatches();
    this.onDrain();
  }

  // -- messages -------------------------------------------------------------------------------------------------------

  #onLocked({ id, fence, expiresIn, resources }: Locked, request: Call | undefined): void {
    if (!(request instanceof Request)) return this.#send('release', { id });
    request.id = id;
    request.fence = fence;
    request.confirmedOn = this.#connectionNumber;
    const { options } = request;
    if (resources) options.resources = choose(options.resources, resources);
    if (expiresIn !== undefined) {
      this.#hold(request, this.#phase === 'resuming' ? this.#helloSentAt : request.sentAt, expiresIn);
    } else if (request.state === 'waiting') {
      // The time counts from the sending of the request, because `locked` may have been on its way for long. That is
      // always safe, but leaves little time after a wait in the queue: then it counts from the sending of an `extend`.
      // A request that was sent before this connection may have been granted before it was sent again.
      const since = request.firstConnection === this.#connectionNumber ? request.sentAt : this.#helloSentAt;
      const waited = (performance.now() - since) / options.transactionTimeout;
      if (waited > LONG_WAIT) this.#extendInBackground(request);
      if (waited < VERY_LONG_WAIT) this.#hold(request, since, options.transactionTimeout);
    }
  }

  /** The server has granted or confirmed a lock, which ends `duration` ms after `since`. */
  #hold(request: Request, since: number, duration: number): void {
    if (request.state !== 'waiting' && request.state !== 'held') return;
    if (request.state === 'waiting') request.resolve(new Lock(this, request));
    request.state = 'held';
    request.deadline = request.sessionEndsAt = Infinity;
    request.expiresAt = since + duration;
    if (request.options.watchdog) request.renewAt = since + duration / 3;
    this.#arm(request.timerAt);
  }

  #onReleased(payload: Released, call: Call | undefined): void {
    if (call instanceof Command) {
      this.#onAnswer(call, payload);
    } else if (!call) {
      log('ignored: %j', payload);
    } else if (call.state === 'held' || (call.state === 'releasing' && payload.reason !== 'success')) {
      this.#lose(call, payload.reason); // after a success, the answer to the release follows
    } else if (call.state !== 'releasing') {
      this.#end(call);
      call.reject(notGranted(payload)); // only `acquire` still waits
    }
  }

  #onAnswer(command: Command, payload: object): void {
    const { request } = command;
    this.#calls.delete(command.ref);
    if (request && 'reason' in payload) this.#onLockEnded(command, request, payload as Released);
    else if (request) this.#onExtended(request, command.sentAt, payload as Extended);
    command.resolve(payload);
  }

  /** A lock was released by this client, or had ended before its `release` or `extend`. */
  #onLockEnded({ name }: Command, request: Request, released: Released): void {
    const { state, error } = request;
    if (error || (state === 'ended' && name === 'extend')) return; // it was lost or released before
    if (state === 'detached' || (state === 'releasing' && released.reason === 'success')) return this.#end(request);
    this.#lose(request, released.reason);
    request.reject(request.error); // if `acquire` still waits
  }

  #onExtended(request: Request, sentAt: number, { transactionTimeout }: Extended): void {
    request.options.transactionTimeout = transactionTimeout;
    this.#hold(request, sentAt, transactionTimeout);
    if (request.error) this.#send('release', { id: request.id }); // it had ended before by the clock of this client
  }

  #findWatch(ref: string): Watch | undefined {
    return [...this.#watches].find((watch) => watch.ref === ref);
  }

  #onEvent(event: Change | { state: 'lagged' }): void {
    for (const watch of this.#watches) {
      if (event.state === 'lagged') watch.onUnsubscribed();
      else watch.onEvent(event);
    }
    if (event.state === 'lagged') this.sendWatches();
  }

  #onError(payload: ErrorReply, call: Call | undefined): void {
    const { code, ref = '', leader } = payload;
    const error = fromReply(payload);
    const watch = this.#findWatch(ref);
    if (code === 'unavailable' && leader) {
      this.#connection.drop(error, leader);
    } else if (ref === RESUME_REF && this.#phase === 'resuming') {
      this.#onResumed(false); // the state of the requests is complete, also if the server cannot reach its store
    } else if (code === 'unavailable' && (call ?? watch)) {
      if (call) call.isRefused = true;
      watch?.onUnsubscribed();
      if (this.#retryAt === Infinity) this.#retryAt = performance.now() + this.#retryBackoff.next();
      this.#arm(this.#retryAt);
    } else if (watch) {
      watch.end(error);
    } else if (call instanceof Command && call.request && code === 'unknown-id') {
      // A release that was sent on an earlier connection may have been executed there.
      const isExecuted = call.name === 'release' && call.firstConnection !== this.#connectionNumber;
      this.#onAnswer(call, { id: call.request.id, reason: isExecuted ? 'success' : code });
    } else if (call && this.#isUnanswered(call)) {
      this.#calls.delete(ref);
      if (call instanceof Request) call.state = 'ended';
      else if (call.request?.state === 'releasing') call.request.state = 'held';
      call.reject(error); // a cancelled request has no caller any more
    } else {
      log('error without a command: %s', error.message);
    }
  }
}

/** Returns the resources that the server has locked. `names` have no modes. */
function choose(resources: readonly string[], names: readonly string[]): readonly string[] {
  const chosen = new Set(names);
  return resources.filter((resource) => chosen.has(resource.slice(resource.indexOf(':') + 1)));
}
