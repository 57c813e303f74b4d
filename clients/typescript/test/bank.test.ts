import assert from 'node:assert/strict';
import { test } from 'node:test';
import { bankUnderFaults } from '../examples/bank-faults.js';
import { bank } from '../examples/bank.js';
import { GenieServer } from './support.js';

test('the bank keeps its sum, through deadlocks and lost locks', async () => {
  await using server = await GenieServer.start();
  const report = await bank({
    clerks: 8, accounts: 3, pause: 4, stop: AbortSignal.timeout(2_000), connect: { host: server.host },
  });
  assert.deepEqual([report.difference, report.overlaps], [0, []]);
  assert.ok(report.transfers > 8 && report.deadlocks > 0 && report.lostLocks > 0, JSON.stringify(report));
});

test('without locks the bank loses or gains money', async () => {
  const report = await bank({ clerks: 8, accounts: 2, pause: 4, stop: AbortSignal.timeout(1_000), withoutLocks: true });
  assert.notEqual(report.difference, 0);
});

test('the bank keeps its sum while servers and Redis are killed', async () => {
  const report = await bankUnderFaults(8_000);
  assert.deepEqual([report.difference, report.overlaps, report.holdersLeft, report.queueLeft], [0, [], 0, 0]);
  assert.ok(report.faults > 0 && report.events > 0 && report.transfers > 12, JSON.stringify(report));
});
