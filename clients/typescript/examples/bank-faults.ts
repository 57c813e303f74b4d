// The bank while two servers and their Redis are killed and paused at random, and connections are half-open for some time:
// the server's side is reset, and the client's side stays silent.
//
//   npm run example:faults -- --seconds 120
//
// At the end: the sum is right, no two locks on an account have overlapped, no lock and no request is left, no clerk is stuck.
import { connect as connectTcp } from 'node:net';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { connect } from '../src/index.js';
import { GenieServer, HalfOpenProxy, RedisServer } from '../test/support.js';
import { bank, type Report } from './bank.js';

/** Everything must end within this time after the last fault. */
const LIMIT = 90_000;
const CONNECT_TIMEOUT = 60_000;
/** Shorter than the time in which a client notices a half-open connection. */
const SESSION_TIMEOUT = 1_000;
const BOUND_PAUSE = 3_000;

interface Row {
  state: 'locked' | 'unlocked' | 'lagged';
  resource: string;
  id: number;
  transactionName?: string;
}

/** What the server's own events say: two owners never hold an account at once. Without the client, which has no part in it. */
class Observer {
  readonly overlaps: string[] = [];
  events = 0;

  /** Watches one server after the other. Each connection begins with a snapshot. */
  async observe(ports: number[], stop: AbortSignal): Promise<void> {
    for (let attempt = 0; !stop.aborted; attempt++) {
      const socket = connectTcp({ host: '127.0.0.1', port: ports[attempt % ports.length]! });
      const closed = new Promise((done) => socket.once('close', done));
      socket.on('error', () => {});
      const end = (): void => void socket.destroy();
      stop.addEventListener('abort', end);
      socket.on('connect', () => socket.write('{"command":"watch","payload":{"prefix":"accounts/"}}\n'));
      const held = new Map<string, Map<number, Row>>();
      createInterface({ input: socket }).on('line', (line) => {
        const { command, payload } = JSON.parse(line);
        if (command === 'error') socket.destroy();
        else if (command === 'watching') for (const row of payload.held as Row[]) this.#change(held, { ...row, state: 'locked' });
        else this.#change(held, payload as Row);
      }).on('error', () => {});
      await closed;
      stop.removeEventListener('abort', end);
      await sleep(50);
    }
  }

  #change(held: Map<string, Map<number, Row>>, row: Row): void {
    this.events++;
    const locks = held.get(row.resource) ?? new Map<number, Row>();
    held.set(row.resource, locks);
    if (row.state === 'unlocked') locks.delete(row.id);
    if (row.state !== 'locked') return;
    for (const other of locks.values()) {
      const isSameOwner = row.transactionName !== undefined && row.transactionName === other.transactionName;
      if (other.id !== row.id && !isSameOwner) this.overlaps.push(`locks ${other.id} and ${row.id} on ${row.resource}`);
    }
    locks.set(row.id, row);
  }
}

export interface FaultReport extends Report {
  faults: number;
  events: number;
  holdersLeft: number;
  queueLeft: number;
}

/** Runs the bank for some time while processes are killed. Rejects if a clerk is stuck. */
export async function bankUnderFaults(ms: number): Promise<FaultReport> {
  await using redis = await RedisServer.start();
  const settings = { REDIS_URL: redis.url, LEASE: '1' };
  await using firstProxy = await HalfOpenProxy.start();
  await using secondProxy = await HalfOpenProxy.start();
  const proxies = [firstProxy, secondProxy];
  await using first = await GenieServer.start({ ...settings, ADVERTISE: firstProxy.host });
  await using second = await GenieServer.start({ ...settings, ADVERTISE: secondProxy.host });
  const servers = [first, second];
  proxies.forEach((proxy, index) => (proxy.target = servers[index]!.port));
  const host = proxies.map((proxy) => proxy.host);
  const stopping = new AbortController();
  const observing = new AbortController();
  const observer = new Observer();
  const observed = observer.observe(servers.map(({ port }) => port), observing.signal);
  const working = bank({
    clerks: 15, accounts: 6, pause: 2, boundPause: BOUND_PAUSE, stop: stopping.signal,
    connect: { host, connectTimeout: CONNECT_TIMEOUT, responseTimeout: 5_000, sessionTimeout: SESSION_TIMEOUT },
  });
  let faults = 0;
  const end = performance.now() + ms;
  while (performance.now() < end) {
    await sleep(300 + Math.random() * 1500);
    const server = servers[faults % 2]!;
    const kind = faults++ % 6;
    if (kind === 0) {
      for (const proxy of proxies) proxy.halfOpen();
      await sleep(2_000); // longer than the session timeout
    } else if (kind === 4) {
      await redis.kill();
      await sleep(Math.random() * 1500);
      await redis.restart();
    } else if (kind === 2) {
      server.pause(true);
      await sleep(500 + Math.random() * 4000);
      server.pause(false);
    } else {
      await server.kill(kind === 1 ? 'SIGTERM' : 'SIGKILL');
      await sleep(Math.random() * 1500);
      await server.restart();
    }
  }
  stopping.abort();
  const stuck = sleep(LIMIT, undefined, { ref: false }).then(() => Promise.reject(new Error('a clerk is stuck')));
  const report = await Promise.race([working, stuck]);
  await using client = await connect({ host, connectTimeout: CONNECT_TIMEOUT, responseTimeout: 5_000 });
  // A lost lock may be held by the server for the rest of its transaction timeout.
  let { holdersTotal, queueTotal } = await client.inspect();
  for (let attempt = 0; attempt < 50 && holdersTotal + queueTotal > 0; attempt++) {
    await sleep(100);
    ({ holdersTotal, queueTotal } = await client.inspect());
  }
  observing.abort();
  await observed;
  const overlaps = [...report.overlaps, ...observer.overlaps];
  return { ...report, overlaps, faults, events: observer.events, holdersLeft: holdersTotal, queueLeft: queueTotal };
}

async function main(): Promise<void> {
  const { values } = parseArgs({ options: { seconds: { type: 'string', default: '120' } } });
  const report = await bankUnderFaults(Number(values.seconds) * 1000);
  console.log(report);
  const { difference, overlaps, holdersLeft, queueLeft } = report;
  const isWrong = difference !== 0 || overlaps.length > 0 || holdersLeft > 0 || queueLeft > 0;
  console.log(isWrong ? 'FAILED' : 'the sum is kept, no locks have overlapped, and none is left');
  process.exitCode = isWrong ? 1 : 0;
}

if (require.main === module) {
  main().catch((error: unknown) => {
    console.error(error);
    process.exit(1); // also if a clerk is stuck
  });
}
