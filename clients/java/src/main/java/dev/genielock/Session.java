package dev.genielock;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.lang.System.Logger.Level;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.Condition;
import java.util.function.Predicate;
import java.util.function.Supplier;

/**
 * The session of a client across its connections: which commands wait for an answer, and which locks are held.
 *
 * <p>Every command has a ref, and its answers have the same ref. The ref of a request identifies the request until it ends. A
 * connection begins with {@code hello} and {@code ping}; the answers are {@code welcome}, the state of the session's requests, and
 * {@code pong}. Then the client sends all commands without an answer again, in their first order, with the same refs: the server
 * executes each of them once.
 */
final class Session {
    static final String TAKEN_OVER = "session-taken-over"; // another process uses the secret of the session
    private static final String HELLO_REF = "hello";
    private static final String PING_REF = "resume"; // of the ping after `hello`
    private static final Map<String, String> COMMANDS = Map.of("pong", "ping", "extended", "extend", "inspected", "inspect", "watching",
            "watch", "unwatched", "unwatch", "bye", "bye"); // which command an answer answers
    private static final int MAX_UNKNOWN_LOCKS = 1000; // unanswered releases of locks that this client has not requested
    private static final long STABLE_AFTER = 2_000_000_000L; // a connection that lasted so long resets the backoff
    private static final long MAX_BYE = 3_000_000_000L;
    private static final long FIRST_BACKOFF_MS = 50;
    private static final long MAX_BACKOFF_MS = 2_000;
    private static final long NANOS_PER_MS = 1_000_000;

    final Config config;
    final Clock clock;
    final Mutex mutex = new Mutex();
    final Condition outputChanged = mutex.newCondition(); // there is output for a writer, or its connection is closed
    final Condition readerChanged = mutex.newCondition(); // the thread of the dialer may have to read the connection
    final Condition outputTaken = mutex.newCondition(); // calls may add more output
    final String secret = UUID.randomUUID().toString(); // 122 random bits
    final AtomicInteger failedRounds = new AtomicInteger(); // since the server has executed a command
    private final AtomicLong lastNumber = new AtomicLong();
    private volatile Throwable lastFailure = new IOException("no server has answered");
    private final Dialer dialer;

    // The mutex protects the rest.
    Connection connection; // the connection whose handshake is complete; null: there is none
    final Map<Long, Lock> locks = new HashMap<>(); // the locks that the server may hold, by id
    final Set<Watch> watches = new HashSet<>(); // the open ones
    long leaseFrom = Long.MIN_VALUE / 2; // the lease of the session: when the last command was sent that was answered
    boolean isEntered; // connect does not wait any more
    private final Map<String, Call> calls = new HashMap<>(); // the commands without an answer, by ref
    long openBytes; // the length of their lines
    private List<Runnable> finished; // wake the callers after the reader has unlocked the mutex; null: they are woken at once
    private List<Runnable> notices = new ArrayList<>(); // of the reader to the logger and to the listener, which may be slow
    GenieException closed; // why the client is closed; null: it is open
    private Call bye; // the command of close; null: it was not called

    Session(Config config) {
        this.config = config;
        this.clock = config.clock();
        this.isEntered = config.isLazy();
        this.dialer = new Dialer(this);
    }

    /** Connects, in the background if the client is lazy. */
    void start() throws InterruptedException {
        var connected = new Call(0, "ping", PING_REF, Map.of("ref", PING_REF), null); // of the handshake
        calls.put(PING_REF, connected);
        openBytes = connected.line.length;
        dialer.start();
        if (config.isLazy()) return;
        try {
            await(connected, System.nanoTime() + config.connectTimeout());
        } catch (InterruptedException | RuntimeException e) {
            close();
            throw e;
        }
    }

    /** Ends the session and the connection. */
    void close() {
        Connection last;
        var kept = new ArrayList<Long>();
        try (var held = mutex.hold()) {
            if (bye == null) {
                for (Lock lock : stopCalls()) {
                    if (lock.options.releasesOnDisconnect()) { // the server ends it before the answer to bye arrives
                        lock.endByClose(closed);
                    } else if (lock.isHeld()) {
                        kept.add(lock.id());
                    }
                }
                bye = sendBackground("bye", null);
            }
            last = dialer.served(); // also if another thread closes the client: this one must not end the connection before the bye
        }
        if (!kept.isEmpty()) config.logger().log(Level.WARNING, "the client is closed and leaves locks held: {0}", kept);
        if (last != null) { // an interrupt does not end this wait: otherwise the server would keep the session
            bye.awaitUninterruptibly(System.nanoTime() + Math.min(MAX_BYE, config.responseTimeout()));
        }
        dialer.stop();
        clock.close();
    }

    /** Lets no further calls begin, and cancels the waiting requests. Returns the locks. */
    List<Lock> stopCalls() {
        try (var held = mutex.hold()) {
            closed = closed == null ? new ClientClosedException() : closed;
            abandonRequests(lock -> true, closed);
            return new ArrayList<>(locks.values());
        }
    }

    /** Releases the locks that have not ended, which count as lost, and waits for the answers. */
    void releaseAll(List<Lock> all) {
        var releases = new ArrayList<Call>();
        try (var held = mutex.hold()) {
            for (Lock lock : all) {
                lock.sendRelease(false);
                lock.endByClose(closed);
                if (lock.release != null) releases.add(lock.release);
            }
        }
        long end = System.nanoTime() + config.responseTimeout();
        for (Call release : releases) awaitQuietly(release, end);
    }

    /** Waits for the answer to a call whose failure does not matter. An interrupt ends the wait, and remains set. */
    void awaitQuietly(Call call, long end) {
        try {
            waitFor(call, end);
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    /** Waits until a call has ended, or until a time of {@link System#nanoTime}. First its caller may have to write, and to read. */
    private void waitFor(Call call, long end) throws InterruptedException {
        if (call.direct != null) {
            Connection direct;
            try (var held = mutex.hold()) { // another thread may wait for the same release
                direct = call.direct;
                call.direct = null;
            }
            if (direct != null) direct.exchange(end);
        }
        call.await(end);
    }

    /** Returns the first two lines of a connection. */
    byte[] hello() {
        var fields = Wire.fields("protocol", Wire.PROTOCOL, "client", Wire.CLIENT, "quiet", true, "session", secret, "sessionTimeout",
                (double) config.sessionTimeout() / NANOS_PER_MS, "ref", HELLO_REF);
        LockOptions.put(fields, "token", config.token().get());
        LockOptions.put(fields, "namespace", config.namespace());
        LockOptions.put(fields, "note", config.note());
        var lines = new ByteArrayOutputStream();
        lines.writeBytes(Wire.encode("hello", fields));
        lines.writeBytes(Wire.encode("ping", Map.of("ref", PING_REF)));
        return lines.toByteArray();
    }

    /** Returns a call that was not sent. It has a ref of its own, unless it is the release of a cancelled request. */
    Call newCall(String name, Map<String, Object> fields, Lock lock) {
        long number = lastNumber.incrementAndGet();
        String ref = (String) fields.computeIfAbsent("ref", key -> Long.toString(number));
        return new Call(number, name, ref, fields, lock);
    }

    /** Sends a command and waits for its answer. */
    Wire.Message execute(String name, Map<String, Object> fields, Lock lock, long limit) throws InterruptedException {
        long end = System.nanoTime() + limit;
        Call call = newCall(name, fields, lock);
        call.isForeground = true;
        if (call.isRelease() && lock == null) call.query = inspectQueue(fields.get("id"));
        submit(call, end);
        return await(call, end);
    }

    /** Sends an inspect if the request with this id may be a waiting one of this client. Returns the call, or null. */
    private Call inspectQueue(Object id) {
        try (var held = mutex.hold()) {
            boolean mayBeOwn = connection != null && calls.values().stream().anyMatch(Call::isRequest);
            return mayBeOwn ? sendBackground("inspect", null, "id", id, "only", "queue") : null;
        }
    }

    /** Sends a command. While too many bytes are unsent, it waits, at most until a time of {@link System#nanoTime}. */
    private void submit(Call call, long end) throws InterruptedException {
        mutex.lockInterruptibly();
        try {
            while (closed == null && connection != null && connection.isFull()) {
                long left = end - System.nanoTime();
                if (left <= 0) throw new UnavailableException(lastFailure);
                outputTaken.awaitNanos(left);
            }
            submitNow(call);
        } finally {
            mutex.unlock();
        }
    }

    /** Sends a command of a caller that must not wait. */
    void submitNow(Call call) {
        try (var held = mutex.hold()) {
            if (closed != null) throw closed.copy();
            if (call.isRequest() && call.lock.ended != null) throw call.lock.ended.copy(); // its transaction has ended
            if (call.isRelease() && call.lock != null) call.lock.endById(); // another client may have it before the answer
            send(call);
        }
    }

    /** Waits for the answer to a call. If the thread is interrupted, or no answer arrives in time, the call is given up. */
    Wire.Message await(Call call, long end) throws InterruptedException {
        try {
            waitFor(call, end);
        } catch (InterruptedException e) {
            if (giveUp(call).isPresent()) throw e;
            Thread.currentThread().interrupt(); // it was answered meanwhile: the answer counts
        }
        Optional<GenieException> failure = call.isDone() ? Optional.empty() : giveUp(call);
        if (failure.isPresent()) throw failure.get();
        return call.result();
    }

    /** Sends a command without waiting, and returns the future of {@link #follow}. */
    <T> CompletableFuture<T> executeAsync(String name, Map<String, Object> fields, Lock lock, long limit,
            Supplier<CompletableFuture<T>> next) {
        try {
            Call call = newCall(name, fields, lock);
            submitNow(call);
            return follow(call, limit, next);
        } catch (GenieException e) {
            return CompletableFuture.failedFuture(e);
        }
    }

    /**
     * Returns a future of what follows the answer to a call. The call is given up after a limit, or when the future is completed
     * otherwise, as by {@code cancel} or {@code orTimeout}.
     */
    <T> CompletableFuture<T> follow(Call call, long limit, Supplier<CompletableFuture<T>> next) {
        var future = new Waited<T>();
        call.handleAsync((answer, failure) -> call.result()).thenCompose(answer -> next.get()).whenComplete((value, failure) -> {
            if (failure == null) {
                future.complete(value);
            } else {
                future.completeExceptionally(failure.getCause()); // it is in a CompletionException
            }
        });
        var timer = clock.schedule(() -> giveUp(call).ifPresent(
                failure -> call.defaultExecutor().execute(() -> future.completeExceptionally(failure))), limit);
        future.whenComplete((value, failure) -> {
            timer.cancel(false);
            giveUp(call); // before the lock is dropped: the request is not granted any more
            if (call.isRequest() && value != call.lock) call.lock.drop(false);
        });
        return future;
    }

    /** Gives up a call, unless it was answered. Returns the failure of a call that was given up. */
    Optional<GenieException> giveUp(Call call) {
        try (var held = mutex.hold()) {
            if (!isOpen(call)) return Optional.empty();
            var failure = new UnavailableException(lastFailure);
            abandon(call, failure);
            return Optional.of(failure);
        }
    }

    /** Handles the end of a connection. Returns whether it was in use. */
    boolean onDown(Connection conn, Throwable cause) {
        noteFailure(conn.address, cause);
        boolean wasUp;
        boolean isClosed;
        try (var held = mutex.hold()) {
            isClosed = closed != null;
            wasUp = connection == conn;
            finish(bye, null);
            if (wasUp) {
                connection = null;
                if (clock.now() - conn.helloAt >= STABLE_AFTER) failedRounds.set(0);
                outputTaken.signalAll(); // the commands that were not written are sent again
                for (Watch watch : watches) watch.onDisconnected();
            }
        }
        if (!isClosed) config.logger().log(Level.WARNING, "connection to {0} lost: {1}", conn.address, cause);
        return wasUp;
    }

    void noteFailure(Config.Address address, Throwable cause) {
        lastFailure = new IOException(address + ": " + cause.getMessage(), cause);
    }

    /** Cancels the waiting requests for some locks. Their callers get the error. */
    void abandonRequests(Predicate<Lock> isChosen, GenieException failure) {
        try (var held = mutex.hold()) {
            for (Call call : openCalls()) {
                if (call.isRequest() && isChosen.test(call.lock)) abandon(call, failure);
            }
        }
    }

    /** Ends all locks, calls and watches, because the client is closed. */
    void shut(GenieException failure) {
        try (var held = mutex.hold()) {
            closed = closed == null ? failure : closed;
            for (Watch watch : new ArrayList<>(watches)) watch.end(closed);
            var all = new ArrayList<>(locks.values());
            locks.clear();
            for (Lock lock : all) lock.endByClose(closed);
            for (Call call : openCalls()) finish(call, closed);
            outputTaken.signalAll();
        }
    }

    // The rest is called with the mutex locked, except backoff, maxBackoffMs and receive.

    boolean isOpen(Call call) { return calls.get(call.ref) == call; }

    /** Returns whether the server may have something to say. */
    boolean expectsMessages() { return !calls.isEmpty() || !locks.isEmpty() || !watches.isEmpty(); }

    List<Call> openCalls() { return new ArrayList<>(calls.values()); }

    private void warn(String message, Object... arguments) {
        notices.add(() -> config.logger().log(Level.WARNING, message, arguments));
    }

    /** Registers a call and sends it, now or on the next connection. */
    private void send(Call call) {
        calls.put(call.ref, call);
        openBytes += call.line.length;
        if (connection != null) write(call);
        call.isForeground = false; // later, nothing is left to its caller
    }

    /** Sends a command that is not repeated on another connection, unless it is a release. The fields are names and values. */
    Call sendBackground(String name, Lock lock, Object... fields) { return sendBackground(false, name, lock, fields); }

    /** {@code isForeground}: the caller waits for the answer next. */
    Call sendBackground(boolean isForeground, String name, Lock lock, Object... fields) {
        Call call = newCall(name, Wire.fields(fields), lock);
        call.isBackground = true;
        call.isForeground = isForeground;
        send(call);
        return call;
    }

    boolean hasCalls() { return !calls.isEmpty(); }

    /** Sends a call on the connection. If the server answers it there, it has not executed it before {@code sentAt}. */
    private void write(Call call) {
        boolean isSent = call.sentAt > connection.helloAt; // and was answered with `unavailable`
        if (call.sentAt == Call.UNSENT || isSent && !call.isRequest()) {
            call.sentAt = clock.now();
        } else if (!isSent) { // it was sent on an earlier connection, and may be answered from now on
            call.sentAt = connection.helloAt;
        } // otherwise the server may have executed the request before it has rejected a repetition
        if (call.isExtend()) {
            call.lock.lastExtend = call;
            call.lock.shorten(call);
        }
        call.isFollowed = false;
        connection.send(call, calls.size() == 1);
    }

    /** Ends a call, unless it has ended before, and wakes its caller. */
    private void finish(Call call, Wire.Message answer, GenieException failure) {
        if (call != null && calls.remove(call.ref, call)) {
            openBytes -= call.line.length;
            if (finished == null) {
                call.end(answer, failure);
            } else {
                finished.add(() -> call.end(answer, failure));
            }
        }
    }

    void finish(Call call, GenieException failure) { finish(call, null, failure); }

    /** Gives up a call, whose caller gets the error. */
    private void abandon(Call call, GenieException failure) {
        if (!call.isRequest() && (connection != null || call.isRelease())) {
            call.isBackground = true; // an extend that was sent may still change the lock
            call.isGivenUp = true;
            return;
        }
        finish(call, failure);
        if (call.isRequest() && call.sentAt != Call.UNSENT) sendBackground("release", null, "ref", call.ref);
    }

    /** Completes the handshake: the server has sent the state of all requests of the session. */
    private void resume(Connection conn) {
        renewLease(conn.helloAt);
        conn.setTimer(conn.pingInterval);
        finish(calls.get(PING_REF), null); // of connect
        for (Lock lock : new ArrayList<>(locks.values())) lock.onResumed(conn);
        var inOrder = openCalls();
        inOrder.sort(Comparator.comparingLong(call -> call.number));
        connection = conn;
        isEntered = true;
        notices.add(() -> dialer.emitUp(conn.address));
        lastFailure = new IOException(conn.address + " does not answer");
        Dialer.newThread("genie-writer", conn::writeOutput).start();
        for (Call call : inOrder) sendAgain(call);
        for (Watch watch : new ArrayList<>(watches)) watch.request();
    }

    /** Sends a command without an answer on a new connection, unless it has become useless. */
    private void sendAgain(Call call) {
        boolean isNewSession = !connection.isResumed;
        if (call.isBackground && !call.isRelease() && call != bye) {
            finish(call, null);
        } else if (call.isExtend() && call.lock.ended != null) {
            finish(call, call.lock.ended);
        } else if (isNewSession && call.isRelease() && !call.fields.containsKey("id")) {
            finish(call, null); // the server does not know the ref of the cancelled request
            if (call.grantedId != 0) sendBackground("release", null, "id", call.grantedId);
        } else if (isNewSession && call.isRequest() && call.sentAt != Call.UNSENT) { // it is queued for the rest of its time
            double timeout = call.queueTimeoutMs();
            if (timeout < Wire.MAX_TIMEOUT_MS) {
                double waited = (clock.now() - call.sentAt) / (double) NANOS_PER_MS;
                call.fields.put("queueTimeout", Math.max(0.0, timeout - waited));
                openBytes -= call.line.length;
                call.line = Wire.encode(call.name, call.fields);
                openBytes += call.line.length;
            }
            call.sentAt = Call.UNSENT;
            write(call);
        } else {
            write(call);
        }
    }

    /** Notes that the server has executed a command that was sent at this time: it keeps the session for its timeout after it. */
    private void renewLease(long sentAt) { leaseFrom = Math.max(leaseFrom, sentAt); }

    /** Handles messages of the server, and closes the connection if it ends after them, or if one of them must end it. */
    void receive(Connection conn, List<Wire.Message> messages, Throwable end) {
        mutex.lock();
        finished = new ArrayList<>();
        List<Runnable> now = notices;
        try {
            for (var message : messages) receive(conn, message);
            if (end != null) conn.close(end);
        } catch (IOException | RuntimeException | Error e) {
            conn.close(e); // before the turn ends: another thread would find the end of the connection, but not the reason
        } finally {
            List<Runnable> woken = finished;
            finished = null;
            if (!now.isEmpty()) notices = new ArrayList<>();
            conn.endTurn(woken.size());
            mutex.unlock();
            woken.forEach(Runnable::run);
            if (!woken.isEmpty()) conn.endWaking();
            now.forEach(Runnable::run);
        }
    }

    /** Handles a message. An exception means that the connection must be closed. */
    private void receive(Connection conn, Wire.Message message) throws IOException {
        boolean isUp = connection == conn;
        Call call = calls.get(message.text("ref"));
        if (call != null) renewLease(call.sentAt);
        boolean isUnavailable = message.text("code").equals("unavailable");
        if (isUp && !isUnavailable) failedRounds.set(0); // the server executes commands
        switch (message.command()) {
            case "locked" -> onLocked(conn, call, message);
            case "released" -> onReleased(call, message);
            case "error" -> {
                var rejection = message.rejection();
                boolean isTakenOver = rejection.code().equals(TAKEN_OVER) && message.text("ref").isEmpty();
                if (!isUp || isUnavailable && !rejection.leader().isEmpty() || isTakenOver) throw rejection;
                onError(conn, call, rejection);
            }
            case "event" -> {
                var change = message.change();
                for (Watch watch : new ArrayList<>(watches)) watch.onEvent(change);
            }
            case "pong", "extended", "inspected", "watching", "unwatched", "bye" -> {
                if (!isUp) { // the answer to the ping after `hello`
                    resume(conn);
                } else {
                    onAnswer(call, message);
                }
            }
            default -> {} // `queued`, which is not needed, or a message of a newer server
        }
    }

    /** Handles the grant of a request, or the report that a lock is held. */
    private void onLocked(Connection conn, Call call, Wire.Message message) throws IOException {
        long id = message.id();
        if (id == 0 || message.integer("fence") == 0) throw new IOException("the server sent a lock without an id or a fence");
        Lock lock = locks.get(id);
        if (call != null && call.isRequest()) {
            call.lock.onGranted(conn, call, message);
        } else if (call != null) { // the request was cancelled meanwhile
            call.grantedId = id;
        } else if (lock != null) {
            lock.onReported(conn, message);
        } else if (calls.values().stream().filter(other -> other.isUnknown).count() >= MAX_UNKNOWN_LOCKS) {
            throw new IOException("the server sent more than " + MAX_UNKNOWN_LOCKS + " locks that were not requested");
        } else { // unless it is released, it stays held until it times out
            sendBackground("release", null, "id", id).isUnknown = true;
            warn("lock {0} is released, because its ref is not known: {1}", Long.toString(id), message.text("ref"));
        }
    }

    /** Handles the end of a request or of a lock, as a notification or as the answer to a command. */
    private void onReleased(Call call, Wire.Message message) {
        Lock lock = locks.get(message.id());
        if (call != null && call.isRequest()) {
            finish(call, message.notGranted());
        } else if (call != null && call.lock != null) {
            call.lock.onEnded(call, message.text("reason"));
        } else if (call != null && (call.isRelease() || call.name.equals("extend"))) {
            finish(call, message, null);
            if (lock != null) { // it is detached, or was granted after the call by its id was sent
                lock.onEnded(null, message.text("reason"));
            } else if (call.isRelease() && call.fields.containsKey("id") && !call.isUnknown && call.mayBeQueued()) {
                repeatRequests();
            }
        } else if (lock != null) {
            lock.onEnded(null, message.text("reason"));
        } // otherwise it is repeated
    }

    /**
     * Sends the waiting requests again. This client does not know their ids, and the server does not notify a client of the end of a
     * request that the client itself has released. The answer to the repetition is the end. It also follows the releases that were sent
     * before, so thousands of them do not each repeat thousands of requests.
     */
    private void repeatRequests() {
        for (Call call : openCalls()) { // without a new sentAt: the request may have been granted before
            if (connection != null && call.isRequest() && call.sentAt != Call.UNSENT) connection.send(call, false);
            call.isFollowed = true;
        }
    }

    /** Handles any other answer to a command. */
    private void onAnswer(Call call, Wire.Message message) {
        if (call == null || !call.name.equals(COMMANDS.get(message.command()))) { // a request was not granted by it
            warn("the answer {0} was ignored, because no such command has its ref: {1}", message.command(), message.text("ref"));
        } else if (call.isExtend()) {
            call.lock.onExtended(call);
        } else {
            call.queueTotal = message.integer("queueTotal");
            finish(call, message, null);
            if (call.watch != null) call.watch.onSnapshot(call, message);
        }
    }

    /** Handles an error as the answer to a command. */
    private void onError(Connection conn, Call call, RejectedException failure) {
        if (call == null) {
            warn("the server sent an error: {0}", failure.getMessage());
        } else if (failure.code().equals("unavailable") && (!call.isGivenUp || call.isRelease())) {
            // The server cannot reach its store, and has not executed the command.
            clock.schedule(() -> writeAgain(call, conn), backoff(call.retries++));
        } else if (failure.code().equals("unknown-id") && call.lock != null && !call.isRequest()) {
            // The release may have been executed on an earlier connection.
            boolean isReleased = call.isRelease() && call.lock.isReleased() && call.sentAt <= conn.helloAt;
            call.lock.onEnded(call, isReleased ? Lock.SUCCESS : LockLostException.LOST);
        } else {
            finish(call, failure);
            if (call.watch != null) {
                call.watch.end(failure);
            } else if (call.isRelease() && call.lock != null) {
                call.lock.release = null; // release may be called again
            }
        }
    }

    private void writeAgain(Call call, Connection conn) {
        try (var held = mutex.hold()) {
            if (isOpen(call) && connection == conn) write(call);
        }
    }

    /** Returns the wait before an attempt in ns: the greatest one, times a random number between 0.5 and 1. */
    static long backoff(int attempts) {
        return (long) (maxBackoffMs(attempts) * NANOS_PER_MS * ThreadLocalRandom.current().nextDouble(0.5, 1));
    }

    /** Returns 50 ms at first, then twice as long each time, at most 2 s. */
    static long maxBackoffMs(int attempts) { return Math.min(FIRST_BACKOFF_MS << Math.min(attempts, 10), MAX_BACKOFF_MS); }
}
