// Measures this client beside a raw loop over a socket, in the same run, against one server.
//
//   npm run bench -- HOST:PORT [--rounds 5] [--seconds 1]
//
// Prints one JSON object: locks (each with its release) per second, and the median of the ratios of the rounds.
import { randomBytes } from 'node:crypto';
import { connect as connectTcp } from 'node:net';
import { parseArgs } from 'node:util';
import { connect, type Client } from '../src/index.js';

type Stop = () => boolean;

/** Locks and releases on a plain socket with `inFlight` requests, and counts the releases. */
function rawLoop(host: string, port: number, inFlight: number, stop: Stop): Promise<number> {
  return new Promise((resolve, reject) => {
    const socket = connectTcp({ host, port });
    socket.setNoDelay(true);
    socket.once('error', reject);
    let [count, open, next, buffered] = [0, inFlight, 0, ''];
    const request = (task: string): string => {
      next++;
      // The fields that the client sends, so that the server does the same for both.
      const fields = `"resources":["exclusive:raw/${task}"],"queueTimeout":10000,"transactionTimeout":10000`;
      return `{"command":"request","payload":{${fields},"ref":"${task}-${next}"}}\n`;
    };
    // A session, like that of the client: the server keeps the outcome of each of its requests for a while.
    const session = randomBytes(24).toString('base64url');
    socket.write(`{"command":"hello","payload":{"quiet":true,"session":"${session}"}}\n`);
    socket.write(Array.from({ length: inFlight }, (_, task) => request(String(task))).join(''));
    socket.setEncoding('utf8');
    socket.on('data', (text: string) => {
      const lines = (buffered + text).split('\n');
      buffered = lines.pop()!;
      let output = '';
      for (const line of lines) {
        const { command, payload } = JSON.parse(line) as { command: string; payload: { id: number; ref: string } };
        if (command === 'locked') {
          output += `{"command":"release","payload":{"id":${payload.id},"ref":"${payload.ref}r"}}\n`;
        } else if (command === 'released') {
          count++;
          if (!stop()) output += request(payload.ref.split('-')[0]!);
          else if (--open === 0) socket.end(() => resolve(count));
        }
      }
      if (output) socket.write(output);
    });
  });
}

/** Locks and releases with concurrent tasks of one client. */
async function clientLoop(client: Client, tasks: number, stop: Stop): Promise<number> {
  let count = 0;
  const run = async (task: number): Promise<void> => {
    while (!stop()) {
      const lock = await client.acquire(`exclusive:client/${task}`);
      await lock.release();
      count++;
    }
  };
  await Promise.all(Array.from({ length: tasks }, (_, task) => run(task)));
  return count;
}

function median(values: number[]): number {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]!;
}

async function main(): Promise<void> {
  const options = { rounds: { type: 'string', default: '5' }, seconds: { type: 'string', default: '1' } } as const;
  const { values, positionals } = parseArgs({ options, allowPositionals: true });
  const [host = '127.0.0.1', port = '7077'] = (positionals[0] ?? '').split(':').filter(Boolean);
  const ms = Number(values.seconds) * 1000;
  const until = (): Stop => {
    const end = performance.now() + ms;
    return () => performance.now() >= end;
  };
  const rate = async (loop: (stop: Stop) => Promise<number>): Promise<number> => {
    const start = performance.now();
    return ((await loop(until())) * 1000) / (performance.now() - start);
  };
  const client = await connect({ host, port: Number(port) });
  const results = [];
  for (const tasks of [1, 64]) {
    const raw: number[] = [];
    const own: number[] = [];
    for (let round = 0; round < Number(values.rounds); round++) {
      // In turns, so that a change of the machine's speed affects both.
      raw.push(await rate((stop) => rawLoop(host, Number(port), tasks, stop)));
      own.push(await rate((stop) => clientLoop(client, tasks, stop)));
    }
    const ratios = own.map((value, index) => value / raw[index]!);
    const round = (value: number, digits: number): number => Number(value.toFixed(digits));
    results.push({
      tasks, raw: round(median(raw), 0), client: round(median(own), 0), ratio: round(median(ratios), 3),
      ratios: ratios.map((ratio) => round(ratio, 3)),
    });
  }
  await client.close();
  console.log(JSON.stringify({ language: 'typescript', runtime: `node ${process.versions.node}`, results }));
}

main().catch((error: unknown) => {
  console.error(`bench: ${String(error)}`);
  process.exitCode = 1;
});
