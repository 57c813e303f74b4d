package dev.genielock;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.function.Supplier;

/** Calls that return a future. */
final class Async {
    /** The common pool, or new threads if that pool has one only: a task that blocks must not hold up all others. */
    static final Executor EXECUTOR = new CompletableFuture<Void>().defaultExecutor();

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

    /** Sends a call. It is given up after a limit, or when its future is completed otherwise, as by {@code cancel} or {@code orTimeout}. */
    static void submit(Session session, Call call, long limit, CompletableFuture<?> future) {
        session.submitNow(call);
        limit(session, call, limit, future);
    }

    static void limit(Session session, Call call, long limit, CompletableFuture<?> future) {
        Clock.Timer timer = session.clock.schedule(() -> session.giveUp(call).ifPresent(
                failure -> EXECUTOR.execute(() -> future.completeExceptionally(failure))), limit);
        future.whenComplete((value, failure) -> {
            timer.cancel();
            if (call.done.getCount() > 0) session.giveUp(call);
            if (call.isRequest() && value == null) call.lock.drop(false); // it may have been granted meanwhile
        });
    }
}
