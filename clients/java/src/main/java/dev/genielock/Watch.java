package dev.genielock;

import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Comparator;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.locks.Condition;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * Follows the locks on all resources with a prefix. It is made by {@link GenieClient#watch} and ended by {@link #close}.
 *
 * <p>A program that applies all changes has the present locks: every {@code unlocked} follows a {@code locked} of the same resource
 * and id, and the end of a lock is reported before the grant of a lock that conflicts. If changes are not taken for too long, the
 * watch ignores events, and resynchronizes when they are taken.
 */
public final class Watch implements Iterable<Change>, AutoCloseable {
    private static final int MAX_BUFFERED_CHANGES = 10_000;
    // How many reported locks that are missing from a truncated snapshot still count as held. Their ends may have been missed.
    private static final int MAX_UNLISTED_LOCKS = 100_000;

    private record Key(String resource, long id) {}

    /**
     * The reported locks on one resource, which do not conflict with each other. A resource may have thousands of shared locks. So a
     * new lock is compared with each of them only if not all have its mode, which is not exclusive, or its transaction.
     */
    private static final class HeldLocks {
        final Map<Long, Change> byId = new HashMap<>();
        private Optional<Change> sample = Optional.empty(); // any of them, unless they have ended
        private boolean hasOneMode; // all have the mode of the sample
        private boolean hasOneOwner; // all have the transaction of the sample

        void add(Change change) {
            if (byId.isEmpty()) reset(change);
            note(change);
            byId.put(change.id(), change);
        }

        List<Change> conflictingWith(Change change) {
            if (sample.isEmpty() || hasOneMode && hasMode(change) && !change.mode().equals("exclusive")
                    || hasOneOwner && hasOwner(change) && change.transaction().isPresent()) return List.of();
            byId.values().stream().findFirst().ifPresent(this::reset); // locks may have ended since: the next call may be shorter
            byId.values().forEach(this::note);
            return byId.values().stream().filter(change::conflictsWith).toList();
        }

        private void reset(Change first) {
            sample = Optional.of(first);
            hasOneMode = true;
            hasOneOwner = true;
        }

        private void note(Change change) {
            hasOneMode &= hasMode(change);
            hasOneOwner &= hasOwner(change);
        }

        private boolean hasMode(Change change) { return sample.get().mode().equals(change.mode()); }

        private boolean hasOwner(Change change) { return sample.get().transaction().equals(change.transaction()); }
    }

    private final Session session;
    private final String prefix;

    // The mutex of the session protects the rest.
    private final Condition changed; // the consumer can continue
    private final ArrayDeque<Change> changes = new ArrayDeque<>();
    private final Map<String, HeldLocks> held = new HashMap<>(); // the locks after all changes, by resource
    private boolean isLive; // events follow the last snapshot
    private Call call; // the `watch` without an answer; null: there is none
    private GenieException ended; // why the watch has ended; null: it is open

    Watch(Session session, String prefix) {
        this.session = session;
        this.prefix = prefix;
        this.changed = session.mutex.newCondition();
        try (var held = session.mutex.hold()) {
            if (session.closed != null) throw session.closed.copy();
            Wire.encode("watch", Wire.fields("prefix", prefix)); // throws for a prefix that cannot be sent
            session.watches.add(this);
            request();
        }
    }

    /**
     * Waits for the next change. A connection that is lost is no error: the watch resynchronizes.
     *
     * @return the change
     * @throws InterruptedException if the thread is interrupted: no change is lost
     * @throws ClientClosedException after the end of the watch or of the client
     * @throws RejectedException if the server has rejected the watch
     */
    public Change next() throws InterruptedException {
        Optional<Change> change = Optional.empty();
        while (change.isEmpty()) change = poll(LockOptions.NO_TIMEOUT);
        return change.get();
    }

    /**
     * Waits for the next change, for a limited time.
     *
     * @param limit the greatest wait
     * @return the change, or nothing
     * @throws InterruptedException if the thread is interrupted: no change is lost
     * @throws ClientClosedException after the end of the watch or of the client
     * @throws RejectedException if the server has rejected the watch
     */
    public Optional<Change> poll(Duration limit) throws InterruptedException {
        long left = Wire.nanos(Wire.ms(limit));
        session.mutex.lockInterruptibly();
        try {
            if (ended == null) request();
            while (changes.isEmpty() && ended == null && left > 0) {
                request();
                left = changed.awaitNanos(left);
            }
            if (ended != null) throw ended.copy();
            return Optional.ofNullable(changes.poll());
        } finally {
            session.mutex.unlock();
        }
    }

    /**
     * {@return an iterator that waits for each change. It ends with the watch, or when the thread is interrupted: the interrupt remains
     * set then. If the server has rejected the watch, it throws a {@link RejectedException}}
     */
    @Override
    public Iterator<Change> iterator() {
        return Stream.generate(this::nextUnlessEnded).takeWhile(Optional::isPresent).map(Optional::get).iterator();
    }

    private Optional<Change> nextUnlessEnded() {
        try {
            return Optional.of(next());
        } catch (ClientClosedException e) {
            return Optional.empty();
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
            return Optional.empty();
        }
    }

    /** Ends the watch. A call of {@link #next} that waits throws a {@link ClientClosedException}. */
    @Override
    public void close() {
        try (var held = session.mutex.hold()) {
            if (ended == null) {
                end(new ClientClosedException());
                // Without a connection, the subscription has ended.
                if (session.connection != null && session.watches.stream().noneMatch(other -> other.prefix.equals(prefix))) {
                    session.sendBackground("unwatch", null, "prefix", prefix);
                }
            }
        }
    }

    // The rest is called with the mutex of the session locked.

    /** Sends `watch` if the watch needs a snapshot. The consumer takes the earlier changes first. */
    void request() {
        if (session.connection != null && !isLive && call == null && changes.isEmpty()) {
            call = session.sendBackground("watch", null, "prefix", prefix);
            call.watch = this;
        }
    }

    void onDisconnected() {
        isLive = false;
        call = null;
    }

    /** Handles the answer to a `watch`. It adds the changes that lead from the reported locks to the present ones. */
    void onSnapshot(Call answered, Wire.Message message) {
        if (call != answered) return;
        isLive = true;
        call = null;
        boolean isTruncated = message.isTrue("truncated");
        List<Change> rows = message.held();
        changes.add(Change.resync(isTruncated));
        var present = rows.stream().map(row -> new Key(row.resource(), row.id())).collect(Collectors.toSet());
        List<Change> missing = held.values().stream().flatMap(locks -> locks.byId.values().stream())
                .filter(lock -> !present.contains(new Key(lock.resource(), lock.id()))).toList();
        if (isTruncated) {
            // They may be held; only a lock that conflicts with one shows its end. If there are too many, the oldest count as ended.
            long ends = Math.max(0, missing.size() - MAX_UNLISTED_LOCKS);
            missing = missing.stream().sorted(Comparator.comparingLong(Change::id)).limit(ends).toList();
        }
        missing.forEach(lock -> unlocked(lock.resource(), lock.id()));
        for (Change row : rows) locked(row);
        changed.signalAll();
    }

    void onEvent(Change event) {
        if (event.state().equals("lagged")) { // the server has ended all watches of the connection
            onDisconnected();
            request();
        } else if (!isLive || !matches(event.resource())) {
            return;
        } else if (changes.size() >= MAX_BUFFERED_CHANGES) {
            isLive = false;
        } else if (event.state().equals("locked")) {
            locked(event);
        } else if (event.state().equals("unlocked")) {
            unlocked(event.resource(), event.id());
        }
        if (!changes.isEmpty()) changed.signalAll();
    }

    /** Returns whether a resource has the prefix, or is a subtree that contains all names with the prefix. */
    private boolean matches(String resource) {
        boolean isSubtree = resource.equals("**") || resource.endsWith("/**");
        return resource.startsWith(prefix) || isSubtree && prefix.startsWith(resource.substring(0, resource.length() - 2));
    }

    /** Adds the grant of a lock. A reported lock that conflicts with it must have ended. */
    private void locked(Change change) {
        var locks = held.getOrDefault(change.resource(), new HeldLocks());
        if (locks.byId.containsKey(change.id())) return;
        for (Change other : locks.conflictingWith(change)) unlocked(other.resource(), other.id());
        locks.add(change);
        held.put(change.resource(), locks); // `unlocked` may have removed it
        changes.add(change.withState("locked"));
    }

    /** Adds the end of a lock, if the lock was reported. */
    private void unlocked(String resource, long id) {
        HeldLocks locks = held.get(resource);
        Change change = locks == null ? null : locks.byId.remove(id);
        if (change != null) {
            if (locks.byId.isEmpty()) held.remove(resource);
            changes.add(change.withState("unlocked"));
        }
    }

    /** Ends the watch, unless it has ended before. */
    void end(GenieException reason) {
        if (ended == null) {
            session.watches.remove(this);
            ended = reason;
            call = null;
            changes.clear();
            held.clear();
            changed.signalAll();
        }
    }
}
