package genie

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	defaultTimeout = 10 * time.Second // of Config, and of the protocol
	defaultHost    = "127.0.0.1"
	defaultPort    = "7077"
	plainPrefix    = "genie://"
	tlsPrefix      = "genies://"
)

// Config says where the servers are and how to connect to them. The environment replaces fields that
// are zero, so Config{} connects to the servers at GENIE_HOST, or to 127.0.0.1:7077.
type Config struct {
	// Addresses are the servers: HOST, HOST:PORT or [IPv6]:PORT. The prefix genies:// selects TLS, also
	// for the addresses without a prefix; genie:// selects a plain connection. Without Addresses:
	// GENIE_HOST, separated by commas. Addresses without a port have the port GENIE_PORT, or 7077.
	Addresses []string
	// TLS selects TLS for all addresses without the prefix genie://. Without TLS, the prefix genies://
	// uses GENIE_TLS_CA (trusted certificates; otherwise those of the system), GENIE_TLS_CERT and
	// GENIE_TLS_KEY (the certificate of the client).
	TLS *tls.Config
	// Token authenticates the client. Default: GENIE_TOKEN, or the word in the file GENIE_TOKEN_FILE.
	Token string
	// Namespace of all locks of the client. Default: GENIE_NAMESPACE, or the server's first namespace.
	Namespace string
	// SessionTimeout is how long the server keeps the waiting requests of a client that lost its
	// connection, and its locks with ReleaseOnDisconnect. Default: 10 s.
	SessionTimeout time.Duration
	// ConnectTimeout limits Dial, and how long a call waits for a server that does not answer (Acquire:
	// in addition to its queue timeout). Default: 10 s. A time below 4 s also shortens the times after
	// which a server that sends nothing is pinged and then given up.
	ConnectTimeout time.Duration
	// Logf, if not nil, receives a line for each lost connection and each unexpected message. It must not
	// use the client.
	Logf func(format string, arguments ...any)

	dial func(ctx context.Context, network, address string) (net.Conn, error) // of tests; nil: a net.Dialer's
}

// address is the address of a server. tls is nil for a plain connection.
type address struct {
	hostPort string
	tls      *tls.Config
}

// resolve fills the zero fields from the environment, and returns the addresses.
func (c *Config) resolve() ([]address, error) {
	for _, timeout := range []*time.Duration{&c.SessionTimeout, &c.ConnectTimeout} {
		if *timeout == 0 {
			*timeout = defaultTimeout
		}
		if *timeout < time.Millisecond || *timeout > maxTimeout {
			return nil, fmt.Errorf("genie: a timeout must be between 1 ms and %v, not %v", maxTimeout, *timeout)
		}
	}
	if c.Logf == nil {
		c.Logf = func(string, ...any) {}
	}
	c.Namespace = firstOf(c.Namespace, os.Getenv("GENIE_NAMESPACE"))
	c.Token = firstOf(c.Token, os.Getenv("GENIE_TOKEN"))
	if path := os.Getenv("GENIE_TOKEN_FILE"); c.Token == "" && path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("genie: GENIE_TOKEN_FILE: %w", err)
		}
		words := strings.Fields(string(text))
		if len(words) != 1 {
			return nil, fmt.Errorf("genie: GENIE_TOKEN_FILE: %s must contain one word, the token, not %d", path, len(words))
		}
		c.Token = words[0]
	}
	list := firstOf(strings.Join(c.Addresses, ","), os.Getenv("GENIE_HOST"))
	texts := strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
	if len(texts) == 0 {
		texts = []string{defaultHost}
	}
	port := firstOf(os.Getenv("GENIE_PORT"), defaultPort)
	config := c.TLS
	if config == nil && strings.Contains(list, tlsPrefix) {
		var err error
		if config, err = tlsFromEnvironment(); err != nil {
			return nil, err
		}
	}
	var addresses []address
	for _, text := range texts {
		parsed, err := parseAddress(text, port, config)
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, parsed)
	}
	return addresses, nil
}

// parseAddress parses an address. port and config are those of an address without a port and without a prefix.
func parseAddress(text, port string, config *tls.Config) (address, error) {
	if strings.HasPrefix(text, plainPrefix) {
		config = nil
	}
	hostPort := strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(text, plainPrefix), tlsPrefix), "/")
	host, number, err := net.SplitHostPort(hostPort)
	if err != nil {
		host, number, err = net.SplitHostPort(hostPort + ":" + port)
	}
	n, invalid := strconv.ParseUint(number, 10, 16)
	if err != nil || invalid != nil || n == 0 || host == "" || strings.ContainsAny(host, "/[]") {
		return address{}, fmt.Errorf("genie: %q: an address is HOST, HOST:PORT or [IPv6]:PORT, with a port from 1 to 65535", text)
	}
	return address{net.JoinHostPort(host, number), config}, nil
}

func tlsFromEnvironment() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	ca, certificate, key := os.Getenv("GENIE_TLS_CA"), os.Getenv("GENIE_TLS_CERT"), os.Getenv("GENIE_TLS_KEY")
	if ca != "" {
		text, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("genie: GENIE_TLS_CA: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("genie: GENIE_TLS_CA: %s contains no certificate", ca)
		}
	}
	if certificate != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(certificate, firstOf(key, certificate)) // one file may contain both
		if err != nil {
			return nil, fmt.Errorf("genie: GENIE_TLS_CERT and GENIE_TLS_KEY: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// firstOf returns the first text that is not empty.
func firstOf(texts ...string) string {
	for _, text := range texts {
		if text != "" {
			return text
		}
	}
	return ""
}
