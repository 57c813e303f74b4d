// Executes the TypeScript examples of the recipes: each is compiled as the program of a user of this package, runs beside a
// server of its own, and must print the `text` block after it. An example of README.md without output is only compiled.
import assert from 'node:assert/strict';
import { execFile, execFileSync } from 'node:child_process';
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { before, test } from 'node:test';
import { promisify } from 'node:util';
import { GenieServer } from './support.js';

const PACKAGE = resolve(__dirname, '../..');
const RECIPES = resolve(PACKAGE, '../../docs/how-to/recipes');
/** Inside of the package, so that `genie-lock` is this package. */
const PROGRAMS = join(PACKAGE, 'build/pages');
/** The first line of a block that later blocks of the page import. */
const MODULE = /^\/\/ (\w+)\.mts\n/;

interface Program {
  title: string;
  path: string;
  text: string;
  /** The expected lines; undefined: the block is imported by others. */
  output: string | undefined;
}

function programs(page: string, name: string): Program[] {
  const blocks = [...readFileSync(page, 'utf8').matchAll(/^```(\w*)\n(.*?)^```$/gms)];
  return blocks.flatMap(([, language, text = ''], index) => {
    if (language !== 'ts') return [];
    const [, next, output] = blocks[index + 1] ?? [];
    const path = join(PROGRAMS, name, `${MODULE.exec(text)?.[1] ?? `example${index}`}.mts`);
    return [{ title: `${name}, block ${index + 1}`, path, text, output: next === 'text' ? output : undefined }];
  });
}

/** The pages without TypeScript: one is about frameworks for Python. */
const WITHOUT_TYPESCRIPT = ['index.md', 'fastapi.md'];
const pages = readdirSync(RECIPES).filter((page) => !WITHOUT_TYPESCRIPT.includes(page));
const recipes = new Map(pages.map((page) => [page, programs(join(RECIPES, page), page.replace('.md', ''))]));
const readme = programs(join(PACKAGE, 'README.md'), 'readme');
const all = [...recipes.values(), readme].flat();

/** In the shown lines, `…` stands for any text, and an id or a fence for any. */
function pattern(output: string): RegExp {
  const escaped = output.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
  return new RegExp(`^${escaped.replace(/…/g, '.*').replace(/\b1790000000\d{6}\b|(?<=fence )\d+/g, '\\d+')}$`);
}

before(() => {
  rmSync(PROGRAMS, { recursive: true, force: true });
  for (const { path, text } of all) {
    mkdirSync(dirname(path), { recursive: true });
    writeFileSync(path, text);
  }
  const paths = all.map(({ path }) => path);
  // As CommonJS, too, whose programs have no `await` at the top level: the types are those of another entry.
  const types = join(PROGRAMS, 'types.cts');
  copyFileSync(join(PACKAGE, 'test/consumer.cts'), types);
  const options = '--strict --target ES2022 --module Node16 --lib ES2022,ESNext.Disposable --types node'.split(' ');
  const compiler = require.resolve('typescript/bin/tsc');
  execFileSync(process.execPath, [compiler, ...options, ...paths, types], { cwd: PACKAGE, stdio: 'inherit' });
});

test('every recipe has an example, and every example shows its output', () => {
  assert.ok(recipes.size >= 6);
  for (const [page, found] of recipes) assert.ok(found.some(({ output }) => output), page);
  for (const { title, text, output } of [...recipes.values()].flat()) assert.ok(output || MODULE.test(text), title);
  assert.deepEqual(readme.map(({ output }) => output !== undefined), [true, false]);
});

for (const { title, path, output } of all.filter((program) => program.output)) {
  test(`the example prints its output: ${title}`, async () => {
    await using server = await GenieServer.start();
    const env = { ...process.env, GENIE_HOST: server.host };
    const program = path.replace(/\.mts$/, '.mjs');
    const { stdout, stderr } = await promisify(execFile)(process.execPath, [program], { env, timeout: 60_000 });
    assert.equal(stderr, '');
    assert.match(stdout, pattern(output!));
  });
}
