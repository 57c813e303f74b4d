package dev.genielock;

import java.util.Comparator;
import java.util.PriorityQueue;
import java.util.concurrent.Future;
import java.util.concurrent.FutureTask;
import java.util.concurrent.locks.ReentrantLock;

/** A clock that only moves when a test moves it. */
final class FakeClock implements Clock {
    private record Task(long at, long number, FutureTask<?> action) {}

    private final ReentrantLock mutex = new ReentrantLock();
    private final PriorityQueue<Task> tasks = new PriorityQueue<>(
            Comparator.comparingLong(Task::at).thenComparingLong(Task::number));
    private long now;
    private long lastNumber;

    @Override
    public long now() {
        mutex.lock();
        try {
            return now;
        } finally {
            mutex.unlock();
        }
    }

    @Override
    public Future<?> schedule(Runnable action, long delay) {
        mutex.lock();
        try {
            var task = new Task(now + delay, ++lastNumber, new FutureTask<>(action, null));
            tasks.add(task);
            return task.action;
        } finally {
            mutex.unlock();
        }
    }

    @Override
    public void close() {
        mutex.lock();
        try {
            tasks.clear();
        } finally {
            mutex.unlock();
        }
    }

    /** Moves the time, and runs what is due, each at its time. */
    void advanceMs(long ms) {
        long end = now() + ms * 1_000_000;
        for (Task task = takeDue(end); task != null; task = takeDue(end)) {
            task.action.run();
        }
    }

    /** Moves the time without running what is due, as if the program had been suspended. */
    void jumpMs(long ms) {
        mutex.lock();
        try {
            now += ms * 1_000_000;
        } finally {
            mutex.unlock();
        }
    }

    private Task takeDue(long end) {
        mutex.lock();
        try {
            Task next = tasks.peek();
            if (next == null || next.at > end) {
                now = Math.max(now, end);
                return null;
            }
            now = Math.max(now, next.at);
            return tasks.poll();
        } finally {
            mutex.unlock();
        }
    }
}
