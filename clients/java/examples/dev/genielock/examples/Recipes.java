package dev.genielock.examples;

import dev.genielock.GenieClient;
import dev.genielock.Lock;
import dev.genielock.LockLostException;
import dev.genielock.LockOptions;
import dev.genielock.QueueTimeoutException;
import dev.genielock.RejectedException;
import dev.genielock.UnavailableException;
import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Optional;

/** The examples of the README, compiled. */
abstract class Recipes {
    private GenieClient client;
    private Connection connection;
    private long amount;

    @interface Configuration {}

    @interface Bean {
        String destroyMethod();
    }

    @interface Scheduled {
        String cron();
    }

    abstract void transfer(int source, int target, long fence);

    abstract int partnerOf(int account, long fence);

    abstract void report();

    void limited() throws InterruptedException {
        try (Lock lock = client.lock(LockOptions.of().queueTimeout(Duration.ofSeconds(2)), "accounts/2")) {
            transfer(2, 13, lock.fence());
        } catch (QueueTimeoutException e) {
            System.out.println("accounts/2 is locked by " + e.blockers());
        }
    }

    void stepByStep() throws InterruptedException {
        client.transaction(tx -> {
            tx.lock("accounts/2");
            int partner = partnerOf(2, tx.fence());
            tx.lock("accounts/" + partner);
            transfer(2, partner, tx.fence());
        });
    }

    @Configuration
    class Locks {
        @Bean(destroyMethod = "close")
        GenieClient genie() throws InterruptedException {
            return GenieClient.builder().lazy() // the service starts while Genie is away
                    .defaults(LockOptions.of().queueTimeout(Duration.ofSeconds(2)))
                    .connect();
        }
    }

    @Scheduled(cron = "0 0 3 * * *")
    void nightly() throws InterruptedException {
        LockOptions options = LockOptions.of().watchdog().note("nightly report");
        Optional<Lock> lock = client.tryLock(options, "jobs/nightly");
        if (lock.isEmpty()) {
            return; // another machine runs it
        }
        try (Lock held = lock.get()) {
            report();
            held.extend(Duration.ofMinutes(1));
            held.detach(); // the end of the block leaves it alone
        }
    }

    void database() throws SQLException, InterruptedException {
        client.transaction(tx -> {
            tx.lock("accounts/2");
            try (var update = connection.prepareStatement(
                    "UPDATE accounts SET balance = balance - ?, fence = ? WHERE id = ? AND (fence IS NULL OR fence <= ?)")) {
                update.setLong(1, amount);
                update.setLong(2, tx.fence());
                update.setLong(3, 2);
                update.setLong(4, tx.fence());
                if (update.executeUpdate() != 1) {
                    throw new SQLException("another client has used the account under a newer lock");
                }
                tx.ensureHeld();
                connection.commit();
            } finally {
                connection.rollback(); // does nothing after the commit
            }
        });
    }

    void leader() throws InterruptedException {
        while (!Thread.currentThread().isInterrupted()) { // a candidate again after each leadership
            try {
                client.elect("leader/reports", LockOptions.of().releaseOnDisconnect(), lock -> {
                    while (lock.isHeld()) {
                        report();
                    }
                });
            } catch (LockLostException | RejectedException | UnavailableException e) { // rejected, for example, while tokens are exchanged
                System.out.println("not the leader: " + e.getMessage());
                Thread.sleep(1000);
            }
        }
    }
}
