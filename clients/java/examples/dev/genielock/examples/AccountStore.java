package dev.genielock.examples;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.LongUnaryOperator;

/**
 * A folder with a file for each account: its balance, and the greatest fencing token with which it was read or written. Each read and
 * each write is atomic; a read and a later write are not.
 */
final class AccountStore {
    private static final int MAX_BYTES = 100;

    private final Path folder;
    private final Map<Integer, ReentrantLock> mutexes = new ConcurrentHashMap<>(); // a file is locked for the whole process

    /** The account was used under a newer lock. */
    static final class StaleFenceException extends RuntimeException {
        private static final long serialVersionUID = 1L;
    }

    AccountStore(Path folder) {
        this.folder = folder;
    }

    private Path path(int account) {
        return folder.resolve(Integer.toString(account));
    }

    void create(int account, long balance) throws IOException {
        Files.writeString(path(account), balance + " 0");
    }

    /**
     * Returns the balance. It also raises the stored token: from this read on, the account rejects an earlier clerk that paused for too
     * long, whose write would be lost by the write that follows this read.
     */
    long read(int account, long fence) throws IOException {
        return update(account, fence, balance -> balance);
    }

    void write(int account, long balance, long fence) throws IOException {
        update(account, fence, old -> balance);
    }

    /** Checks the token and changes the account in one atomic step. */
    private long update(int account, long fence, LongUnaryOperator change) throws IOException {
        ReentrantLock mutex = mutexes.computeIfAbsent(account, key -> new ReentrantLock());
        mutex.lock();
        try (var file = FileChannel.open(path(account), StandardOpenOption.READ, StandardOpenOption.WRITE); var held = file.lock()) {
            var buffer = ByteBuffer.allocate(MAX_BYTES);
            file.read(buffer, 0);
            String[] words = new String(buffer.array(), 0, buffer.position(), StandardCharsets.US_ASCII).strip().split(" +");
            if (fence < Long.parseLong(words[1]) || !held.isValid()) {
                throw new StaleFenceException();
            }
            long balance = change.applyAsLong(Long.parseLong(words[0]));
            file.write(ByteBuffer.wrap(String.format("%-20d %-20d", balance, fence).getBytes(StandardCharsets.US_ASCII)), 0);
            return balance;
        } finally {
            mutex.unlock();
        }
    }

    long sum(int accounts) throws IOException {
        long sum = 0;
        for (int account = 0; account < accounts; account++) {
            sum += Long.parseLong(Files.readString(path(account)).strip().split(" +")[0]);
        }
        return sum;
    }
}
