// A bank whose clerks would lose money without locks.
//
//   genie serve &
//   npm run example                       the sum is kept
//   npm run example -- --without-locks    the same clerks, the same work, and a sum that is wrong
//
// Many clerks, each with its own client, move money between accounts. Each reads two balances, pauses, and writes them back:
// only the locks prevent lost updates. Some clerks request both accounts at once, which cannot deadlock. Some request the
// second account while they hold the first, in a transaction: a deadlock is detected, and the transaction starts over. Some
// pause for longer than their transaction timeout: they lose their lock with half a transfer done. Fencing tokens make that
// safe, and `compensate` undoes the half. And some have locks that end with their session, and no other timeout to speak of.
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import {
  connect, GenieError, LockLostError, QueueTimeoutError, UnavailableError,
  type Client, type ConnectOptions, type Lock,
} from '../src/index.js';

const OPENING_BALANCE = 1_000_000; // cents
const LARGEST_TRANSFER = 10_000;
const TRANSACTION_TIMEOUT = 250;
const BOUND_TRANSACTION_TIMEOUT = 60_000;
const QUEUE_TIMEOUT = 60_000;
const STRATEGIES = ['at once', 'step by step', 'slow', 'step by step', 'bound'] as const;
/** A slow clerk exceeds its transaction timeout in every 20th transfer, and a bound one makes a pause. */
const TRANSFERS_PER_PAUSE = 20;

type Change = readonly [account: number, amount: number];
/** The fencing token of the lock under which an account is changed. */
type Fences = ReadonlyMap<number, number>;

/** The store has seen a greater fencing token: the lock was granted again since. Nothing was read or written. */
class StaleFenceError extends Error {}

/** A data store that is reached by a network. Each access is atomic, and checks the fencing token, also a read. */
class Store {
  readonly #rows: { balance: number; fence: number }[];

  constructor(accounts: number) {
    this.#rows = Array.from({ length: accounts }, () => ({ balance: OPENING_BALANCE, fence: 0 }));
  }

  get total(): number {
    return this.#rows.reduce((sum, { balance }) => sum + balance, 0);
  }

  async read(account: number, fence: number): Promise<number> {
    await sleep(0);
    return this.#fenced(account, fence).balance;
  }

  async write(account: number, balance: number, fence: number): Promise<void> {
    await sleep(0);
    this.#fenced(account, fence).balance = balance;
  }

  #fenced(account: number, fence: number): { balance: number; fence: number } {
    const row = this.#rows[account]!;
    if (fence < row.fence) throw new StaleFenceError(`account ${account} has seen the fencing token ${row.fence}`);
    row.fence = fence;
    return row;
  }
}

export interface BankOptions {
  clerks: number;
  accounts: number;
  /** Maximum time between reading and writing, in ms. */
  pause: number;
  /** The pause of bound clerks in every 20th transfer, in ms. */
  boundPause?: number;
  withoutLocks?: boolean;
  connect?: ConnectOptions;
  /** The clerks complete their transfers when it is aborted. */
  stop: AbortSignal;
}

export interface Report {
  transfers: number;
  retries: number;
  deadlocks: number;
  lostLocks: number;
  /** What the sum of all balances has gained or lost, in cents. */
  difference: number;
  /** Two clerks whose locks on the same account were both held, by the clock of the clients. */
  overlaps: string[];
}

/** What the clerks share. */
interface Bank {
  options: BankOptions;
  store: Store;
  report: Report;
  /** The last lock on each account. */
  lastLocks: Map<number, Lock>;
}

class Clerk {
  readonly #strategy: (typeof STRATEGIES)[number];
  #completed = 0;

  constructor(readonly number: number, readonly bank: Bank, readonly client: Client | undefined) {
    this.#strategy = STRATEGIES[number % STRATEGIES.length]!;
  }

  /** Makes random transfers. A started transfer is repeated until it succeeds. */
  async work(): Promise<void> {
    const { options, report } = this.bank;
    while (!options.stop.aborted) {
      const source = Math.floor(Math.random() * options.accounts);
      const target = (source + 1 + Math.floor(Math.random() * (options.accounts - 1))) % options.accounts;
      const amount = 1 + Math.floor(Math.random() * LARGEST_TRANSFER);
      let isSlow = this.#completed % TRANSFERS_PER_PAUSE === 0;
      while (!(await this.#transfer([[source, -amount], [target, amount]], isSlow))) {
        report.retries++;
        isSlow = false;
      }
      this.#completed++;
      report.transfers++;
    }
  }

  /** Attempts a transfer. Returns false if it has failed and was undone. */
  async #transfer(changes: Change[], isSlow: boolean): Promise<boolean> {
    // In memory, because here only locks are lost. If the process may crash, record each change in the store.
    const written: Change[] = [];
    try {
      await this.#locked(changes, (fences) => this.#apply(changes, fences, written, isSlow));
      return true;
    } catch (error) {
      if (!(error instanceof GenieError || error instanceof StaleFenceError)) throw error;
      if (error instanceof LockLostError || error instanceof StaleFenceError) this.bank.report.lostLocks++;
      else if (!(error instanceof QueueTimeoutError || error instanceof UnavailableError)) throw error;
      await this.#compensate(written);
      return false;
    }
  }

  /** Reads all balances, pauses, and writes them one by one. Appends to `written` what the store has accepted. */
  async #apply(changes: readonly Change[], fences: Fences, written: Change[], isSlow = false): Promise<void> {
    const { store, options } = this.bank;
    const balances = new Map<number, number>();
    for (const [account] of changes) balances.set(account, await store.read(account, fences.get(account)!));
    await sleep(Math.random() * options.pause);
    for (const [account, amount] of changes) {
      await store.write(account, balances.get(account)! + amount, fences.get(account)!);
      written.push([account, amount]);
      if (isSlow && written.length === 1) await sleep(this.#longPause);
    }
  }

  get #longPause(): number {
    if (this.#strategy === 'slow') return 1.5 * TRANSACTION_TIMEOUT;
    return this.#strategy === 'bound' ? this.bank.options.boundPause ?? 0 : 0;
  }

  /** Undoes the written part of a transfer under new locks. Others have changed the accounts since, so it adds amounts. */
  async #compensate(written: readonly Change[]): Promise<void> {
    let remaining = written.map(([account, amount]): Change => [account, -amount]).reverse();
    while (remaining.length) {
      const undone: Change[] = [];
      try {
        await this.#locked(remaining, (fences) => this.#apply(remaining, fences, undone));
      } catch (error) {
        if (!(error instanceof GenieError || error instanceof StaleFenceError)) throw error;
      }
      // What the store has accepted stays undone, also if the lock was lost at last.
      remaining = remaining.slice(undone.length);
    }
  }

  /** Runs `work` under locks on the accounts of the changes, requested at once or step by step. */
  async #locked(changes: readonly Change[], work: (fences: Fences) => Promise<void>): Promise<void> {
    const accounts = changes.map(([account]) => account);
    const { client } = this;
    if (!client) return work(new Map(accounts.map((account) => [account, 1])));
    const fences = new Map<number, number>();
    const options = {
      queueTimeout: QUEUE_TIMEOUT,
      ...(this.#strategy === 'bound'
        ? { transactionTimeout: BOUND_TRANSACTION_TIMEOUT, onDisconnect: 'release' as const }
        : { transactionTimeout: TRANSACTION_TIMEOUT }),
    };
    const onLocked = (account: number, lock: Lock): void => {
      fences.set(account, lock.fence);
      this.#checkOverlap(account, lock);
    };
    if (this.#strategy !== 'step by step') {
      return client.using(accounts.map((account) => `accounts/${account}`), (lock) => {
        for (const account of accounts) onLocked(account, lock);
        return work(fences);
      }, options);
    }
    let attempts = 0;
    await client.transaction(async (tx) => {
      if (attempts++) this.bank.report.deadlocks++;
      for (const account of accounts) onLocked(account, await tx.lock(`accounts/${account}`));
      await work(fences); // after all locks, so that a deadlock undoes nothing
    }, options);
  }

  #checkOverlap(account: number, lock: Lock): void {
    const { lastLocks, report } = this.bank;
    const last = lastLocks.get(account);
    if (last?.held && lock.held) report.overlaps.push(`locks ${last.id} and ${lock.id} on account ${account}`);
    if (!last || lock.fence > last.fence) lastLocks.set(account, lock);
  }
}

/** Runs the clerks until `stop` is aborted, and all transfers are completed. */
export async function bank(options: BankOptions): Promise<Report> {
  const store = new Store(options.accounts);
  const before = store.total;
  const report: Report = { transfers: 0, retries: 0, deadlocks: 0, lostLocks: 0, difference: 0, overlaps: [] };
  const shared = { options, store, report, lastLocks: new Map<number, Lock>() };
  const clerks = Array.from({ length: options.clerks }, async (_, number) => {
    const client = options.withoutLocks ? undefined : await connect(options.connect);
    try {
      await new Clerk(number, shared, client).work();
    } finally {
      await client?.close();
    }
  });
  await Promise.all(clerks);
  report.difference = store.total - before;
  return report;
}

async function main(): Promise<void> {
  const { values } = parseArgs({
    options: {
      clerks: { type: 'string', default: '8' },
      accounts: { type: 'string', default: '10' },
      seconds: { type: 'string', default: '5' },
      pause: { type: 'string', default: '2' },
      'without-locks': { type: 'boolean', default: false },
    },
  });
  const report = await bank({
    clerks: Number(values.clerks), accounts: Number(values.accounts), pause: Number(values.pause),
    withoutLocks: values['without-locks'], stop: AbortSignal.timeout(Number(values.seconds) * 1000),
  });
  console.log(report);
  const isWrong = report.difference !== 0 || report.overlaps.length > 0;
  console.log(isWrong ? `the sum has changed by ${report.difference / 100}` : 'the sum is kept');
  process.exitCode = isWrong && !values['without-locks'] ? 1 : 0;
}

if (require.main === module) {
  main().catch((error: unknown) => {
    console.error(`bank: ${String(error)} (start a server with: genie serve)`);
    process.exitCode = 1;
  });
}
