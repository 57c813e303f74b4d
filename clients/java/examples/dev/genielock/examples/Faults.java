package dev.genielock.examples;

import dev.genielock.GenieClient;
import dev.genielock.InspectQuery;
import dev.genielock.Servers;
import dev.genielock.UnavailableException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.file.Files;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Random;
import java.util.Scanner;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Runs the bank while Redis and two servers are killed or suspended for a moment, and while connections between the clerks and the
 * servers become half-open: the server's side is reset, and the clerk's side is silent.
 *
 * <pre>Faults [--seconds S]</pre>
 */
public final class Faults {
    private static final int LEFT_LIMIT_S = 40;

    private Faults() {}

    public static void main(String[] arguments) throws Exception {
        int seconds = arguments.length == 2 ? Integer.parseInt(arguments[1]) : 20;
        var servers = new ArrayList<Servers.Server>();
        boolean isRight;
        try {
            servers.add(Servers.redis(Files.createTempDirectory("redis")).start());
            String url = "redis://" + servers.get(0).address() + "/0";
            var proxies = new ArrayList<Proxy>();
            for (int i = 0; i < 2; i++) {
                var proxy = new Proxy();
                // Followers name the proxy of the leader, so that all connections of the clerks lead through the proxies.
                var server = Servers.genie(Map.of("GENIE_REDIS_URL", url, "GENIE_LEASE", "1", "GENIE_ADVERTISE", proxy.address()));
                proxy.forwardTo(server.port);
                proxies.add(proxy);
                servers.add(server.start());
            }
            isRight = run(seconds, servers, proxies);
        } finally {
            servers.forEach(Servers.Server::close);
        }
        System.exit(isRight ? 0 : 1);
    }

    private static boolean run(int seconds, List<Servers.Server> servers, List<Proxy> proxies) throws Exception {
        String[] direct = {servers.get(1).address(), servers.get(2).address()};
        var observer = new Observer(servers.get(1).port, servers.get(2).port);
        start(observer::run);
        var bank = new ProcessBuilder(ProcessHandle.current().info().command().orElse("java"), "-XX:TieredStopAtLevel=1",
                "-XX:+UseSerialGC", "-cp", System.getProperty("java.class.path"), Bank.class.getName(), "--seconds",
                Integer.toString(seconds)).inheritIO();
        bank.environment().put("GENIE_HOST", proxies.get(0).address() + "," + proxies.get(1).address());
        Process process = bank.start();
        int[] faults = inject(seconds, servers, proxies);
        boolean isRight = process.waitFor() == 0;
        System.out.printf("kills %d, stops %d, half-open connections %d, events watched %d, overlaps %d%n", faults[0], faults[1],
                faults[2], observer.events.get(), observer.overlaps.get());
        boolean isClean = isNothingLeft(direct);
        return isRight && isClean && observer.overlaps.get() == 0 && observer.events.get() > 0 && faults[2] > 0;
    }

    private static void start(Runnable task) {
        var thread = new Thread(task);
        thread.setDaemon(true);
        thread.start();
    }

    /** Injects a fault about every second, and returns the numbers of kills, stops and half-open connections. */
    private static int[] inject(int seconds, List<Servers.Server> servers, List<Proxy> proxies) throws Exception {
        var random = new Random();
        int[] faults = new int[3];
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(seconds);
        for (int n = 0; System.nanoTime() < end; n++) {
            Thread.sleep(500 + random.nextInt(1000));
            var victim = servers.get(random.nextInt(servers.size()));
            if (n % 6 == 1) {
                victim.kill();
                faults[0]++;
                Thread.sleep(random.nextInt(1500));
                victim.start();
            } else if (n % 6 == 4) {
                victim.signal("STOP");
                faults[1]++;
                Thread.sleep(random.nextInt(2500));
                victim.signal("CONT");
            } else {
                faults[2] += halfOpen(proxies, end);
            }
        }
        return faults;
    }

    /** Makes the connections half-open, one of which is that of the leader, as soon as there is one. Returns their number. */
    private static int halfOpen(List<Proxy> proxies, long end) throws Exception {
        int opened = 0;
        while (opened == 0 && System.nanoTime() < end) {
            for (Proxy proxy : proxies) {
                opened += proxy.halfOpen() ? 1 : 0;
            }
            Thread.sleep(20);
        }
        return opened;
    }

    /** Waits until no lock is held. One whose grant was lost with its server may remain for its transaction timeout. */
    private static boolean isNothingLeft(String[] addresses) throws InterruptedException {
        try (var client = GenieClient.builder().addresses(addresses).responseTimeout(Duration.ofSeconds(5)).connect()) {
            long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(LEFT_LIMIT_S);
            while (System.nanoTime() < end) {
                try {
                    var left = client.inspect(InspectQuery.all());
                    if (left.holdersTotal() + left.queueTotal() == 0) {
                        System.out.println("nothing is left");
                        return true;
                    }
                } catch (UnavailableException e) {
                    System.out.println(e.getMessage());
                }
                Thread.sleep(20);
            }
            System.out.println("left: " + client.inspect(InspectQuery.all()));
            return false;
        }
    }

    /** Watches the locks on a connection of its own, without the client, which would hide an overlap. */
    private static final class Observer {
        private static final Pattern LOCK = Pattern.compile(
                "(?:\"state\":\"(locked|unlocked)\",)?\"resource\":\"([^\"]+)\",\"mode\":\"exclusive\",\"id\":(\\d+)(?:,\"transactionName\":\"([^\"]*)\")?");

        private final int[] ports;
        private final AtomicInteger events = new AtomicInteger();
        private final AtomicInteger overlaps = new AtomicInteger();

        Observer(int... ports) {
            this.ports = ports;
        }

        void run() {
            for (int i = 0;; i++) {
                try (var socket = new Socket(InetAddress.getLoopbackAddress(), ports[i % ports.length])) {
                    watch(socket);
                } catch (IOException e) {
                    // the server is down
                }
                try {
                    Thread.sleep(20);
                } catch (InterruptedException e) {
                    return;
                }
            }
        }

        /**
         * Compares the events of one connection: a lock must end before that of another transaction on its resource begins.
         * A transaction may hold two: one of a session that has ended, and one that its client has requested again.
         */
        private void watch(Socket socket) throws IOException {
            socket.getOutputStream().write("{\"command\":\"watch\",\"payload\":{\"prefix\":\"accounts/\"}}\n".getBytes());
            var held = new HashMap<String, Map<String, String>>();
            try (var lines = new Scanner(socket.getInputStream()).useDelimiter("\n")) {
                while (lines.hasNext()) {
                    String line = lines.next();
                    boolean isSnapshot = line.startsWith("{\"command\":\"watching\"");
                    if (!isSnapshot && !line.startsWith("{\"command\":\"event\"") || line.contains("lagged")) {
                        return; // a follower, or events are missing
                    }
                    Matcher lock = LOCK.matcher(line);
                    while (lock.find()) {
                        onLock(isSnapshot ? "watching" : lock.group(1), lock.group(2), lock.group(3),
                                Objects.requireNonNullElse(lock.group(4), ""), held);
                    }
                }
            }
        }

        private void onLock(String state, String resource, String id, String transaction, Map<String, Map<String, String>> held) {
            var transactions = held.computeIfAbsent(resource, name -> new HashMap<>()); // of its locks, by id
            if (state.equals("unlocked")) {
                transactions.remove(id);
                return;
            }
            if (state.equals("locked")) {
                events.incrementAndGet();
                transactions.forEach((other, its) -> {
                    if (!other.equals(id) && (its.isEmpty() || !its.equals(transaction))) {
                        System.out.println(resource + ": " + id + " is locked while " + other + " is held");
                        overlaps.incrementAndGet();
                    }
                });
            }
            transactions.put(id, transaction);
        }
    }

    /** Forwards connections to a server. */
    private static final class Proxy {
        private static final int MAX_SILENCE_MS = 20_000; // for how long the client's side of a half-open connection stays open

        private final ServerSocket listener;
        private int port;
        private final Set<Link> links = ConcurrentHashMap.newKeySet();

        private final class Link {
            private final Socket client;
            private final Socket server;
            private volatile boolean isHalfOpen;

            Link(Socket client, Socket server) {
                this.client = client;
                this.server = server;
            }

            void forward(Socket from, Socket to) {
                try {
                    InputStream in = from.getInputStream();
                    OutputStream out = to.getOutputStream();
                    in.transferTo(out);
                } catch (IOException e) {
                    // the connection has ended
                }
                links.remove(this);
                try {
                    server.close();
                    if (!isHalfOpen) {
                        client.close();
                    }
                } catch (IOException e) {
                    throw new IllegalStateException(e);
                }
            }
        }

        Proxy() throws IOException {
            listener = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
        }

        void forwardTo(int serverPort) {
            port = serverPort;
            start(this::accept);
        }

        String address() {
            return "127.0.0.1:" + listener.getLocalPort();
        }

        private void accept() {
            for (;;) {
                try {
                    Socket client = listener.accept();
                    try {
                        var link = new Link(client, new Socket(InetAddress.getLoopbackAddress(), port));
                        links.add(link);
                        start(() -> link.forward(link.client, link.server));
                        start(() -> link.forward(link.server, link.client));
                    } catch (IOException e) {
                        client.close(); // the server is down
                    }
                } catch (IOException e) {
                    throw new IllegalStateException(e);
                }
            }
        }

        /** Makes a connection half-open, if there is one. */
        boolean halfOpen() throws IOException {
            for (Link link : links) {
                link.isHalfOpen = true;
                links.remove(link);
                link.server.setSoLinger(true, 0); // close resets the connection
                link.server.close();
                start(() -> {
                    try {
                        Thread.sleep(MAX_SILENCE_MS);
                        link.client.close();
                    } catch (IOException | InterruptedException e) {
                        throw new IllegalStateException(e);
                    }
                });
                return true;
            }
            return false;
        }
    }
}
