package dev.genielock;

import java.io.IOException;
import java.lang.System.Logger.Level;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.UnknownHostException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** Connects in rounds and reads the connection, in a thread of its own, until the client is closed or all servers reject it. */
final class Dialer {
    private static final long STAGGER = 250_000_000L; // ns between the attempts of a round (RFC 8305)
    private static final int MAX_TAKEOVERS = 3; // of the session, in a row, after which the client ends

    private final Session session;
    private final Waited<Boolean> ended = new Waited<>();
    private Thread thread;
    private volatile boolean isStopped;
    private volatile Connection served;

    // The thread uses these.
    private final List<Config.Address> addresses; // in the order in which they are tried next
    private Optional<Config.Address> leader = Optional.empty(); // as the last server named it
    private Config.Address lastUp; // the server of the last connection; null: there was none
    private int takeovers;

    Dialer(Session session) {
        this.session = session;
        this.addresses = new ArrayList<>(session.config.addresses());
    }

    /** Returns a thread that does not keep the program running, and has no thread locals of its creator. */
    static Thread newThread(String name, Runnable task) {
        var thread = new Thread(null, task, name, 0, false);
        thread.setDaemon(true);
        return thread;
    }

    void start() {
        thread = newThread("genie-reader", this::run);
        thread.start();
    }

    /** Ends the thread and its connection, and waits for it. An interrupt remains set. */
    void stop() {
        isStopped = true;
        thread.interrupt();
        Connection last = served;
        if (last != null) last.close(new IOException("the client is closed"));
        if (Thread.currentThread() != thread) ended.awaitUninterruptibly(System.nanoTime() + Long.MAX_VALUE);
    }

    /** Returns the connection whose {@code hello} was accepted, or null. */
    Connection served() { return served; }

    private void run() {
        Optional<GenieException> end = Optional.empty();
        try {
            while (!isStopped && end.isEmpty()) {
                var round = new Round();
                Optional<Connection> accepted = round.connect();
                end = accepted.isPresent() ? serve(accepted.get()) : onFailed(round);
                if (end.isEmpty()) TimeUnit.NANOSECONDS.sleep(Session.backoff(session.failedRounds.getAndIncrement()));
            }
        } catch (InterruptedException e) {
            // by stop
        } finally {
            try {
                session.shut(end.orElseGet(ClientClosedException::new));
            } finally { // also if an executor has no thread for what depends on a future
                ended.complete(true);
            }
        }
    }

    /** Handles a round without a connection. Returns why the client ends, or nothing: it connects again. */
    private Optional<GenieException> onFailed(Round round) {
        if (!round.isRejected || round.rejected == null) return Optional.empty();
        if (!session.isEntered) return Optional.of(round.rejected);
        session.abandonRequests(lock -> true, round.rejected); // it may be temporary, for example while tokens are exchanged
        return Optional.empty();
    }

    /** Handles the messages of a connection until it ends. Returns why the client ends, or nothing: it connects again. */
    private Optional<GenieException> serve(Connection conn) {
        served = conn;
        int next = addresses.indexOf(conn.address) + 1; // the next round begins with the address after it
        Collections.rotate(addresses, -next);
        try {
            if (!isStopped) conn.read(); // otherwise stop may have looked before
        } catch (InterruptedException e) { // by stop
            Thread.currentThread().interrupt();
        } catch (RuntimeException | Error e) { // of the logger
            conn.close(e);
        }
        conn.close(new IOException("the client is closed")); // unless it is closed
        Throwable cause = conn.failure.get();
        if (!(cause instanceof IOException || cause instanceof GenieException)) { // for example no memory for a thread
            session.config.logger().log(Level.ERROR, "the client failed to handle a message", cause);
        }
        served = null; // before the session ends what waits for this connection
        if (session.onDown(conn, cause)) emit(ConnectionEvent.State.DOWN, conn.address, Optional.of(cause));
        leader = leaderOf(conn.address, cause);
        boolean isTakenOver = cause instanceof RejectedException rejected && rejected.code().equals(Session.TAKEN_OVER);
        takeovers = isTakenOver && conn.isAlone ? takeovers + 1 : 0;
        return takeovers == MAX_TAKEOVERS ? Optional.of((GenieException) cause) : Optional.empty();
    }

    /** Returns the address of the leader that the error of a server names. */
    private Optional<Config.Address> leaderOf(Config.Address address, Throwable cause) {
        if (cause instanceof RejectedException rejected && !rejected.leader().isEmpty()) {
            try {
                return Optional.of(Config.Address.parseLeader(rejected.leader(), address.isSecure()));
            } catch (IllegalArgumentException e) {
                session.config.logger().log(Level.WARNING, "{0} named an invalid leader: {1}", address, e.getMessage());
            }
        }
        return Optional.empty();
    }

    void emitUp(Config.Address address) {
        boolean isOther = lastUp != null && !lastUp.equals(address);
        lastUp = address;
        emit(isOther ? ConnectionEvent.State.LEADER : ConnectionEvent.State.UP, address, Optional.empty());
    }

    private void emit(ConnectionEvent.State state, Config.Address address, Optional<Throwable> cause) {
        try {
            session.config.onEvent().accept(new ConnectionEvent(state, address.toString(), cause));
        } catch (RuntimeException | Error e) {
            session.config.logger().log(Level.ERROR, "the listener of connection events failed", e);
        }
    }

    /**
     * One round of attempts to find the leader: it connects to each address of all names once, one after the other, and does not wait
     * longer than the stagger for the answer of one before it tries the next one, too. The first connection whose {@code hello} is
     * accepted is used, and the others are closed.
     */
    private final class Round {
        /** {@code ip}: one of several of the name; null: the attempt looks up the name. */
        private record Endpoint(Config.Address address, InetAddress ip) {}

        private final BlockingQueue<Runnable> reports = new LinkedBlockingQueue<>(); // of the attempts
        private final ArrayDeque<Endpoint> queue = new ArrayDeque<>();
        private final Set<Connection> attempts = new HashSet<>(); // that have not ended
        private final Set<Endpoint> tried = new HashSet<>();
        private boolean mayStart = true;
        private Optional<Connection> accepted = Optional.empty();
        private RejectedException rejected; // the last rejection that is final for its address
        private boolean isRejected = true; // all attempts were rejected so

        Optional<Connection> connect() throws InterruptedException {
            try {
                leader.ifPresent(address -> queue.add(new Endpoint(address, null)));
                leader = Optional.empty();
                for (var address : addresses) queue.add(new Endpoint(address, null));
                firstAccepted();
                return accepted;
            } catch (RuntimeException | Error e) { // for example no memory for a thread: the next round follows
                isRejected = false;
                session.noteFailure(addresses.get(0), e);
                return Optional.empty();
            } finally {
                for (Connection loser : attempts) loser.close(new IOException("another connection is used"));
            }
        }

        private void firstAccepted() throws InterruptedException {
            long startedAt = System.nanoTime();
            while (accepted.isEmpty() && !isStopped) {
                if (!queue.isEmpty() && (mayStart || attempts.isEmpty())) {
                    mayStart = !start(queue.poll());
                    startedAt = System.nanoTime();
                } else if (queue.isEmpty() && attempts.isEmpty()) {
                    return;
                } else {
                    Runnable report = queue.isEmpty() ? reports.take()
                            : reports.poll(startedAt + STAGGER - System.nanoTime(), TimeUnit.NANOSECONDS);
                    if (report == null) {
                        mayStart = true;
                    } else {
                        report.run();
                    }
                }
            }
        }

        /** Begins an attempt. Returns false if the endpoint was tried before in this round. */
        private boolean start(Endpoint endpoint) {
            if (!tried.add(endpoint)) return false;
            // An attempt also fails when its time is over, although a name server, or a source of the token or of TLS, does not return.
            var conn = new Connection(session, endpoint.address, failed -> reports.add(() -> onFailed(failed)));
            attempts.add(conn);
            newThread("genie-connect", () -> {
                try {
                    conn.handshake(new InetSocketAddress(lookUp(endpoint), endpoint.address.port()));
                    reports.add(() -> onAccepted(conn));
                } catch (IOException | RuntimeException | Error e) {
                    conn.close(e);
                }
            }).start();
            return true;
        }

        /** Returns the IP address of an endpoint. Further ones of its name are tried next. */
        private InetAddress lookUp(Endpoint endpoint) throws UnknownHostException {
            if (endpoint.ip != null) return endpoint.ip;
            String name = endpoint.address.host();
            try {
                InetAddress[] found = InetAddress.getAllByName(name);
                reports.add(() -> {
                    for (int i = found.length - 1; i > 0; i--) queue.addFirst(new Endpoint(endpoint.address, found[i]));
                });
                return found[0];
            } catch (UnknownHostException e) { // its message is the name
                throw new UnknownHostException("the name " + name + " cannot be looked up");
            }
        }

        private void onAccepted(Connection conn) {
            if (attempts.remove(conn)) {
                conn.isAlone = attempts.isEmpty();
                accepted = Optional.of(conn);
            }
        }

        /** Notes why an attempt has failed. A follower names the leader, which is tried next. */
        private void onFailed(Connection conn) {
            if (!attempts.remove(conn)) return;
            mayStart = true;
            Throwable cause = conn.failure.get();
            session.config.logger().log(Level.DEBUG, "connection to {0} failed: {1}", conn.address, cause);
            session.noteFailure(conn.address, cause);
            if (cause instanceof RejectedException rejection && rejection.isFinal()) {
                rejected = rejection;
            } else {
                isRejected = false;
            }
            leaderOf(conn.address, cause).ifPresent(address -> queue.addFirst(new Endpoint(address, null)));
        }
    }
}
