package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class JsonTest {
    private static Object decode(String text) throws IOException {
        byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
        return Json.decode(bytes, 0, bytes.length);
    }

    private static String encode(Object value) {
        var text = new StringBuilder();
        Json.encode(value, text);
        return text.toString();
    }

    @Test
    void valuesOfTheProtocol() throws Exception {
        assertEquals(Map.of("a", 1L, "b", List.of(true, false, "x"), "c", 0.5), decode(" {\"a\": 1, \"b\":[true,false,\"x\"],\"c\":5e-1}\r"));
        assertEquals(9_007_199_254_740_991L, decode("9007199254740991"));
        assertEquals(new BigInteger("-1000000000000000000000"), decode("-1000000000000000000000"));
        assertEquals("ä€😀\"\\/\b\f\n\r\t", decode("\"ä€😀\\\"\\\\\\/\\b\\f\\n\\r\\t\""));
        assertEquals("😀é", decode("\"\\ud83d\\uDE00\\u00e9\""));
        assertEquals("{\"a\":[1,0.5,10,null,\"\\u0001\\\"\\\\é\"]}", encode(Map.of("a", java.util.Arrays.asList(1L, 0.5, 10.0, null, "\u0001\"\\é"))));
    }

    @ParameterizedTest
    @ValueSource(strings = {"", "{", "[1,]", "{\"a\":}", "{a:1}", "{\"a\" 1}", "\"a", "\"\\x\"", "\"\\u12g4\"", "01", "-", "1.", "1e",
        "tru", "NaN", "1 2", "\"\u0001\"", "[1", "{\"a\":1,}", "+1", ".5", "'a'"})
    void invalidTexts(String text) {
        assertThrows(IOException.class, () -> decode(text));
    }

    @Test
    void invalidUtf8() {
        for (int[] bytes : new int[][] {{'"', 0xff, '"'}, {'"', 0xc3, '"'}, {'"', 0xed, 0xa0, 0x80, '"'}, {'"', 0xc0, 0x80, '"'}}) {
            byte[] text = new byte[bytes.length];
            for (int i = 0; i < bytes.length; i++) {
                text[i] = (byte) bytes[i];
            }
            assertThrows(IOException.class, () -> Json.decode(text, 0, text.length));
        }
    }

    @Test
    void boundsOfDepthAndOfNumbers() throws Exception {
        decode("[".repeat(32) + "]".repeat(32));
        assertThrows(IOException.class, () -> decode("[".repeat(33) + "]".repeat(33)));
        assertThrows(IOException.class, () -> decode("[".repeat(2_000_000)));
        assertThrows(IOException.class, () -> decode("9".repeat(401)));
    }

    @Test
    void textsThatAreNotUnicodeAreNotSent() {
        for (String text : List.of("\ud800", "\udc00", "a\ud800b")) {
            assertEquals("bad-request", assertThrows(RejectedException.class, () -> encode(text)).code());
        }
    }

    @Test
    void whatIsEncodedIsDecoded() throws Exception {
        var random = new Random(7);
        for (int i = 0; i < 20_000; i++) {
            Object value = randomValue(random, 4);
            assertEquals(value, decode(encode(value)));
        }
    }

    /** Any bytes are decoded or rejected: there is no other exception. */
    @Test
    void damagedTextsAreDecodedOrRejected() throws Exception {
        var random = new Random(11);
        int rejected = 0;
        for (int i = 0; i < 100_000; i++) {
            byte[] text = encode(randomValue(random, 4)).getBytes(StandardCharsets.UTF_8);
            for (int change = random.nextInt(3); change >= 0 && text.length > 0; change--) {
                text[random.nextInt(text.length)] = random.nextBoolean() ? (byte) random.nextInt(256)
                        : (byte) "{}[]\",:\\0-.e".charAt(random.nextInt(13 - 1));
            }
            try {
                Json.decode(text, 0, random.nextBoolean() ? text.length : random.nextInt(text.length + 1));
            } catch (IOException e) {
                rejected++;
            }
        }
        assertTrue(rejected > 10_000, "rejected " + rejected);
    }

    private static Object randomValue(Random random, int depth) {
        switch (random.nextInt(depth > 0 ? 8 : 6)) {
            case 0:
                return random.nextLong() >> random.nextInt(64);
            case 1:
                return new BigInteger(100 + random.nextInt(200), random).setBit(99);
            case 2:
                return random.nextInt() + 0.5;
            case 3:
                return random.nextBoolean();
            case 4, 5:
                return randomText(random);
            case 6:
                var list = new ArrayList<Object>();
                for (int i = random.nextInt(4); i > 0; i--) {
                    list.add(randomValue(random, depth - 1));
                }
                return list;
            default:
                var map = new HashMap<String, Object>();
                for (int i = random.nextInt(4); i > 0; i--) {
                    map.put(randomText(random), randomValue(random, depth - 1));
                }
                return map;
        }
    }

    private static String randomText(Random random) {
        int[] greatest = {0x7f, 0xff, 0x7ff, 0xffff, 0x10ffff};
        var text = new StringBuilder();
        for (int i = random.nextInt(8); i > 0; i--) {
            int point = random.nextInt(greatest[random.nextInt(greatest.length)] + 1);
            text.appendCodePoint(point >= 0xd800 && point < 0xe000 ? 'x' : point);
        }
        return text.toString();
    }
}
