import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { afterEach, beforeEach, test } from 'node:test';
import { formatAddress, parseAddresses, resolveToken, tlsOptions } from '../src/config.js';

let folder = '';

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'genie-config-'));
  for (const name of Object.keys(process.env)) if (name.startsWith('GENIE_')) delete process.env[name];
});

afterEach(() => rmSync(folder, { recursive: true }));

function texts(options: Parameters<typeof parseAddresses>[0]): string[] {
  return parseAddresses(options).map(formatAddress);
}

test('addresses come from the options, else from the environment', () => {
  assert.deepEqual(texts({}), ['127.0.0.1:7077']);
  assert.deepEqual(texts({ host: 'a, b:7000,[::1]:7001,::2', port: 9 }), ['a:9', 'b:7000', '[::1]:7001', '[::2]:9']);
  process.env.GENIE_HOST = 'c,genies://d:8/';
  process.env.GENIE_PORT = '7078';
  assert.deepEqual(texts({}), ['genies://c:7078', 'genies://d:8']);
  assert.deepEqual(texts({ host: ['genie://e', 'genies://f'] }), ['e:7078', 'genies://f:7078']);
});

test('wrong addresses are rejected', () => {
  for (const host of ['', ',', 'a:x', 'a:0', 'a:65536', '[::1', 'http://a', 'a/b', 'a:1:2']) {
    assert.throws(() => parseAddresses({ host }), TypeError, host);
  }
  assert.throws(() => parseAddresses({ port: 0 }), /port: a port is a number from 1 to 65535, not 0/);
  assert.throws(() => parseAddresses({ host: 'genie://a', tls: true }), /contradicts/);
  assert.throws(() => parseAddresses({ host: 'genies://a', tls: false }), /contradicts/);
  process.env.GENIE_TLS_CA = join(folder, 'missing');
  assert.throws(() => tlsOptions({ tls: true }), /GENIE_TLS_CA: .*missing can't be read/);
});

test('a service link in GENIE_PORT is ignored with one warning, and a default that is not needed is not validated', () => {
  const warnings: string[] = [];
  const logger = { warn: (message: string) => warnings.push(message), debug() {} };
  process.env.GENIE_PORT = 'tcp://10.96.3.4:7077';
  assert.deepEqual(parseAddresses({ host: 'a,b', logger }).map(formatAddress), ['a:7077', 'b:7077']);
  assert.deepEqual(parseAddresses({ host: 'a', logger }).map(formatAddress), ['a:7077']);
  assert.equal(warnings.length, 1);
  assert.match(warnings[0]!, /GENIE_PORT=tcp:\/\/10\.96\.3\.4:7077 is ignored: it is a service link/);
  process.env.GENIE_PORT = 'wrong';
  assert.deepEqual(texts({ host: 'a:1' }), ['a:1']);
  assert.throws(() => texts({ host: 'a' }), /GENIE_PORT/);
});

test('the token comes from the option, the environment, or a file', () => {
  assert.equal(resolveToken(), undefined);
  const path = join(folder, 'token');
  writeFileSync(path, ' secret\n');
  process.env.GENIE_TOKEN_FILE = path;
  assert.equal(resolveToken(), 'secret');
  process.env.GENIE_TOKEN = 'other';
  assert.equal(resolveToken(), 'other');
  assert.equal(resolveToken(''), undefined);
  delete process.env.GENIE_TOKEN;
  writeFileSync(path, 'a b');
  assert.throws(() => resolveToken(), /must contain one word, the token, not 2/);
});

test('the package is usable from ES modules and from CommonJS, with the same classes', () => {
  const root = resolve(__dirname, '../..');
  const program = `
    import { createRequire } from 'node:module';
    import * as esm from 'genie-lock';
    const cjs = createRequire(import.meta.url)('genie-lock');
    const names = Object.keys(cjs).sort().join();
    console.log(names === Object.keys(esm).filter((name) => !['default', 'module.exports', '__esModule'].includes(name)).sort().join());
    console.log(esm.GenieError === cjs.GenieError, typeof esm.connect);`;
  const output = execFileSync(process.execPath, ['--input-type=module', '-e', program], { cwd: root, encoding: 'utf8' });
  assert.equal(output, 'true\ntrue function\n');
});
