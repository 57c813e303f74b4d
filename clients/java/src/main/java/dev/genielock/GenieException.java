package dev.genielock;

/** A call has failed. The subclasses say how; their set is closed. */
public abstract sealed class GenieException extends RuntimeException implements Cloneable
        permits QueueTimeoutException, DeadlockException, InsufficientException, LockLostException, LockEndedException,
                RequestEndedException, RejectedException, UnavailableException, ClientClosedException {
    private static final long serialVersionUID = 1L;

    /** {@code cause}: null if there is none. */
    GenieException(String message, Throwable cause) { super(message, cause); }

    /** Returns an equal exception with the stack of the caller, because this one was made by the thread that reads. */
    final GenieException copy() {
        try {
            var copy = (GenieException) clone();
            copy.fillInStackTrace();
            return copy;
        } catch (CloneNotSupportedException e) {
            throw new AssertionError(e); // it is Cloneable
        }
    }
}
