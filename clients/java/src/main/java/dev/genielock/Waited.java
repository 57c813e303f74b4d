package dev.genielock;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;

/**
 * A future for which a thread can wait. In contrast to other ones, a thread of the common pool executes no other tasks of the pool
 * meanwhile, which may wait for that thread.
 */
class Waited<T> extends CompletableFuture<T> {
    private static final Executor EXECUTOR = new CompletableFuture<Void>().defaultExecutor()::execute; // not equal to the pool

    @Override
    public Executor defaultExecutor() { return EXECUTOR; }

    @Override
    public <U> CompletableFuture<U> newIncompleteFuture() { return new Waited<>(); }
}
