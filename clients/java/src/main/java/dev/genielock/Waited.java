package dev.genielock;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.concurrent.ForkJoinPool;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * A future for which a thread can wait. In contrast to other ones, a thread of the common pool executes no other tasks of the pool
 * meanwhile, which may wait for that thread.
 */
class Waited<T> extends CompletableFuture<T> {
    // If the common pool has only one thread, a task that blocks would hold up all others: then each task has a new thread, as in
    // CompletableFuture before Java 25. The executor is not equal to the pool.
    private static final Executor EXECUTOR = ForkJoinPool.getCommonPoolParallelism() > 1 ? ForkJoinPool.commonPool()::execute
            : task -> Dialer.newThread("genie-task", task).start();

    @Override
    public Executor defaultExecutor() { return EXECUTOR; }

    @Override
    public <U> CompletableFuture<U> newIncompleteFuture() { return new Waited<>(); }

    /** Waits until the future has ended, or for a limit in ns. A thread of a pool is replaced meanwhile if the pool can grow. */
    final void await(long limit) throws InterruptedException {
        long end = System.nanoTime() + limit; // it may overflow: only the difference counts
        try {
            get(limit, TimeUnit.NANOSECONDS);
        } catch (ExecutionException | TimeoutException e) {
            // the caller asks for the result next
        } catch (RuntimeException | Error e) { // the pool has too many threads, or cannot start one
            var ended = new CountDownLatch(1);
            whenComplete((value, failure) -> ended.countDown());
            ended.await(end - System.nanoTime(), TimeUnit.NANOSECONDS);
        }
    }

    /** As {@link #await}. An interrupt does not end the wait, and remains set. */
    final void awaitUninterruptibly(long limit) {
        long end = System.nanoTime() + limit;
        boolean isInterrupted = false;
        while (!isDone() && end - System.nanoTime() > 0) {
            try {
                await(end - System.nanoTime());
            } catch (InterruptedException e) {
                isInterrupted = true;
            }
        }
        if (isInterrupted) Thread.currentThread().interrupt();
    }
}
