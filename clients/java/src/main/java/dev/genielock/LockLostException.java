package dev.genielock;

/**
 * A granted lock has ended without {@link Lock#release}. Other clients may hold it now: undo the work that it protected. The cause
 * is a {@link ClientClosedException} if the client was closed.
 */
public final class LockLostException extends GenieException {
    private static final long serialVersionUID = 1L;

    static final String TRANSACTION_TIMEOUT = "transaction-timeout";
    static final String DISCONNECTED = "disconnected";
    static final String LOST = "lost"; // not a reason of the wire: the server does not know the lock
    static final String CLOSED = "closed"; // nor is this: the client does not manage the lock any more

    /** As returned. */
    private final long id;
    /** As returned. */
    private final String reason;

    LockLostException(long id, String reason) { this(id, reason, null); }

    LockLostException(long id, String reason, Throwable cause) {
        super("lock " + id + " was lost: " + explain(reason), cause);
        this.id = id;
        this.reason = reason;
    }

    private static String explain(String reason) {
        return switch (reason) {
            case TRANSACTION_TIMEOUT -> "it was held for longer than its transaction timeout";
            case DISCONNECTED -> "its session ended";
            case "success" -> "it was released by its id";
            case LOST -> "the server does not know it any more";
            case CLOSED -> "the client does not manage it any more";
            default -> reason;
        };
    }

    /** {@return the id of the lock} */
    public long id() { return id; }

    /**
     * {@return the reason of the server, such as {@code transaction-timeout}, {@code disconnected}, or {@code success} if the lock
     * was released by its id; {@code lost} if the server does not know the lock any more; {@code closed} if the client was closed}
     */
    public String reason() { return reason; }
}
