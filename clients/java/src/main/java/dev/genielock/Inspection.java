package dev.genielock;

import java.time.Duration;
import java.time.Instant;
import java.util.List;
import java.util.Optional;

/**
 * Held locks and waiting requests, as they were at one moment.
 *
 * @param holders held locks
 * @param holdersTotal the number of all that match, also beyond the limit
 * @param queue waiting requests
 * @param queueTotal the number of all that match, also beyond the limit
 */
public record Inspection(List<Request> holders, int holdersTotal, List<Request> queue, int queueTotal) {
    /**
     * A held lock or a waiting request.
     *
     * @param id its id
     * @param resources the first ten resources with their modes, exclusive ones first
     * @param resourcesTotal the number of all its resources
     * @param priority its priority
     * @param since when it was granted; of a waiting request: when it has arrived
     * @param expiresIn when it times out; empty: it waits without a limit
     * @param transaction the transaction to which it belongs
     * @param note who or what has made it
     * @param traceparent its trace context
     * @param fence the fencing token; 0 for a waiting request
     * @param blockers of a waiting request: the first ten
     * @param blockersTotal the number of all blockers
     */
    public record Request(long id, List<String> resources, int resourcesTotal, double priority, Instant since,
            Optional<Duration> expiresIn, Optional<String> transaction, Optional<String> note, Optional<String> traceparent,
            long fence, List<Blocker> blockers, int blockersTotal) {}
}
