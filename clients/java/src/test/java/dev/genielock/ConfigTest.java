package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class ConfigTest {
    private static GenieClient.Builder builder(Map<String, String> environment) {
        return new GenieClient.Builder(environment);
    }

    private static Config config(GenieClient.Builder builder) {
        return Config.of(builder, new FakeClock());
    }

    private static List<String> addresses(Map<String, String> environment, String... given) {
        var config = config(builder(environment).addresses(given));
        return config.addresses().stream().map(address -> (address.isSecure() ? "tls " : "") + address).toList();
    }

    @Test
    void addressesAndTheirDefaults() {
        assertEquals(List.of("127.0.0.1:7077"), addresses(Map.of()));
        assertEquals(List.of("a:1", "b:9", "[::1]:9"), addresses(Map.of("GENIE_HOST", "a:1, b,[::1]", "GENIE_PORT", "9")));
        assertEquals(List.of("c:7077"), addresses(Map.of("GENIE_HOST", "a"), "c"));
        assertEquals(List.of("tls a:7077", "tls b:7077", "c:7077"), addresses(Map.of(), "genies://a/", "b", "genie://c"));
        assertEquals(List.of("a:7077"), addresses(Map.of("GENIE_PORT", "tcp://10.0.0.1:7077"), "a"));
    }

    @ParameterizedTest
    @ValueSource(strings = {"a:0", "a:65536", "a:x", ":1", "[::1", "::1", "a/b", "http://a"})
    void invalidAddresses(String address) {
        assertThrows(IllegalArgumentException.class, () -> addresses(Map.of(), address));
    }

    /** Otherwise a thread of the client would fail later. */
    @Test
    void nullIsRejectedAtOnce() {
        var builder = builder(Map.of());
        assertThrows(NullPointerException.class, () -> builder.token(null));
        assertThrows(NullPointerException.class, () -> builder.namespace(null));
        assertThrows(NullPointerException.class, () -> builder.defaults(null));
        assertThrows(NullPointerException.class, () -> builder.logger(null));
        assertThrows(NullPointerException.class, () -> builder.onEvent(null));
    }

    @Test
    void aLeaderDoesNotTurnTlsOff() {
        assertTrue(Config.Address.parseLeader("b:7077", true).isSecure());
        for (String leader : List.of("genie://b:7077", "b", "b:")) {
            assertThrows(IllegalArgumentException.class, () -> Config.Address.parseLeader(leader, true));
        }
    }

    @Test
    void theTokenOfAFileIsReadAgain(@TempDir Path folder) throws Exception {
        Path file = Files.writeString(folder.resolve("token"), "one\n");
        var config = config(builder(Map.of("GENIE_TOKEN_FILE", file.toString())));
        assertEquals("one", config.token().get());
        Files.writeString(file, "two");
        assertEquals("two", config.token().get());
        Files.writeString(file, "two words");
        assertThrows(IllegalArgumentException.class, () -> config.token().get());
    }

    @Test
    void invalidSettings(@TempDir Path folder) throws Exception {
        Path empty = Files.writeString(folder.resolve("empty.pem"), "");
        assertThrows(IllegalArgumentException.class, () -> addresses(Map.of("GENIE_TLS_CA", empty.toString()), "genies://a"));
        assertThrows(IllegalArgumentException.class, () -> addresses(Map.of("GENIE_TOKEN_FILE", folder.resolve("none").toString())));
        for (Duration timeout : List.of(Duration.ZERO, Duration.ofMillis(-1), Duration.ofDays(100))) {
            assertThrows(IllegalArgumentException.class, () -> GenieClient.builder().sessionTimeout(timeout));
        }
        assertThrows(IllegalArgumentException.class, () -> LockOptions.of().queueTimeout(Duration.ofMillis(-1)));
        assertThrows(NullPointerException.class, () -> LockOptions.of().note(null));
        assertThrows(IllegalArgumentException.class, () -> LockOptions.of().attempts(0));
    }

    @Test
    void theDefaultNoteNamesTheProcess() {
        var config = config(builder(Map.of("HOSTNAME", "host-7")));
        assertTrue(config.note().endsWith(" " + ProcessHandle.current().pid() + "@host-7"), config.note());
        var named = config(builder(Map.of()).defaults(LockOptions.of().note("me")));
        assertEquals("me", named.note());
        assertEquals("", named.defaults().note()); // hello says it
    }
}
