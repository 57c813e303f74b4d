package dev.genielock;

import java.time.Duration;
import java.util.List;

/** A request was not granted within its queue timeout. */
public final class QueueTimeoutException extends GenieException {
    private static final long serialVersionUID = 1L;

    /** As returned. */
    private final long id;
    /** As returned. */
    private final Duration waited;
    private final transient List<Blocker> blockers; // null after serialization
    /** As returned. */
    private final int blockersTotal;

    QueueTimeoutException(long id, Duration waited, List<Blocker> blockers, int blockersTotal) {
        super(text(id, waited, blockers, blockersTotal), null);
        this.id = id;
        this.waited = waited;
        this.blockers = blockers;
        this.blockersTotal = blockersTotal;
    }

    private static String text(long id, Duration waited, List<Blocker> blockers, int blockersTotal) {
        String list = String.join(", ", blockers.stream().map(Blocker::toString).toList());
        String text = "request " + id + " was not granted within " + waited.toMillis() + " ms" + (list.isEmpty() ? "" : ": " + list);
        int rest = blockersTotal - blockers.size();
        return rest > 0 ? text + " and " + rest + " more" : text;
    }

    /** {@return the id of the request} */
    public long id() { return id; }

    /** {@return how long the request waited at the server} */
    public Duration waited() { return waited; }

    /** {@return the requests that blocked this one: the first ten. The list is not serialized} */
    public List<Blocker> blockers() { return blockers == null ? List.of() : blockers; }

    /** {@return the number of all blockers; from 1,000 on a lower bound} */
    public int blockersTotal() { return blockersTotal; }
}
