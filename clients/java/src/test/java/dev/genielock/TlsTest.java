package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.IntStream;
import javax.net.ssl.SSLHandshakeException;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.io.TempDir;

/** TLS with a real server, and certificates of openssl. */
@Timeout(60)
@EnabledIfEnvironmentVariable(named = "GENIE_COMMAND", matches = ".+", disabledReason = "GENIE_COMMAND starts the server")
class TlsTest {
    @TempDir
    private Path folder;

    /** Makes a certificate of 127.0.0.1 that is its own CA, in NAME.pem, with its key in NAME.key. */
    private String certificate(String name, String... key) throws Exception {
        var command = new java.util.ArrayList<>(java.util.List.of("openssl", "req", "-x509", "-nodes", "-days", "1", "-subj", "/CN=" + name,
                "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", name + ".key", "-out", name + ".pem", "-newkey"));
        command.addAll(java.util.List.of(key));
        var process = new ProcessBuilder(command).directory(folder.toFile()).redirectErrorStream(true).start();
        String output = new String(process.getInputStream().readAllBytes());
        assertEquals(0, process.waitFor(), output);
        return folder.resolve(name + ".pem").toString();
    }

    private String key(String name) {
        return folder.resolve(name + ".key").toString();
    }

    private static GenieClient.Builder builder(Servers.Server server, Map<String, String> environment) {
        return new GenieClient.Builder(environment).addresses("genies://" + server.address()).responseTimeout(Duration.ofSeconds(20));
    }

    @Test
    void bothSidesHaveCertificates() throws Exception {
        String own = certificate("own", "rsa:2048");
        String ca = certificate("server", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1");
        var settings = Map.of("GENIE_TLS_CERT", ca, "GENIE_TLS_KEY", key("server"), "GENIE_TLS_CA", own);
        try (var server = Servers.genie(settings).start();
                var client = builder(server, Map.of("GENIE_TLS_CA", ca, "GENIE_TLS_CERT", own, "GENIE_TLS_KEY", key("own"))).connect()) {
            var threads = IntStream.range(0, 8).mapToObj(i -> CompletableFuture.runAsync(() -> {
                try {
                    for (int n = 0; n < 20; n++) {
                        client.lock("a", "b".repeat(500) + n).release();
                    }
                } catch (InterruptedException e) {
                    throw new IllegalStateException(e);
                }
            })).toList();
            for (var thread : threads) {
                thread.get(20, TimeUnit.SECONDS);
            }
            assertEquals(0, client.inspect(InspectQuery.all()).holdersTotal());
            var plain = GenieClient.builder().addresses("genie://" + server.address()).connectTimeout(Duration.ofMillis(200));
            assertThrows(UnavailableException.class, plain::connect);
        }
    }

    @Test
    void theFilesAreReadForEachConnection() throws Exception {
        String wrong = certificate("wrong", "rsa:2048");
        String ca = certificate("server", "rsa:2048");
        var environment = new HashMap<>(Map.of("GENIE_TLS_CA", wrong));
        try (var server = Servers.genie(Map.of("GENIE_TLS_CERT", ca, "GENIE_TLS_KEY", key("server"))).start();
                var client = builder(server, environment).lazy().responseTimeout(Duration.ofMillis(300)).connect()) {
            Throwable cause;
            do { // until the first attempt to connect has failed
                cause = assertThrows(UnavailableException.class, client::ping).getCause();
            } while (!(cause.getCause() instanceof SSLHandshakeException));
            Files.copy(Path.of(ca), Path.of(wrong), StandardCopyOption.REPLACE_EXISTING);
            while (true) {
                try {
                    client.ping();
                    break;
                } catch (UnavailableException e) {
                    continue; // until the next attempt to connect
                }
            }
        }
    }
}
