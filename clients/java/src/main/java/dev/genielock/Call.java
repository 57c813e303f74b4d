package dev.genielock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;

/** A command without an answer. The mutex of the session protects the fields that are not final. */
final class Call {
    static final long UNSENT = Long.MIN_VALUE;

    /** The order of the commands; also the ref of most. */
    final long number;
    final String name;
    final String ref;
    final Map<String, Object> fields;
    /** Of a request, an extend and most releases; otherwise null. */
    final Lock lock;
    /** Counted down with the answer. */
    final CountDownLatch done = new CountDownLatch(1);
    byte[] line;
    /** Of a watch; otherwise null. */
    Watch watch;
    /** Its caller is about to wait for the answer, and can write the line itself. */
    boolean isForeground;
    /** The connection to which its caller must write the line; null: none, the writer of the connection does. */
    Connection direct;
    /** No caller waits: it is not sent again on another connection, unless it is a release. */
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
    /** What to do with the answer, after the mutex is unlocked. */
    private final List<Runnable> listeners = new ArrayList<>(0);
    private Wire.Message answer;
    private GenieException error;

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

    double queueTimeoutMs() { return (double) fields.get("queueTimeout"); }

    double transactionTimeoutMs() { return (double) fields.get("transactionTimeout"); }

    void complete(Wire.Message message, Optional<GenieException> failure) {
        answer = message;
        error = failure.orElse(null);
    }

    /** Adds what to do with the answer, in {@link Async#EXECUTOR}. The call has no answer yet. */
    void addListener(Runnable listener) { listeners.add(listener); }

    /** Wakes the callers of a call that is complete. */
    void wake() {
        done.countDown();
        listeners.forEach(Async.EXECUTOR::execute);
    }

    /** Returns the answer, null if there is none but success, or throws the error. */
    Wire.Message result() {
        if (error != null) throw error.copy();
        return answer;
    }
}
