package dev.genielock.examples;

import dev.genielock.DeadlockException;
import dev.genielock.GenieClient;
import dev.genielock.GenieException;
import dev.genielock.Lock;
import dev.genielock.LockLostException;
import dev.genielock.LockOptions;
import dev.genielock.QueueTimeoutException;
import dev.genielock.Resources;
import dev.genielock.UnavailableException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicIntegerArray;

/**
 * Moves money between accounts that only locks protect.
 *
 * <p>Several processes, each with several clerks (threads), read two balances, pause, and write them back in separate steps. At the
 * end the sum of all balances must be unchanged.
 *
 * <pre>Bank [--seconds S] [--without-locks]</pre>
 *
 * <p>There are four kinds of clerks. Some lock both accounts at once, which cannot deadlock. Some lock the second account while they
 * hold the first, in a transaction, which starts over after a deadlock. Some pause for longer than their transaction timeout between
 * their two writes: they lose their lock with half a transfer done. Fencing tokens make that safe, and {@code compensate} undoes the
 * half. And some hold locks for long that the server releases when their session ends: their client must know that before another
 * clerk has the lock.
 */
public final class Bank {
    private static final int ACCOUNTS = 10;
    private static final long OPENING_BALANCE = 1_000_000; // cents
    private static final int LARGEST_TRANSFER = 10_000;
    private static final int PROCESSES = 2;
    private static final int CLERKS = 5; // of each process
    private static final Duration TRANSACTION_TIMEOUT = Duration.ofMillis(250); // a transfer takes a few milliseconds
    private static final int TRANSFERS_PER_PAUSE = 20; // a slow clerk exceeds its timeout in every 20th transfer
    private static final long PATIENCE_MS = 1500; // a patient clerk holds its locks for long, and they end with its session
    private static final Duration PATIENT_TIMEOUT = Duration.ofSeconds(30);
    private static final Duration SESSION_TIMEOUT = Duration.ofMillis(500);
    private static final int TOO_SLOW = 2; // the kinds of clerks; 1 and 4 lock step by step
    private static final int PATIENT = 3;
    private static final String[] COUNTERS = {"transfers", "deadlocks", "lost locks", "retries", "mistakes"};

    private Bank() {}

    private record Change(int account, long amount) {}

    /** Waits for a time in ms, or until the lock is lost. */
    @FunctionalInterface
    private interface Pause {
        void await(long ms) throws InterruptedException;
    }

    /** What a clerk has while it holds its locks: the token of each account, and how to look whether they are lost. */
    private record Access(Map<Integer, Long> fences, Runnable ensureHeld, Pause pause) {
        long fence(Change change) {
            return fences.getOrDefault(change.account, 0L);
        }
    }

    @FunctionalInterface
    private interface Work {
        void accept(Access access) throws IOException, InterruptedException;
    }

    public static void main(String[] arguments) throws Exception {
        var list = Arrays.asList(arguments);
        boolean usesLocks = !list.contains("--without-locks");
        if (list.contains("--process")) {
            runProcess(Integer.parseInt(list.get(1)), new AccountStore(Path.of(list.get(2))), usesLocks);
            System.exit(0);
        }
        int seconds = list.contains("--seconds") ? Integer.parseInt(list.get(list.indexOf("--seconds") + 1)) : 5;
        System.exit(run(seconds, usesLocks) ? 0 : 1);
    }

    /** Runs the processes, and returns whether the sum is right. */
    static boolean run(int seconds, boolean usesLocks) throws Exception {
        Path folder = Files.createTempDirectory("bank");
        var store = new AccountStore(folder);
        for (int account = 0; account < ACCOUNTS; account++) {
            store.create(account, OPENING_BALANCE);
        }
        var processes = new ArrayList<Process>();
        for (int i = 0; i < PROCESSES; i++) {
            var command = new ArrayList<>(List.of(ProcessHandle.current().info().command().orElse("java"), "-XX:TieredStopAtLevel=1",
                    "-XX:+UseSerialGC", "-cp", System.getProperty("java.class.path"), Bank.class.getName(), "--process",
                    Integer.toString(i), folder.toString()));
            if (!usesLocks) {
                command.add("--without-locks");
            }
            processes.add(new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.INHERIT).start());
        }
        TimeUnit.SECONDS.sleep(seconds);
        long[] counters = new long[COUNTERS.length];
        boolean isRight = true;
        for (Process process : processes) {
            process.getOutputStream().close();
        }
        for (Process process : processes) {
            if (!process.waitFor(2, TimeUnit.MINUTES)) {
                throw new IllegalStateException("a clerk is stuck");
            }
            isRight &= process.exitValue() == 0;
            String output = new String(process.getInputStream().readAllBytes()).strip();
            String[] words = output.isEmpty() ? new String[0] : output.split(" ");
            for (int i = 0; i < words.length; i++) {
                counters[i] += Long.parseLong(words[i]);
            }
        }
        long difference = store.sum(ACCOUNTS) - ACCOUNTS * OPENING_BALANCE;
        for (int i = 0; i < COUNTERS.length; i++) {
            System.out.print(COUNTERS[i] + " " + counters[i] + ", ");
        }
        System.out.println("difference of the sum " + difference);
        return isRight && (!usesLocks || difference == 0 && counters[4] == 0);
    }

    /** Runs the clerks of one process until its standard input ends, and prints the counters. */
    private static void runProcess(int number, AccountStore store, boolean usesLocks) throws Exception {
        var counters = new AtomicIntegerArray(COUNTERS.length);
        GenieClient client = usesLocks ? GenieClient.builder().connectTimeout(Duration.ofSeconds(30)).sessionTimeout(SESSION_TIMEOUT)
                .responseTimeout(Duration.ofSeconds(30)).connect() : null;
        ExecutorService threads = Executors.newFixedThreadPool(CLERKS);
        var clerks = new ArrayList<Clerk>();
        var results = new ArrayList<Future<?>>();
        for (int i = 0; i < CLERKS; i++) {
            var clerk = new Clerk(number * CLERKS + i, store, client, counters);
            clerks.add(clerk);
            results.add(threads.submit(() -> {
                clerk.work();
                return null;
            }));
        }
        System.in.readAllBytes();
        clerks.forEach(clerk -> clerk.isStopped = true);
        for (Future<?> result : results) {
            result.get();
        }
        if (client != null) {
            client.close();
        }
        var text = new StringBuilder();
        for (int i = 0; i < COUNTERS.length; i++) {
            text.append(counters.get(i)).append(' ');
        }
        System.out.println(text);
    }

    private static final class Clerk {
        private final int kind;
        private final AccountStore store;
        private final GenieClient client; // null: without locks
        private final AtomicIntegerArray counters;
        private final Random random;
        private volatile boolean isStopped;

        Clerk(int number, AccountStore store, GenieClient client, AtomicIntegerArray counters) {
            this.kind = number % CLERKS;
            this.store = store;
            this.client = client;
            this.counters = counters;
            this.random = new Random(System.nanoTime() + number);
        }

        /** Makes random transfers. A transfer that was begun is repeated until it succeeds. */
        void work() throws Exception {
            for (int transfers = 0; !isStopped; transfers++) {
                int source = random.nextInt(ACCOUNTS);
                int target = (source + 1 + random.nextInt(ACCOUNTS - 1)) % ACCOUNTS;
                long amount = 1 + random.nextInt(LARGEST_TRANSFER);
                boolean pauses = transfers % TRANSFERS_PER_PAUSE == 0;
                while (!transfer(List.of(new Change(source, -amount), new Change(target, amount)), pauses)) {
                    pauses = false;
                    counters.incrementAndGet(3);
                }
                counters.incrementAndGet(0);
            }
        }

        /** Attempts a transfer. Returns false if the transfer failed and all its changes were undone. */
        private boolean transfer(List<Change> changes, boolean pauses) throws Exception {
            var written = new ArrayList<Change>();
            try {
                locked(changes, access -> apply(changes, access, written, pauses));
                return true;
            } catch (LockLostException | AccountStore.StaleFenceException e) {
                counters.incrementAndGet(2);
            } catch (QueueTimeoutException | UnavailableException | DeadlockException e) {
                // nothing was granted, or the release of a finished transfer is not confirmed, which close only logs
            }
            compensate(written);
            return false;
        }

        /** Reads all balances, pauses, and writes them one by one; written gets each change that the store accepted. */
        private void apply(List<Change> changes, Access access, List<Change> written, boolean pauses)
                throws IOException, InterruptedException {
            var balances = new HashMap<Integer, Long>();
            for (Change change : changes) {
                balances.put(change.account, store.read(change.account, access.fence(change)));
            }
            if (pauses && kind == PATIENT) {
                access.pause.await(PATIENCE_MS);
            } else {
                TimeUnit.MICROSECONDS.sleep(random.nextInt(2000));
            }
            for (int i = 0; i < changes.size(); i++) {
                Change change = changes.get(i);
                if (i == 1 && pauses && kind == TOO_SLOW) { // does not look at the lock: only the fence prevents the second write
                    TimeUnit.MILLISECONDS.sleep(TRANSACTION_TIMEOUT.toMillis() * 3 / 2);
                } else {
                    access.ensureHeld.run(); // do not begin another write when a lock is lost
                }
                store.write(change.account, balances.get(change.account) + change.amount, access.fence(change));
                written.add(change);
            }
        }

        /**
         * Undoes the written part of a transfer that lost its locks: it locks the accounts again and subtracts the amounts. The old
         * balances would be wrong, because others have changed them since.
         */
        private void compensate(List<Change> written) throws Exception {
            List<Change> rest = new ArrayList<>(written.stream().map(done -> new Change(done.account, -done.amount)).toList());
            while (!rest.isEmpty()) {
                var undone = new ArrayList<Change>();
                List<Change> attempt = List.copyOf(rest);
                try {
                    locked(attempt, access -> apply(attempt, access, undone, false));
                } catch (GenieException | AccountStore.StaleFenceException e) {
                    counters.incrementAndGet(3);
                }
                rest = rest.subList(undone.size(), rest.size());
            }
        }

        /** Does the work while the accounts are locked, with the fencing token of each account. */
        private void locked(List<Change> changes, Work work) throws IOException, InterruptedException {
            var fences = new HashMap<Integer, Long>();
            if (client == null) {
                work.accept(new Access(fences, () -> {}, Thread::sleep));
                return;
            }
            LockOptions options = LockOptions.of().queueTimeout(Duration.ofSeconds(60)).transactionTimeout(TRANSACTION_TIMEOUT);
            if (kind == PATIENT) {
                options = options.transactionTimeout(PATIENT_TIMEOUT).releaseOnDisconnect();
            }
            if (kind % 3 == 1) {
                var attempts = new int[1];
                client.transaction(options, tx -> {
                    if (++attempts[0] > 1) {
                        counters.incrementAndGet(1);
                    }
                    for (Change change : changes) {
                        fences.put(change.account, tx.lock(resource(change)).fence());
                    }
                    work.accept(new Access(fences, tx::ensureHeld, Thread::sleep));
                });
                return;
            }
            String[] resources = changes.stream().map(Clerk::resource).toArray(String[]::new);
            try (Lock lock = client.lock(options, resources)) {
                changes.forEach(change -> fences.put(change.account, lock.fence()));
                try {
                    work.accept(new Access(fences, lock::ensureHeld, ms -> awaitLoss(lock, ms)));
                } catch (AccountStore.StaleFenceException e) {
                    if (lock.isHeld()) { // another clerk had the account while this one still believed in its lock
                        counters.incrementAndGet(4);
                    }
                    throw e;
                }
            }
        }

        private static void awaitLoss(Lock lock, long ms) throws InterruptedException {
            try {
                lock.lost().get(ms, TimeUnit.MILLISECONDS);
            } catch (java.util.concurrent.TimeoutException | java.util.concurrent.ExecutionException e) {
                return; // it is held, or was released
            }
        }

        private static String resource(Change change) {
            return Resources.exclusive("accounts/" + change.account);
        }
    }
}
