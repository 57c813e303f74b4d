// Runs the conformance kit of the repository against this client. Further arguments are options of the kit.
import { spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join, resolve } from 'node:path';

const root = resolve(__dirname, '../../../..');
const installed = join(root, '.venv/bin/python');
const python = process.env.PYTHON ?? (existsSync(installed) ? installed : 'python3');
const adapter = join(__dirname, 'adapter.js');
const args = ['-m', 'conformance', 'client', ...process.argv.slice(2), '--', process.execPath, adapter];
spawn(python, args, { cwd: root, stdio: 'inherit' }).on('exit', (code) => (process.exitCode = code ?? 1));
