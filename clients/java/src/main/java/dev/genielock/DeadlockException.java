package dev.genielock;

import java.util.List;
import java.util.Optional;

/**
 * A request would have waited in a cycle. Release the locks of the transaction, undo its work, wait for a random time and start
 * over, as {@link GenieClient#transaction} does.
 */
public final class DeadlockException extends GenieException {
    private static final long serialVersionUID = 1L;

    /** As returned. */
    private final long id;
    private final transient List<String> cycle; // null after serialization
    private final transient List<Wait> waits; // null after serialization

    /**
     * An edge of the cycle: one request waits for another one.
     *
     * @param resource the name for which it waits, without a mode
     * @param waiter the id of the request that waits
     * @param holder the id of the request that holds the resource
     * @param units the units for which it waits; 0 if it does not wait for units
     * @param of the limit of the units; 0 if it does not wait for units
     * @param note the note of the waiter
     * @param traceparent the trace context of the waiter
     */
    public record Wait(String resource, long waiter, long holder, int units, int of, Optional<String> note,
            Optional<String> traceparent) {}

    DeadlockException(long id, List<String> cycle, List<Wait> waits) {
        super("request " + id + " would deadlock: " + String.join(" → ", cycle)
                + (cycle.isEmpty() ? "" : " → " + cycle.get(0)), null);
        this.id = id;
        this.cycle = cycle;
        this.waits = waits;
    }

    /** {@return the id of the request} */
    public long id() { return id; }

    /** {@return the names of the transactions: each waits for the next, and the last one for the first. The list is not serialized} */
    public List<String> cycle() { return cycle == null ? List.of() : cycle; }

    /** {@return the edges of the cycle. The list is not serialized} */
    public List<Wait> waits() { return waits == null ? List.of() : waits; }
}
