package dev.genielock;

import java.util.concurrent.locks.ReentrantLock;

/** A lock that a {@code try} block holds. In contrast to {@code synchronized}, a virtual thread that waits for it leaves its carrier. */
final class Mutex extends ReentrantLock {
    private static final long serialVersionUID = 1L;

    private final transient Held held = this::unlock;

    /** Unlocks the mutex. */
    interface Held extends AutoCloseable {
        @Override
        void close();
    }

    Held hold() {
        lock();
        return held;
    }
}
