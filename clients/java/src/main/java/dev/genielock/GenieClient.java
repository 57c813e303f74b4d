package dev.genielock;

import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;
import java.util.function.Supplier;
import javax.net.ssl.SSLContext;

/**
 * A client of Genie, a lock server for distributed transactions.
 *
 * <pre>{@code
 * try (var client = GenieClient.builder().addresses("lock-1:7077", "lock-2:7077").connect();
 *         Lock lock = client.lock("accounts/2")) {
 *     transfer(lock.fence());
 * }
 * }</pre>
 *
 * <p>A client has one connection to the leader of the servers, for any number of threads. If the connection is lost, it reconnects:
 * locks stay held, and waiting requests keep their places in the queue. A resource is {@code exclusive:NAME}, {@code shared:NAME},
 * or a NAME without a colon, which is exclusive; {@link Resources} returns further ones.
 */
public final class GenieClient implements AutoCloseable {
    private final Session session;

    GenieClient(Session session) { this.session = session; }

    /** {@return a client whose settings are those of the environment, connected to the leader of the servers}
     *
     * @throws InterruptedException if the thread is interrupted
     * @throws UnavailableException if no leader is found within the connect timeout
     * @throws RejectedException if all servers reject the token or the namespace
     * @throws IllegalArgumentException if a setting is invalid
     */
    public static GenieClient connect() throws InterruptedException { return builder().connect(); }

    /** {@return a builder whose settings are those of the environment} */
    public static Builder builder() { return new Builder(System.getenv()); }

    /** Says where the servers are and how to connect to them. What is not set is read from the environment. */
    public static final class Builder {
        private static final Duration DEFAULT_TIMEOUT = Duration.ofSeconds(10);
        private static final Duration DEFAULT_RESPONSE_TIMEOUT = Duration.ofSeconds(1);

        final Map<String, String> environment;
        List<String> addresses = List.of();
        Optional<Supplier<SSLContext>> sslContext = Optional.empty();
        Supplier<String> token;
        String namespace;
        Duration sessionTimeout = DEFAULT_TIMEOUT;
        Duration connectTimeout = DEFAULT_TIMEOUT;
        Duration responseTimeout = DEFAULT_RESPONSE_TIMEOUT;
        boolean isLazy;
        LockOptions defaults = LockOptions.of();
        System.Logger logger = System.getLogger("dev.genielock");
        Consumer<ConnectionEvent> onEvent = event -> {};

        Builder(Map<String, String> environment) {
            this.environment = environment;
            token = () -> Config.token(environment);
            namespace = environment.getOrDefault("GENIE_NAMESPACE", "");
        }

        /**
         * Sets the servers. Default: {@code GENIE_HOST}, separated by commas, or 127.0.0.1.
         *
         * @param servers HOST, HOST:PORT or [IPv6]:PORT. The prefix {@code genies://} selects TLS, also for the addresses without a
         *     prefix; {@code genie://} selects a plain connection. The default port is {@code GENIE_PORT}, or 7077
         * @return the builder
         */
        public Builder addresses(String... servers) {
            addresses = List.of(servers);
            return this;
        }

        /**
         * Selects TLS for all addresses without the prefix {@code genie://}. Without it, the prefix {@code genies://} uses the files
         * {@code GENIE_TLS_CA} (trusted certificates; otherwise those of the JVM), {@code GENIE_TLS_CERT} and {@code GENIE_TLS_KEY}
         * (the certificate of the client, and its key in the format PKCS #8), which are read for each connection.
         *
         * @param source is called for each connection
         * @return the builder
         */
        public Builder sslContext(Supplier<SSLContext> source) {
            sslContext = Optional.of(source);
            return this;
        }

        /**
         * Sets the access token. Default: {@code GENIE_TOKEN}, or the word in the file {@code GENIE_TOKEN_FILE}, which is read for
         * each connection.
         *
         * @param source is called for each connection; empty: no token
         * @return the builder
         */
        public Builder token(Supplier<String> source) {
            token = Objects.requireNonNull(source);
            return this;
        }

        /**
         * Sets the namespace of all locks of the client. Default: {@code GENIE_NAMESPACE}, or the first one of the server.
         *
         * @param name the namespace
         * @return the builder
         */
        public Builder namespace(String name) {
            namespace = Objects.requireNonNull(name);
            return this;
        }

        /**
         * Sets how long the server keeps the waiting requests of a client that lost its connection, and its locks with
         * {@link LockOptions#releaseOnDisconnect}. Default: 10 s.
         *
         * @param timeout at least 1 ms
         * @return the builder
         */
        public Builder sessionTimeout(Duration timeout) {
            sessionTimeout = checked("sessionTimeout", timeout);
            return this;
        }

        /**
         * Limits {@link #connect}. Default: 10 s.
         *
         * @param timeout at least 1 ms
         * @return the builder
         */
        public Builder connectTimeout(Duration timeout) {
            connectTimeout = checked("connectTimeout", timeout);
            return this;
        }

        /**
         * Limits how long a call waits for a server that does not answer; a request for a lock in addition to its queue timeout.
         * Default: 1 s. To ride through a failover, whose lease is 3 s, set it to 5 s or more.
         *
         * @param timeout at least 1 ms
         * @return the builder
         */
        public Builder responseTimeout(Duration timeout) {
            responseTimeout = checked("responseTimeout", timeout);
            return this;
        }

        /**
         * Lets {@link #connect} return at once: the client connects in the background, and calls fail with an
         * {@link UnavailableException} until it has connected.
         *
         * @return the builder
         */
        public Builder lazy() {
            isLazy = true;
            return this;
        }

        /**
         * Sets options of every request, which the options of a call override.
         *
         * @param options the options
         * @return the builder
         */
        public Builder defaults(LockOptions options) {
            defaults = Objects.requireNonNull(options);
            return this;
        }

        /**
         * Sets the logger of warnings, and with the level DEBUG of each attempt to connect that failed. Default: the system logger
         * {@code dev.genielock}.
         *
         * @param target must not use the client
         * @return the builder
         */
        public Builder logger(System.Logger target) {
            logger = Objects.requireNonNull(target);
            return this;
        }

        /**
         * Reports changes of the connection.
         *
         * @param listener must return soon, and must not use the client
         * @return the builder
         */
        public Builder onEvent(Consumer<ConnectionEvent> listener) {
            onEvent = Objects.requireNonNull(listener);
            return this;
        }

        /**
         * Connects to the leader of the servers.
         *
         * @return the client
         * @throws InterruptedException if the thread is interrupted
         * @throws UnavailableException if no leader is found within the connect timeout
         * @throws RejectedException if all servers reject the token or the namespace
         * @throws IllegalArgumentException if a setting is invalid
         */
        public GenieClient connect() throws InterruptedException { return connect(new Clock.Real("genie-timer")); }

        GenieClient connect(Clock clock) throws InterruptedException {
            try {
                var session = new Session(Config.of(this, clock));
                session.start();
                return new GenieClient(session);
            } catch (InterruptedException | RuntimeException e) {
                clock.close();
                throw e;
            }
        }

        private static Duration checked(String name, Duration timeout) {
            if (timeout.compareTo(Duration.ofMillis(1)) < 0 || timeout.compareTo(LockOptions.NO_TIMEOUT) > 0) {
                throw new IllegalArgumentException(name + " must be between 1 ms and " + LockOptions.NO_TIMEOUT + ", not " + timeout);
            }
            return timeout;
        }
    }

    /**
     * Waits until all of the resources can be locked at once, with the default options.
     *
     * @param resources as in {@link Resources}
     * @return the lock
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws GenieException as {@link #lock(LockOptions, String...)}
     */
    public Lock lock(String... resources) throws InterruptedException { return lock(LockOptions.of(), resources); }

    /**
     * Waits until all of the resources can be locked at once.
     *
     * @param options the options
     * @param resources as in {@link Resources}
     * @return the lock
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws QueueTimeoutException if it was not granted in time
     * @throws DeadlockException if the wait would never end
     * @throws RequestEndedException if another client has released the request
     * @throws RejectedException if the server rejects the request
     * @throws UnavailableException if no server answers in time
     * @throws ClientClosedException if the client is closed
     */
    public Lock lock(LockOptions options, String... resources) throws InterruptedException {
        List<String> list = Resources.withModes(resources);
        return acquire(session.config.defaults().overriddenBy(options), list, "resources", list);
    }

    /**
     * Locks the resources if that needs no wait for other clients, with the default options.
     *
     * @param resources as in {@link Resources}
     * @return the lock, or nothing
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws GenieException as {@link #lock(LockOptions, String...)}
     */
    public Optional<Lock> tryLock(String... resources) throws InterruptedException {
        return tryLock(LockOptions.of(), resources);
    }

    /**
     * Locks the resources if that needs no wait for other clients. A lock with {@code queueTimeout(Duration.ZERO)} tells who holds
     * them.
     *
     * @param options the options
     * @param resources as in {@link Resources}
     * @return the lock, or nothing
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws GenieException as {@link #lock(LockOptions, String...)}
     */
    public Optional<Lock> tryLock(LockOptions options, String... resources) throws InterruptedException {
        try {
            return Optional.of(lock(options.queueTimeout(Duration.ZERO), resources));
        } catch (QueueTimeoutException e) {
            return Optional.empty();
        }
    }

    /**
     * Locks the resources without waiting, with the default options.
     *
     * @param resources as in {@link Resources}
     * @return as {@link #lockAsync(LockOptions, String...)}
     */
    public CompletableFuture<Lock> lockAsync(String... resources) { return lockAsync(LockOptions.of(), resources); }

    /**
     * Requests the resources without waiting.
     *
     * @param options the options
     * @param resources as in {@link Resources}
     * @return completes with the lock, or exceptionally as {@link #lock(LockOptions, String...)}. If it is cancelled, or completed
     *     otherwise, as by {@code orTimeout}, the request is cancelled, and a lock that was granted meanwhile is released. If
     *     {@code cancel} returns false, the future has the lock, which must be released. Functions that depend on the future run in
     *     its {@link CompletableFuture#defaultExecutor}, unless they name another one
     */
    public CompletableFuture<Lock> lockAsync(LockOptions options, String... resources) {
        List<String> list = Resources.withModes(resources);
        return acquireAsync(session.config.defaults().overriddenBy(options), list, "resources", list);
    }

    /**
     * Locks free resources, in the given order, until their weights reach the target, with the default options.
     *
     * @param choices the resources, their weights, and the target
     * @return the lock; {@link Lock#resources} returns what is locked
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws GenieException as {@link #lockAny(LockOptions, AnyOf)}
     */
    public Lock lockAny(AnyOf choices) throws InterruptedException { return lockAny(LockOptions.of(), choices); }

    /**
     * Locks free resources, in the given order, until their weights reach the target. It never waits for other clients.
     *
     * @param options the options
     * @param choices the resources, their weights, and the target
     * @return the lock; {@link Lock#resources} returns what is locked
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws InsufficientException if the free resources are not enough
     * @throws GenieException as {@link #lock(LockOptions, String...)}
     */
    public Lock lockAny(LockOptions options, AnyOf choices) throws InterruptedException {
        return acquire(withoutWait(options), choices.resources(), choices.fields());
    }

    /**
     * Locks free resources as {@link #lockAny}, without waiting for the server.
     *
     * @param options the options
     * @param choices the resources, their weights, and the target
     * @return completes with the lock, or exceptionally as {@link #lockAny(LockOptions, AnyOf)}. For {@code cancel} see
     *     {@link #lockAsync(LockOptions, String...)}
     */
    public CompletableFuture<Lock> lockAnyAsync(LockOptions options, AnyOf choices) {
        return acquireAsync(withoutWait(options), choices.resources(), choices.fields());
    }

    private LockOptions withoutWait(LockOptions options) {
        return session.config.defaults().overriddenBy(options).queueTimeout(Duration.ZERO);
    }

    long responseTimeout() { return session.config.responseTimeout(); }

    /** Cancels the requests for these locks, which wait or follow. Their callers get the error. */
    void cancel(Collection<Lock> locks, GenieException failure) {
        if (locks.isEmpty()) return;
        try (var held = session.mutex.hold()) {
            for (Lock lock : locks) lock.end(failure); // before its request is sent
            session.abandonRequests(locks::contains, failure);
        }
    }

    /** Waits for a lock. The options include the defaults, and the resources their modes. */
    private Lock acquire(LockOptions options, List<String> resources, Object... fields) throws InterruptedException {
        return acquire(newLock(options, resources), fields);
    }

    /** Returns a lock that was not requested. */
    Lock newLock(LockOptions options, List<String> resources) { return new Lock(session, options, resources); }

    /** Waits for a lock. */
    Lock acquire(Lock lock, Object... fields) throws InterruptedException {
        LockOptions options = lock.options;
        session.execute("request", options.request(fields), lock, options.limit(session.config.responseTimeout()));
        if (lock.isLate) { // it is unknown how long the lock is held
            try {
                lock.extend(options.transactionTimeout());
            } catch (InterruptedException | RuntimeException e) {
                lock.drop(false);
                throw e;
            }
        }
        return lock;
    }

    /** Requests a lock. The options include the defaults, and the resources their modes. */
    private CompletableFuture<Lock> acquireAsync(LockOptions options, List<String> resources, Object... fields) {
        var lock = newLock(options, resources);
        return session.executeAsync("request", options.request(fields), lock, options.limit(session.config.responseTimeout()),
                () -> lock.isLate
                        ? lock.extendAsync(options.transactionTimeout()).thenApply(extended -> lock)
                        : CompletableFuture.completedFuture(lock));
    }

    /**
     * The work of a transaction that returns a value.
     *
     * @param <T> the type of the value
     * @param <E> the checked exception that it throws
     */
    @FunctionalInterface
    public interface TransactionFunction<T, E extends Exception> {
        /**
         * Executes the work. It is executed again after a deadlock.
         *
         * @param transaction the attempt, which locks what the work needs
         * @return the value
         * @throws E as it likes
         * @throws InterruptedException if the thread is interrupted
         */
        T apply(Transaction transaction) throws E, InterruptedException;
    }

    /**
     * The work under a lock or in a transaction.
     *
     * @param <T> {@link Lock} or {@link Transaction}
     * @param <E> the checked exception that it throws
     */
    @FunctionalInterface
    public interface Work<T, E extends Exception> {
        /**
         * Executes the work. That of a transaction is executed again after a deadlock.
         *
         * @param subject the lock, or the attempt, which locks what the work needs
         * @throws E as it likes
         * @throws InterruptedException if the thread is interrupted
         */
        void accept(T subject) throws E, InterruptedException;
    }

    /**
     * Runs a transaction with the default options.
     *
     * @param <E> the checked exception of the work
     * @param work what to do
     * @throws E if the work throws it
     * @throws InterruptedException if the thread is interrupted
     * @throws GenieException as {@link #transactionResult(LockOptions, TransactionFunction)}
     */
    public <E extends Exception> void transaction(Work<Transaction, E> work) throws E, InterruptedException {
        transaction(LockOptions.of(), work);
    }

    /**
     * Runs a transaction, as {@link #transactionResult(LockOptions, TransactionFunction)}, without a value.
     *
     * @param <E> the checked exception of the work
     * @param options the options of each request
     * @param work what to do
     * @throws E if the work throws it
     * @throws InterruptedException if the thread is interrupted
     * @throws GenieException as {@link #transactionResult(LockOptions, TransactionFunction)}
     */
    public <E extends Exception> void transaction(LockOptions options, Work<Transaction, E> work) throws E, InterruptedException {
        this.<Boolean, E>transactionResult(options, transaction -> {
            work.accept(transaction);
            return true;
        });
    }

    /**
     * Runs a transaction that returns a value, with the default options.
     *
     * @param <T> the type of the value
     * @param <E> the checked exception of the work
     * @param work what to do
     * @return the value of the work
     * @throws E if the work throws it
     * @throws InterruptedException if the thread is interrupted
     * @throws GenieException as {@link #transactionResult(LockOptions, TransactionFunction)}
     */
    public <T, E extends Exception> T transactionResult(TransactionFunction<T, E> work) throws E, InterruptedException {
        return transactionResult(LockOptions.of(), work);
    }

    /**
     * Calls the work, which locks what it needs step by step with {@link Transaction#lock}, and releases all locks when it ends.
     *
     * <p>If the work throws a {@link DeadlockException}, all locks are released, and the work is called again after a random pause.
     * Before that, all names that it has asked for are locked in one request, which cannot deadlock. So the work must be able to
     * start over: keep its effects until it has all locks, or undo them.
     *
     * <p>The exception is that of the work; if a lock was lost, a {@link LockLostException} is suppressed in it. Without the option
     * {@code transaction}, the transaction has a new name. Do not use a name that another transaction may have at the same time, such
     * as an idempotency key: their locks would not exclude each other.
     *
     * @param <T> the type of the value
     * @param <E> the checked exception of the work
     * @param options the options of each request
     * @param work what to do
     * @return the value of the work
     * @throws E if the work throws it
     * @throws InterruptedException if the thread is interrupted
     * @throws LockLostException if a lock was lost
     * @throws DeadlockException if the last attempt was in a deadlock
     */
    public <T, E extends Exception> T transactionResult(LockOptions options, TransactionFunction<T, E> work)
            throws E, InterruptedException {
        return Transaction.run(this, session.config.defaults().overriddenBy(options), work);
    }

    /**
     * Waits until this client is the leader of an election, and executes the work, with the default options.
     *
     * @param <E> the checked exception of the work
     * @param name the name of the election
     * @param work what the leader does
     * @throws E if the work throws it
     * @throws InterruptedException if the thread is interrupted
     * @throws GenieException as {@link #elect(String, LockOptions, Work)}
     */
    public <E extends Exception> void elect(String name, Work<Lock, E> work) throws E, InterruptedException {
        elect(name, LockOptions.of(), work);
    }

    /**
     * Waits until this client is the leader of all that call this method with the same name, and executes the work. The leader
     * remains the leader until the work ends, or until it loses the lock, which is extended until then: the work should end then
     * ({@link Lock#lost}).
     *
     * @param <E> the checked exception of the work
     * @param name the name of the election
     * @param options the options of the lock
     * @param work what the leader does
     * @throws E if the work throws it
     * @throws InterruptedException if the thread is interrupted
     * @throws LockLostException if the leadership was lost during the work
     */
    public <E extends Exception> void elect(String name, LockOptions options, Work<Lock, E> work) throws E, InterruptedException {
        LockOptions candidacy = LockOptions.of().queueTimeout(LockOptions.NO_TIMEOUT).watchdog().overriddenBy(options);
        try (Lock lock = lock(candidacy, Resources.exclusive(name))) { work.accept(lock); }
    }

    /**
     * Returns the present leader of an election.
     *
     * @param name the name of the election
     * @return the leader with its note, its fence, and since when it leads; or nothing
     * @throws InterruptedException if the thread is interrupted
     * @throws GenieException as {@link #inspect}
     */
    public Optional<Inspection.Request> leader(String name) throws InterruptedException {
        return inspect(InspectQuery.all().resource(name).onlyHolders().limit(1)).holders().stream().findFirst();
    }

    /**
     * Releases a lock, or cancels a waiting request, of any client.
     *
     * @param id its id
     * @throws InterruptedException if the thread is interrupted: the release may have happened
     * @throws LockLostException if it had ended otherwise before
     * @throws RejectedException with the code {@code unknown-id} if the server does not know the id
     * @throws UnavailableException if no server answers
     */
    public void release(long id) throws InterruptedException {
        String reason = endOf(id, "release", Wire.fields("id", id));
        if (!reason.isEmpty() && !reason.equals(Lock.SUCCESS)) throw new LockLostException(id, reason);
    }

    /**
     * Sets the remaining time of a lock of any client.
     *
     * @param id its id
     * @param timeout from now
     * @throws InterruptedException if the thread is interrupted: the extension may have happened
     * @throws LockLostException if it has ended
     * @throws RejectedException with the code {@code unknown-id} if the server does not know the id
     * @throws UnavailableException if no server answers
     */
    public void extend(long id, Duration timeout) throws InterruptedException {
        String reason = endOf(id, "extend", Wire.fields("id", id, "transactionTimeout", Wire.ms(timeout)));
        if (!reason.isEmpty()) throw new LockLostException(id, reason);
    }

    /** Executes a command by id. Returns the reason if the lock has ended, otherwise nothing. */
    private String endOf(long id, String command, Map<String, Object> fields) throws InterruptedException {
        Lock own; // no notification tells this client what it has changed itself
        try (var held = session.mutex.hold()) {
            own = session.locks.get(id);
        }
        try {
            var answer = session.execute(command, fields, own != null && own.isHeld() ? own : null, session.config.responseTimeout());
            return answer == null ? "" : answer.text("reason");
        } catch (LockLostException e) {
            return e.reason();
        }
    }

    /**
     * Lists held locks and waiting requests.
     *
     * @param query what to list
     * @return the list
     * @throws InterruptedException if the thread is interrupted
     * @throws UnavailableException if no server answers
     * @throws RejectedException if the server rejects the query
     */
    public Inspection inspect(InspectQuery query) throws InterruptedException {
        return session.execute("inspect", new HashMap<>(query.fields()), null, session.config.responseTimeout()).inspection();
    }

    /**
     * Begins to follow the locks on all resources whose names begin with a prefix. The first changes are a {@code resync}, and a
     * {@code locked} for each lock that is held.
     *
     * @param prefix the prefix; empty: all names
     * @return the watch
     * @throws ClientClosedException if the client is closed
     */
    public Watch watch(String prefix) { return new Watch(session, prefix); }

    /**
     * Checks whether the server executes commands.
     *
     * @throws InterruptedException if the thread is interrupted
     * @throws UnavailableException if no server answers
     */
    public void ping() throws InterruptedException {
        session.execute("ping", Wire.fields(), null, session.config.responseTimeout());
    }

    /**
     * Ends the session and the connection. Waiting calls fail with a {@link ClientClosedException}, and their requests are cancelled.
     * Locks with {@link LockOptions#releaseOnDisconnect} are released. The others stay held at the server until their transaction
     * timeout, which is logged, but count as lost here: see {@link #shutdown}.
     */
    @Override
    public void close() { session.close(); }

    /**
     * Lets no further calls begin, waits until all locks have ended, releases the locks that are still held after a limit, which count as
     * lost here, and closes the client.
     *
     * @param limit the greatest wait for the locks
     * @throws InterruptedException if the thread is interrupted: the locks are released nevertheless
     */
    public void shutdown(Duration limit) throws InterruptedException {
        List<Lock> all = session.stopCalls();
        try {
            var ended = new Waited<Boolean>();
            CompletableFuture.allOf(all.stream().map(Lock::lost).toArray(CompletableFuture[]::new))
                    .whenComplete((none, released) -> ended.complete(true));
            ended.await(System.nanoTime() + Wire.nanos(Wire.ms(limit)));
        } finally {
            session.releaseAll(all);
            session.close();
        }
    }
}
