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
    private Thread thread;
    private volatile boolean isStopped;
    private volatile Connection served;

    // The thread uses these.
    private List<Config.Address> addresses; // in the order in which they are tried next
    private Optional<Config.Address> leader = Optional.empty(); // as the last server named it
    private Optional<Config.Address> lastUp = Optional.empty(); // the server of the last connection
    private int takeovers;

    Dialer(Session session) { this.session = session; }

    /** Returns a thread that does not keep the program running, and has no thread locals of its creator. */
    static Thread newThread(String name, Runnable task) {
        var thread = new Thread(null, task, name, 0, false);
        thread.setDaemon(true);
        return thread;
    }

    static Thread startThread(String name, Runnable task) {
        Thread thread = newThread(name, task);
        thread.start();
        return thread;
    }

    void start() {
        addresses = new ArrayList<>(session.config.addresses());
        thread = startThread("genie-reader", this::run);
    }

    /** Ends the thread and its connection, and waits for it. An interrupt remains set. */
    void stop() {
        isStopped = true;
        thread.interrupt();
        Connection last = served;
        if (last != null) last.close(new IOException("the client is closed"));
        boolean isInterrupted = false;
        while (Thread.currentThread() != thread && thread.isAlive()) {
            try {
                thread.join();
            } catch (InterruptedException e) {
                isInterrupted = true;
            }
        }
        if (isInterrupted) Thread.currentThread().interrupt();
    }

    private void run() {
        GenieException end = new ClientClosedException();
        try {
            end = connectUntilClosed();
        } catch (InterruptedException e) {
            // by stop
        } finally {
            try (var held = session.mutex.hold()) {
                session.shut(end);
            }
        }
    }

    /** Connects in rounds. Returns why the client ends. */
    private GenieException connectUntilClosed() throws InterruptedException {
        while (!isStopped) {
            var round = new Round();
            Optional<Connection> accepted = round.connect();
            if (accepted.isPresent()) {
                Optional<GenieException> end = serve(accepted.get());
                if (end.isPresent()) return end.get();
            } else if (round.isRejected && round.rejected != null) {
                if (!session.isEntered) return round.rejected;
                try (var held = session.mutex.hold()) { // this may be temporary, for example while tokens are exchanged
                    session.abandonRequests(round.rejected);
                }
            }
            TimeUnit.NANOSECONDS.sleep(Session.backoff(session.nextRound()));
        }
        return new ClientClosedException();
    }

    /** Handles the messages of a connection until it ends. Returns why the client ends, or nothing: it connects again. */
    private Optional<GenieException> serve(Connection conn) {
        served = conn;
        int next = addresses.indexOf(conn.address) + 1; // the next round begins with the address after it
        Collections.rotate(addresses, -next);
        try {
            if (!isStopped) { // otherwise stop may have looked before
                conn.read();
            }
            conn.close(new IOException("the client is closed"));
        } catch (InterruptedException e) { // by stop
            Thread.currentThread().interrupt();
            conn.close(new IOException("the client is closed"));
        } catch (IOException | GenieException e) {
            conn.close(e);
        } catch (RuntimeException | Error e) { // for example no memory for a thread: the client connects again
            session.config.logger().log(Level.ERROR, "the client failed to handle a message", e);
            conn.close(e);
        }
        Throwable cause = conn.failure.get();
        session.mutex.lock();
        boolean wasUp = session.onDown(conn, cause);
        boolean isClosed = session.isClosed();
        session.mutex.unlock();
        if (!isClosed) session.config.logger().log(Level.WARNING, "connection to {0} lost: {1}", conn.address, cause);
        if (wasUp) emit(ConnectionEvent.State.DOWN, conn.address, Optional.of(cause));
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
        boolean isOther = lastUp.isPresent() && !lastUp.get().equals(address);
        lastUp = Optional.of(address);
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
        private record Endpoint(Config.Address address, InetSocketAddress target) {}

        private final BlockingQueue<Runnable> reports = new LinkedBlockingQueue<>(); // of the threads that look up or connect
        private final ArrayDeque<Endpoint> queue = new ArrayDeque<>();
        private final Set<Connection> attempts = new HashSet<>(); // that have not ended
        private final Set<InetSocketAddress> tried = new HashSet<>();
        private int lookUps; // of names, that have not ended
        private boolean mayStart = true;
        private Optional<Connection> accepted = Optional.empty();
        private RejectedException rejected; // the last rejection that is final for its address
        private boolean isRejected = true; // all attempts were rejected so

        Optional<Connection> connect() throws InterruptedException {
            try {
                for (int i = addresses.size() - 1; i >= 0; i--) add(addresses.get(i));
                leader.ifPresent(this::add);
                leader = Optional.empty();
                firstAccepted();
                return accepted;
            } catch (RuntimeException | Error e) { // for example no memory for a thread: the next round follows
                isRejected = false;
                try (var held = session.mutex.hold()) {
                    session.noteFailure(addresses.get(0), e);
                }
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
                } else if (queue.isEmpty() && lookUps == 0 && attempts.isEmpty()) {
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

        /** Adds an address to the front of the queue. A name is looked up first. */
        private void add(Config.Address address) {
            String host = address.host();
            if (host.indexOf(':') >= 0 || host.matches("\\d+(\\.\\d+){3}")) {
                for (InetAddress ip : lookUp(host)) {
                    queue.addFirst(new Endpoint(address, new InetSocketAddress(ip, address.port())));
                }
                return;
            }
            lookUps++;
            startThread("genie-lookup", () -> {
                InetAddress[] found = lookUp(host);
                reports.add(() -> {
                    lookUps--;
                    for (int i = found.length - 1; i >= 0; i--) {
                        queue.addFirst(new Endpoint(address, new InetSocketAddress(found[i], address.port())));
                    }
                    if (found.length == 0) fail(address, new UnknownHostException("the name " + host + " cannot be looked up"));
                });
            });
        }

        private InetAddress[] lookUp(String host) {
            try {
                return InetAddress.getAllByName(host);
            } catch (UnknownHostException e) {
                return new InetAddress[0]; // the attempt has failed
            }
        }

        /** Begins an attempt. Returns false if the endpoint was tried before in this round. */
        private boolean start(Endpoint endpoint) {
            if (!tried.add(endpoint.target)) return false;
            // An attempt also fails when its time is over, although a source of the token or of TLS does not return.
            var conn = new Connection(session, endpoint.address, failed -> reports.add(() -> onFailed(failed)));
            attempts.add(conn);
            startThread("genie-connect", () -> {
                try {
                    conn.handshake(endpoint.target);
                    reports.add(() -> onAccepted(conn));
                } catch (IOException | RuntimeException | Error e) {
                    conn.close(e);
                }
            });
            return true;
        }

        private void onAccepted(Connection conn) {
            if (attempts.remove(conn)) {
                conn.isAlone = attempts.isEmpty();
                accepted = Optional.of(conn);
            }
        }

        private void onFailed(Connection conn) {
            if (attempts.remove(conn)) {
                fail(conn.address, conn.failure.get());
                mayStart = true;
            }
        }

        /** Notes why an attempt has failed. A follower names the leader, which is tried next. */
        private void fail(Config.Address address, Throwable cause) {
            session.config.logger().log(Level.DEBUG, "connection to {0} failed: {1}", address, cause);
            try (var held = session.mutex.hold()) {
                session.noteFailure(address, cause);
            }
            if (cause instanceof RejectedException rejection && rejection.isFinal()) {
                rejected = rejection;
            } else {
                isRejected = false;
            }
            leaderOf(address, cause).ifPresent(this::add);
        }
    }
}
