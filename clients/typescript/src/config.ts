// The configuration of a client, from its options and the environment: addresses, TLS, token, note.

import { readFileSync } from 'node:fs';
import { isIPv6 } from 'node:net';
import { hostname } from 'node:os';
import { basename } from 'node:path';
import type { ConnectionOptions } from 'node:tls';
import { debuglog } from 'node:util';
import type { ConnectOptions, Logger } from './options.js';

/** The address of a server. @internal */
export interface Address {
  readonly host: string;
  readonly port: number;
  readonly isSecure: boolean;
}

const DEFAULT_HOST = '127.0.0.1';
const DEFAULT_PORT = 7077;
const PLAIN = 'genie://';
const TLS = 'genies://';
const MAX_NOTE = 256;

const debug = debuglog('genie');
/** @internal */
export const DEFAULT_LOGGER: Logger = {
  debug: (message) => debug('%s', message),
  warn: (message) => process.emitWarning(message, 'GenieWarning'),
};

let hasWarnedOfServiceLink = false;

/** Returns the addresses to connect to, in order. Throws TypeError if an option or a variable is wrong. @internal */
export function parseAddresses({ host, port, tls, logger = DEFAULT_LOGGER }: ConnectOptions): Address[] {
  const source = host ?? (process.env.GENIE_HOST || DEFAULT_HOST);
  const texts = (typeof source === 'string' ? source.split(',') : source).map((text) => text.trim()).filter(Boolean);
  if (!texts.length) throw new TypeError('host must contain at least one server address');
  const defaultPort = (): number => (port === undefined ? environmentPort(logger) : parsePort(String(port), 'port'));
  // One address with genies:// selects TLS for all addresses without a prefix.
  const useTls = Boolean(tls ?? texts.some((text) => text.startsWith(TLS)));
  return texts.map((text) => {
    const [, prefix, address = ''] = /^(genies?:\/\/)?(.*?)\/?$/.exec(text) ?? [];
    if (prefix && tls !== undefined && (prefix === TLS) !== useTls) {
      throw new TypeError(`${text}: the prefix contradicts the option tls`);
    }
    return parseAddress(address, useTls && prefix !== PLAIN, defaultPort);
  });
}

/** Parses one address without a prefix. Throws TypeError if the text is not an address. */
function parseAddress(text: string, isSecure: boolean, defaultPort = (): number => DEFAULT_PORT): Address {
  const match = isIPv6(text) ? [text, text] : /^(?:\[([^\]/]+)\]|([^:[\]/]*))(?::(\d+))?$/.exec(text);
  if (!match) throw new TypeError(`${text}: an address is HOST, HOST:PORT or [IPv6]:PORT, with the prefix ${TLS} for TLS`);
  const [, ipv6, name, port] = match;
  return { host: ipv6 || name || DEFAULT_HOST, port: port ? parsePort(port, text) : defaultPort(), isSecure };
}

/** Parses the leader that a server has named; undefined: it has named none, or in a way of another version. @internal */
export function parseLeader(text: string | undefined, isSecure: boolean): Address | undefined {
  try {
    return text ? parseAddress(text, isSecure) : undefined;
  } catch {
    return undefined;
  }
}

/** Returns the text of an address, which `parseAddresses` can parse. @internal */
export function formatAddress({ host, port, isSecure }: Address): string {
  return `${isSecure ? TLS : ''}${host.includes(':') ? `[${host}]` : host}:${port}`;
}

/** Returns GENIE_PORT, unless Kubernetes has set it for a service of the name `genie`, as a URL. */
function environmentPort(logger: Logger): number {
  const text = process.env.GENIE_PORT || String(DEFAULT_PORT);
  if (!text.startsWith('tcp://')) return parsePort(text, 'GENIE_PORT');
  if (!hasWarnedOfServiceLink) logger.warn(`GENIE_PORT=${text} is ignored: it is a service link of Kubernetes, not a port`);
  hasWarnedOfServiceLink = true;
  return DEFAULT_PORT;
}

function parsePort(text: string, source: string): number {
  const port = /^\d{1,5}$/.test(text) ? Number(text) : 0;
  if (port < 1 || port > 65535) throw new TypeError(`${source}: a port is a number from 1 to 65535, not ${text}`);
  return port;
}

/** Returns the options of `tls.connect`, and reads the files of the environment. @internal */
export function tlsOptions({ tls }: ConnectOptions): ConnectionOptions {
  const options = typeof tls === 'object' ? tls : {};
  if (options.secureContext) return options;
  const [ca, cert, key] = ['GENIE_TLS_CA', 'GENIE_TLS_CERT', 'GENIE_TLS_KEY'].map(readFile);
  if (key && !cert) throw new TypeError('GENIE_TLS_KEY is set without GENIE_TLS_CERT');
  return { minVersion: 'TLSv1.2', ca, cert, key: key ?? cert, ...options };
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

/** Returns the note of a client that has none: which program it is, and where it runs. @internal */
export function defaultNote(): string {
  const program = basename(process.argv[1] ?? process.execPath);
  return `${program} ${process.pid}@${hostname()}`.replace(/\p{Cc}/gu, ' ').toWellFormed().slice(0, MAX_NOTE);
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
