package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.ResourceBundle;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ForkJoinPool;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Reconnects, resumed sessions and the end of a client, with a scripted server. */
@Timeout(60)
class SessionTest {
    private static final int LIMIT_S = 20;

    private final BlockingQueue<ConnectionEvent> events = new LinkedBlockingQueue<>();
    private final AtomicInteger tokens = new AtomicInteger();
    private FakeServer server;
    private GenieClient client;
    private FakeServer.Peer peer;

    @BeforeEach
    void connect() throws Exception {
        server = new FakeServer();
        client = builder().lazy().connect();
        peer = server.handshake(false);
        assertEquals(ConnectionEvent.State.UP, events.take().state());
    }

    private GenieClient.Builder builder() {
        return GenieClient.builder().addresses(server.address()).onEvent(events::add).responseTimeout(Duration.ofSeconds(LIMIT_S))
                .token(() -> "token" + tokens.incrementAndGet());
    }

    @AfterEach
    void close() throws Exception {
        peer.close();
        server.close();
        client.close();
    }

    private static <T> T get(CompletableFuture<T> future) throws Exception {
        return future.get(LIMIT_S, TimeUnit.SECONDS);
    }

    private static GenieException failure(CompletableFuture<?> future) {
        return (GenieException) assertThrows(ExecutionException.class, () -> get(future)).getCause();
    }

    @Test
    void aResumedSessionKeepsItsLocksAndRequests() throws Exception {
        var first = client.lockAsync("a");
        peer.grant(7);
        Lock lock = get(first);
        var second = client.lockAsync("b");
        var request = peer.expect("request");
        peer.close();
        peer = server.handshake(true, "{\"command\":\"locked\",\"payload\":{\"id\":7,\"fence\":8,\"expiresIn\":5000,\"ref\":\"1\"}}");
        assertEquals(request, peer.expect("request"));
        peer.answer("locked", "id", 9, "fence", 10, "ref", request.get("ref"));
        assertEquals(9, get(second).id());
        assertTrue(lock.isHeld());
        assertTrue(lock.remaining().compareTo(Duration.ofSeconds(5)) <= 0);
        assertEquals(ConnectionEvent.State.DOWN, events.take().state());
        assertEquals(ConnectionEvent.State.UP, events.take().state());
    }

    @Test
    void aLockThatTheServerDoesNotMentionIsLost() throws Exception {
        var granted = client.lockAsync("a");
        peer.grant(7);
        var lost = get(granted).lost();
        peer.close();
        peer = server.handshake(false);
        assertEquals("lost", get(lost).reason());
        assertEquals(7L, peer.expect("release").get("id"));
    }

    @Test
    void theTokenIsReadForEachConnection() throws Exception {
        peer.close();
        peer = server.accept();
        assertEquals("token3", peer.expect("hello").get("token")); // the first was checked at the start
    }

    @Test
    void aTokenSourceThatDoesNotReturnFailsOneAttemptAfterTheOther() throws Exception {
        var clock = new FakeClock();
        var calls = new AtomicInteger();
        var isCalled = new CountDownLatch(1);
        var mayReturn = new CountDownLatch(1);
        try (var other = new FakeServer();
                var waiting = builder().addresses(other.address()).lazy().token(() -> {
                    if (calls.incrementAndGet() == 3) { // the first call checks the settings
                        isCalled.countDown();
                        assertDoesNotThrow(() -> mayReturn.await());
                    }
                    return "token";
                }).connect(clock)) {
            other.handshake(false).close();
            try (var late = other.accept()) {
                isCalled.await();
                clock.advanceMs(5_000);
                assertTrue(late.awaitEnd());
            }
            try (var next = other.accept()) {
                assertEquals("token", next.expect("hello").get("token"));
            }
            mayReturn.countDown();
        }
    }

    @Test
    void theCallsOfASourceThatDoNotReturnAreLimited() throws Exception {
        var isCalled = new CountDownLatch(Config.MAX_CALLS);
        var mayReturn = new CountDownLatch(1);
        var source = Config.limited("token", () -> {
            isCalled.countDown();
            assertDoesNotThrow(() -> mayReturn.await());
            return "token";
        });
        var callers = IntStream.range(0, Config.MAX_CALLS).mapToObj(i -> onThread(source::get)).toList();
        isCalled.await();
        assertThrows(IllegalStateException.class, source::get);
        mayReturn.countDown();
        for (var caller : callers) assertEquals("token", get(caller.result()));
        assertEquals("token", source.get());
    }

    @Test
    void aCallerReadsTheAnswersOfOthersAndTheirCallersReadOn() throws Exception {
        var first = CompletableFuture.supplyAsync(() -> lock("a"), task -> new Thread(task).start());
        Object ref = peer.expect("request").get("ref");
        var second = client.lockAsync("b");
        Object other = peer.expect("request").get("ref");
        peer.answer("locked", "id", 2, "fence", 2, "ref", other);
        assertEquals(2, get(second).id());
        peer.answer("locked", "id", 1, "fence", 1, "ref", ref);
        assertEquals(1, get(first).id());
    }

    private Lock lock(String resource) {
        return assertDoesNotThrow(() -> client.lock(resource));
    }

    @Test
    void aCallOfAnInterruptedThreadThatClosesSaysBye() throws Exception {
        var closing = new Thread(() -> {
            Thread.currentThread().interrupt();
            client.close();
        });
        closing.start();
        Map<?, ?> bye = peer.expect("bye");
        peer.answer("bye", "ref", bye.get("ref"));
        closing.join();
    }

    @Test
    void threadsOfTheClientHaveNoThreadLocalsOfItsUser() throws Exception {
        var inherited = new InheritableThreadLocal<String>();
        inherited.set("the user's");
        var seen = new LinkedBlockingQueue<String>();
        try (var other = new FakeServer();
                var lazy = GenieClient.builder().addresses(other.address()).lazy().token(() -> "t")
                        .onEvent(event -> seen.add(String.valueOf(inherited.get()))).connect()) {
            other.handshake(false);
            assertEquals("null", seen.take());
        }
    }

    @Test
    void closeEndsWaitingCallsAndSaysBye() throws Exception {
        var waiting = client.lockAsync("a");
        var request = peer.expect("request");
        var closed = CompletableFuture.runAsync(client::close);
        assertEquals(request.get("ref"), peer.expect("release").get("ref"));
        var bye = peer.expect("bye");
        assertInstanceOf(ClientClosedException.class, failure(waiting));
        assertFalse(closed.isDone());
        peer.answer("bye", "ref", bye.get("ref"));
        get(closed);
        assertTrue(peer.awaitEnd());
        assertThrows(ClientClosedException.class, () -> client.lock("a"));
        assertThrows(ClientClosedException.class, () -> client.watch(""));
        client.close(); // does nothing
    }

    @Test
    void aSecondCloseWaitsForTheFirst() throws Exception {
        var first = CompletableFuture.runAsync(client::close);
        var bye = peer.expect("bye");
        var second = CompletableFuture.runAsync(client::close);
        assertThrows(TimeoutException.class, () -> second.get(100, TimeUnit.MILLISECONDS));
        assertFalse(first.isDone());
        peer.answer("bye", "ref", bye.get("ref"));
        get(first);
        get(second);
    }

    @Test
    void closeDuringAResumptionSaysByeAfterIt() throws Exception {
        var waiting = client.lockAsync("a");
        var ref = peer.expect("request").get("ref");
        peer.close();
        peer = server.accept();
        peer.expect("hello");
        peer.expect("ping");
        peer.send("welcome", "{\"protocol\":1,\"namespace\":\"genie\",\"quiet\":true,\"resumed\":true}");
        Thread.sleep(200);
        var closed = CompletableFuture.runAsync(client::close);
        assertInstanceOf(ClientClosedException.class, failure(waiting));
        peer.send("pong", "{\"ref\":\"resume\"}");
        assertEquals(ref, peer.expect("release").get("ref"));
        peer.answer("bye", "ref", peer.expect("bye").get("ref"));
        get(closed);
    }

    @Test
    void theEndOfATransactionCancelsTheRequestsOfItsOtherThreads() throws Exception {
        var late = new CompletableFuture<Lock>();
        client.transaction(transaction -> {
            new Thread(() -> {
                try {
                    late.complete(transaction.lock("late"));
                } catch (InterruptedException | GenieException e) {
                    late.completeExceptionally(e);
                }
            }).start();
            peer.expect("request");
        });
        assertInstanceOf(LockEndedException.class, failure(late));
        peer.expect("release");
    }

    @Test
    void aRequestThatFollowsTheEndOfItsTransactionIsNotSent() throws Exception {
        var session = new Session(Config.of(builder().lazy(), new FakeClock()));
        session.start();
        try (var other = server.handshake(false); var own = new GenieClient(session)) {
            assertEquals(ConnectionEvent.State.UP, events.take().state());
            var late = new ArrayList<Running>();
            own.transaction(transaction -> {
                session.mutex.lock();
                late.add(onThread(() -> transaction.lock("late")));
                while (!session.mutex.hasQueuedThread(late.get(0).thread())) Thread.sleep(1);
            });
            session.mutex.unlock();
            assertInstanceOf(LockEndedException.class, failure(late.get(0).result()));
            other.close();
        }
    }

    @Test
    void closeReportsLocksAsLost() throws Exception {
        var granted = client.lockAsync(LockOptions.of().releaseOnDisconnect(), "a");
        peer.grant(7);
        Lock lock = get(granted);
        var lost = lock.lost();
        var closed = CompletableFuture.runAsync(client::close);
        var bye = peer.expect("bye");
        assertInstanceOf(ClientClosedException.class, get(lost).getCause()); // before the answer
        peer.answer("bye", "ref", bye.get("ref"));
        get(closed);
        assertThrows(LockLostException.class, lock::release);
    }

    @Test
    void shutdownReleasesWhatIsLeft() throws Exception {
        var granted = client.lockAsync("a");
        peer.grant(7);
        get(granted);
        var ended = CompletableFuture.runAsync(() -> {
            try {
                client.shutdown(Duration.ofMillis(1));
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        });
        var release = peer.expect("release");
        peer.answer("released", "id", 7, "reason", "success", "ref", release.get("ref"));
        var bye = peer.expect("bye");
        peer.answer("bye", "ref", bye.get("ref"));
        get(ended);
    }

    @Test
    void aListenerOfALossMayUseTheClient() throws Exception {
        var granted = client.lockAsync("a");
        peer.grant(7);
        var again = get(granted).lost().thenCompose(loss -> client.lockAsync("a"));
        peer.answer("released", "id", 7, "reason", "transaction-timeout", "ref", "1");
        peer.grant(8);
        assertEquals(8, get(again).id());
    }

    @Test
    void anInvalidLineEndsTheConnection() throws Exception {
        peer.sendLine("{\"command\":");
        assertTrue(peer.awaitEnd());
        peer = server.handshake(false);
        var inspected = CompletableFuture.supplyAsync(() -> {
            try {
                return client.inspect(InspectQuery.all().resource("a").limit(5).onlyQueue());
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        });
        var query = peer.expect("inspect");
        assertEquals("a", query.get("resource"));
        peer.sendLine("[1,2]"); // no message
        peer.answer("inspected", "holders", 5, "queue", java.util.List.of(), "queueTotal", 3, "ref", query.get("ref"));
        assertEquals(new Inspection(java.util.List.of(), 0, java.util.List.of(), 3), get(inspected));
    }

    @Test
    void aServerThatRejectsTheTokenIsFinal() throws Exception {
        var rejected = CompletableFuture.supplyAsync(() -> {
            try {
                return builder().connect();
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        });
        try (var second = server.accept()) {
            second.expect("hello");
            second.answer("error", "code", "unauthorized", "message", "the access token is unknown", "ref", "hello");
            assertEquals("unauthorized", ((RejectedException) failure(rejected)).code());
        }
    }

    @Test
    void noThreadIsLeftAfterClose() throws Exception {
        peer.close();
        server.close();
        client.close();
        for (Thread thread : Thread.getAllStackTraces().keySet()) {
            if (thread.getName().startsWith("genie-")) {
                thread.join(TimeUnit.SECONDS.toMillis(LIMIT_S));
                assertFalse(thread.isAlive(), thread.getName());
            }
        }
    }

    /** Fails when it is to log that an attempt has failed. */
    private static final class FailingLogger implements System.Logger {
        @Override
        public String getName() { return "failing"; }

        @Override
        public boolean isLoggable(Level level) { return true; }

        @Override
        public void log(Level level, ResourceBundle bundle, String message, Throwable thrown) { log(level, bundle, message); }

        @Override
        public void log(Level level, ResourceBundle bundle, String format, Object... arguments) {
            if (level == Level.DEBUG) throw new IllegalStateException("of the logger");
        }
    }

    @Test
    void anErrorOfACallbackIsNoEndOfTheClient() throws Exception {
        var calls = new AtomicInteger();
        try (var other = builder().lazy().onEvent(event -> {
            throw new AssertionError("of a listener");
        }).token(() -> {
            if (calls.incrementAndGet() == 2) throw new NoClassDefFoundError("of the first connection");
            return "";
        }).logger(new FailingLogger()).connect()) {
            assertTrue(server.accept().awaitEnd());
            try (var second = server.handshake(false)) {
                var future = other.lockAsync("a");
                second.grant(7);
                assertEquals(7, get(future).id());
            }
        }
    }

    @Test
    void aCallThatWasGivenUpIsNotRepeated() throws Exception {
        var session = new Session(Config.of(builder().lazy(), new FakeClock()));
        session.start();
        try (var second = server.handshake(false)) {
            assertEquals(ConnectionEvent.State.UP, events.take().state());
            Call unanswered = givenUp(session);
            second.expect("ping");
            second.answer("error", "code", "unavailable", "message", "", "ref", unanswered.ref);
            var next = session.newCall("ping", Wire.fields(), null);
            session.submitNow(next);
            second.answer("pong", "ref", second.expect("ping").get("ref"));
            session.await(next, System.nanoTime() + Long.MAX_VALUE);
            assertFalse(isOpen(session, unanswered));
        }
        session.close();
    }

    @Test
    void aCallThatIsGivenUpWithoutAConnectionIsForgotten() throws Exception {
        var session = new Session(Config.of(GenieClient.builder().addresses("127.0.0.1:" + Servers.freePort()).lazy(),
                new Clock.Real("timer")));
        session.start();
        assertFalse(isOpen(session, givenUp(session)));
        int calls = session.openCalls().size();
        new Watch(session, "a").close();
        assertEquals(calls, session.openCalls().size());
        session.close();
    }

    private static Call givenUp(Session session) {
        Call call = session.newCall("ping", Wire.fields(), null);
        session.submitNow(call);
        session.giveUp(call);
        return call;
    }

    private static boolean isOpen(Session session, Call call) {
        try (var held = session.mutex.hold()) {
            return session.isOpen(call);
        }
    }

    private CompletableFuture<Boolean> released(long id) {
        return CompletableFuture.supplyAsync(() -> {
            try {
                client.release(id);
                return true;
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        }, task -> new Thread(task).start());
    }

    /** The server may execute the release, and grant the lock to another client, although no answer arrives. */
    @Test
    void aLockOfThisClientIsNotHeldOnceItIsReleasedById() throws Exception {
        for (String reason : new String[] {"success", "transaction-timeout"}) {
            var acquired = client.lockAsync("a");
            peer.grant(7);
            Lock lock = get(acquired);
            var released = released(7);
            var release = peer.expect("release");
            assertFalse(lock.isHeld());
            peer.answer("released", "id", 7L, "reason", reason, "ref", release.get("ref"));
            if (reason.equals("success")) {
                get(released);
            } else {
                assertThrows(ExecutionException.class, () -> get(released));
            }
            assertEquals(reason, assertThrows(LockLostException.class, lock::ensureHeld).reason());
        }
    }

    @Test
    void aReleaseByIdThatCrossesTheGrantEndsTheLock() throws Exception {
        var acquired = client.lockAsync("a");
        var request = peer.expect("request");
        var released = released(7);
        var inspect = peer.expect("inspect");
        var release = peer.expect("release");
        peer.answer("locked", "id", 7L, "fence", 8L, "ref", request.get("ref"));
        peer.answer("inspected", "holders", List.of(), "holdersTotal", 1, "queue", List.of(), "queueTotal", 0, "ref", inspect.get("ref"));
        peer.answer("released", "id", 7L, "reason", "success", "ref", release.get("ref"));
        get(released);
        assertThrows(LockLostException.class, get(acquired)::ensureHeld);
    }

    /** The server sends no notification to a client that releases its own waiting request by id. */
    @Test
    void aReleaseByIdOfAWaitingRequestRepeatsTheRequests() throws Exception {
        var acquired = client.lockAsync(LockOptions.of().queueTimeout(LockOptions.NO_TIMEOUT), "a");
        var request = peer.expect("request");
        for (int queueTotal : new int[] {0, -1, 1}) { // -1: an error
            var released = released(7);
            var inspect = peer.expect("inspect");
            assertEquals(List.of(7L, "queue"), List.of(inspect.get("id"), inspect.get("only")));
            var release = peer.expect("release");
            if (queueTotal < 0) {
                peer.answer("error", "code", "unauthorized", "message", "no", "ref", inspect.get("ref"));
            } else {
                peer.answer("inspected", "queueTotal", queueTotal, "ref", inspect.get("ref"));
            }
            peer.answer("released", "id", 7L, "reason", "success", "ref", release.get("ref"));
            get(released);
            if (queueTotal != 0) assertEquals(request, peer.expect("request"));
        }
        peer.answer("released", "id", 7L, "reason", "success", "ref", request.get("ref"));
        assertInstanceOf(RequestEndedException.class, failure(acquired));
    }

    /** The server may have executed a request although it rejects its repetition. */
    @Test
    void theTimeOfALockDoesNotCountFromARetry() throws Exception {
        var acquired = client.lockAsync("a");
        var ref = peer.expect("request").get("ref");
        long sent = System.nanoTime();
        peer.answer("error", "code", "unavailable", "message", "no", "ref", ref);
        peer.expect("request");
        peer.answer("locked", "id", 7L, "fence", 8L, "ref", ref);
        Lock lock = get(acquired);
        long passed = System.nanoTime() - sent;
        assertTrue(lock.remaining().plusNanos(passed).compareTo(Duration.ofSeconds(10)) <= 0);
    }

    /** A request that is sent again follows all releases that were sent before. */
    @Test
    void releasesByIdThatAreSentTogetherRepeatTheRequestsOnce() throws Exception {
        client.lockAsync(LockOptions.of().queueTimeout(LockOptions.NO_TIMEOUT), "a");
        peer.expect("request");
        var answered = new ArrayList<Map<?, ?>>();
        for (long id = 1; id <= 3; id++) {
            released(id);
            peer.expect("inspect");
            answered.add(peer.expect("release"));
        }
        for (Map<?, ?> release : answered) peer.answer("released", "id", release.get("id"), "reason", "success", "ref", release.get("ref"));
        peer.expect("request");
        client.lockAsync("b");
        assertEquals(List.of("exclusive:b"), peer.expect("request").get("resources"));
    }

    /** A repetition may cross the grant. The time in its answer counts from the repetition, and not from {@code hello}. */
    @Test
    void theAnswerToARepetitionDoesNotShortenAHeldLock() throws Exception {
        var acquired = client.lockAsync("a");
        var request = peer.grant(7);
        Lock lock = get(acquired);
        peer.answer("locked", "id", 7L, "fence", 8L, "expiresIn", 0L, "ref", request.get("ref"));
        var next = client.lockAsync("b");
        peer.grant(9);
        get(next); // so the message before was read, too
        assertTrue(lock.isHeld());
    }

    @Test
    void aFutureThatTimesOutCancelsItsRequest() throws Exception {
        var future = client.lockAsync("a");
        Object ref = peer.expect("request").get("ref");
        future.completeExceptionally(new TimeoutException()); // as orTimeout does
        assertEquals(ref, peer.expect("release").get("ref"));
    }

    @Test
    void aWatchThatIsPolledWithoutWaitsResynchronizes() throws Exception {
        var watch = client.watch("a");
        peer.answer("watching", "held", List.of(), "ref", peer.expect("watch").get("ref"));
        var granted = client.lockAsync("b");
        peer.grant(7);
        get(granted); // the answer to the watch has arrived
        peer.close();
        peer = server.handshake(true, "{\"command\":\"locked\",\"payload\":{\"id\":7,\"fence\":8,\"expiresIn\":5000,\"ref\":\"2\"}}");
        assertEquals(ConnectionEvent.State.DOWN, events.take().state());
        assertEquals(ConnectionEvent.State.UP, events.take().state());
        assertEquals("resync", watch.poll(Duration.ZERO).orElseThrow().state());
        assertTrue(watch.poll(Duration.ZERO).isEmpty());
        peer.answer("watching", "held", List.of(), "ref", peer.expect("watch").get("ref"));
        assertEquals("resync", watch.next().state());
    }

    @Test
    void aFunctionThatBlocksDoesNotHoldUpOtherFutures() throws Exception {
        assumeTrue(ForkJoinPool.getCommonPoolParallelism() <= 1, "the common pool has further threads");
        var end = new CountDownLatch(1);
        try {
            var first = client.lockAsync("a");
            var blocked = new CountDownLatch(1);
            first.thenRun(() -> {
                blocked.countDown();
                assertDoesNotThrow(() -> end.await());
            });
            peer.grant(7);
            blocked.await();
            var second = client.lockAsync("b");
            peer.grant(9);
            assertEquals(9, get(second).id());
        } finally {
            end.countDown();
        }
    }

    /** The clock stands still, so that the keepalive does not close the connection. */
    @Test
    void callsEndInTimeAlthoughTheServerReadsNothing() throws Exception {
        var names = IntStream.range(0, 900).mapToObj(i -> "n".repeat(1000) + i).toArray(String[]::new);
        try (var silent = new FakeServer();
                var own = builder().addresses(silent.address()).lazy().responseTimeout(Duration.ofMillis(1)).connect(new FakeClock());
                var end = silent.handshake(false)) {
            assertEquals(ConnectionEvent.State.UP, events.take().state());
            for (int i = 0; i < 20; i++) { // until neither the buffers of the sockets nor that of the client have room
                var late = onThread(() -> own.lock(LockOptions.of().queueTimeout(Duration.ZERO), "a"));
                assertInstanceOf(UnavailableException.class, failure(late.result()));
                var interrupted = onThread(() -> own.lock(LockOptions.of().queueTimeout(Duration.ofMinutes(1)), "a"));
                while (interrupted.thread().getState() == Thread.State.RUNNABLE) Thread.sleep(1);
                interrupted.thread().interrupt();
                var thrown = assertThrows(ExecutionException.class, () -> get(interrupted.result()));
                assertInstanceOf(InterruptedException.class, thrown.getCause());
                own.lockAsync(names);
            }
        }
    }

    /** The server answers what it has not read, so that a caller writes itself although the buffers of the sockets are full. */
    @Test
    void aWriteThatBlocksEndsWithTheKeepalive() throws Exception {
        var clock = new FakeClock();
        try (var silent = new FakeServer()) {
            var session = new Session(Config.of(builder().addresses(silent.address()).lazy(), clock));
            session.start();
            try (var end = silent.handshake(false)) {
                assertEquals(ConnectionEvent.State.UP, events.take().state());
                var caller = onThread(() -> {
                    while (true) session.execute("ping", Wire.fields("filler", "x".repeat(4000)), null, Long.MAX_VALUE);
                });
                var answered = new HashSet<String>();
                while (events.isEmpty()) {
                    List<Call> calls;
                    try (var held = session.mutex.hold()) {
                        calls = session.openCalls();
                    }
                    for (Call call : calls) {
                        if (call.fields.containsKey("filler") && answered.add(call.ref)) end.answer("pong", "ref", call.ref);
                    }
                    Thread.sleep(1);
                    clock.advanceMs(10);
                }
                assertEquals(ConnectionEvent.State.DOWN, events.take().state());
                caller.thread().interrupt();
                var thrown = assertThrows(ExecutionException.class, () -> get(caller.result()));
                assertInstanceOf(InterruptedException.class, thrown.getCause());
            }
            session.close();
        }
    }

    private record Running(Thread thread, CompletableFuture<Object> result) {}

    private static Running onThread(Callable<Object> call) {
        var result = new CompletableFuture<Object>();
        var thread = new Thread(() -> {
            try {
                result.complete(call.call());
            } catch (Exception e) {
                result.completeExceptionally(e);
            }
        });
        thread.setDaemon(true); // a call that does not end fails the test
        thread.start();
        return new Running(thread, result);
    }

    /** A lock that a truncated snapshot lacks may be held; a lock that conflicts shows that it has ended. */
    @Test
    void aTruncatedWatch() throws Exception {
        var watch = client.watch("");
        Object first = Map.of("resource", "a", "mode", "shared", "id", 1);
        Object second = Map.of("resource", "b", "mode", "shared", "id", 2, "transactionName", "x");
        peer.answer("watching", "held", List.of(first, second), "truncated", false, "ref", peer.expect("watch").get("ref"));
        assertEquals(List.of("resync ", "locked a", "locked b"), List.of(next(watch), next(watch), next(watch)));
        peer.answer("event", "state", "lagged");
        peer.answer("watching", "held", List.of(), "truncated", true, "ref", peer.expect("watch").get("ref"));
        assertTrue(watch.next().isTruncated());
        peer.answer("event", "state", "locked", "resource", "b", "mode", "exclusive", "id", 3, "transactionName", "x");
        peer.answer("event", "state", "locked", "resource", "a", "mode", "exclusive", "id", 4);
        assertEquals(List.of("locked b", "unlocked a", "locked a"), List.of(next(watch), next(watch), next(watch)));
        peer.answer("event", "state", "lagged");
        peer.answer("watching", "held", List.of(), "truncated", false, "ref", peer.expect("watch").get("ref"));
        assertEquals("resync ", next(watch));
        assertEquals(List.of("unlocked a", "unlocked b", "unlocked b"), List.of(next(watch), next(watch), next(watch)));
    }

    private static String next(Watch watch) throws InterruptedException {
        Change change = watch.next();
        return change.state() + " " + change.resource();
    }

    /** Those tasks may wait for the caller. */
    @Test
    void theLocksThatTruncatedSnapshotsDoNotListAreBounded() throws Exception {
        var session = new Session(Config.of(GenieClient.builder().addresses("127.0.0.1:" + Servers.freePort()).lazy(),
                new Clock.Real("timer")));
        session.start();
        int count = 100_002;
        var rows = IntStream.rangeClosed(1, count).mapToObj(i -> Map.of("resource", "a/" + i, "mode", "exclusive", "id", i)).toList();
        try (var watch = new Watch(session, "")) {
            try (var held = session.mutex.hold()) {
                watch.onSnapshot(null, new Wire.Message("watching", Map.of("held", rows, "truncated", false)));
                watch.onSnapshot(null, new Wire.Message("watching", Map.of("held", List.of(), "truncated", true)));
            }
            for (int i = 0; i < count + 2; i++) watch.next(); // with two `resync`
            assertEquals(List.of("unlocked a/1", "unlocked a/2"), List.of(next(watch), next(watch)));
            assertTrue(watch.poll(Duration.ZERO).isEmpty());
        }
        session.close();
    }

    @Test
    void aThreadOfTheCommonPoolExecutesNoOtherTasksWhileItWaits() throws Exception {
        assumeTrue(ForkJoinPool.getCommonPoolParallelism() > 1, "tasks have threads of their own");
        client.lockAsync("b"); // without an answer: then a caller does not read itself
        peer.expect("request");
        var end = new CountDownLatch(1);
        try {
            var caller = CompletableFuture.supplyAsync(() -> {
                for (int i = 0; i < 100; i++) CompletableFuture.runAsync(() -> assertDoesNotThrow(() -> end.await()));
                return lock("a");
            });
            peer.grant(7);
            assertEquals(7, get(caller).id());
        } finally {
            end.countDown();
        }
    }

    /** A pool that may not grow cannot replace a thread that waits. */
    @Test
    void aThreadOfAPoolThatMayNotGrowWaitsToo() throws Exception {
        var pool = new ForkJoinPool(1, ForkJoinPool.defaultForkJoinWorkerThreadFactory, null, false, 1, 1, 1, null, 1, TimeUnit.MINUTES);
        try {
            var caller = CompletableFuture.supplyAsync(() -> lock("a"), pool);
            Map<?, ?> request = peer.expect("request");
            assertThrows(TimeoutException.class, () -> caller.get(100, TimeUnit.MILLISECONDS));
            peer.answer("locked", "id", 7, "fence", 8, "ref", request.get("ref"));
            assertEquals(7, get(caller).id());
            var closed = CompletableFuture.runAsync(client::close, pool);
            peer.expect("bye");
            assertThrows(TimeoutException.class, () -> closed.get(100, TimeUnit.MILLISECONDS));
            peer.close();
            get(closed);
        } finally {
            pool.shutdown();
        }
    }

    /** The thread of the dialer makes the call, so that it does not read meanwhile. */
    @Test
    void aConnectionThatIsClosedBeforeACallerReadsIsReplaced() throws Exception {
        var session = new Session(Config.of(builder().lazy(), new FakeClock()));
        session.start();
        try (var first = server.handshake(false)) {
            assertEquals(ConnectionEvent.State.UP, events.take().state());
            Call answered = session.newCall("ping", Wire.fields(), null);
            var closed = answered.thenRun(() -> {
                awaitWritten(session);
                try (var held = session.mutex.hold()) {
                    Connection conn = session.connection;
                    Call call = session.newCall("ping", Wire.fields(), null);
                    call.isForeground = true;
                    session.submitNow(call);
                    onThread(() -> {
                        conn.exchange(System.nanoTime() + Long.MAX_VALUE);
                        return true;
                    });
                    assertDoesNotThrow(() -> first.expect("ping"));
                    conn.close(new IOException("the server does not answer"));
                }
            });
            session.submitNow(answered);
            first.answer("pong", "ref", first.expect("ping").get("ref"));
            get(closed);
            server.handshake(true).close();
        }
        session.close();
    }

    private static final String TAKEN_OVER = "{\"command\":\"error\",\"payload\":{\"code\":\"session-taken-over\",\"message\":\"\"}}";

    /** Lets the thread of the dialer wait while it wakes a number of callers, so that it does not read. */
    private static CountDownLatch stalledDialer(Session session, FakeServer.Peer peer, int woken) throws Exception {
        var isStalled = new CountDownLatch(1);
        var mayRead = new CountDownLatch(1);
        var answers = new ArrayList<String>();
        for (int i = 0; i < woken; i++) {
            Call answered = submitted(session, false, 0);
            if (i == 0) {
                answered.thenRun(() -> {
                    isStalled.countDown();
                    assertDoesNotThrow(() -> mayRead.await());
                });
            }
            answers.add("{\"command\":\"pong\",\"payload\":{\"ref\":\"" + peer.expect("ping").get("ref") + "\"}}");
        }
        peer.sendLine(String.join("\n", answers));
        isStalled.await();
        awaitWritten(session);
        return mayRead;
    }

    /** Waits until no thread is about to end a write: the server may answer before. */
    private static void awaitWritten(Session session) {
        for (boolean isWriting = true; isWriting; Thread.onSpinWait()) {
            try (var held = session.mutex.hold()) {
                isWriting = session.connection.isWriting;
            }
        }
    }

    private static Call submitted(Session session, boolean isForeground, int filler) {
        Call call = session.newCall("ping", Wire.fields("filler", "x".repeat(filler)), null);
        call.isForeground = isForeground;
        session.submitNow(call);
        return call;
    }

    @Test
    void callersThatAreWokenTogetherWriteTogether() throws Exception {
        var session = new Session(Config.of(builder().lazy(), new FakeClock()));
        session.start();
        try (var first = server.handshake(false)) {
            assertEquals(ConnectionEvent.State.UP, events.take().state());
            var mayRead = stalledDialer(session, first, 2);
            Connection conn = session.connection;
            assertEquals(null, submitted(session, true, 0).direct); // the only call, but others may follow
            assertEquals(conn, submitted(session, true, 3_000).direct); // enough for a write
            Call last = submitted(session, true, 0);
            assertEquals(null, last.direct);
            conn.exchange(System.nanoTime() + Long.MAX_VALUE);
            first.answer("pong", "ref", first.expect("ping").get("ref"));
            first.answer("pong", "ref", first.expect("ping").get("ref"));
            mayRead.countDown();
            first.answer("pong", "ref", first.expect("ping").get("ref")); // the reader has written it
            session.await(last, System.nanoTime() + Long.MAX_VALUE);
            assertEquals(0, session.openBytes);
            Call great = submitted(session, true, 20_000);
            assertEquals(null, great.direct); // a write could block
            assertEquals(great.line.length, session.openBytes);
            first.expect("ping");
        }
        session.close();
    }

    private static Throwable failure(Connection conn) {
        while (conn.failure.get() == null) Thread.onSpinWait();
        return conn.failure.get();
    }

    /** Ends a connection with an error that a caller reads. */
    private void anErrorThatACallerReads(boolean isReset) throws Exception {
        var session = new Session(Config.of(builder().lazy(), new FakeClock()));
        session.start();
        Throwable end;
        try (var first = server.handshake(false)) {
            assertEquals(ConnectionEvent.State.UP, events.take().state());
            var mayRead = stalledDialer(session, first, 1);
            Connection conn = session.connection;
            Call call = session.newCall("ping", Wire.fields(), null);
            call.isForeground = true;
            // The thread of the dialer may read on before the caller has closed the connection.
            call.whenComplete((answer, failure) -> {
                mayRead.countDown();
                failure(conn);
            });
            session.submitNow(call);
            first.sendLine("{\"command\":\"pong\",\"payload\":{\"ref\":\"" + call.ref + "\"}}\n" + TAKEN_OVER);
            if (isReset) first.reset();
            first.close();
            onThread(() -> {
                conn.exchange(System.nanoTime() + Long.MAX_VALUE);
                return true;
            });
            end = failure(conn);
            mayRead.countDown();
            server.handshake(true).close();
        }
        session.close();
        assertEquals(Session.TAKEN_OVER, assertInstanceOf(RejectedException.class, end).code());
    }

    @Test
    void theErrorThatEndsAConnectionIsItsReason() throws Exception { anErrorThatACallerReads(false); }

    @Test
    void aFailedWriteDoesNotHideTheErrorThatWasSentBefore() throws Exception { anErrorThatACallerReads(true); }

    @Test
    void anUnknownNameIsToldByTheException() {
        var failure = assertThrows(UnavailableException.class,
                () -> GenieClient.builder().addresses("a..b").connectTimeout(Duration.ofSeconds(2)).connect());
        assertTrue(failure.getMessage().contains("the name a..b cannot be looked up"), failure.getMessage());
    }
}
