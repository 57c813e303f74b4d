package genie

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"
)

// limit is a generous limit for anything that must happen.
const limit = 60 * time.Second

// fake is a scripted server: the test accepts its connections, reads its commands and writes its messages.
type fake struct {
	t        testing.TB
	listener net.Listener
	peers    []net.Conn
}

func newFake(t testing.TB) *fake {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return &fake{t: t, listener: listener}
}

func (f *fake) address() string { return f.listener.Addr().String() }

// peer is a connection of the client, as the server sees it.
type peer struct {
	net.Conn
	t     testing.TB
	lines *bufio.Reader
	pings bool // whether `expect` returns pings; otherwise it answers them
}

// close ends all connections, so that a client that is closed does not wait for the answer to `bye`.
func (f *fake) close() {
	f.listener.Close()
	for _, stream := range f.peers {
		stream.Close()
	}
}

func (f *fake) accept() *peer {
	f.t.Helper()
	_ = f.listener.(*net.TCPListener).SetDeadline(time.Now().Add(limit))
	stream, err := f.listener.Accept()
	if err != nil {
		f.t.Fatal(err)
	}
	f.peers = append(f.peers, stream)
	_ = stream.SetDeadline(time.Now().Add(limit))
	return &peer{stream, f.t, bufio.NewReader(stream), false}
}

// handshake accepts a connection and answers `hello` and `ping`; between them come the messages of the resumption.
func (f *fake) handshake(resumed bool, messages ...string) *peer {
	f.t.Helper()
	p := f.accept()
	p.expect("hello")
	p.pings = true
	p.send(fmt.Sprintf(`{"command":"welcome","payload":{"protocol":1,"server":"fake","features":[],"pingInterval":2000,`+
		`"namespace":"genie","resumed":%v,"quiet":true,"ref":"hello"}}`, resumed))
	p.send(messages...)
	p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, p.expect("ping").text("ref")))
	p.pings = false
	return p
}

type received map[string]any

func (p received) text(name string) string { return fmt.Sprint(p[name]) }

// expect reads the next command, which must have this name.
func (p *peer) expect(command string) received {
	p.t.Helper()
	line, err := p.lines.ReadBytes('\n')
	if err != nil {
		p.t.Fatalf("expected %s: %v", command, err)
	}
	var message struct {
		Command string
		Payload received
	}
	if err := json.Unmarshal(line, &message); err != nil {
		p.t.Fatalf("%s: %v", line, err)
	}
	if message.Command == "ping" && !p.pings {
		p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, message.Payload.text("ref")))
		return p.expect(command)
	}
	if message.Command != command {
		p.t.Fatalf("expected %s, got %s", command, line)
	}
	return message.Payload
}

func (p *peer) send(lines ...string) {
	p.t.Helper()
	for _, line := range lines {
		if _, err := p.Write([]byte(line + "\n")); err != nil {
			p.t.Fatal(err)
		}
	}
}

// expectClosed reads until the client closes the connection.
func (p *peer) expectClosed() {
	p.t.Helper()
	for {
		if _, err := p.lines.ReadBytes('\n'); err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				p.t.Fatal("the client did not close the connection")
			}
			return
		}
	}
}

// grant expects a request and grants it.
func (p *peer) grant(id int) received {
	p.t.Helper()
	request := p.expect("request")
	p.send(locked1(id, request.text("ref")))
	return request
}

// confirm expects a release by id and confirms it.
func (p *peer) confirm(id int) {
	p.t.Helper()
	release := p.expect("release")
	if release.text("id") != fmt.Sprint(id) {
		p.t.Fatalf("release %v instead of %d", release, id)
	}
	p.send(released1(id, "success", release.text("ref")))
}

func locked1(id int, ref string) string {
	return fmt.Sprintf(`{"command":"locked","payload":{"id":%d,"fence":%d,"ref":%q}}`, id, id+100, ref)
}

func released1(id int, reason, ref string) string {
	return fmt.Sprintf(`{"command":"released","payload":{"id":%d,"reason":%q,"ref":%q}}`, id, reason, ref)
}

func error1(code, ref string) string {
	return fmt.Sprintf(`{"command":"error","payload":{"code":%q,"message":"as scripted","ref":%q}}`, code, ref)
}

// forTests lets a slow machine answer, and logs nothing.
func forTests(config Config) Config {
	if config.ResponseTimeout == 0 {
		config.ResponseTimeout = limit
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	return config
}

// dial connects to scripted servers in the background; the test scripts the handshake meanwhile.
func dial(t testing.TB, config Config, fakes ...*fake) func() *Client {
	t.Helper()
	for _, f := range fakes {
		config.Addresses = append(config.Addresses, f.address())
	}
	config = forTests(config)
	dialled := start(func() (*Client, error) { return Dial(context.Background(), config) })
	return func() *Client {
		t.Helper()
		client, err := dialled()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			for _, f := range fakes {
				f.close()
			}
			client.Close()
			checkNoGoroutines(t)
		})
		return client
	}
}

// checkNoGoroutines waits until no goroutine of a client runs any more.
func checkNoGoroutines(t testing.TB) {
	t.Helper()
	var stacks string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		stacks = goroutines()
		if !strings.Contains(stacks, "clients/go.(*Client)") && !strings.Contains(stacks, "clients/go.(*conn)") {
			return
		}
	}
	t.Errorf("goroutines are left:\n%s", stacks)
}

// goroutines returns the stacks of all goroutines.
func goroutines() string {
	buffer := make([]byte, 1<<20)
	return string(buffer[:runtime.Stack(buffer, true)])
}

// start runs a function in the background; the result waits for it.
func start[T any](function func() (T, error)) func() (T, error) {
	var value T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		value, err = function()
	}()
	return func() (T, error) {
		select {
		case <-done:
			return value, err
		case <-time.After(limit):
			panic("the call does not return")
		}
	}
}

func acquire(client *Client, resource string, opts ...Option) func() (*Lock, error) {
	return start(func() (*Lock, error) {
		return client.Acquire(context.Background(), []string{resource}, opts...)
	})
}

func release(lock *Lock) func() (bool, error) {
	return start(func() (bool, error) { return true, lock.Release(context.Background()) })
}

// connected connects to a scripted server.
func connected(t testing.TB, config Config) (*fake, *peer, *Client) {
	t.Helper()
	f := newFake(t)
	client := dial(t, config, f)
	p := f.handshake(false)
	return f, p, client()
}

// hold connects and acquires a lock.
func hold(t testing.TB, config Config, opts ...Option) (*fake, *peer, *Client, *Lock) {
	t.Helper()
	f, p, client := connected(t, config)
	acquired := acquire(client, "exclusive:a", opts...)
	p.grant(17)
	lock, err := acquired()
	if err != nil {
		t.Fatal(err)
	}
	return f, p, client, lock
}

func expectError(t testing.TB, err error, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("expected %v, got %v", target, err)
	}
}

func expectDone(t testing.TB, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatal("it is not done")
	}
}

func expectLost(t testing.TB, lock *Lock, reason string) {
	t.Helper()
	if lost, _ := lock.Err().(*LostError); lost == nil || lost.Reason != reason {
		t.Fatal(lock.Err())
	}
}
