package dev.genielock;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Base64;
import java.util.Collection;
import java.util.Map;
import java.util.regex.MatchResult;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import javax.net.ssl.KeyManager;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManager;
import javax.net.ssl.TrustManagerFactory;

/** Reads the files of {@code GENIE_TLS_CA}, {@code GENIE_TLS_CERT} and {@code GENIE_TLS_KEY}. */
final class Tls {
    private static final Pattern CERTIFICATE = Pattern.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", Pattern.DOTALL);
    private static final Pattern KEY = Pattern.compile("-----BEGIN PRIVATE KEY-----(.*?)-----END PRIVATE KEY-----", Pattern.DOTALL);

    private Tls() {}

    static SSLContext context(Map<String, String> environment) {
        String ca = environment.getOrDefault("GENIE_TLS_CA", "");
        String certificate = environment.getOrDefault("GENIE_TLS_CERT", "");
        String key = environment.getOrDefault("GENIE_TLS_KEY", "");
        try {
            var context = SSLContext.getInstance("TLS");
            context.init(certificate.isEmpty() && key.isEmpty() ? null : keyManagers(certificate, key.isEmpty() ? certificate : key),
                    ca.isEmpty() ? null : trustManagers(ca), null);
            return context;
        } catch (IOException | GeneralSecurityException e) {
            throw new IllegalArgumentException("GENIE_TLS_CA, GENIE_TLS_CERT and GENIE_TLS_KEY: " + e, e);
        }
    }

    private static TrustManager[] trustManagers(String ca) throws IOException, GeneralSecurityException {
        var store = emptyStore();
        for (var certificate : certificates(ca)) store.setCertificateEntry("ca" + store.size(), certificate);
        var factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        factory.init(store);
        return factory.getTrustManagers();
    }

    private static KeyManager[] keyManagers(String certificate, String key) throws IOException, GeneralSecurityException {
        var store = emptyStore();
        var chain = certificates(certificate).toArray(Certificate[]::new);
        store.setKeyEntry("own", privateKey(key, chain[0].getPublicKey().getAlgorithm()), new char[0], chain);
        var factory = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
        factory.init(store, new char[0]);
        return factory.getKeyManagers();
    }

    private static KeyStore emptyStore() throws IOException, GeneralSecurityException {
        var store = KeyStore.getInstance("PKCS12");
        store.load(null, null);
        return store;
    }

    private static Collection<? extends Certificate> certificates(String path) throws IOException, GeneralSecurityException {
        var match = CERTIFICATE.matcher(Files.readString(Path.of(path)));
        String texts = match.results().map(MatchResult::group).collect(Collectors.joining("\n"));
        if (texts.isEmpty()) throw new GeneralSecurityException(path + " contains no certificate");
        return CertificateFactory.getInstance("X.509").generateCertificates(new ByteArrayInputStream(texts.getBytes()));
    }

    private static PrivateKey privateKey(String path, String algorithm) throws IOException, GeneralSecurityException {
        var match = KEY.matcher(Files.readString(Path.of(path)));
        if (!match.find()) {
            throw new GeneralSecurityException(path + " contains no key in the format PKCS #8; convert it with openssl pkcs8 -topk8 -nocrypt");
        }
        var encoded = new PKCS8EncodedKeySpec(Base64.getMimeDecoder().decode(match.group(1)));
        return KeyFactory.getInstance(algorithm).generatePrivate(encoded);
    }
}
