package dev.genielock;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeSet;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.BinaryOperator;

/** An attempt of a transaction, made by {@link GenieClient#transaction}. */
public final class Transaction {
    private static final int MAX_CAUSES = 20;

    private final GenieClient client;
    private final LockOptions options;
    private final Mutex mutex = new Mutex();
    private final List<Lock> locks = new ArrayList<>();
    private final Map<String, String> wanted; // the names that all earlier attempts have asked for, and the strongest resource
    private final Map<String, String> asked = new HashMap<>(); // the names that this attempt has asked for; units are added up
    private final Map<String, Units> reserved = new HashMap<>(); // units of the first request of a repeated attempt, not asked for yet
    private boolean isEnded;

    private Transaction(GenieClient client, LockOptions options, Map<String, String> wanted) {
        this.client = client;
        this.options = options;
        this.wanted = wanted;
    }

    /** Calls the work, again after each deadlock. */
    static <T, E extends Exception> T run(GenieClient client, LockOptions options, GenieClient.TransactionFunction<T, E> work)
            throws E, InterruptedException {
        String given = options.transaction();
        LockOptions named = options.transaction(given.isEmpty() ? "tx-" + Session.randomText().substring(0, 16) : given);
        var transaction = new Transaction(client, named, new HashMap<>());
        for (int attempt = 1;; attempt++) {
            try {
                return transaction.attempt(work);
            } catch (Throwable e) {
                if (!isDeadlock(e) || attempt >= options.attempts()) throw e;
            }
            TimeUnit.MILLISECONDS.sleep(ThreadLocalRandom.current().nextLong(Session.maxBackoffMs(attempt - 1)));
            transaction = transaction.next();
        }
    }

    private static boolean isDeadlock(Throwable failure) {
        Throwable cause = failure;
        for (int i = 0; i < MAX_CAUSES && cause != null && !(cause instanceof DeadlockException); i++) cause = cause.getCause();
        return cause instanceof DeadlockException;
    }

    /** Returns the next attempt, which first locks what the earlier ones have asked for. */
    private Transaction next() {
        try (var held = mutex.hold()) {
            asked.values().forEach(resource -> addTo(wanted, resource, Units::most));
            return new Transaction(client, options, wanted);
        }
    }

    private <T, E extends Exception> T attempt(GenieClient.TransactionFunction<T, E> work) throws E, InterruptedException {
        T result;
        try {
            reserve();
            result = work.apply(this);
        } catch (Throwable e) {
            Optional<LockLostException> lost = end();
            if (lost.isPresent() && !(e instanceof LockLostException)) e.addSuppressed(lost.get());
            throw e;
        }
        Optional<LockLostException> lost = end();
        if (lost.isPresent()) throw lost.get();
        return result;
    }

    /** Locks what the earlier attempts have asked for, in one request. */
    private void reserve() throws InterruptedException {
        if (wanted.isEmpty()) return;
        var all = new TreeSet<>(wanted.values());
        lock(all.toArray(String[]::new));
        try (var held = mutex.hold()) {
            asked.clear(); // the work asks for the same units again
            for (String resource : all) {
                Units units = Units.of(resource);
                if (units.limit > 0) reserved.put(Resources.name(resource), units);
            }
        }
    }

    /** Releases the locks. Returns the loss of one of them. An interrupt ends the wait, and remains set. */
    private Optional<LockLostException> end() {
        List<Lock> all;
        try (var held = mutex.hold()) {
            isEnded = true;
            all = List.copyOf(locks);
        }
        all.forEach(lock -> lock.drop(false)); // together, before the first wait
        long end = System.nanoTime() + client.responseTimeout();
        Optional<LockLostException> lost = Optional.empty();
        for (Lock lock : all) {
            try {
                lock.close(end);
            } catch (LockLostException e) {
                lost = Optional.of(e);
            }
        }
        return lost;
    }

    /**
     * Locks resources for the rest of the transaction, all at once. If one lock of the transaction has them already, it is returned
     * at once. Each call locks further units.
     *
     * @param resources as in {@link Resources}
     * @return the lock. It need not be closed: it is released at the end of the transaction
     * @throws InterruptedException if the thread is interrupted: the request is cancelled
     * @throws LockLostException if a lock of the transaction was lost
     * @throws LockEndedException if the transaction has ended
     * @throws GenieException as {@link GenieClient#lock(LockOptions, String...)}
     */
    public Lock lock(String... resources) throws InterruptedException {
        List<String> list = Resources.withModes(resources);
        Optional<Lock> covering = ask(list);
        ensureHeld();
        if (covering.isPresent()) return covering.get();
        Lock lock = client.acquire(options, list);
        try (var held = mutex.hold()) {
            if (isEnded) {
                lock.drop(false);
                throw new LockEndedException("the transaction has ended");
            }
            locks.add(lock);
            return lock;
        }
    }

    /**
     * Throws an exception if a lock of the transaction was lost, or if the transaction has ended: call it before each effect.
     *
     * @throws LockLostException if a lock was lost
     * @throws LockEndedException if the transaction has ended
     */
    public void ensureHeld() {
        try (var held = mutex.hold()) {
            if (isEnded) throw new LockEndedException("the transaction has ended");
            for (Lock lock : locks) lock.ensureNotLost();
        }
    }

    /** {@return the greatest fencing token of the locks: pass it to the data store with each read and write} */
    public long fence() {
        try (var held = mutex.hold()) {
            return locks.stream().mapToLong(Lock::fence).max().orElse(0);
        }
    }

    /** {@return the name of the transaction, which is the same in all its attempts} */
    public String name() { return options.transaction(); }

    /** Notes what the work asks for, and returns a lock of the transaction that covers it. */
    private Optional<Lock> ask(List<String> resources) {
        var merged = new HashMap<String, String>();
        resources.forEach(resource -> addTo(merged, resource, Units::sum));
        try (var held = mutex.hold()) {
            merged.values().forEach(resource -> addTo(asked, resource, Units::sum));
            Optional<Lock> covering = locks.stream().filter(lock -> covers(lock, merged)).findFirst();
            if (covering.isPresent()) {
                merged.forEach((name, resource) -> reserved.computeIfPresent(name,
                        (key, left) -> new Units(left.count - Units.of(resource).count, left.limit)));
            }
            return covering;
        }
    }

    /** Returns whether the lock is held, and includes the resources, by name. */
    private boolean covers(Lock lock, Map<String, String> resources) {
        for (var entry : resources.entrySet()) {
            Units units = Units.of(entry.getValue());
            Units left = reserved.getOrDefault(entry.getKey(), Units.NONE);
            boolean isReserved = lock == locks.get(0) && units.count <= left.count && left.limit <= units.limit;
            boolean isIncluded = units.limit > 0 ? isReserved : lock.resources().contains(entry.getValue());
            if (!isIncluded && !lock.resources().contains(Resources.exclusive(entry.getKey()))) return false;
        }
        return lock.isHeld();
    }

    /** Units of a counted resource: how many, and the limit. The limit 0 stands for another mode. */
    private record Units(long count, long limit) {
        private static final Units NONE = new Units(0, 0);

        static Units of(String resource) {
            String mode = resource.substring(0, resource.indexOf(':'));
            int slash = mode.indexOf('/');
            try {
                return slash < 0 ? NONE : new Units(Long.parseLong(mode.substring(0, slash)), Long.parseLong(mode.substring(slash + 1)));
            } catch (NumberFormatException e) {
                return NONE; // the server rejects it
            }
        }

        static Units sum(Units a, Units b) {
            long limit = Math.min(a.limit, b.limit);
            return new Units(Math.min(a.count + b.count, limit), limit);
        }

        static Units most(Units a, Units b) { return a.count > b.count || a.count == b.count && a.limit > b.limit ? a : b; }
    }

    /** Adds a resource to that of the same name. */
    private static void addTo(Map<String, String> byName, String resource, BinaryOperator<Units> join) {
        byName.merge(Resources.name(resource), resource, (one, other) -> {
            Units units = Units.of(one);
            Units others = Units.of(other);
            if (units.limit > 0 && others.limit > 0) {
                Units joined = join.apply(others, units);
                return joined.count + "/" + joined.limit + ":" + Resources.name(one);
            }
            return one.equals(other) ? one : Resources.exclusive(Resources.name(one));
        });
    }
}
