package dev.genielock;

import java.lang.System.Logger.Level;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.stream.Collectors;

/**
 * A granted lock. It survives a reconnect of its client. It ends with {@link #release}, or is lost: after its transaction timeout,
 * if another client releases it by its id, or if the server loses its state.
 */
public final class Lock implements AutoCloseable {
    static final String SUCCESS = "success";

    // If more than this part of its transaction timeout may have passed when a grant arrives, the lock is extended first.
    private static final int MAX_PASSED_SHARE = 4;
    private static final int WATCHDOG_SHARE = 3;
    private static final long FOREVER = Long.MAX_VALUE / 4; // ns

    // Why a lock has ended that was not lost. Copies are thrown.
    private static final GenieException RELEASED = new LockEndedException("the lock was released");
    private static final GenieException DETACHED = new LockEndedException("the lock was detached: use the calls by id of the client");

    final LockOptions options;
    private final Session session;

    // The mutex of the session protects the rest. The caller gets the lock after the grant has set the id, the fence and the names.
    private long id;
    private long fence;
    private List<String> resources; // of lockAny: the choices, and after the grant the locked ones
    boolean isLate; // when the grant arrived, too little of the timeout remained for certain, or the lock was lost
    private double timeoutMs; // that of the last extension
    Call lastExtend; // the extend that was sent last
    Call release; // the release of the lock; null: none was sent
    private Connection confirmedOn; // the last connection on which the server reported the lock
    private long expiresAt;
    private Call shortenedBy; // the last extend that shortens the lock; null: none was sent, or it was answered
    private long renewAt; // when the watchdog extends the lock
    private Future<?> timer; // for the end and renewAt; null: there is neither a watchdog nor a listener
    GenieException ended; // why the lock has ended; null: it is held
    private CompletableFuture<LockLostException> loss; // null: not asked for yet

    Lock(Session session, LockOptions options, List<String> resources) {
        this.session = session;
        this.options = options;
        this.resources = resources;
        this.timeoutMs = options.transactionTimeoutMs();
    }

    /** {@return the id of the lock at the server. Any client can release a lock by its id} */
    public long id() { return id; }

    /**
     * {@return the fencing token: a number that grows with every grant. Pass it to the data store with each read and write, so that
     * the store can reject a client whose lock has ended}
     */
    public long fence() { return fence; }

    /** {@return the locked resources, such as {@code exclusive:accounts/2}} */
    public List<String> resources() { return List.copyOf(resources); }

    /**
     * {@return how long the lock is held unless it is extended; zero if it has ended. With
     * {@link LockOptions#releaseOnDisconnect}, that may be the rest of the session, which each answer of the server prolongs}
     */
    public Duration remaining() {
        try (var held = session.mutex.hold()) {
            return check() ? Duration.ofNanos(Math.max(0, expiry() - session.clock.now())) : Duration.ZERO;
        }
    }

    /**
     * {@return whether the lock is held. It reads {@link System#nanoTime}: it is correct even if the program was suspended. On Linux
     * that clock stands still while the whole machine is suspended: only {@link #fence} protects the data then}
     */
    public boolean isHeld() {
        try (var held = session.mutex.hold()) {
            return check();
        }
    }

    /**
     * Throws an exception unless the lock is held.
     *
     * @throws LockLostException if it was lost
     * @throws LockEndedException if it was released or detached
     */
    public void ensureHeld() {
        try (var held = session.mutex.hold()) {
            if (!check()) throw ended.copy();
        }
    }

    /**
     * {@return a future that completes with the reason when the lock is lost, and exceptionally, with a {@link LockEndedException},
     * when it is released or detached. Functions that depend on it run in its {@link CompletableFuture#defaultExecutor}, unless
     * they name another one. Each call returns a further future, which is kept until the lock ends: do not call it again and again}
     */
    public CompletableFuture<LockLostException> lost() {
        try (var held = session.mutex.hold()) {
            if (loss == null) {
                loss = new Waited<>();
                if (check()) {
                    setTimer();
                } else {
                    completeLoss();
                }
            }
            return loss.copy();
        }
    }

    /**
     * Sets the remaining time of the lock, which may be shorter than before.
     *
     * @param timeout from now
     * @throws InterruptedException if the thread is interrupted: the extension may have happened
     * @throws LockLostException if the lock was lost
     * @throws LockEndedException if the lock was released or detached
     * @throws UnavailableException if no server answers
     * @throws RejectedException if the server rejects the timeout
     */
    public void extend(Duration timeout) throws InterruptedException {
        ensureHeld();
        session.execute("extend", extension(timeout), this, session.config.responseTimeout());
        ensureHeld(); // the answer may be late
    }

    /**
     * Sets the remaining time of the lock without waiting, as {@link #extend}.
     *
     * @param timeout from now
     * @return completes with the answer of the server
     */
    public CompletableFuture<Void> extendAsync(Duration timeout) {
        try (var held = session.mutex.hold()) {
            if (!check()) return CompletableFuture.failedFuture(ended.copy());
        }
        return session.executeAsync("extend", extension(timeout), this, session.config.responseTimeout(), () -> {
            ensureHeld();
            return CompletableFuture.completedFuture(null);
        });
    }

    /**
     * Releases the lock and waits for the server's confirmation. If no server confirms in time, or if the thread is interrupted, the
     * client keeps releasing in the background. A second release of a released lock does nothing.
     *
     * @throws InterruptedException if the thread is interrupted
     * @throws LockLostException if the lock was lost before: other clients may have held it meanwhile
     * @throws LockEndedException if the lock was detached
     * @throws UnavailableException if no server confirms the release in time
     */
    public void release() throws InterruptedException {
        Optional<Call> call = drop(true);
        if (call.isPresent()) {
            session.await(call.get(), System.nanoTime() + session.config.responseTimeout());
        } else {
            try (var held = session.mutex.hold()) {
                if (!isReleased()) throw ended.copy();
            }
        }
    }

    /**
     * Releases the lock without waiting.
     *
     * @return completes with the server's confirmation, exceptionally as {@link #release}
     */
    public CompletableFuture<Void> releaseAsync() {
        try (var held = session.mutex.hold()) {
            var released = CompletableFuture.<Void>completedFuture(null);
            return drop(false).map(call -> session.follow(call, session.config.responseTimeout(), () -> released))
                    .orElseGet(() -> isReleased() ? released : CompletableFuture.failedFuture(ended.copy()));
        }
    }

    /**
     * Releases the lock at the end of a {@code try} block. In contrast to {@link #release}, it only logs if no server confirms the
     * release, because the work has succeeded, and an interrupt ends the wait and remains set: the client keeps releasing in the
     * background. A detached lock is left alone.
     *
     * @throws LockLostException if the lock was lost before: undo the work
     */
    @Override
    public void close() {
        awaitRelease(System.nanoTime() + session.config.responseTimeout());
        ensureNotLost();
    }

    /** Releases the lock, and waits for the answer of the server until a time of {@link System#nanoTime}. */
    void awaitRelease(long end) {
        Optional<Call> call = drop(true);
        if (call.isEmpty()) return;
        session.awaitQuietly(call.get(), end);
        if (!call.get().isDone() && !Thread.currentThread().isInterrupted()) {
            session.config.logger().log(Level.WARNING,
                    "the release of lock {0} is not confirmed; it is repeated until the server confirms it", Long.toString(id));
        }
    }

    /**
     * Hands the lock over to other clients: from then on this client neither extends nor releases it, and does not report its end.
     * The other client should call {@link GenieClient#extend} at once.
     *
     * @return the id
     * @throws IllegalStateException if the lock ends with its session ({@link LockOptions#releaseOnDisconnect})
     * @throws LockLostException if the lock was lost
     * @throws LockEndedException if the lock was released
     */
    public long detach() {
        try (var held = session.mutex.hold()) {
            if (options.releasesOnDisconnect()) {
                throw new IllegalStateException("a lock with releaseOnDisconnect ends with its session, and cannot be detached");
            }
            if (!check() && !isDetached()) throw ended.copy();
            end(DETACHED);
            return id;
        }
    }

    @Override
    public String toString() { return "Lock " + id + " " + resources; }

    private Map<String, Object> extension(Duration timeout) {
        return Wire.fields("id", id, "transactionTimeout", Wire.ms(timeout));
    }

    /**
     * Ends the lock for its holder, and releases it if the server may hold it. Returns the release, or nothing if the lock had ended
     * before. {@code isForeground}: the caller waits for the answer next.
     */
    Optional<Call> drop(boolean isForeground) {
        try (var held = session.mutex.hold()) {
            check();
            sendRelease(isForeground);
            end(RELEASED);
            return Optional.ofNullable(release);
        }
    }

    /** Throws an exception if the lock was lost; not if it was released. */
    void ensureNotLost() {
        try (var held = session.mutex.hold()) {
            if (!check() && ended instanceof LockLostException) throw ended.copy();
        }
    }

    // The rest is called with the mutex of the session locked.

    boolean isReleased() { return ended == RELEASED; }

    private boolean isDetached() { return ended == DETACHED; }

    /** Notes that the server holds the lock for at least {@code timeout} after {@code since}. */
    private void hold(long since, long timeout) {
        expiresAt = since + timeout;
        renewAt = since + timeout / WATCHDOG_SHARE;
        setTimer();
    }

    /**
     * Lets the lock end earlier if an extend that is being sent shortens it. The server may execute the extend although no answer
     * arrives.
     */
    void shorten(Call call) {
        long timeout = Wire.nanos(call.transactionTimeoutMs());
        if (timeout > 0 && ended == null && call.sentAt + timeout < expiresAt) { // the server rejects another timeout
            expiresAt = call.sentAt + timeout;
            shortenedBy = call;
            setTimer();
        }
    }

    /** Returns when the lock counts as lost unless the server confirms it again. */
    private long expiry() { return options.releasesOnDisconnect() ? Math.min(expiresAt, leaseEnd()) : expiresAt; }

    private long leaseEnd() { return session.leaseFrom + session.config.sessionTimeout(); }

    /** Sets the timer of a lock that is held, if its watchdog or a listener needs one: the other methods read the clock. */
    private void setTimer() {
        if (ended != null || !options.hasWatchdog() && loss == null) return;
        if (timer != null) timer.cancel(false);
        long next = options.hasWatchdog() ? Math.min(expiry(), renewAt) : expiry();
        timer = session.clock.schedule(this::onTimer, Math.max(0, next - session.clock.now()));
    }

    private void onTimer() {
        try (var held = session.mutex.hold()) {
            if (!check()) return;
            if (options.hasWatchdog() && session.clock.now() >= renewAt) {
                renewAt = session.clock.now() + Wire.nanos(timeoutMs) / WATCHDOG_SHARE;
                session.sendBackground("extend", this, "id", id, "transactionTimeout", timeoutMs);
            }
            setTimer();
        }
    }

    /**
     * Ends the lock if its time has passed, and returns whether it is held. The server may hold it for longer: until it reports the
     * end, the lock remains in the session, so that it is released by {@link #release}, or after a reconnect.
     */
    private boolean check() {
        if (ended == null && session.clock.now() >= expiry()) {
            boolean hasLeaseEnded = options.releasesOnDisconnect() && leaseEnd() < expiresAt;
            end(lost(hasLeaseEnded ? LockLostException.DISCONNECTED : LockLostException.TRANSACTION_TIMEOUT));
            if (hasLeaseEnded || shortenedBy != null) { // the server may hold the lock for longer
                sendRelease(false);
            }
        }
        return ended == null;
    }

    private LockLostException lost(String reason) { return new LockLostException(id, reason); }

    /** The lock is released by its id, not by its holder. */
    void endById() { end(lost(SUCCESS)); }

    void endByClose(GenieException cause) { end(new LockLostException(id, LockLostException.CLOSED, cause)); }

    /** Ends the lock for its holder, unless it has ended before. */
    void end(GenieException reason) {
        if (ended != null) return;
        ended = reason;
        if (timer != null) timer.cancel(false);
        if (loss != null) completeLoss();
    }

    private void completeLoss() {
        GenieException reason = ended;
        loss.completeAsync(() -> {
            if (reason instanceof LockLostException lost) return lost;
            throw reason.copy();
        });
    }

    /** Releases the lock at the server, if the server may hold it and no release was sent. {@code isForeground}: as {@link #drop}. */
    void sendRelease(boolean isForeground) {
        if (release == null && !isDetached() && session.locks.get(id) == this) {
            release = session.sendBackground(isForeground, "release", this, "id", id);
        }
    }

    /** Handles the grant of a request. */
    void onGranted(Connection conn, Call call, Wire.Message message) {
        id = message.id();
        fence = message.integer("fence");
        confirmedOn = conn;
        session.locks.put(id, this);
        if (call.fields.containsKey("anyOf")) { // the names have no modes
            var choices = resources.stream().collect(Collectors.toMap(Resources::name, choice -> choice, (one, other) -> other));
            resources = message.texts("resources").stream().map(name -> choices.getOrDefault(name, Resources.exclusive(name))).toList();
        }
        long timeout = Wire.nanos(timeoutMs);
        long start = message.expiresIn().isPresent() ? conn.helloAt : call.sentAt; // the server held or granted the lock after it
        long remaining = message.expiresIn().map(Wire::nanos).orElse(timeout);
        long now = session.clock.now();
        isLate = start + remaining - now < timeout - timeout / MAX_PASSED_SHARE;
        if (options.releasesOnDisconnect()) { // the extension renews the lease
            isLate |= now - session.leaseFrom > session.config.sessionTimeout() / 2;
        }
        // If it is late, its caller does not have the lock before the answer to the extension.
        hold(start, isLate ? FOREVER : remaining);
        isLate |= !check(); // the lease of the session has ended: there is no lock to return
        session.finish(call, null);
    }

    /**
     * Handles the report that the server still holds the lock. On a connection on which the server has confirmed the lock before, it
     * is the answer to a repeated request, whose time does not count from {@code hello}.
     */
    void onReported(Connection conn, Wire.Message message) {
        boolean isNews = confirmedOn != conn;
        confirmedOn = conn;
        if (ended != null) { // by this client's clock, or it is detached
            sendRelease(false);
        } else if (isNews && message.expiresIn().isPresent()) {
            hold(conn.helloAt, Wire.nanos(message.expiresIn().get()));
        }
    }

    /** Handles the answer to an extend. */
    void onExtended(Call call) {
        if (ended != null) { // by this client's clock
            sendRelease(false);
        } else {
            timeoutMs = call.transactionTimeoutMs();
            shortenedBy = null;
            hold(call.sentAt, Wire.nanos(timeoutMs));
            if (lastExtend != call && session.isOpen(lastExtend)) { // the server may have executed later ones, too
                for (Call later : session.openCalls()) {
                    if (later != call && later.lock == this && later.isExtend() && later.sentAt != Call.UNSENT) shorten(later);
                }
            }
        }
        session.finish(call, ended);
    }

    /** Handles the end of the lock at the server, as a notification or as the answer to a release or an extend. */
    void onEnded(Call call, String reason) {
        if (call == null && release != null && reason.equals(SUCCESS)) {
            return; // the answer to the release follows
        }
        session.locks.remove(id, this);
        boolean isById = call != null && call.isRelease() && call != release;
        if ((isReleased() || isById) && !reason.equals(SUCCESS)) { // before the server received the release
            ended = lost(reason);
        }
        if (ended == null) end(lost(reason));
        if (release != null) session.finish(release, isReleased() ? null : ended);
        session.finish(call, ended);
    }

    /** Handles the end of the handshake: the server has reported the locks that it holds. */
    void onResumed(Connection conn) {
        if (confirmedOn != conn && isDetached()) {
            session.locks.remove(id, this);
        } else if (confirmedOn != conn && release == null) { // it is lost, but the server may hold it without a session
            sendRelease(false);
            end(lost(LockLostException.LOST));
        } else if (confirmedOn == conn && options.hasWatchdog()) { // the last extension may have been lost
            renewAt = session.clock.now();
            setTimer();
        }
    }
}
