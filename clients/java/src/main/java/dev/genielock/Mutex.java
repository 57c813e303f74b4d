package dev.genielock;

import java.util.concurrent.locks.ReentrantLock;

/** A lock that a {@code try} block holds. In contrast to {@code synchronized}, a virtual thread that waits for it leaves its carrier. */
final class Mutex extends ReentrantLock {
    private static final long serialVersionUID = 1L;

    private final transient AtEnd held = this::unlock;

    /** What the end of a {@code try} block does, for example to unlock the mutex. */
    interface AtEnd extends AutoCloseable {
        @Override
        void close();
    }

    AtEnd hold() {
        lock();
        return held;
    }
}
