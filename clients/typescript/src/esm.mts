// The entry of ES modules. It shares the modules of the CommonJS entry, so that `instanceof` works for users of both.
export * from './index.js';
