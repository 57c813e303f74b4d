package dev.genielock;

import java.time.Duration;
import java.util.EnumMap;
import java.util.Map;
import java.util.function.Supplier;

/**
 * Options of a request. Immutable; each method returns a copy. What is not set has the default of the client.
 *
 * <pre>{@code LockOptions.of().queueTimeout(Duration.ofSeconds(2)).watchdog()}</pre>
 */
public final class LockOptions {
    /** As a queue timeout: wait without a limit. */
    public static final Duration NO_TIMEOUT = Duration.ofMillis(Integer.MAX_VALUE);

    private static final Duration DEFAULT_TIMEOUT = Duration.ofSeconds(10); // of the protocol
    private static final int DEFAULT_ATTEMPTS = 10;
    private static final LockOptions EMPTY = new LockOptions(Map.of());

    private enum Key {
        QUEUE_TIMEOUT, TRANSACTION_TIMEOUT, TRANSACTION, PRIORITY, WATCHDOG, RELEASES_ON_DISCONNECT, NOTE, TRACEPARENT, ATTEMPTS
    }

    private final Map<Key, Object> values;

    private LockOptions(Map<Key, Object> values) { this.values = values; }

    /** {@return options of which none is set} */
    public static LockOptions of() { return EMPTY; }

    private LockOptions with(Key key, Object value) { return with(Map.of(key, value)); }

    private LockOptions with(Map<Key, Object> more) {
        var copy = new EnumMap<Key, Object>(Key.class);
        copy.putAll(values);
        copy.putAll(more);
        return new LockOptions(copy);
    }

    /** Returns these options, in which those of another object replace them. */
    LockOptions overriddenBy(LockOptions other) { return other.values.isEmpty() ? this : with(other.values); }

    private static Duration checked(Duration timeout, String name) {
        if (timeout.isNegative()) throw new IllegalArgumentException(name + " must not be negative, and is " + timeout);
        return timeout;
    }

    /**
     * Limits the wait for the lock. Default: 10 s.
     *
     * @param timeout the greatest wait; {@link #NO_TIMEOUT} for none
     * @return the options
     */
    public LockOptions queueTimeout(Duration timeout) { return with(Key.QUEUE_TIMEOUT, checked(timeout, "queueTimeout")); }

    /**
     * Limits how long the lock is held, unless it is extended. Default: 10 s.
     *
     * @param timeout from the grant
     * @return the options
     */
    public LockOptions transactionTimeout(Duration timeout) {
        return with(Key.TRANSACTION_TIMEOUT, checked(timeout, "transactionTimeout"));
    }

    /**
     * Names the one transaction to which the request belongs, such as {@code transfer-42}. Requests of one transaction do not block
     * each other, and deadlocks between transactions are detected.
     *
     * @param name a name that no other transaction has at the same time; empty: none
     * @return the options
     */
    public LockOptions transaction(String name) { return with(Key.TRANSACTION, name); }

    /**
     * Lets requests of a higher priority be granted first. Default: 0.
     *
     * @param priority the priority
     * @return the options
     */
    public LockOptions priority(int priority) { return with(Key.PRIORITY, priority); }

    /**
     * Extends the lock automatically until it is released, so that the transaction timeout only limits how long the lock outlives a
     * crash of this process.
     *
     * @return the options
     */
    public LockOptions watchdog() { return with(Key.WATCHDOG, true); }

    /**
     * Lets the server release the lock when the session of this client ends: when the client is closed, or has no connection for
     * its session timeout. Otherwise the lock then stays held until its transaction timeout. Such a lock counts as lost if the
     * server has not answered any command that was sent during the last session timeout.
     *
     * @return the options
     */
    public LockOptions releaseOnDisconnect() { return with(Key.RELEASES_ON_DISCONNECT, true); }

    /**
     * Describes for operators who or what makes the request. Default: {@code PROGRAM PID@HOST}.
     *
     * @param note a text of at most 256 characters; empty: that of the client
     * @return the options
     */
    public LockOptions note(String note) { return with(Key.NOTE, note); }

    /**
     * Sends the trace context of each request, in the format of W3C Trace Context. Operators, and clients that the request blocks,
     * see it.
     *
     * @param source is called for each request by the thread that makes it; empty: none
     * @return the options
     */
    public LockOptions traceparent(Supplier<String> source) { return with(Key.TRACEPARENT, source); }

    /**
     * Limits how often {@link GenieClient#transaction} calls its work. Default: 10.
     *
     * @param attempts at least 1
     * @return the options
     */
    public LockOptions attempts(int attempts) {
        if (attempts < 1) throw new IllegalArgumentException("attempts must be at least 1, and is " + attempts);
        return with(Key.ATTEMPTS, attempts);
    }

    @SuppressWarnings("unchecked")
    private <T> T get(Key key, T fallback) { return (T) values.getOrDefault(key, fallback); }

    boolean hasNote() { return values.containsKey(Key.NOTE); }

    double queueTimeoutMs() { return Wire.ms(get(Key.QUEUE_TIMEOUT, DEFAULT_TIMEOUT)); }

    Duration transactionTimeout() { return get(Key.TRANSACTION_TIMEOUT, DEFAULT_TIMEOUT); }

    double transactionTimeoutMs() { return Wire.ms(transactionTimeout()); }

    String transaction() { return get(Key.TRANSACTION, ""); }

    String note() { return get(Key.NOTE, ""); }

    boolean hasWatchdog() { return get(Key.WATCHDOG, false); }

    boolean releasesOnDisconnect() { return get(Key.RELEASES_ON_DISCONNECT, false); }

    int attempts() { return get(Key.ATTEMPTS, DEFAULT_ATTEMPTS); }

    /** Returns how long to wait for the answer to a request, in ns. */
    long limit(long responseTimeout) {
        double timeout = queueTimeoutMs();
        return timeout >= Wire.MAX_TIMEOUT_MS ? Long.MAX_VALUE : Wire.nanos(timeout) + responseTimeout;
    }

    /** Returns the fields of a request: these names and values, and the options that differ from the protocol's defaults. */
    Map<String, Object> request(Object... namesAndValues) {
        var fields = Wire.fields(namesAndValues);
        fields.put("queueTimeout", queueTimeoutMs());
        fields.put("transactionTimeout", transactionTimeoutMs());
        put(fields, "transactionName", transaction());
        if (get(Key.PRIORITY, 0) != 0) fields.put("priority", get(Key.PRIORITY, 0));
        if (releasesOnDisconnect()) fields.put("onDisconnect", "release");
        put(fields, "note", note());
        put(fields, "traceparent", this.<Supplier<String>>get(Key.TRACEPARENT, () -> "").get());
        return fields;
    }

    /** Puts a text that is not empty. */
    static void put(Map<String, Object> fields, String name, String text) {
        if (!text.isEmpty()) fields.put(name, text);
    }
}
