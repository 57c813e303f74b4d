package dev.genielock;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

class ReadmeTest {
    private static final Path HELLO = Path.of("examples/Hello.java");

    /** Every example of the README is part of a program that is compiled with the tests. */
    @Test
    void theExamplesAreCompiled() throws Exception {
        String recipes = Files.readString(Path.of("examples/dev/genielock/examples/Recipes.java"));
        String compiled = (recipes + Files.readString(HELLO)).replaceAll("(?m)^ +", "");
        var examples = Pattern.compile("```java\n(.*?)```", Pattern.DOTALL).matcher(Files.readString(Path.of("README.md"))).results()
                .map(match -> match.group(1).replaceAll("(?m)^ +", "")).toList();
        assertEquals(7, examples.size());
        for (String example : examples) {
            assertTrue(compiled.contains(example), example);
        }
    }

    @Test
    @EnabledIfEnvironmentVariable(named = "GENIE_COMMAND", matches = ".+", disabledReason = "GENIE_COMMAND starts the server")
    void theFirstProgramPrintsWhatIsShown() throws Exception {
        String classes = Path.of(GenieClient.class.getProtectionDomain().getCodeSource().getLocation().toURI()).toString();
        try (var server = Servers.genie(Map.of()).start()) {
            var builder = new ProcessBuilder("java", "-cp", classes, HELLO.toString()).redirectErrorStream(true);
            builder.environment().keySet().removeIf(name -> name.startsWith("GENIE_"));
            builder.environment().put("GENIE_HOST", server.address());
            var program = builder.start();
            String printed = new String(program.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
            assertEquals(0, program.waitFor(), printed);
            assertTrue(Files.readString(Path.of("README.md")).contains("```text\n" + printed + "```\n"), printed);
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
