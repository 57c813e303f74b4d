package dev.genielock;

import java.time.Instant;
import java.util.Optional;

/**
 * A request that blocks another one: it holds the resource, or is ahead in the queue.
 *
 * @param id the id of the request
 * @param resource the name, without a mode
 * @param mode {@code shared}, {@code exclusive} or {@code units}
 * @param units the units that it holds or waits for; 0 if the mode is another one
 * @param of the limit of the units; 0 if the mode is another one
 * @param state {@code held} or {@code queued}
 * @param since when it was granted, or has arrived
 * @param transaction the transaction to which it belongs
 * @param note who or what has made it
 * @param traceparent its trace context
 */
public record Blocker(long id, String resource, String mode, int units, int of, String state, Instant since,
        Optional<String> transaction, Optional<String> note, Optional<String> traceparent) {
    @Override
    public String toString() {
        String verb = state.equals("held") ? "holds" : "waits for";
        return id + transaction.map(name -> " of '" + name + "'").orElse("") + note.map(text -> " (" + text + ")").orElse("")
                + " " + verb + " " + (units > 0 ? units + "/" + of : mode) + ":" + resource;
    }
}
