package dev.genielock;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/**
 * Compares the client with a loop that writes and reads the same lines on a socket of its own: lock + release by one thread, and by
 * 64 threads on one connection.
 *
 * <pre>bench [HOST:PORT] [--rounds N] [--seconds S]</pre>
 *
 * <p>Without HOST:PORT it starts a server (GENIE_COMMAND). It prints JSON: cycles per second, as medians of the rounds, and the
 * median of the ratios of the rounds.
 */
public final class Bench {
    private static final int TASKS = 64;
    private static final int WARM_UP_ROUNDS = 6; // until the JIT compiler, which shares the processor, is done

    private Bench() {}

    public static void main(String[] arguments) throws Exception {
        int rounds = 9;
        double seconds = 0.7;
        String address = "";
        for (int i = 0; i < arguments.length; i++) {
            switch (arguments[i]) {
                case "--rounds" -> rounds = Integer.parseInt(arguments[++i]);
                case "--seconds" -> seconds = Double.parseDouble(arguments[++i]);
                default -> address = arguments[i];
            }
        }
        if (address.isEmpty()) {
            try (var server = Servers.genie(Map.of()).start()) {
                run(server.address(), rounds, seconds);
            }
        } else {
            run(address, rounds, seconds);
        }
        System.exit(0);
    }

    private static void run(String address, int rounds, double seconds) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(TASKS);
        try (var client = GenieClient.builder().addresses(address).connect()) {
            var raw = new RawConnection(address);
            List<List<Double>> samples = List.of(new ArrayList<>(), new ArrayList<>(), new ArrayList<>(), new ArrayList<>());
            long length = (long) (seconds * 1e9);
            List<Callable<Integer>> loops = List.of(() -> raw.loop(1, length), () -> loop(client, threads, 1, length),
                    () -> raw.loop(TASKS, length), () -> loop(client, threads, TASKS, length));
            for (int round = -WARM_UP_ROUNDS; round < rounds; round++) {
                for (int i = 0; i < loops.size(); i++) {
                    long start = System.nanoTime();
                    int pairs = loops.get(i).call();
                    if (round >= 0) {
                        samples.get(i).add(pairs * 1e9 / (System.nanoTime() - start));
                    }
                }
            }
            System.out.printf("{\"language\": \"java\", \"runtime\": \"%s\", \"results\": [%s, %s]}%n", System.getProperty("java.version"),
                    compared(1, samples.get(0), samples.get(1)), compared(TASKS, samples.get(2), samples.get(3)));
        }
    }

    private static String compared(int tasks, List<Double> raw, List<Double> client) {
        var ratios = new ArrayList<Double>();
        for (int i = 0; i < raw.size(); i++) {
            ratios.add(client.get(i) / raw.get(i));
        }
        return String.format(java.util.Locale.ROOT, "{\"tasks\": %d, \"raw\": %.1f, \"client\": %.1f, \"ratio\": %.3f}", tasks,
                median(raw), median(client), median(ratios));
    }

    private static double median(List<Double> values) {
        double[] sorted = values.stream().mapToDouble(value -> value).sorted().toArray();
        return sorted[sorted.length / 2];
    }

    /** Locks and releases with the client in a number of threads, and returns the number of pairs. */
    private static int loop(GenieClient client, ExecutorService threads, int tasks, long length) throws Exception {
        long end = System.nanoTime() + length;
        var results = new ArrayList<Future<Integer>>();
        for (int i = 0; i < tasks; i++) {
            String resource = "exclusive:bench/client/" + i;
            results.add(threads.submit(() -> {
                int pairs = 0;
                while (System.nanoTime() < end) {
                    client.lock(resource).release();
                    pairs++;
                }
                return pairs;
            }));
        }
        int pairs = 0;
        for (var result : results) {
            pairs += result.get();
        }
        return pairs;
    }

    /** Writes and reads lines itself. */
    private static final class RawConnection {
        private final InputStream in;
        private final OutputStream out;
        private final StringBuilder output = new StringBuilder();
        private final byte[] buffer = new byte[1 << 16];
        private int from;
        private int end;
        private long ref;

        RawConnection(String address) throws IOException {
            String[] parts = address.split(":");
            var socket = new Socket(InetAddress.getByName(parts[0]), Integer.parseInt(parts[1]));
            socket.setTcpNoDelay(true);
            in = socket.getInputStream();
            out = socket.getOutputStream();
            output.append("{\"command\":\"hello\",\"payload\":{\"protocol\":1,\"quiet\":true,\"session\":\"a-secret-of-the-benchmark\"}}\n");
            flush();
            in.read(buffer);
        }

        private void flush() throws IOException {
            out.write(output.toString().getBytes(StandardCharsets.UTF_8));
            output.setLength(0);
        }

        private void request(Map<String, Integer> tasks, int task) {
            String own = Long.toString(++ref);
            tasks.put(own, task);
            output.append("{\"command\":\"request\",\"payload\":{\"resources\":[\"exclusive:bench/raw/").append(task)
                    .append("\"],\"queueTimeout\":10000,\"transactionTimeout\":10000,\"ref\":\"").append(own).append("\"}}\n");
        }

        /**
         * Keeps a number of locks in flight: each answer is followed by the next command of its task. The commands that follow the
         * answers of one read are written together.
         */
        int loop(int inFlight, long length) throws Exception {
            int pairs = 0;
            int waiting = inFlight;
            var tasks = new HashMap<String, Integer>();
            for (int task = 0; task < inFlight; task++) {
                request(tasks, task);
            }
            long stop = System.nanoTime() + length;
            while (waiting > 0) {
                Map<?, ?> message = next();
                Map<?, ?> payload = (Map<?, ?>) message.get("payload");
                int task = tasks.remove((String) payload.get("ref"));
                if (message.get("command").equals("locked")) {
                    String own = Long.toString(++ref);
                    tasks.put(own, task);
                    output.append("{\"command\":\"release\",\"payload\":{\"id\":").append((long) payload.get("id")).append(",\"ref\":\"")
                            .append(own).append("\"}}\n");
                    continue;
                }
                pairs++;
                if (System.nanoTime() < stop) {
                    request(tasks, task);
                } else {
                    waiting--;
                }
            }
            return pairs;
        }

        private Map<?, ?> next() throws Exception {
            int searched = from;
            for (;;) {
                for (; searched < end; searched++) {
                    if (buffer[searched] == '\n') {
                        int start = from;
                        from = searched + 1;
                        return (Map<?, ?>) Json.decode(buffer, start, searched);
                    }
                }
                searched -= from;
                flush();
                System.arraycopy(buffer, from, buffer, 0, end - from);
                end -= from;
                from = 0;
                end += in.read(buffer, end, buffer.length - end);
            }
        }
    }
}
