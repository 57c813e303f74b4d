// The configuration of a client, from its options and the environment: addresses, TLS, token, namespace.

import { readFileSync } from 'node:fs';
import { isIPv6 } from 'node:net';
import { createSecureContext, type ConnectionOptions } from 'node:tls';

export interface ConnectOptions {
  /**
   * One address, several addresses separated by commas, or a list: `HOST`, `HOST:PORT` or `[IPv6]:PORT`. The prefix
   * `genies://` selects TLS, `genie://` a plain connection. Default: GENIE_HOST, else 127.0.0.1.
   */
  host?: string | readonly string[] | undefined;
  /** The port of addresses without a port. Default: GENIE_PORT, else 7077. */
  port?: number | undefined;
  /** Token for authentication. Default: GENIE_TOKEN, else the word in the file GENIE_TOKEN_FILE. */
  token?: string | undefined;
  /** The namespace of all locks of the client. Default: GENIE_NAMESPACE, else the first namespace of the server. */
  namespace?: string | undefined;
  /**
   * `true`, or options of `tls.connect`, selects TLS for all servers. By default GENIE_TLS_CA is the file of trusted CAs
   * (else those of Node), GENIE_TLS_CERT and GENIE_TLS_KEY are the client's own certificate.
   */
  tls?: boolean | ConnectionOptions | undefined;
  /** Limit in ms for the first connection, and for a later call to wait for a server. Default: 10,000. */
  connectTimeout?: number | undefined;
  /**
   * How long the server keeps the session of a disconnected client, in ms: its waiting requests, and its locks with
   * `onDisconnect: 'release'`. The client counts it from the last command that was answered. Default: 10,000.
   */
  sessionTimeout?: number | undefined;
  /** Aborts the attempt to connect. */
  signal?: AbortSignal | undefined;
}

/** The address of a server. Without `tls`, the connection is plain. @internal */
export interface Address {
  readonly host: string;
  readonly port: number;
  readonly tls?: ConnectionOptions | undefined;
}

const DEFAULT_HOST = '127.0.0.1';
const DEFAULT_PORT = 7077;
const PLAIN = 'genie://';
const TLS = 'genies://';

/** Returns the addresses to connect to, in order. Throws TypeError if an option or a variable is wrong. @internal */
export function parseAddresses({ host, port, tls }: ConnectOptions): Address[] {
  const source = host ?? (process.env.GENIE_HOST || DEFAULT_HOST);
  const texts = (typeof source === 'string' ? source.split(',') : source).map((text) => text.trim()).filter(Boolean);
  if (!texts.length) throw new TypeError('host must contain at least one server address');
  const portText = String(port ?? (process.env.GENIE_PORT || DEFAULT_PORT));
  const defaultPort = parsePort(portText, port === undefined ? 'GENIE_PORT' : 'port');
  // One address with genies:// selects TLS for all addresses without a prefix.
  const useTls = tls ?? texts.some((text) => text.startsWith(TLS));
  const options = useTls ? tlsOptions(typeof tls === 'object' ? tls : {}) : undefined;
  return texts.map((text) => {
    const [, prefix, address = ''] = /^(genies?:\/\/)?(.*?)\/?$/.exec(text) ?? [];
    if (prefix && tls !== undefined && (prefix === TLS) !== Boolean(tls)) {
      throw new TypeError(`${text}: the prefix contradicts the option tls`);
    }
    return parseAddress(address, defaultPort, prefix === PLAIN ? undefined : options);
  });
}

/** Parses one address without a prefix. Throws TypeError if the text is not an address. @internal */
export function parseAddress(text: string, defaultPort = DEFAULT_PORT, tls?: ConnectionOptions): Address {
  const match = isIPv6(text) ? [text, text] : /^(?:\[([^\]/]+)\]|([^:[\]/]*))(?::(\d+))?$/.exec(text);
  if (!match) throw new TypeError(`${text}: an address is HOST, HOST:PORT or [IPv6]:PORT, with the prefix ${TLS} for TLS`);
  const [, ipv6, name, port] = match;
  return { host: ipv6 || name || DEFAULT_HOST, port: port ? parsePort(port, text) : defaultPort, tls };
}

/** Returns the text of an address, which `parseAddresses` can parse. @internal */
export function formatAddress({ host, port, tls }: Address): string {
  return `${tls ? TLS : ''}${host.includes(':') ? `[${host}]` : host}:${port}`;
}

function parsePort(text: string, source: string): number {
  const port = /^\d{1,5}$/.test(text) ? Number(text) : 0;
  if (port < 1 || port > 65535) throw new TypeError(`${source}: a port is a number from 1 to 65535, not ${text}`);
  return port;
}

/** Adds the files of the environment to the options, and creates the TLS context, which checks them. */
function tlsOptions(options: ConnectionOptions): ConnectionOptions {
  if (options.secureContext) return options;
  const [ca, cert, key] = ['GENIE_TLS_CA', 'GENIE_TLS_CERT', 'GENIE_TLS_KEY'].map(readFile);
  if (key && !cert) throw new TypeError('GENIE_TLS_KEY is set without GENIE_TLS_CERT');
  const context = { minVersion: 'TLSv1.2', ca, cert, key: key ?? cert, ...options } as const;
  return { ...options, secureContext: createSecureContext(context) };
}

/** Returns the option, else GENIE_TOKEN, else the word in the file GENIE_TOKEN_FILE, else undefined. @internal */
export function resolveToken(token?: string): string | undefined {
  if (token !== undefined) return token || undefined;
  if (process.env.GENIE_TOKEN) return process.env.GENIE_TOKEN;
  const words = readFile('GENIE_TOKEN_FILE')?.split(/\s+/).filter(Boolean);
  if (words && words.length !== 1) {
    throw new TypeError(`${process.env.GENIE_TOKEN_FILE} must contain one word, the token, not ${words.length}`);
  }
  return words?.[0];
}

/** Returns the text of the file that an environment variable names, or undefined if the variable is not set. */
function readFile(variable: string): string | undefined {
  const path = process.env[variable];
  try {
    return path ? readFileSync(path, 'utf8') : undefined;
  } catch (error) {
    throw new TypeError(`${variable}: ${path} can't be read: ${(error as Error).message}`, { cause: error });
  }
}
