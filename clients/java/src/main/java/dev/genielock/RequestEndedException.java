package dev.genielock;

/**
 * A waiting request has ended for a reason that has no class of its own, for example because another client has released it by
 * its id.
 */
public final class RequestEndedException extends GenieException {
    private static final long serialVersionUID = 1L;

    /** As returned. */
    private final long id;
    /** As returned. */
    private final String reason;

    RequestEndedException(long id, String reason) {
        super("request " + id + " ended before it was granted: " + reason, null);
        this.id = id;
        this.reason = reason;
    }

    /** {@return the id of the request} */
    public long id() { return id; }

    /** {@return the reason of the server; {@code success} if another client has released the request} */
    public String reason() { return reason; }
}
