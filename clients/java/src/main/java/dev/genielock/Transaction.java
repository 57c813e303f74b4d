package dev.genielock;

import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;

/** An attempt of a transaction, made by {@link GenieClient#transaction}. */
public final class Transaction {
    private static final int MAX_CAUSES = 20;

    private final GenieClient client;
    private final LockOptions options;
    private final Mutex mutex = new Mutex();
    private final List<Lock> locks = new ArrayList<>();
    private final Set<Lock> requested = new HashSet<>(); // by threads that wait
    private final Map<String, Demand> wanted; // the strongest demands of all earlier attempts, by name
    private final Map<String, Demand> asked = new HashMap<>(); // those of this attempt; units are added up
    private final Map<String, Demand> reserved = new HashMap<>(); // units of the first request of a repeated attempt, not asked for yet
    private boolean isEnded;

    private Transaction(GenieClient client, LockOptions options, Map<String, Demand> wanted) {
        this.client = client;
        this.options = options;
        this.wanted = wanted;
    }

    /** Calls the work, again after each deadlock. */
    static <T, E extends Exception> T run(GenieClient client, LockOptions options, GenieClient.TransactionFunction<T, E> work)
            throws E, InterruptedException {
        String given = options.transaction();
        LockOptions named = options.transaction(given.isEmpty() ? "tx-" + UUID.randomUUID() : given);
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
            asked.forEach((name, demand) -> wanted.merge(name, demand, Demand::strongest));
            return new Transaction(client, options, wanted);
        }
    }

    private <T, E extends Exception> T attempt(GenieClient.TransactionFunction<T, E> work) throws E, InterruptedException {
        try (Mutex.AtEnd end = this::end) {
            reserve();
            return work.apply(this);
        }
    }

    /** Locks what the earlier attempts have asked for, in one request. */
    private void reserve() throws InterruptedException {
        if (wanted.isEmpty()) return;
        lock(wanted.values().stream().map(Demand::resource).sorted().toArray(String[]::new));
        try (var held = mutex.hold()) {
            asked.clear(); // the work asks for the same units again
            reserved.putAll(wanted);
        }
    }

    /** Releases the locks. Throws an exception if one of them was lost. An interrupt ends the wait, and remains set. */
    private void end() {
        List<Lock> all;
        List<Lock> late;
        try (var held = mutex.hold()) {
            isEnded = true;
            all = List.copyOf(locks);
            late = List.copyOf(requested);
        }
        client.cancel(late, new LockEndedException("the transaction has ended"));
        all.forEach(lock -> lock.drop(false)); // together, before the first wait
        long end = System.nanoTime() + client.responseTimeout();
        for (Lock lock : all) lock.awaitRelease(end);
        for (Lock lock : all) lock.ensureNotLost();
    }

    /**
     * Locks resources for the rest of the transaction, all at once. If one lock of the transaction has them already, it is returned
     * at once. Each call locks further units. If the transaction ends first, the request is cancelled.
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
        Lock lock = client.newLock(options, list);
        try (var held = mutex.hold()) {
            ensureHeld();
            if (covering.isPresent()) return covering.get();
            requested.add(lock);
        }
        try {
            client.acquire(lock, "resources", list);
            return keep(lock);
        } finally {
            try (var held = mutex.hold()) {
                requested.remove(lock);
            }
        }
    }

    /** Keeps a granted lock until the end of the transaction. If that has come, it releases the lock. */
    private Lock keep(Lock lock) {
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
        var demands = new HashMap<String, Demand>();
        resources.stream().map(Demand::of).forEach(demand -> demands.merge(demand.name, demand, Demand::plus));
        try (var held = mutex.hold()) {
            demands.forEach((name, demand) -> asked.merge(name, demand, Demand::plus));
            Optional<Lock> covering = locks.stream().filter(lock -> covers(lock, demands.values())).findFirst();
            if (covering.isPresent()) {
                demands.forEach((name, demand) -> reserved.computeIfPresent(name,
                        (key, left) -> Demand.ofUnits(name, left.units - demand.units, left.limit)));
            }
            return covering;
        }
    }

    /** Returns whether the lock is held, and includes what is demanded. */
    private boolean covers(Lock lock, Collection<Demand> demands) {
        for (Demand demand : demands) {
            Demand left = reserved.get(demand.name);
            boolean isReserved = lock == locks.get(0) && left != null && demand.units <= left.units && left.limit <= demand.limit;
            boolean isIncluded = demand.limit > 0 ? isReserved : lock.resources().contains(demand.resource());
            if (!isIncluded && !lock.resources().contains(Resources.exclusive(demand.name))) return false;
        }
        return lock.isHeld();
    }

    /** What is demanded of one name: a mode, or units with their limit. The limit 0 stands for another mode than units. */
    private record Demand(String name, String mode, long units, long limit) {
        private static final Pattern UNITS = Pattern.compile("(\\d{1,9})/(\\d{1,9})"); // the server rejects greater numbers

        static Demand of(String resource) {
            String mode = resource.substring(0, resource.indexOf(':'));
            var match = UNITS.matcher(mode);
            return match.matches() ? ofUnits(Resources.name(resource), Long.parseLong(match.group(1)), Long.parseLong(match.group(2)))
                    : new Demand(Resources.name(resource), mode, 0, 0);
        }

        static Demand ofUnits(String name, long units, long limit) { return new Demand(name, units + "/" + limit, units, limit); }

        String resource() { return mode + ":" + name; }

        /** Returns a demand for both: units are added up. */
        Demand plus(Demand other) {
            long least = Math.min(limit, other.limit);
            return least > 0 ? ofUnits(name, Math.min(units + other.units, least), least) : strongest(other);
        }

        /** Returns a demand that includes both, but not both at once. */
        Demand strongest(Demand other) {
            if (limit > 0 && other.limit > 0) return units > other.units || units == other.units && limit > other.limit ? this : other;
            return mode.equals(other.mode) ? this : new Demand(name, "exclusive", 0, 0);
        }
    }
}
