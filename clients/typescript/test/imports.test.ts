import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { test } from 'node:test';

const SOURCE = resolve(__dirname, '../../src');

test('the modules import each other without a cycle, also for types', () => {
  const imports = new Map<string, string[]>();
  for (const file of readdirSync(SOURCE).filter((name) => name.endsWith('.ts'))) {
    const text = readFileSync(join(SOURCE, file), 'utf8');
    imports.set(file, [...text.matchAll(/from '\.\/(\w+)\.js'/g)].map(([, name]) => `${name}.ts`));
  }
  const done = new Set<string>();
  const visit = (file: string, path: string[]): void => {
    assert.ok(!path.includes(file), [...path, file].join(' → '));
    if (done.has(file)) return;
    for (const next of imports.get(file)!) visit(next, [...path, file]);
    done.add(file);
  };
  for (const file of imports.keys()) visit(file, []);
  assert.ok(done.size >= 10);
});
