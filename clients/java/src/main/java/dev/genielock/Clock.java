package dev.genielock;

import java.util.concurrent.Future;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/** The time, and what happens at a time. Tests have a clock of their own. */
interface Clock {
    /** Returns the time in ns since a moment before the start of the client. Without overflow: it may be compared by {@code <}. */
    long now();

    /** Calls the task once after a delay in ns, in the thread of the clock. */
    Future<?> schedule(Runnable task, long delay);

    /** Ends all timers. */
    void close();

    /** The clock of the machine. */
    final class Real implements Clock {
        private static final long ORIGIN = System.nanoTime();

        private final ScheduledThreadPoolExecutor executor;

        Real(String threadName) {
            executor = new ScheduledThreadPoolExecutor(1, task -> Dialer.newThread(threadName, task));
            executor.setRemoveOnCancelPolicy(true);
            executor.setRejectedExecutionHandler((task, closed) -> {}); // a timer of a closed client
        }

        @Override
        public long now() { return System.nanoTime() - ORIGIN; }

        @Override
        public Future<?> schedule(Runnable task, long delay) { return executor.schedule(task, delay, TimeUnit.NANOSECONDS); }

        @Override
        public void close() { executor.shutdownNow(); }
    }
}
