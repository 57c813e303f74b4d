//go:build go1.25

package genie

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// These tests have a clock of their own, which advances when all goroutines wait. So they measure times exactly, and take none.

// memoryNetwork connects clients with scripted servers by pipes.
type memoryNetwork struct {
	t        testing.TB
	accepted chan *peer
}

func (n *memoryNetwork) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case n.accepted <- &peer{server, n.t, bufio.NewReader(pump(server)), true}:
		return client, nil
	default:
		server.Close()
		return nil, syscall.ECONNREFUSED
	}
}

// pump reads everything at once, as a kernel does, so that the other side never waits in a write.
func pump(from io.Reader) io.Reader {
	to := &pumped{arrived: make(chan []byte, 1000)}
	go func() {
		defer close(to.arrived)
		for {
			buffer := make([]byte, 4096)
			n, err := from.Read(buffer)
			if err != nil {
				return
			}
			to.arrived <- buffer[:n]
		}
	}()
	return to
}

type pumped struct {
	arrived chan []byte
	rest    []byte
}

func (p *pumped) Read(buffer []byte) (int, error) {
	if len(p.rest) == 0 {
		more, open := <-p.arrived
		if !open {
			return 0, io.EOF
		}
		p.rest = more
	}
	n := copy(buffer, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// world runs a test with a clock of its own, and with a client that is connected to a scripted server.
func world(t *testing.T, config Config, test func(t *testing.T, p *peer, client *Client)) {
	synctest.Test(t, func(t *testing.T) {
		network := &memoryNetwork{t, make(chan *peer, 3)}
		config.Addresses, config.dial = []string{"10.0.0.1"}, network.dial
		dialled := start(func() (*Client, error) { return Dial(background, config) })
		p := <-network.accepted
		p.welcome()
		client, err := dialled()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { // also if the test has failed
			p.Close()
			client.Close()
			for len(network.accepted) > 0 {
				(<-network.accepted).Close()
			}
		}()
		test(t, p, client)
	})
}

// welcome answers `hello` and `ping`.
func (p *peer) welcome() {
	p.t.Helper()
	p.expect("hello")
	p.send(`{"command":"welcome","payload":{"protocol":1,"pingInterval":2000,"namespace":"genie","resumed":false,"ref":"hello"}}`)
	p.pong()
}

func (p *peer) pong() {
	p.t.Helper()
	p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, p.expect("ping").text("ref")))
}

func (p *peer) holdBound(client *Client, opts ...Option) *Lock {
	p.t.Helper()
	acquired := acquire(client, "a", append(opts, TransactionTimeout(time.Hour), ReleaseOnDisconnect())...)
	p.grant(17)
	lock, err := acquired()
	if err != nil {
		p.t.Fatal(err)
	}
	return lock
}

func TestALeaseEndsAtAHalfOpenConnection(t *testing.T) {
	for _, c := range []struct{ session, interval time.Duration }{
		{10 * time.Second, 2 * time.Second}, {time.Minute, 2 * time.Second}, {300 * time.Millisecond, 100 * time.Millisecond},
	} {
		t.Run(c.session.String(), func(t *testing.T) {
			world(t, Config{SessionTimeout: c.session}, func(t *testing.T, p *peer, client *Client) {
				lock, renewed := p.holdBound(client), time.Now()
				for i := 0; i < 5; i++ {
					ping := p.expect("ping")
					if passed := time.Since(renewed); passed != c.interval {
						t.Fatal("pinged after", passed)
					}
					renewed = time.Now()
					time.Sleep(c.interval / 2) // the lease counts from the ping, not from its answer
					p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, ping.text("ref")))
				}
				expectDone(t, lock.Context(background))
				if passed := time.Since(renewed); passed != c.session {
					t.Fatal("lost after", passed)
				}
				expectLost(t, lock, reasonDisconnected)
			})
		})
	}
}

func TestMessagesThatAnswerNothingDoNotRenewTheLease(t *testing.T) {
	world(t, Config{}, func(t *testing.T, p *peer, client *Client) {
		lock, renewed := p.holdBound(client), time.Now()
		ctx := lock.Context(background)
		for ctx.Err() == nil {
			p.send(`{"command":"event","payload":{"state":"locked","resource":"t/2","mode":"shared","id":2}}`)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if passed := time.Since(renewed); passed != 10*time.Second {
			t.Fatal("lost after", passed)
		}
		expectLost(t, lock, reasonDisconnected)
	})
}

func TestAClientThatWaitsRenewsItsLease(t *testing.T) {
	world(t, Config{}, func(t *testing.T, p *peer, client *Client) {
		time.Sleep(time.Hour) // without requests there are no pings
		acquired := acquire(client, "a", QueueTimeout(NoTimeout), TransactionTimeout(time.Hour), ReleaseOnDisconnect())
		request, begin := p.expect("request"), time.Now()
		for i := 0; i < 10; i++ {
			p.pong()
		}
		if passed := time.Since(begin); passed > 20*time.Second {
			t.Fatal("10 pings took", passed)
		}
		p.send(locked1(17, request.text("ref")))
		lock, err := acquired()
		if err != nil || lock.Err() != nil {
			t.Fatal(err, lock)
		}
		p.Close()
		expectDone(t, lock.Context(background))
		expectLost(t, lock, reasonDisconnected)
	})
}

func TestALockThatIsNotBoundOutlivesTheLease(t *testing.T) {
	world(t, Config{}, func(t *testing.T, p *peer, client *Client) {
		acquired := acquire(client, "a", TransactionTimeout(time.Hour))
		p.grant(17)
		lock, err := acquired()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour - time.Nanosecond)
		if lock.Err() != nil {
			t.Fatal(lock.Err())
		}
		time.Sleep(time.Nanosecond)
		expectLost(t, lock, reasonTransactionTimeout)
	})
}

func expectLost(t testing.TB, lock *Lock, reason string) {
	t.Helper()
	if lost, _ := lock.Err().(*LostError); lost == nil || lost.Reason != reason {
		t.Fatal(lock.Err())
	}
}
