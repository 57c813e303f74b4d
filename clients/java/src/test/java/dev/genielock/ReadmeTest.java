package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;

class ReadmeTest {
    /** Every example of the README is part of a program that is compiled with the tests. */
    @Test
    void theExamplesAreCompiled() throws Exception {
        String compiled = Files.readString(Path.of("examples/dev/genielock/examples/Recipes.java")).replaceAll("(?m)^ +", "");
        var examples = Pattern.compile("```java\n(.*?)```", Pattern.DOTALL).matcher(Files.readString(Path.of("README.md"))).results()
                .map(match -> match.group(1).replaceAll("(?m)^ +", "")).toList();
        assertEquals(7, examples.size());
        for (String example : examples) {
            assertTrue(compiled.contains(example), example);
        }
    }

    @Test
    void theArchiveContainsItsLicense() throws Exception {
        String archive = GenieClient.class.getProtectionDomain().getCodeSource().getLocation().toString();
        var license = GenieClient.class.getResource("/META-INF/LICENSE");
        assertTrue(license.toString().contains(archive), license.toString());
        try (var stream = license.openStream()) {
            assertEquals(Files.readString(Path.of("LICENSE")), new String(stream.readAllBytes(), StandardCharsets.UTF_8));
        }
    }
}
