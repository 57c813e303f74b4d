package dev.genielock;

/** The client was closed. */
public final class ClientClosedException extends GenieException {
    private static final long serialVersionUID = 1L;

    ClientClosedException() { super("the client is closed", null); }
}
