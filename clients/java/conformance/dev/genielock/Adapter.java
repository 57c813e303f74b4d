package dev.genielock;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Drives the client for the conformance kit: calls arrive as JSON lines on standard input, answers and events leave on standard
 * output. conformance/README.md specifies them. With the argument {@code async}, locks are requested with {@code lockAsync} and
 * {@code lockAnyAsync}, and a cancel cancels the future; otherwise it interrupts the thread of the call.
 */
public final class Adapter {
    private static final double DEFAULT_LIMIT_MS = 20_000;

    private final PrintStream output = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private final ReentrantLock outputLock = new ReentrantLock();
    private final ExecutorService threads = Executors.newCachedThreadPool();
    private final Map<Long, Canceller> open = new ConcurrentHashMap<>();
    private final Map<Long, Lock> locks = new ConcurrentHashMap<>();
    private final Map<Long, Followed> watches = new ConcurrentHashMap<>();
    private final AtomicLong lastNumber = new AtomicLong();
    private final boolean isAsync;
    private volatile GenieClient client;

    private record Followed(Watch watch, CountDownLatch resume, CountDownLatch ended) {}

    /** An open call, which can be cancelled until it has ended. */
    private static final class Canceller {
        private Runnable cancel;
        private boolean isCancelled;
        private boolean isEnded;

        synchronized void set(Runnable action) {
            cancel = action;
            if (isCancelled) {
                action.run();
            }
        }

        synchronized void cancel() {
            isCancelled = true;
            if (cancel != null && !isEnded) {
                cancel.run();
            }
        }

        synchronized void end() {
            isEnded = true;
        }
    }

    private Adapter(boolean isAsync) {
        this.isAsync = isAsync;
    }

    public static void main(String[] arguments) throws Exception {
        new Adapter(arguments.length > 0 && arguments[0].equals("async")).run();
        System.exit(0);
    }

    private void run() throws IOException {
        var input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            byte[] text = line.getBytes(StandardCharsets.UTF_8);
            Map<?, ?> call = (Map<?, ?>) Json.decode(text, 0, text.length);
            long number = (long) call.get("call");
            if ("exit".equals(call.get("do"))) {
                write(answer(number, "ok", Map.of()));
                return;
            }
            var canceller = new Canceller();
            open.put(number, canceller);
            threads.execute(() -> execute(number, call, canceller));
        }
    }

    private static Map<String, Object> answer(long call, String key, Object value) {
        var answer = new LinkedHashMap<String, Object>();
        answer.put("call", call);
        answer.put(key, value);
        return answer;
    }

    private void write(Map<String, Object> message) {
        var text = new StringBuilder();
        Json.encode(message, text);
        outputLock.lock();
        try {
            output.append(text).append("\n");
            output.flush();
        } finally {
            outputLock.unlock();
        }
    }

    private void execute(long number, Map<?, ?> call, Canceller canceller) {
        canceller.set(Thread.currentThread()::interrupt);
        Map<String, Object> answer;
        Optional<Lock> granted = Optional.empty();
        try {
            Map<String, Object> result = execute(call, canceller);
            answer = answer(number, "ok", result);
            granted = result.get("lock") instanceof Long lock ? Optional.of(locks.get(lock)) : Optional.empty();
        } catch (Exception e) {
            answer = answer(number, "error", describe(e));
        }
        canceller.end();
        open.remove(number);
        Thread.interrupted();
        write(answer);
        if (granted.isPresent()) {
            long reported = (long) ((Map<?, ?>) answer.get("ok")).get("lock");
            granted.get().lost().thenAccept(loss -> {
                if (!(loss.getCause() instanceof ClientClosedException)) {
                    write(event("lost", "lock", reported, "type", loss.reason()));
                }
            });
        }
    }

    private static Map<String, Object> event(String name, Object... fields) {
        var event = new LinkedHashMap<String, Object>();
        event.put("event", name);
        for (int i = 0; i < fields.length; i += 2) {
            event.put((String) fields[i], fields[i + 1]);
        }
        return event;
    }

    private Map<String, Object> execute(Map<?, ?> call, Canceller canceller) throws Exception {
        GenieClient present = client;
        String name = (String) call.get("do");
        boolean needsClient = !List.of("connect", "close", "cancel").contains(name) && call.get("lock") == null
                && call.get("watch") == null;
        if (present == null && needsClient) {
            throw new ClientClosedException();
        }
        switch (name) {
            case "connect":
                client = connect(call);
                return Map.of();
            case "acquire":
                return added(acquire(present, call, canceller));
            case "tryAcquire":
                Optional<Lock> lock = present.tryLock(options(call), texts(call, "resources"));
                var failed = new HashMap<String, Object>();
                failed.put("lock", null);
                return lock.isPresent() ? added(lock.get()) : failed;
            case "acquireAny":
                return added(isAsync ? granted(present.lockAnyAsync(options(call), anyOf(call)), canceller)
                        : present.lockAny(options(call), anyOf(call)));
            case "release":
                locks.get((long) call.get("lock")).release();
                return Map.of();
            case "extend":
                locks.get((long) call.get("lock")).extend(duration(call.get("transactionTimeout")));
                return Map.of();
            case "ping":
                present.ping();
                return Map.of();
            case "inspect":
                return inspect(present, call);
            case "watch":
                return watch(present, call);
            case "resume":
                watches.get((long) call.get("watch")).resume.countDown();
                return Map.of();
            case "unwatch":
                var followed = watches.get((long) call.get("watch"));
                followed.watch.close();
                followed.ended.await();
                return Map.of();
            case "cancel":
                Optional.ofNullable(open.get((long) call.get("target"))).ifPresent(Canceller::cancel);
                return Map.of();
            case "close":
                client = null;
                if (present != null) {
                    present.close();
                }
                return Map.of();
            default:
                throw new IllegalArgumentException("unknown call " + name);
        }
    }

    private static GenieClient connect(Map<?, ?> call) throws InterruptedException {
        String[] addresses = texts(call, "addresses");
        Map<?, ?> options = optionsOf(call);
        var builder = GenieClient.builder().addresses(addresses);
        if (options.get("sessionTimeout") != null) {
            builder.sessionTimeout(duration(options.get("sessionTimeout")));
        }
        if (options.get("connectTimeout") != null) {
            builder.connectTimeout(duration(options.get("connectTimeout")).multipliedBy(addresses.length));
        }
        Object limit = options.get("maxUnavailable") == null ? (Object) DEFAULT_LIMIT_MS : options.get("maxUnavailable");
        builder.responseTimeout(duration(limit));
        if (options.get("token") instanceof String token) {
            builder.token(() -> token);
        }
        if (options.get("namespace") instanceof String namespace) {
            builder.namespace(namespace);
        }
        return builder.connect();
    }

    private Lock acquire(GenieClient present, Map<?, ?> call, Canceller canceller) throws Exception {
        if (!isAsync) {
            return present.lock(options(call), texts(call, "resources"));
        }
        return granted(present.lockAsync(options(call), texts(call, "resources")), canceller);
    }

    private static Lock granted(CompletableFuture<Lock> future, Canceller canceller) {
        canceller.set(() -> future.cancel(false));
        try {
            return future.join();
        } catch (java.util.concurrent.CompletionException e) {
            throw (GenieException) e.getCause();
        }
    }

    private Map<String, Object> added(Lock lock) {
        long number = lastNumber.incrementAndGet();
        locks.put(number, lock);
        var result = new LinkedHashMap<String, Object>();
        result.put("lock", number);
        result.put("id", lock.id());
        result.put("fence", lock.fence());
        result.put("resources", lock.resources());
        return result;
    }

    private static Map<String, Object> inspect(GenieClient present, Map<?, ?> call) throws InterruptedException {
        InspectQuery query = InspectQuery.all();
        if (call.get("resource") instanceof String resource) {
            query = query.resource(resource);
        }
        if (call.get("transactionName") instanceof String transaction) {
            query = query.transaction(transaction);
        }
        if (call.get("id") instanceof Long id) {
            query = query.id(id);
        }
        if (call.get("limit") instanceof Long limit) {
            query = query.limit((int) (long) limit);
        }
        if (call.get("only") instanceof String only) {
            query = only.equals("queue") ? query.onlyQueue() : query.onlyHolders();
        }
        Inspection inspection = present.inspect(query);
        return Map.of("holders", rows(inspection.holders()), "holdersTotal", inspection.holdersTotal(),
                "queue", rows(inspection.queue()), "queueTotal", inspection.queueTotal());
    }

    private static List<Map<String, Object>> rows(List<Inspection.Request> requests) {
        return requests.stream().map(row -> Map.<String, Object>of("id", row.id(), "resources", row.resources())).toList();
    }

    private Map<String, Object> watch(GenieClient present, Map<?, ?> call) {
        long number = lastNumber.incrementAndGet();
        var followed = new Followed(present.watch((String) call.get("prefix")), new CountDownLatch(1), new CountDownLatch(1));
        watches.put(number, followed);
        if (!Boolean.TRUE.equals(call.get("paused"))) {
            followed.resume.countDown();
        }
        threads.execute(() -> report(number, followed));
        return Map.of("watch", number);
    }

    private void report(long number, Followed followed) {
        try {
            followed.resume.await();
            for (;;) {
                Change change = followed.watch.next();
                if (!change.state().equals("resync")) { // the following changes are differences
                    write(event("watch", "watch", number, "change", Map.of("state", change.state(), "resource", change.resource(),
                            "mode", change.mode(), "id", change.id())));
                }
            }
        } catch (GenieException e) {
            followed.ended.countDown();
        } catch (InterruptedException e) {
            throw new IllegalStateException(e);
        }
    }

    private static Map<?, ?> optionsOf(Map<?, ?> call) {
        return call.get("options") instanceof Map<?, ?> options ? options : Map.of();
    }

    private static LockOptions options(Map<?, ?> call) {
        Map<?, ?> given = optionsOf(call);
        LockOptions options = LockOptions.of();
        if (given.get("queueTimeout") != null) {
            options = options.queueTimeout(duration(given.get("queueTimeout")));
        }
        if (given.get("transactionTimeout") != null) {
            options = options.transactionTimeout(duration(given.get("transactionTimeout")));
        }
        if (given.get("priority") instanceof Long priority) {
            options = options.priority((int) (long) priority);
        }
        if ("release".equals(given.get("onDisconnect"))) {
            options = options.releaseOnDisconnect();
        }
        if (given.get("transactionName") instanceof String transaction) {
            options = options.transaction(transaction);
        }
        if (given.get("note") instanceof String note) {
            options = options.note(note);
        }
        return Boolean.TRUE.equals(given.get("watchdog")) ? options.watchdog() : options;
    }

    private static AnyOf anyOf(Map<?, ?> call) {
        AnyOf choices = AnyOf.target(new BigInteger((String) call.get("target")));
        String[] resources = texts(call, "anyOf");
        String[] weights = texts(call, "weights");
        for (int i = 0; i < resources.length; i++) {
            choices = weights.length > 0 ? choices.choice(resources[i], new BigInteger(weights[i])) : choices.choice(resources[i]);
        }
        return choices;
    }

    private static String[] texts(Map<?, ?> call, String name) {
        var texts = new ArrayList<String>();
        if (call.get(name) instanceof List<?> list) {
            list.forEach(text -> texts.add((String) text));
        }
        return texts.toArray(String[]::new);
    }

    private static Duration duration(Object ms) {
        return Wire.duration(((Number) ms).doubleValue());
    }

    /** Returns an exception as the kit expects it. */
    private static Map<String, Object> describe(Exception failure) {
        var result = new LinkedHashMap<String, Object>();
        result.put("message", String.valueOf(failure.getMessage()));
        if (failure instanceof QueueTimeoutException e) {
            result.put("type", "queue-timeout");
            result.put("blockers", e.blockers().stream().map(blocker -> Map.of("id", blocker.id(), "resource", blocker.resource(),
                    "units", blocker.units(), "of", blocker.of())).toList());
        } else if (failure instanceof DeadlockException e) {
            result.put("type", "deadlock");
            result.put("cycle", e.cycle());
        } else if (failure instanceof InsufficientException e) {
            result.put("type", "insufficient");
            result.put("free", e.free().toString());
            result.put("locked", e.locked().toString());
        } else if (failure instanceof LockLostException e) {
            result.put("type", e.reason());
        } else if (failure instanceof RequestEndedException e) {
            result.put("type", e.reason());
        } else if (failure instanceof RejectedException e) {
            result.put("type", e.code());
        } else if (failure instanceof UnavailableException) {
            result.put("type", "unavailable");
        } else if (failure instanceof ClientClosedException) {
            result.put("type", "closed");
        } else if (failure instanceof InterruptedException || failure instanceof java.util.concurrent.CancellationException) {
            result.put("type", "cancelled");
        } else {
            result.put("type", "unexpected");
            failure.printStackTrace();
        }
        return result;
    }
}
