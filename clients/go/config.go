package genie

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	defaultTimeout         = 10 * time.Second // of Config, and of the protocol
	defaultResponseTimeout = time.Second
	defaultHost            = "127.0.0.1"
	defaultPort            = "7077"
	plainPrefix            = "genie://"
	tlsPrefix              = "genies://"
	serviceLinkPrefix      = "tcp://"
	maxNote                = 256 // characters
	maxTokenCalls          = 10  // of TokenSource that run at once
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
	// GENIE_TLS_KEY (the certificate of the client). The files are read for each connection.
	TLS *tls.Config
	// Token authenticates the client. Default: GENIE_TOKEN, or the word in the file GENIE_TOKEN_FILE, which
	// is read for each connection.
	Token string
	// TokenSource, if not nil, is called for the token of each connection, in place of Token.
	TokenSource func(ctx context.Context) (string, error)
	// Namespace of all locks of the client. Default: GENIE_NAMESPACE, or the server's first namespace.
	Namespace string
	// SessionTimeout is how long the server keeps the waiting requests of a client that lost its
	// connection, and its locks with ReleaseOnDisconnect. Default: 10 s.
	SessionTimeout time.Duration
	// ConnectTimeout limits Dial. Default: 10 s.
	ConnectTimeout time.Duration
	// ResponseTimeout limits how long a call waits for a server that does not answer; Acquire: in addition to its
	// queue timeout. Default: 1 s. To ride through a failover, whose lease is 3 s, set it to 5 s or more.
	ResponseTimeout time.Duration
	// Lazy lets Dial return at once: the client connects in the background, and calls fail with
	// ErrUnavailable until it has connected. Otherwise Dial waits for the connection.
	Lazy bool
	// Defaults are the options of every request, which the options of a call override.
	Defaults []Option
	// Logger receives warnings, and with the level debug each connection attempt that failed. Its handler must not
	// use the client. Default: slog.Default().
	Logger *slog.Logger
	// OnEvent, if not nil, is called when the connection changes. It must return soon, and must not use the client.
	OnEvent func(Event)

	dial       func(ctx context.Context, network, address string) (net.Conn, error) // of tests; nil: a net.Dialer's
	lookUpHost func(ctx context.Context, host string) ([]string, error)             // of tests; nil: a net.Resolver's
}

// Event is a change of the connection.
type Event struct {
	State   string // "up"; "leader": also up, but at another server than before; "down"
	Address string // HOST:PORT of the server
	Err     error  // of "down": why
}

// address is the address of a server.
type address struct {
	host, port string
	isSecure   bool // whether the connection uses TLS
}

func (a address) String() string { return net.JoinHostPort(a.host, a.port) }

// setDefaults fills the zero fields from the environment.
func (c *Config) setDefaults() error {
	for timeout, otherwise := range map[*time.Duration]time.Duration{
		&c.SessionTimeout: defaultTimeout, &c.ConnectTimeout: defaultTimeout, &c.ResponseTimeout: defaultResponseTimeout,
	} {
		if *timeout = cmp.Or(*timeout, otherwise); *timeout < time.Millisecond || *timeout > maxTimeout {
			return fmt.Errorf("genie: a timeout must be between 1 ms and %v, not %v", maxTimeout, *timeout)
		}
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.dial == nil {
		c.dial = (&net.Dialer{KeepAlive: tcpKeepAlive}).DialContext
	}
	if c.lookUpHost == nil {
		c.lookUpHost = net.DefaultResolver.LookupHost
	}
	if c.OnEvent == nil {
		c.OnEvent = func(Event) {}
	}
	c.Namespace = cmp.Or(c.Namespace, os.Getenv("GENIE_NAMESPACE"))
	if c.TokenSource != nil {
		c.TokenSource = limitCalls(c.TokenSource)
		return nil
	}
	token := c.Token
	c.TokenSource = func(context.Context) (string, error) { return tokenFrom(token) }
	_, err := tokenFrom(token)
	return err
}

// limitCalls limits how many calls of a source run at once. An attempt to connect does not wait for a source that ignores its context:
// each round would leave a further goroutine behind.
func limitCalls(source func(context.Context) (string, error)) func(context.Context) (string, error) {
	calls := make(chan struct{}, maxTokenCalls)
	return func(ctx context.Context) (string, error) {
		select {
		case calls <- struct{}{}:
		case <-ctx.Done():
			return "", ctx.Err()
		}
		defer func() { <-calls }()
		return source(ctx)
	}
}

// resolve fills the zero fields, checks what each connection will read, and returns the addresses.
func (c *Config) resolve() ([]address, error) {
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	list := cmp.Or(strings.Join(c.Addresses, ","), os.Getenv("GENIE_HOST"))
	texts := strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
	if len(texts) == 0 {
		texts = []string{defaultHost}
	}
	isSecure := c.TLS != nil || strings.Contains(list, tlsPrefix)
	var addresses []address
	for _, text := range texts {
		parsed, err := c.parseAddress(text, isSecure)
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, parsed)
	}
	if isSecure {
		if _, err := c.tlsFor(""); err != nil {
			return nil, err
		}
	}
	return addresses, nil
}

// parseAddress parses an address. isSecure is that of an address without a prefix.
func (c *Config) parseAddress(text string, isSecure bool) (address, error) {
	isSecure = isSecure && !strings.HasPrefix(text, plainPrefix)
	hostPort := strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(text, plainPrefix), tlsPrefix), "/")
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		host, port, err = net.SplitHostPort(hostPort + ":" + c.portFromEnvironment())
	}
	n, invalid := strconv.ParseUint(port, 10, 16)
	if err != nil || invalid != nil || n == 0 || host == "" || strings.ContainsAny(host, "/[]") {
		return address{}, fmt.Errorf("genie: %q: an address is HOST, HOST:PORT or [IPv6]:PORT, with a port from 1 to 65535", text)
	}
	return address{host, port, isSecure}, nil
}

var warnOfServiceLink sync.Once

// portFromEnvironment returns the port of addresses without a port. Kubernetes sets GENIE_PORT to tcp://… beside a Service with
// the name genie: that is not meant for clients.
func (c *Config) portFromEnvironment() string {
	port := os.Getenv("GENIE_PORT")
	if strings.HasPrefix(port, serviceLinkPrefix) {
		warnOfServiceLink.Do(func() {
			c.Logger.Warn("genie: GENIE_PORT is ignored, because it is a service link of Kubernetes", "value", port)
		})
		port = ""
	}
	return cmp.Or(port, defaultPort)
}

// tokenFrom returns the token, or that of the environment.
func tokenFrom(token string) (string, error) {
	path := os.Getenv("GENIE_TOKEN_FILE")
	if token = cmp.Or(token, os.Getenv("GENIE_TOKEN")); token != "" || path == "" {
		return token, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("genie: GENIE_TOKEN_FILE: %w", err)
	}
	words := strings.Fields(string(text))
	if len(words) != 1 {
		return "", fmt.Errorf("genie: GENIE_TOKEN_FILE: %s must contain one word, the token, not %d", path, len(words))
	}
	return words[0], nil
}

// tlsFor returns the TLS configuration of a connection to a host.
func (c *Config) tlsFor(host string) (config *tls.Config, err error) {
	if config = c.TLS.Clone(); config == nil {
		if config, err = tlsFromEnvironment(); err != nil {
			return nil, err
		}
	}
	config.ServerName = cmp.Or(config.ServerName, host)
	return config, nil
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
		pair, err := tls.LoadX509KeyPair(certificate, cmp.Or(key, certificate)) // one file may contain both
		if err != nil {
			return nil, fmt.Errorf("genie: GENIE_TLS_CERT and GENIE_TLS_KEY: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// defaultNote returns PROGRAM PID@HOST, or nothing if that is no valid note.
func defaultNote() string {
	host, _ := os.Hostname()
	note := fmt.Sprintf("%s %d@%s", filepath.Base(os.Args[0]), os.Getpid(), host)
	if len(note) > maxNote || strings.ContainsFunc(note, unicode.IsControl) || !utf8.ValidString(note) {
		return ""
	}
	return note
}
