package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** An interrupt at any blocking call leaves nothing held: with a real server. */
@Timeout(120)
@EnabledIfEnvironmentVariable(named = "GENIE_COMMAND", matches = ".+", disabledReason = "GENIE_COMMAND starts the server")
class InterruptTest {
    private static final int ROUNDS = 300;

    private static Servers.Server server;
    private final AtomicInteger lostConnections = new AtomicInteger(); // of the client
    private GenieClient client;
    private GenieClient other;

    @BeforeAll
    static void start() throws Exception {
        server = Servers.genie(Map.of()).start();
    }

    @AfterAll
    static void stop() {
        server.close();
    }

    @BeforeEach
    void connect() throws Exception {
        client = GenieClient.builder().addresses(server.address()).responseTimeout(Duration.ofSeconds(20)).onEvent(event -> {
            if (event.state() == ConnectionEvent.State.DOWN) {
                lostConnections.incrementAndGet();
            }
        }).connect();
        other = GenieClient.builder().addresses(server.address()).responseTimeout(Duration.ofSeconds(20)).connect();
    }

    @AfterEach
    void nothingIsLeft() throws Exception {
        client.ping(); // the server has executed what was sent before
        Inspection left = other.inspect(InspectQuery.all());
        assertEquals(List.of(), left.holders());
        assertEquals(List.of(), left.queue());
        client.close();
        other.close();
    }

    /** Interrupts a call as soon as its thread waits, and returns what it throws. */
    private static Throwable interrupted(Executable call) throws InterruptedException {
        var thrown = new AtomicReference<Throwable>();
        var thread = new Thread(() -> {
            try {
                call.execute();
            } catch (Throwable e) {
                thrown.set(e);
            }
        });
        thread.start();
        while (thread.getState() != Thread.State.TIMED_WAITING && thread.getState() != Thread.State.WAITING && thread.isAlive()) {
            Thread.onSpinWait();
        }
        thread.interrupt();
        thread.join();
        return thrown.get();
    }

    @Test
    void aCallIsNotBegunByAnInterruptedThread() {
        for (Executable call : List.<Executable>of(() -> client.lock("a"), () -> client.tryLock("a"), () -> client.ping(),
                () -> client.lockAny(AnyOf.target(1).choice("a")), () -> client.inspect(InspectQuery.all()),
                () -> client.transaction(tx -> tx.lock("a")), () -> client.elect("a", LockOptions.of(), lock -> {}),
                () -> client.release(1), () -> client.watch("").next(), () -> GenieClient.builder().addresses(server.address()).connect())) {
            Thread.currentThread().interrupt();
            assertThrows(InterruptedException.class, call);
            assertTrue(!Thread.interrupted());
        }
    }

    @Test
    void aWaitInTheQueue() throws Exception {
        try (Lock held = other.lock("a")) {
            assertEquals(InterruptedException.class, interrupted(() -> client.lock("a")).getClass());
            assertEquals(InterruptedException.class, interrupted(() -> client.transaction(tx -> tx.lock("b", "a"))).getClass());
            assertEquals(InterruptedException.class,
                    interrupted(() -> client.elect("a", LockOptions.of(), lock -> {})).getClass());
            client.ping();
            assertEquals(List.of(), other.inspect(InspectQuery.all().onlyQueue()).queue());
            held.ensureHeld();
        }
    }

    @Test
    void theWorkOfATransactionAndOfALeader() throws Exception {
        assertEquals(InterruptedException.class, interrupted(() -> client.transaction(tx -> {
            tx.lock("a");
            tx.lock("b");
            Thread.sleep(TimeUnit.MINUTES.toMillis(1));
        })).getClass());
        assertEquals(InterruptedException.class, interrupted(() -> client.elect("a", LockOptions.of(), lock -> {
            Thread.sleep(TimeUnit.MINUTES.toMillis(1));
        })).getClass());
    }

    @Test
    void aWatchLosesNoChange() throws Exception {
        try (Watch watch = client.watch("a")) {
            assertEquals("resync", watch.next().state());
            assertEquals(InterruptedException.class, interrupted(watch::next).getClass());
            var isSet = new AtomicBoolean();
            assertEquals(null, interrupted(() -> {
                for (Change change : watch) {
                    throw new AssertionError(change);
                }
                isSet.set(Thread.interrupted());
            }));
            assertTrue(isSet.get());
            other.lock("a").release();
            assertEquals("locked", watch.next().state());
            assertEquals("unlocked", watch.next().state());
        }
    }

    @Test
    void callsWhileTheServerHangs() throws Exception {
        Lock lock = client.lock("a");
        Lock second = client.lock("b");
        server.signal("STOP");
        try {
            for (Executable call : List.<Executable>of(() -> client.lock("c"), () -> client.tryLock("d"), () -> client.ping(),
                    () -> client.lockAny(AnyOf.target(1).choice("e")), () -> client.inspect(InspectQuery.all()),
                    () -> lock.extend(Duration.ofSeconds(9)), () -> client.extend(lock.id(), Duration.ofSeconds(9)),
                    () -> client.release(second.id()), () -> lock.release(), () -> client.transaction(tx -> tx.lock("f")),
                    () -> GenieClient.builder().addresses(server.address()).connect())) {
                assertEquals(InterruptedException.class, interrupted(call).getClass());
            }
            Thread.currentThread().interrupt();
            lock.close(); // does not wait
            assertTrue(Thread.interrupted());
        } finally {
            server.signal("CONT");
        }
    }

    @Test
    void shutdown() throws Exception {
        var own = GenieClient.builder().addresses(server.address()).connect();
        own.lock("a");
        assertEquals(InterruptedException.class, interrupted(() -> own.shutdown(Duration.ofMinutes(1))).getClass());
    }

    /** Interrupts at random moments, at every kind of call. No interrupt ends the connection. */
    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void randomMoments(boolean isVirtual) throws Exception {
        assumeTrue(!isVirtual || Runtime.version().feature() >= 21, "this version of Java has no virtual threads");
        var random = new Random(3);
        var isDone = new AtomicBoolean();
        var contender = CompletableFuture.runAsync(() -> {
            try {
                while (!isDone.get()) {
                    other.lock("a").release();
                }
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
        });
        for (int i = 0; i < ROUNDS; i++) {
            int kind = i % 5;
            var begun = new CountDownLatch(1);
            var failure = new AtomicReference<Throwable>();
            Thread thread = started(isVirtual, () -> {
                begun.countDown();
                try {
                    for (;;) {
                        execute(kind);
                        if (Thread.currentThread().isInterrupted()) {
                            return;
                        }
                    }
                } catch (InterruptedException e) {
                    return;
                } catch (RuntimeException e) {
                    failure.set(e);
                }
            });
            begun.await();
            TimeUnit.MICROSECONDS.sleep(random.nextInt(3000));
            thread.interrupt();
            thread.join();
            assertEquals(null, failure.get());
        }
        isDone.set(true);
        contender.get(20, TimeUnit.SECONDS);
        assertEquals(0, lostConnections.get());
    }

    private static Thread started(boolean isVirtual, Runnable task) throws ReflectiveOperationException {
        if (isVirtual) {
            return (Thread) Thread.class.getMethod("startVirtualThread", Runnable.class).invoke(null, task);
        }
        var thread = new Thread(task);
        thread.start();
        return thread;
    }

    private void execute(int kind) throws InterruptedException {
        switch (kind) {
            case 0 -> {
                try (Lock lock = client.lock("a", "b")) {
                    lock.extend(Duration.ofSeconds(5));
                }
            }
            case 1 -> client.transaction(tx -> {
                tx.lock("b");
                tx.lock("a");
            });
            case 2 -> client.elect("a", LockOptions.of(), Lock::ensureHeld);
            case 3 -> {
                var lock = client.tryLock("a");
                if (lock.isPresent()) {
                    lock.get().release();
                }
            }
            default -> {
                try (Lock lock = client.lockAny(AnyOf.target(1).choice("x").choice("y"))) {
                    lock.ensureHeld();
                }
            }
        }
    }

    @Test
    void cancelledFutures() throws Exception {
        var random = new Random(5);
        for (int i = 0; i < ROUNDS; i++) {
            var future = client.lockAsync("a");
            TimeUnit.MICROSECONDS.sleep(random.nextInt(500));
            if (future.cancel(true)) {
                assertThrows(CancellationException.class, future::join);
            } else {
                future.join().release();
            }
        }
    }

    /** The cancelled request was granted meanwhile: the cancellation releases it. */
    @Test
    void aFutureThatIsCancelledAfterTheGrant() throws Exception {
        for (int i = 0; i < ROUNDS; i++) {
            var future = client.lockAsync("a");
            if (!future.cancel(true)) { // this thread was late
                future.join().release();
            }
            client.ping();
            assertEquals(0, other.inspect(InspectQuery.all()).holdersTotal());
        }
    }
}
