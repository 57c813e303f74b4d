package dev.genielock;

/**
 * No leader has answered in time. Either the command was not executed, or the client releases the request as soon as a server can
 * be reached. The cause is why the last connection has failed.
 */
public final class UnavailableException extends GenieException {
    private static final long serialVersionUID = 1L;

    UnavailableException(Throwable cause) { super("no server is available: " + cause.getMessage(), cause); }
}
