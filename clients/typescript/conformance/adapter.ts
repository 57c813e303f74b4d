// The adapter of this client for the conformance kit: calls on standard input, answers and events on standard output.
// conformance/README.md of the repository describes the protocol.
import { createInterface } from 'node:readline';
import { connect, DeadlockError, GenieError, InsufficientError, QueueTimeoutError } from '../src/index.js';
import type { Client, ConnectOptions, Lock, Watch } from '../src/index.js';

type Call = any;

let client: Client | undefined;
let lastNumber = 0;
const locks = new Map<number, Lock>();
const watches = new Map<number, Watch>();
const controllers = new Map<number, AbortController>();

function write(message: object): void {
  process.stdout.write(`${JSON.stringify(message)}\n`);
}

/** The kit uses the reason of the wire. */
function typeOf(error: GenieError): string {
  return error.code === 'released' ? 'success' : error.code;
}

function describe(error: unknown): object {
  if (!(error instanceof GenieError)) return { type: (error as Error).name, message: String(error) };
  const fields = { type: typeOf(error), message: `${error.name}: ${error.message}` };
  if (error instanceof QueueTimeoutError) return { ...fields, blockers: error.blockers };
  if (error instanceof DeadlockError) return { ...fields, cycle: error.cycle };
  if (error instanceof InsufficientError) return { ...fields, free: String(error.free), locked: String(error.locked) };
  return fields;
}

/** Returns the options that are not null: they mean the default of the client. */
function given(options: object | null | undefined): object {
  return Object.fromEntries(Object.entries(options ?? {}).filter(([, value]) => value !== null));
}

function opened(): Client {
  if (!client) throw new GenieError('closed', 'there is no client');
  return client;
}

function added(lock: Lock | null): object {
  if (!lock) return { lock: null };
  const [number, owner] = [++lastNumber, client];
  locks.set(number, lock);
  lock.signal.addEventListener('abort', () => {
    // A lock that stays held after `close` times out during a later case.
    if (client === owner) write({ event: 'lost', lock: number, type: typeOf(lock.error!) });
  });
  return { lock: number, id: lock.id, fence: lock.fence, resources: lock.resources };
}

async function report(number: number, watch: Watch): Promise<void> {
  for await (const change of watch) write({ event: 'watch', watch: number, change });
}

function reportInBackground(number: number): void {
  report(number, watches.get(number)!).catch((error: unknown) => console.error('watch', number, error));
}

async function execute(call: Call, signal: AbortSignal): Promise<object> {
  const options = { ...given(call.options), signal };
  switch (call.do) {
    case 'connect': {
      const { connectTimeout, maxUnavailable, token = '', ...others } = options as ConnectOptions & { maxUnavailable?: number };
      const responseTimeout = maxUnavailable ?? connectTimeout ?? 10_000;
      client = await connect({ ...others, host: call.addresses, token, connectTimeout, responseTimeout });
      return {};
    }
    case 'acquire':
      return added(await opened().acquire(call.resources, options));
    case 'tryAcquire':
      return added(await opened().tryAcquire(call.resources, options));
    case 'acquireAny': {
      const weights = call.weights?.map((weight: string) => BigInt(weight));
      return added(await opened().acquireAny(call.anyOf, { ...options, target: BigInt(call.target ?? 1), weights }));
    }
    case 'release':
      await locks.get(call.lock)!.release();
      return {};
    case 'extend':
      await locks.get(call.lock)!.extend(call.transactionTimeout);
      return {};
    case 'ping':
      await opened().ping();
      return {};
    case 'inspect': {
      const { resource, id, transactionName, limit, only } = call;
      return opened().inspect(given({ resource, id, transactionName, limit, only }));
    }
    case 'watch': {
      const number = ++lastNumber;
      watches.set(number, opened().watch(call.prefix));
      if (!call.paused) reportInBackground(number);
      return { watch: number };
    }
    case 'resume':
      reportInBackground(call.watch);
      return {};
    case 'unwatch':
      await watches.get(call.watch)!.return();
      return {};
    case 'cancel':
      controllers.get(call.target)?.abort(new GenieError('cancelled', 'cancelled by the runner'));
      return {};
    case 'close':
      await client?.close();
      client = undefined;
      return {};
    case 'exit':
      return {};
    default:
      throw new TypeError(`unknown call ${call.do}`);
  }
}

createInterface({ input: process.stdin }).on('line', (line) => {
  const call: Call = JSON.parse(line);
  const controller = new AbortController();
  controllers.set(call.call, controller);
  execute(call, controller.signal)
    .then((ok) => write({ call: call.call, ok }), (error: unknown) => write({ call: call.call, error: describe(error) }))
    .finally(() => controllers.delete(call.call))
    .finally(() => call.do === 'exit' && process.exit());
});
