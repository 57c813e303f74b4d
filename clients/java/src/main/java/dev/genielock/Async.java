package dev.genielock;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ForkJoinPool;
import java.util.function.Supplier;

/** Calls that return a future. */
final class Async {
    private Async() {}

    /** Completes a future with the value of a function, or with its exception. */
    static <T> boolean complete(CompletableFuture<T> future, Supplier<T> result) {
        T value;
        try {
            value = result.get();
        } catch (RuntimeException e) {
            return future.completeExceptionally(e);
        }
        return future.complete(value);
    }

    /** Sends a call. It is given up after a limit, or when its future is cancelled. */
    static void submit(Session session, Call call, long limit, CompletableFuture<?> future) {
        session.submitNow(call);
        limit(session, call, limit, future);
    }

    static void limit(Session session, Call call, long limit, CompletableFuture<?> future) {
        Clock.Timer timer = session.clock.schedule(() -> session.giveUp(call).ifPresent(
                failure -> ForkJoinPool.commonPool().execute(() -> future.completeExceptionally(failure))), limit);
        future.whenComplete((value, failure) -> {
            timer.cancel();
            if (future.isCancelled()) session.giveUp(call);
        });
    }
}
