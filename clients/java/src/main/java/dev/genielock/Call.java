package dev.genielock;

import java.util.Map;
import java.util.concurrent.CompletionException;

/**
 * A command, as a future of its answer. The answer is null if there is none but success. Its callers may wait for less than that:
 * see {@link Session#giveUp}. The mutex of the session protects the fields that are not final.
 */
final class Call extends Waited<Wire.Message> {
    static final long UNSENT = Long.MIN_VALUE;

    /** The order of the commands; also the ref of most. */
    final long number;
    final String name;
    final String ref;
    final Map<String, Object> fields;
    /** Of a request, an extend and most releases; otherwise null. */
    final Lock lock;
    byte[] line;
    /** Of a watch; otherwise null. */
    Watch watch;
    /** Its caller is about to wait for the answer, and can write the line itself. */
    boolean isForeground;
    /** The connection to which its caller must write the line; null: none, the writer of the connection does. */
    Connection direct;
    /** No caller waits: it is not sent again on another connection, unless it is a release or bye. */
    boolean isBackground;
    /** Its caller has got an error: it is not repeated, unless it is a release. */
    boolean isGivenUp;
    /** When it was sent, in ns of the clock. See {@link Session#write}. */
    long sentAt = UNSENT;
    /** After the error {@code unavailable}. */
    int retries;
    /** Of the release of a cancelled request: the id of the lock that was granted nevertheless. */
    long grantedId;
    /** A release of a lock that this client has not requested. */
    boolean isUnknown;
    /** Of a release by id: the inspect that was sent before it; null: there is none. */
    Call query;
    /** Of a release by id: the waiting requests were sent again after it. */
    boolean isFollowed;
    /** Of an inspect that was answered: how many requests wait. */
    long queueTotal = -1;

    Call(long number, String name, String ref, Map<String, Object> fields, Lock lock) {
        this.number = number;
        this.name = name;
        this.ref = ref;
        this.fields = fields;
        this.lock = lock;
        this.line = Wire.encode(name, fields);
    }

    boolean isRequest() { return name.equals("request"); }

    boolean isRelease() { return name.equals("release"); }

    /** Returns whether it changes a lock of this client. */
    boolean isExtend() { return name.equals("extend") && lock != null; }

    /** Returns whether the request that a release by id has released may have waited, and was not sent again since. */
    boolean mayBeQueued() { return !isFollowed && (query == null || query.queueTotal != 0); }

    double queueTimeoutMs() { return (double) fields.get("queueTimeout"); }

    double transactionTimeoutMs() { return (double) fields.get("transactionTimeout"); }

    /** Completes the future: with the failure, unless it is null, otherwise with the answer. */
    void end(Wire.Message answer, GenieException failure) {
        if (failure == null) {
            complete(answer);
        } else {
            completeExceptionally(failure);
        }
    }

    /** Returns the answer of a call that has ended, or throws its failure. */
    Wire.Message result() {
        try {
            return join();
        } catch (CompletionException e) {
            throw ((GenieException) e.getCause()).copy();
        }
    }
}
