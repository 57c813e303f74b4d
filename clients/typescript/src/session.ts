// The session of a client across its successive connections: which commands wait for an answer, which locks are held.
//
// Each command has a `ref`, by which its answer is matched. The `ref` of a request identifies the request until it ends.
// Each connection begins with `hello` and `ping`. Before it answers this `ping`, the server sends the state of the requests
// of the session. Then the client sends again what has no answer yet, in the order in which it was first sent.
import { randomBytes } from 'node:crypto';
import { CallTable, Command, Request } from './calls.js';
import type { Address, ConnectOptions } from './config.js';
import { Backoff, Connection, log } from './connection.js';
import { ClosedError, DisconnectedError, LockLostError, RejectedError, TransactionTimeoutError } from './errors.js';
import { forgotten, fromReply, lost, notGranted, type GenieError } from './errors.js';
import { Lock } from './lock.js';
import { Watch } from './watch.js';
import { encode, MAX_TIMEOUT } from './wire.js';
import type { Change, ErrorReply, Locked, Message, Released, Watching, Welcome } from './wire.js';

type AnyCall = Request | Command;

const PROTOCOL = 1;
const CLIENT = 'genie-typescript/0.1.0';
const RESUME_REF = 'resume';
/** Errors in reply to `hello` that another attempt with the same server would not change. */
const FINAL_ERRORS = ['unauthorized', 'unknown-namespace', 'unsupported-protocol'];
const ANSWERS = ['extended', 'pong', 'inspected', 'watching', 'unwatched', 'bye'];
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

/** @internal */
export class Session {
  readonly #connection: Connection;
  readonly #connectTimeout: number;
  readonly #sessionTimeout: number;
  readonly #hello: { namespace: string | undefined };
  /** Requests that wait, are held, or are being released, by `ref`. */
  readonly #requests = new CallTable<Request>();
  /** The other commands without an answer, by `ref`. */
  readonly #commands = new CallTable<Command>();
  readonly #watches = new Set<Watch>();
  /** The refs of locks that other clients manage now. */
  readonly #detached = new Set<string>();
  /** What is not written yet, because the server has not read enough. */
  #queue: AnyCall[] = [];
  /** What the server has answered with `unavailable`. */
  #retries: AnyCall[] = [];
  #retryAt = Infinity;
  readonly #retryBackoff = new Backoff();
  #lastOrder = 0;
  #phase: 'down' | 'hello' | 'resuming' | 'up' = 'down';
  /** The number of the current connection; the first one has the number 1. */
  #connectionNumber = 0;
  #helloSentAt = 0;
  #closing: Promise<void> | undefined;
  #closed = false;
  #pingInterval = DEFAULT_PING_INTERVAL;
  /** When the keepalive acts next. Infinity: no message is expected from the server. */
  #pingAt = Infinity;
  #pingSteps = 0;
  /** When the last `ping` was sent, or the keepalive was started. */
  #silentSince = 0;
  #timer: NodeJS.Timeout | undefined;
  #timerAt = Infinity;

  constructor(addresses: Address[], options: ConnectOptions, token: string | undefined, namespace: string | undefined) {
    this.#connectTimeout = checkTimeout('connectTimeout', options.connectTimeout ?? 10_000);
    this.#sessionTimeout = checkTimeout('sessionTimeout', options.sessionTimeout ?? 10_000);
    const hello = { protocol: PROTOCOL, client: CLIENT, quiet: true, session: randomBytes(24).toString('base64url') };
    this.#hello = Object.assign(hello, { sessionTimeout: this.#sessionTimeout, token, namespace });
    this.#connection = new Connection(addresses, this.#connectTimeout, this);
  }

  // -- calls ----------------------------------------------------------------------------------------------------------

  /** Sends a request, and resolves with the lock when it is granted. */
  request(
    payload: object, resources: readonly string[], queueTimeout: number, transactionTimeout: number,
    watchdog: boolean, isBoundToSession: boolean, signal: AbortSignal | undefined,
  ): Promise<Lock> {
    this.#checkOpen(signal);
    const order = ++this.#lastOrder;
    const deadline = queueTimeout < MAX_TIMEOUT ? performance.now() + queueTimeout + this.#connectTimeout : Infinity;
    const request = new Request(
      this.#requests.nextRef(order), payload, resources, transactionTimeout, watchdog, isBoundToSession, order, deadline,
    );
    request.abortOn(signal, () => this.#cancel(request));
    this.#requests.add(request);
    this.#submit(request);
    return request.promise;
  }

  /** Sends another command, and resolves with the payload of its answer. `subject`: the lock that it is about. */
  call(name: string, payload: object, signal?: AbortSignal, subject?: Request): Promise<object> {
    this.#checkOpen(signal);
    const command = this.#command(name, payload, subject, performance.now() + this.#connectTimeout);
    command.abortOn(signal, () => {});
    return command.promise;
  }

  async release(request: Request, signal?: AbortSignal): Promise<void> {
    if (request.state !== 'held') return;
    this.#checkOpen(signal);
    request.state = 'releasing';
    await this.call('release', { id: request.id }, signal, request);
  }

  async extend(request: Request, transactionTimeout: number, signal?: AbortSignal): Promise<void> {
    this.#checkHeld(request);
    checkTimeout('transactionTimeout', transactionTimeout);
    await this.call('extend', { id: request.id, transactionTimeout }, signal, request);
    if (request.error) throw request.error;
  }

  /** Releases a lock, or cancels a waiting request, of any client. Returns the reason for which it has ended. */
  async releaseId(id: number, signal?: AbortSignal): Promise<string> {
    const { reason } = (await this.call('release', { id }, signal)) as Released;
    const own = this.#findHeld(id);
    // The answer is the only message to the session that has sent the release.
    if (own) this.#lose(own, lost({ id, reason }));
    else if (reason === 'success') this.#repeatWaiting();
    return reason;
  }

  async extendId(id: number, transactionTimeout: number, signal?: AbortSignal): Promise<void> {
    const own = this.#findHeld(id);
    if (own) return this.extend(own, transactionTimeout, signal);
    checkTimeout('transactionTimeout', transactionTimeout);
    const answer = await this.call('extend', { id, transactionTimeout }, signal);
    if ('reason' in answer) throw lost(answer as Released);
  }

  detach(request: Request): void {
    if (request.state === 'detached') return;
    this.#checkHeld(request);
    if (request.isBoundToSession) throw new TypeError(`lock ${request.id} ends with this client, by its onDisconnect`);
    this.#requests.delete(request);
    this.#detached.add(request.ref);
    request.state = 'detached';
  }

  /** Starts a watch, which asks for a snapshot of the held locks when it needs one. */
  addWatch(watch: Watch): void {
    this.#checkOpen();
    this.#watches.add(watch);
    this.sendWatches();
  }

  sendWatches(): void {
    if (this.#phase !== 'up') this.#connection.start();
    else for (const watch of this.#watches) if (watch.request()) this.#command('watch', { prefix: watch.prefix }, watch);
  }

  removeWatch(watch: Watch): void {
    if (!this.#watches.delete(watch) || !watch.isSubscribed || this.#closed) return;
    for (const other of this.#watches) if (other.prefix === watch.prefix) return;
    this.#command('unwatch', { prefix: watch.prefix });
  }

  close(): Promise<void> {
    return (this.#closing ??= this.#close());
  }

  async #close(): Promise<void> {
    for (const watch of [...this.#watches]) watch.end();
    for (const request of this.#requests.all()) this.#fail(request, new ClosedError());
    const bye = this.#phase === 'up' ? this.#command('bye', {}) : undefined;
    this.#closed = true;
    if (bye) {
      const timer = setTimeout(bye.resolve, Math.min(BYE_TIMEOUT, this.#connectTimeout), {});
      await bye.promise.catch(() => {});
      clearTimeout(timer);
    }
    this.#connection.close();
    for (const command of this.#commands.all()) this.#failCommand(command, new ClosedError());
    for (const request of this.#requests.all()) {
      // The other locks stay held until they are released by id or time out: then their signals are aborted.
      const { id, state, isBoundToSession } = request;
      if (isBoundToSession && state === 'held') this.#lose(request, lost({ id, reason: 'disconnected' }));
    }
  }

  // -- requests and commands ------------------------------------------------------------------------------------------

  #checkOpen(signal?: AbortSignal): void {
    if (this.#closed) throw new ClosedError();
    signal?.throwIfAborted();
  }

  #checkHeld({ id, error, state }: Request): void {
    if (error) throw error;
    if (state !== 'held') throw new LockLostError('lost', `lock ${id} was released or detached`, id);
  }

  /** Sends a command. Without a deadline it has no caller, unless the result is used. */
  #command(name: string, payload: object, subject?: Request | Watch, deadline = Infinity): Command {
    const order = ++this.#lastOrder;
    const command = new Command(name, this.#commands.nextRef(order), payload, order, deadline, subject);
    if (deadline === Infinity) command.promise.catch((error: Error) => log('%s: %s', name, error.message));
    this.#commands.add(command);
    this.#submit(command);
    return command;
  }

  /** Cancels a request whose caller no longer waits. */
  #cancel(request: Request): void {
    if (request.state !== 'waiting') return;
    if (request.sentAt === 0) return this.#end(request);
    request.state = 'cancelling';
    request.line = encode('release', {}, request.ref);
    request.order = ++this.#lastOrder;
    this.#submit(request);
  }

  #fail(request: Request, error: GenieError): void {
    if (request.state !== 'waiting') return;
    this.#cancel(request);
    request.reject(error);
  }

  #failCommand(command: Command, error: GenieError): void {
    this.#commands.delete(command);
    command.unanswered = false;
    command.reject(error);
    if (command.subject instanceof Watch) command.subject.end(error);
  }

  #end(request: Request): void {
    this.#requests.delete(request);
    request.state = 'ended';
  }

  #lose(request: Request, error: LockLostError): void {
    this.#requests.delete(request);
    request.lose(error);
  }

  #findHeld(id: number): Request | undefined {
    for (const request of this.#requests.all()) if (request.id === id && request.state === 'held') return request;
    return undefined;
  }

  /** The id of a waiting request is unknown, so a released id may be that of any. The answers to a repetition tell. */
  #repeatWaiting(): void {
    if (this.#phase !== 'up') return;
    for (const request of this.#requests.all()) {
      // Not a new sending: the request may be granted already, and its time counts from the first sending.
      if (request.state === 'waiting' && request.sentAt) this.#connection.write(request.line);
    }
  }

  #extendInBackground(request: Request): void {
    const { id, transactionTimeout } = request;
    this.#command('extend', { id, transactionTimeout }, request, performance.now() + this.#connectTimeout)
      .promise.catch((error: Error) => log('extend: %s', error.message));
  }

  // -- sending --------------------------------------------------------------------------------------------------------

  /** Sends a new call now, or on the next connection. */
  #submit(call: AnyCall): void {
    this.#arm(call.deadline);
    if (this.#phase === 'up') this.#send(call);
    else this.#connection.start();
  }

  #send(call: AnyCall): void {
    if (this.#queue.length || this.#connection.congested) this.#queue.push(call);
    else this.#write(call);
  }

  #write(call: AnyCall): void {
    call.sentAt = performance.now();
    call.firstConnection ||= this.#connectionNumber;
    this.#connection.write(call.line);
    if (this.#pingAt === Infinity) this.#startKeepalive(call.sentAt);
  }

  /** The server has read enough: more may be written. */
  onDrain(): void {
    if (this.#phase !== 'up' || !this.#queue.length) return;
    let count = 0;
    for (const call of this.#queue) {
      if (this.#connection.congested) break;
      if (call.unanswered) this.#write(call);
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
    for (const request of this.#requests.all()) if (request.timerAt <= now) this.#onRequestTimer(request, now);
    for (const command of this.#commands.all()) if (command.deadline <= now) this.#onDeadline(command);
    if (this.#retryAt <= now) this.#retry();
    if (this.#pingAt <= now) this.#keepAlive(now);
    let next = Math.min(this.#retryAt, this.#pingAt);
    for (const call of this.#requests.all()) next = Math.min(next, call.timerAt);
    for (const call of this.#commands.all()) next = Math.min(next, call.timerAt);
    this.#arm(Math.max(next, now + MIN_SCAN_INTERVAL * (this.#requests.size + this.#commands.size)));
  }

  #onRequestTimer(request: Request, now: number): void {
    const { id } = request;
    if (request.state === 'waiting') {
      this.#fail(request, this.#connection.unavailableError());
    } else if (request.endsAt > now) {
      request.renewAt = now + request.transactionTimeout / 3;
      if (this.#phase === 'up') this.#extendInBackground(request);
    } else {
      // Time without a server does not count for the server, so it may hold a lock longer that it has not confirmed here.
      const isConfirmed = this.#phase === 'up' && request.confirmedOn === this.#connectionNumber;
      if (!isConfirmed && !this.#closed) this.#command('release', { id });
      const text = `lock ${id} has timed out by the clock of this client`;
      const isSessionOver = request.sessionEndsAt < request.expiresAt;
      if (isSessionOver) this.#lose(request, new DisconnectedError('disconnected', `${text}, with its session`, id));
      else this.#lose(request, new TransactionTimeoutError('transaction-timeout', text, id));
    }
  }

  #onDeadline(command: Command): void {
    command.deadline = Infinity;
    const error = this.#connection.unavailableError();
    // A release is repeated until the server confirms it, although its caller no longer waits.
    if (command.name === 'release') command.reject(error);
    else this.#failCommand(command, error);
  }

  #retry(): void {
    this.#retryAt = Infinity;
    const calls = [...new Set(this.#retries)].sort(byOrder);
    this.#retries = [];
    for (const call of calls) if (call.unanswered) this.#send(call);
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
    const isExpecting = this.#requests.size || this.#commands.size || this.#watches.size;
    if (!isExpecting || this.#phase !== 'up') {
      this.#pingAt = Infinity;
    } else if (lastReceivedAt > this.#silentSince) {
      this.#pingSteps = 0;
      this.#silentSince = lastReceivedAt;
      this.#pingAt = Math.max(lastReceivedAt + this.#pingInterval, now);
    } else if (this.#pingSteps >= PING_STEPS) {
      this.#connection.drop('the server does not answer');
    } else {
      if (this.#pingSteps++ === 0) {
        this.#silentSince = now;
        this.#command('ping', {});
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
    const sessionEndsAt = performance.now() + this.#sessionTimeout;
    for (const request of this.#requests.all()) {
      if (request.isBoundToSession) request.sessionEndsAt = Math.min(request.sessionEndsAt, sessionEndsAt);
    }
    this.#arm(sessionEndsAt);
    this.#phase = 'down';
    this.#queue = [];
    this.#retries = [];
    this.#retryAt = this.#pingAt = Infinity;
    for (const watch of this.#watches) watch.onUnsubscribed();
    for (const command of this.#commands.all()) {
      // Commands about this connection, not about the session.
      if (!['ping', 'watch', 'unwatch', 'bye'].includes(command.name) || command.deadline !== Infinity) continue;
      this.#commands.delete(command);
      command.unanswered = false;
      command.resolve({});
    }
  }

  /** All servers have rejected this client for good. The next call tries again. */
  onRejected(error: RejectedError): void {
    for (const watch of [...this.#watches]) watch.end(error);
    for (const request of this.#requests.all()) this.#fail(request, error);
    for (const command of this.#commands.all()) {
      if (command.name === 'release') command.reject(error);
      else this.#failCommand(command, error);
    }
  }

  onMessage(message: Message): void {
    const { command, payload } = message;
    if (this.#phase === 'hello') this.#onHandshake(message);
    else if (command === 'locked') this.#onLocked(payload);
    else if (command === 'released') this.#onReleased(payload);
    else if (command === 'event') this.#onEvent(payload);
    else if (command === 'error') this.#onError(payload);
    else if (ANSWERS.includes(command)) this.#onAnswer(payload as { ref?: string });
    else log('ignored: %j', message); // `queued`, which is not needed, or a message of a newer server
  }

  #onHandshake({ command, payload }: Message): void {
    if (command === 'error') {
      const error = fromReply(payload);
      const isFinal = error instanceof RejectedError && FINAL_ERRORS.includes(error.code);
      this.#connection.drop(`the server answered ${error.message}`, payload.leader, isFinal ? error : undefined);
    } else if (command === 'welcome') {
      this.#onWelcome(payload);
    } else if (command === 'pong') {
      this.#connection.drop('the server did not answer hello');
    }
  }

  #onWelcome({ protocol, namespace, resumed, pingInterval }: Welcome): void {
    if (protocol !== PROTOCOL || (this.#hello.namespace ?? namespace) !== namespace) {
      return this.#connection.drop(`the server speaks protocol ${protocol} and serves the namespace ${namespace}`);
    }
    this.#phase = 'resuming';
    const limit = this.#connectTimeout / 2;
    this.#pingInterval = Math.min(Math.max(pingInterval ?? DEFAULT_PING_INTERVAL, MIN_PING_INTERVAL), limit);
    if (resumed) return;
    // The server does not know the session: its locks are lost, and may still block other requests.
    for (const request of this.#requests.all()) {
      const { id, state } = request;
      if (state === 'held') this.#lose(request, forgotten(id));
      else if (state === 'cancelling') this.#end(request); // a release by `ref` has no effect any more
      if (id && state !== 'releasing') this.#command('release', { id });
      if (state === 'waiting') request.id = 0; // it is queued again
    }
  }

  /** The server has sent the state of all requests of the session. */
  #onResumed(isAvailable: boolean): void {
    for (const request of this.#requests.all()) {
      if (request.state !== 'held') continue;
      if (request.confirmedOn !== this.#connectionNumber) {
        this.#end(request);
        this.#command('release', { id: request.id }, request); // the answer contains the reason
      } else if (request.watchdog) {
        request.renewAt = 0; // the last extension may have been lost with the connection
        this.#arm(0);
      }
    }
    const calls: AnyCall[] = this.#requests.all().filter((request) => request.unanswered);
    for (const command of this.#commands.all()) {
      const { name, subject } = command;
      if (name === 'ping' && isAvailable) this.#onAnswer(command); // the server has just answered a `ping`
      else if (name !== 'extend' || !(subject instanceof Request) || subject.state === 'held') calls.push(command);
      else this.#failCommand(command, subject.error ?? forgotten(subject.id));
    }
    this.#phase = 'up';
    this.#connection.established();
    this.#startKeepalive(performance.now());
    this.#queue = calls.sort(byOrder);
    this.onDrain();
    this.sendWatches();
  }

  // -- messages -------------------------------------------------------------------------------------------------------

  #onLocked({ id, fence, ref = '', expiresIn, resources }: Locked): void {
    const request = this.#requests.get(ref);
    if (!request) {
      if (!this.#detached.has(ref)) this.#command('release', { id });
      return;
    }
    this.#onSuccess();
    request.id = id;
    request.fence = fence;
    request.confirmedOn = this.#connectionNumber;
    if (resources) choose(request, resources);
    if (expiresIn !== undefined) {
      this.#hold(request, this.#phase === 'resuming' ? this.#helloSentAt : request.sentAt, expiresIn);
    } else if (request.state === 'waiting') {
      // The time counts from the sending of the request, because `locked` may have been on its way for long. That is
      // always safe, but leaves little time after a wait in the queue: then it counts from the sending of an `extend`.
      // A request that was sent before this connection may have been granted before it was sent again.
      const since = request.firstConnection === this.#connectionNumber ? request.sentAt : this.#helloSentAt;
      const waited = (performance.now() - since) / request.transactionTimeout;
      if (waited > LONG_WAIT) this.#extendInBackground(request);
      if (waited < VERY_LONG_WAIT) this.#hold(request, since, request.transactionTimeout);
    }
  }

  /** The server has granted or confirmed a lock, which ends `duration` ms after `since`. */
  #hold(request: Request, since: number, duration: number): void {
    if (request.state !== 'waiting' && request.state !== 'held') return;
    const isNew = request.state === 'waiting';
    request.hold(since, duration);
    this.#arm(request.timerAt);
    if (isNew) request.resolve(new Lock(this, request));
  }

  #onReleased(payload: Released): void {
    const { ref = '', reason } = payload;
    const request = this.#requests.get(ref);
    if (this.#commands.get(ref)) {
      this.#onAnswer(payload);
    } else if (!request) {
      if (!this.#detached.delete(ref)) log('ignored: %j', payload);
    } else if (request.state === 'waiting') {
      this.#end(request);
      request.reject(notGranted(payload));
    } else if (request.state === 'cancelling') {
      this.#end(request);
    } else if (request.state === 'held' || reason !== 'success') {
      this.#lose(request, lost(payload)); // else the answer to the release follows
    }
  }

  #onAnswer(payload: { ref?: string }): void {
    const { ref = '' } = payload;
    const command = this.#commands.get(ref);
    if (!command) return ref === RESUME_REF && this.#phase === 'resuming' ? this.#onResumed(true) : log('ignored: %j', payload);
    this.#onSuccess();
    this.#commands.delete(command);
    command.unanswered = false;
    const { subject } = command;
    if (subject instanceof Watch) subject.onSnapshot(payload as Watching);
    else if (subject && 'reason' in payload) this.#onLockEnded(subject, payload as Released);
    else if (subject) this.#onExtended(subject, command);
    command.resolve(payload);
  }

  /** A lock was released by this client, or had ended before its `release` or `extend`. */
  #onLockEnded(request: Request, released: Released): void {
    if (request.error || request.state === 'detached') return;
    if (request.state === 'releasing' && released.reason === 'success') return this.#end(request);
    this.#lose(request, lost(released));
    request.reject(request.error); // if `acquire` still waits
  }

  #onExtended(request: Request, { payload, sentAt }: Command): void {
    const { transactionTimeout } = payload as { transactionTimeout: number };
    request.transactionTimeout = transactionTimeout;
    this.#hold(request, sentAt, transactionTimeout);
    if (request.error) this.#command('release', { id: request.id }); // it had ended before by the clock of this client
  }

  /** The server executes commands: the next retry, and the next reconnect, begin with the shortest delay. */
  #onSuccess(): void {
    this.#retryBackoff.reset();
    this.#connection.confirm();
  }

  #onEvent(event: Change | { state: 'lagged' }): void {
    for (const watch of this.#watches) {
      if (event.state === 'lagged') watch.onUnsubscribed();
      else watch.onEvent(event);
    }
    if (event.state === 'lagged') this.sendWatches();
  }

  #onError(payload: ErrorReply): void {
    const { code, ref = '', leader } = payload;
    const error = fromReply(payload);
    const call = this.#commands.get(ref) ?? this.#requests.get(ref);
    if (code === 'unavailable' && leader) {
      this.#connection.drop(`the server answered ${error.message}`, leader);
    } else if (!call) {
      // The answer to `ping` follows the state of the requests, also if the server cannot reach its store.
      if (ref === RESUME_REF && this.#phase === 'resuming') this.#onResumed(false);
      else log('error without a command: %s', error.message);
    } else if (code === 'unavailable') {
      this.#retries.push(call);
      if (this.#retryAt === Infinity) this.#retryAt = performance.now() + this.#retryBackoff.next();
      this.#arm(this.#retryAt);
    } else if (call instanceof Command) {
      this.#onCommandRejected(call, error);
    } else if (call.unanswered) {
      this.#end(call);
      call.reject(error); // a cancelled request has no caller any more
    }
  }

  #onCommandRejected(command: Command, error: GenieError): void {
    const { name, ref, subject, firstConnection } = command;
    if (subject instanceof Request && error.code === 'unknown-id') {
      // A release that was sent on an earlier connection may have been executed there.
      const isExecuted = name === 'release' && firstConnection !== this.#connectionNumber;
      return this.#onAnswer({ ref, id: subject.id, reason: isExecuted ? 'success' : error.code } as Released);
    }
    if (subject instanceof Request && subject.state === 'releasing') subject.state = 'held';
    this.#failCommand(command, error);
  }
}

function byOrder(a: AnyCall, b: AnyCall): number {
  return a.order - b.order;
}

/** Keeps only the resources of an `anyOf` request that the server has locked. `names` have no modes. */
function choose(request: Request, names: readonly string[]): void {
  const chosen = new Set(names);
  request.resources = request.resources.filter((resource) => chosen.has(resource.slice(resource.indexOf(':') + 1)));
}
