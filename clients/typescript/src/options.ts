// The options of the client and of its calls. Times are in ms.
import type { ConnectionOptions } from 'node:tls';

/** Options of all calls. */
export interface CallOptions {
  /** Ends the wait: the call rejects with the reason of the signal. */
  signal?: AbortSignal | undefined;
}

/** Options of `acquire`. */
export interface AcquireOptions extends CallOptions {
  /** Limit of the wait in the queue. Infinity: no limit, even while no server responds. Default: 10,000. */
  queueTimeout?: number | undefined;
  /** Time for which the locks are held, from the grant. Default: 10,000. */
  transactionTimeout?: number | undefined;
  /** Names one transaction, such as `transfer-42`. Its requests do not block each other, and deadlocks are detected. */
  transactionName?: string | undefined;
  /** Requests of higher priority are granted first. Default: 0. */
  priority?: number | undefined;
  /** `release`: the server releases the lock when the session of this client ends. Default: `keep`. */
  onDisconnect?: 'keep' | 'release' | undefined;
  /** Text for operators, at most 256 characters, instead of the note of the client. */
  note?: string | undefined;
  /** The trace to which the request belongs, in the format of W3C Trace Context. Operators see it beside the note. */
  traceparent?: string | undefined;
  /** Whether the client extends the lock until it is released. Default: false. */
  watchdog?: boolean | undefined;
}

/** Options of `tryAcquire`. */
export type TryOptions = Omit<AcquireOptions, 'queueTimeout'>;

/** Options of `acquireAny`. `target` is the sum of `weights` to reach. The default of each weight is 1. */
export interface AnyOptions extends Omit<TryOptions, 'priority'> {
  target: number | bigint;
  weights?: readonly (number | bigint)[] | undefined;
}

/** Options of `elect`. A leader that does not respond is succeeded after its `transactionTimeout`. */
export type ElectOptions = Pick<AcquireOptions, 'transactionTimeout' | 'onDisconnect' | 'note' | 'traceparent' | 'signal'>;

/** Options of `transaction`, and of each of its requests. */
export interface TransactionOptions extends Omit<AcquireOptions, 'transactionName'> {
  /**
   * Default: a new name. Two transactions with one name at the same time do not exclude each other, so an idempotency key is
   * no name.
   */
  name?: string | undefined;
  /** How often `work` is run, at most. Default: 10. */
  attempts?: number | undefined;
}

export interface CloseOptions {
  /** How long to wait until the locks are released and the requests have ended, in ms. Default: 0. */
  drain?: number | undefined;
  /** Whether to release the locks that are still held. Default: false. */
  release?: boolean | undefined;
}

export interface InspectQuery {
  /** Only requests that lock or wait for this resource, a name without a mode. */
  resource?: string | undefined;
  id?: number | undefined;
  transactionName?: string | undefined;
  /** Maximum number of rows. Default: 100. */
  limit?: number | undefined;
  only?: 'holders' | 'queue' | undefined;
}

/** Receives what a client reports beside its errors. `console` is a logger. */
export interface Logger {
  debug(message: string): void;
  warn(message: string): void;
}

/**
 * `up`: connected to the leader. `leader`: after `up`, if this is another server than before. `down`: the connection has
 * ended, because of `error`. `server` is the address.
 */
export type ConnectionEvent = { type: 'up' | 'leader'; server: string } | { type: 'down'; server: string; error: Error };

export interface ConnectOptions {
  /**
   * One address, several addresses separated by commas, or a list: `HOST`, `HOST:PORT` or `[IPv6]:PORT`. The prefix
   * `genies://` selects TLS, `genie://` a plain connection. Default: GENIE_HOST, else 127.0.0.1.
   */
  host?: string | readonly string[] | undefined;
  /** The port of addresses without a port. Default: GENIE_PORT, else 7077. */
  port?: number | undefined;
  /**
   * Token for authentication, or a function that is called for each connection. Default: GENIE_TOKEN, else the word in the
   * file GENIE_TOKEN_FILE, which is read for each connection.
   */
  token?: string | (() => string | Promise<string>) | undefined;
  /** The namespace of all locks of the client. Default: GENIE_NAMESPACE, else the first namespace of the server. */
  namespace?: string | undefined;
  /**
   * `true`, or options of `tls.connect`, selects TLS for all servers. By default GENIE_TLS_CA is the file of trusted CAs
   * (else those of Node), GENIE_TLS_CERT and GENIE_TLS_KEY are the client's own certificate. They are read for each
   * connection.
   */
  tls?: boolean | ConnectionOptions | undefined;
  /** Limit for `connect`, which tries all addresses again and again. Default: 10,000. */
  connectTimeout?: number | undefined;
  /**
   * How long a call waits for a server that does not answer, in addition to its `queueTimeout`. To ride through the
   * failover of a leader, whose lease is 3 s, set 5,000 or more. Default: 1,000.
   */
  responseTimeout?: number | undefined;
  /**
   * How long the server keeps the session of a disconnected client: its waiting requests, and its locks with
   * `onDisconnect: 'release'`. The client counts it from the last command that was answered. Default: 10,000.
   */
  sessionTimeout?: number | undefined;
  /** Whether `connect` returns at once, and the client connects in the background. Default: false. */
  lazy?: boolean | undefined;
  /** Who the client is, for operators, at most 256 characters; '': no note. Default: `PROGRAM PID@HOST`. */
  note?: string | undefined;
  /** Options of all requests that do not have them. */
  defaults?: Omit<AcquireOptions, 'note' | 'signal'> | undefined;
  /** Default: `debug` prints if NODE_DEBUG contains `genie`, and `warn` emits a warning of the process. */
  logger?: Logger | undefined;
  /** Is called when the connection has changed. */
  onEvent?: ((event: ConnectionEvent) => void) | undefined;
  /** Aborts the attempt to connect. */
  signal?: AbortSignal | undefined;
}
