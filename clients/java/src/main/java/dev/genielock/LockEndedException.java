package dev.genielock;

/** A lock was used after {@link Lock#release} or {@link Lock#detach}, or a transaction after its end. */
public final class LockEndedException extends GenieException {
    private static final long serialVersionUID = 1L;

    LockEndedException(String message) { super(message, null); }
}
