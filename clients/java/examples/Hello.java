import dev.genielock.GenieClient;
import dev.genielock.Lock;
import dev.genielock.Resources;

public class Hello {
    public static void main(String[] arguments) throws InterruptedException {
        try (var client = GenieClient.connect();
                Lock lock = client.lock("accounts/2", Resources.shared("rates"))) {
            System.out.println("I hold " + lock.resources());
        }
    }
}
