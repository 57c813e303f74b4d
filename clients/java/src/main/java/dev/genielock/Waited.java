package dev.genielock;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.ForkJoinPool;
import java.util.concurrent.locks.LockSupport;

/** A future for which a thread can wait. */
class Waited<T> extends CompletableFuture<T> {
    // If the common pool has only one thread, a task that blocks would hold up all others: then each task has a new thread, as in
    // CompletableFuture before Java 25. The executor is not equal to the pool: so, before Java 25, a join executes no other tasks.
    private static final Executor EXECUTOR = ForkJoinPool.getCommonPoolParallelism() > 1 ? ForkJoinPool.commonPool()::execute
            : task -> Dialer.newThread("genie-task", task).start();

    /** Waits for a future. */
    private record Blocker(Waited<?> future, long end) implements ForkJoinPool.ManagedBlocker {
        @Override
        public boolean block() throws InterruptedException {
            while (!future.isDone()) {
                if (Thread.interrupted()) throw new InterruptedException();
                long left = end - System.nanoTime(); // the times may overflow: only the difference counts
                if (left <= 0) return true;
                LockSupport.parkNanos(future, left);
            }
            return true;
        }

        @Override
        public boolean isReleasable() { return future.isDone(); }
    }

    @Override
    public Executor defaultExecutor() { return EXECUTOR; }

    @Override
    public <U> CompletableFuture<U> newIncompleteFuture() { return new Waited<>(); }

    /**
     * Waits until the future has ended, or until a time of {@link System#nanoTime}. A thread of a pool is replaced meanwhile if the pool
     * can grow. In contrast to {@link #get}, it executes no other tasks of the pool, which may wait for this thread.
     */
    final void await(long end) throws InterruptedException {
        if (isDone()) return;
        var blocker = new Blocker(this, end);
        Thread waiter = Thread.currentThread();
        whenComplete((value, failure) -> LockSupport.unpark(waiter));
        try {
            ForkJoinPool.managedBlock(blocker);
        } catch (RuntimeException | Error e) { // the pool has too many threads, or cannot start one
            blocker.block();
        }
    }

    /** As {@link #await}. An interrupt does not end the wait, and remains set. */
    final void awaitUninterruptibly(long end) {
        boolean isInterrupted = false;
        while (!isDone() && end - System.nanoTime() > 0) {
            try {
                await(end);
            } catch (InterruptedException e) {
                isInterrupted = true;
            }
        }
        if (isInterrupted) Thread.currentThread().interrupt();
    }
}
