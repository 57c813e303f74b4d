package dev.genielock;

import java.util.Optional;

/**
 * A change of the connection.
 *
 * @param state what has changed
 * @param address {@code HOST:PORT} of the server
 * @param cause why the connection is down
 */
public record ConnectionEvent(State state, String address, Optional<Throwable> cause) {
    /** What has changed. */
    public enum State {
        /** The client is connected. */
        UP,
        /** The client is connected, to another server than before. */
        LEADER,
        /** The connection is lost. */
        DOWN
    }
}
