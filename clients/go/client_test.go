package genie

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

var background = context.Background()

func TestLockAndRelease(t *testing.T) {
	_, p, _, lock := hold(t, Config{}, Transaction("t-1"), Note("why \"x\""), Priority(3), ReleaseOnDisconnect(),
		QueueTimeout(1500*time.Microsecond), TransactionTimeout(time.Hour))
	if lock.ID() != 17 || lock.Fence() != 117 || lock.Resources()[0] != "exclusive:a" || lock.Err() != nil {
		t.Fatal(lock.ID(), lock.Fence(), lock.Resources(), lock.Err())
	}
	ctx, cancel := lock.Context(background)
	defer cancel()
	released := release(lock)
	p.confirm(17)
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
	expectDone(t, ctx.Done())
	expectError(t, lock.Err(), ErrReleased)
	if err := lock.Release(background); err != nil {
		t.Fatal("a second release is not nothing:", err)
	}
	expectError(t, lock.Extend(background, time.Second), ErrReleased)
}

func TestEncodedCommands(t *testing.T) {
	prefix := ""
	for _, c := range []struct {
		name     string
		fields   fields
		expected string
	}{
		{"request", fields{
			Ref: "5", Resources: []string{"exclusive:a\"", "shared:é"}, QueueTimeout: toMS(1500 * time.Microsecond),
			TransactionTimeout: toMS(NoTimeout), Priority: -2, Transaction: "t", OnDisconnect: "release", Note: "n\n",
		}, `{"command":"request","payload":{"ref":"5","resources":["exclusive:a\"","shared:é"],"queueTimeout":1.5,` +
			`"transactionTimeout":2147483647,"transactionName":"t","priority":-2,"onDisconnect":"release","note":"n\n"}}`},
		{"request", fields{Ref: "6", Resources: []string{"a"}, QueueTimeout: toMS(0)},
			`{"command":"request","payload":{"ref":"6","resources":["a"],"queueTimeout":0}}`},
		{"release", fields{Ref: "7", ID: 17}, `{"command":"release","payload":{"ref":"7","id":17}}`},
		{"release", fields{Ref: "7"}, `{"command":"release","payload":{"ref":"7"}}`},
		{"watch", fields{Ref: "9", Prefix: &prefix}, `{"command":"watch","payload":{"ref":"9","prefix":""}}`},
		{"bye", fields{Ref: "9"}, `{"command":"bye","payload":{"ref":"9"}}`},
	} {
		if line := encode(c.name, &c.fields); string(line) != c.expected+"\n" {
			t.Errorf("%sinstead of\n%s", line, c.expected)
		}
	}
}

func TestErrorsOfRequests(t *testing.T) {
	_, p, client := connected(t, Config{})
	fail := func(message string) error {
		t.Helper()
		acquired := acquire(client, "exclusive:a")
		p.send(strings.Replace(message, "REF", p.expect("request").text("ref"), 1))
		lock, err := acquired()
		if lock != nil || err == nil {
			t.Fatal("no error")
		}
		return err
	}
	err := fail(`{"command":"released","payload":{"id":17,"reason":"queue-timeout","waited":1500,"blockers":[` +
		`{"id":3,"resource":"a","mode":"exclusive","state":"held","since":1790000000000,"transactionName":"t","note":"n"}],` +
		`"blockersTotal":4,"ref":"REF"}}`)
	var timeout *QueueTimeoutError
	if !errors.Is(err, ErrQueueTimeout) || !errors.As(err, &timeout) || timeout.Blockers[0].Transaction != "t" ||
		timeout.BlockersTotal != 4 || timeout.Waited != 1500*time.Millisecond || timeout.Blockers[0].Since.Year() != 2026 {
		t.Error(err)
	}
	if text := `genie: request 17 was not granted within 1.5s: 3 of "t" (n) holds exclusive:a and 3 more`; err.Error() != text {
		t.Error(err)
	}
	err = fail(`{"command":"released","payload":{"id":17,"reason":"deadlock","cycle":["t1","t2"],` +
		`"waits":[{"resource":"a","waiter":17,"holder":3}],"ref":"REF"}}`)
	var deadlock *DeadlockError
	if !errors.Is(err, ErrDeadlock) || !errors.As(err, &deadlock) || deadlock.Cycle[1] != "t2" || deadlock.Waits[0].Holder != 3 ||
		!strings.Contains(err.Error(), "t1 → t2 → t1") {
		t.Error(err)
	}
	err = fail(`{"command":"released","payload":{"id":17,"reason":"deadlock","cycle":["t","u"],"waits":[` +
		`{"resource":"licences/cad","waiter":17,"holder":3,"units":2,"of":10},` +
		`{"resource":"accounts/**","waiter":4,"holder":5}],"ref":"REF"}}`)
	text := "genie: request 17 would deadlock: t would wait for 2/10:licences/cad of u, which waits for accounts/** of t"
	if err.Error() != text {
		t.Error(err)
	}
	err = fail(`{"command":"released","payload":{"id":17,"reason":"insufficient","free":"20000000000000000000","locked":5,"ref":"REF"}}`)
	var insufficient *InsufficientError
	if !errors.Is(err, ErrInsufficient) || !errors.As(err, &insufficient) || insufficient.Locked.Int64() != 5 ||
		insufficient.Free.String() != "20000000000000000000" {
		t.Error(err)
	}
	var ended *EndedError
	if err := fail(released1(17, "a-new-reason", "REF")); !errors.As(err, &ended) || ended.Reason != "a-new-reason" {
		t.Error(err)
	}
	var rejected *RejectedError
	if err := fail(error1("a-new-code", "REF")); !errors.As(err, &rejected) || rejected.Code != "a-new-code" {
		t.Error(err)
	}
	expectError(t, fail(released1(17, "transaction-timeout", "REF")), ErrTransactionTimeout)
}

func TestArgumentsThatTheServerCouldNotAnswer(t *testing.T) {
	_, _, client := connected(t, Config{})
	for _, resources := range [][]string{{"a\xff"}, {strings.Repeat("a", 1<<20)}} {
		var rejected *RejectedError
		if _, err := client.Acquire(background, resources); !errors.As(err, &rejected) {
			t.Errorf("%.20q: %v", resources, err)
		}
	}
	if _, err := client.Watch("a\xff"); err == nil {
		t.Error("a prefix that is not UTF-8 is accepted")
	}
}

func TestUnknownMessagesAreIgnored(t *testing.T) {
	_, p, client := connected(t, Config{})
	acquired := acquire(client, "a")
	ref := p.expect("request").text("ref")
	p.send(`{"command":"news","payload":{"id":"x","ref":[]},"more":1}`, "", `{"command":"pong","payload":{"ref":"strange"}}`,
		fmt.Sprintf(`{"more":{},"payload":{"more":[{}],"ref":%q,"fence":9,"id":17},"command":"locked"}`, ref))
	lock, err := acquired()
	if err != nil || lock.Fence() != 9 {
		t.Fatal(err)
	}
}

func TestAnUnknownLockIsReleased(t *testing.T) {
	_, p, client := connected(t, Config{})
	p.send(locked1(99, "404"))
	p.confirm(99)
	_ = client
}

func TestAServerThatSendsManyUnknownLocksAndAnswersNoReleaseIsLeft(t *testing.T) {
	f, p, client := connected(t, Config{})
	for id := 1; id <= 2*maxUnknownLocks; id++ { // without end if the server answers
		p.send(locked1(id, "404"))
		p.confirm(id)
	}
	for id := 1; id <= maxUnknownLocks+1; id++ {
		p.send(locked1(id, "404"))
	}
	p.expectClosed()
	p = f.handshake(true)
	for range maxUnknownLocks { // the releases are repeated, and no others are added
		p.expect("release")
	}
	p.send(locked1(1, "404"))
	p.expectClosed()
	client.mu.Lock()
	defer client.mu.Unlock()
	if len(client.calls) != maxUnknownLocks || client.unknownLocks != maxUnknownLocks {
		t.Error(len(client.calls), client.unknownLocks)
	}
}

func TestALockIsLost(t *testing.T) {
	for reason, target := range map[string]error{
		"transaction-timeout": ErrTransactionTimeout, "success": ErrLockLost, "disconnected": ErrLockLost, "new": ErrLockLost,
	} {
		t.Run(reason, func(t *testing.T) {
			_, p, _, lock := hold(t, Config{})
			p.send(released1(17, reason, "1"))
			expectDone(t, lock.Done())
			expectError(t, lock.Err(), target)
			expectError(t, lock.Release(background), target)
			expectError(t, lock.Extend(background, time.Second), ErrLockLost)
			var lost *LostError
			if !errors.As(lock.Err(), &lost) || lost.Reason != reason || errors.Is(lock.Err(), ErrTransactionTimeout) != (reason == "transaction-timeout") {
				t.Error(lock.Err())
			}
		})
	}
}

func TestALockExpiresByTheClientsClock(t *testing.T) {
	_, p, _, lock := hold(t, Config{}, TransactionTimeout(100*time.Millisecond))
	expectDone(t, lock.Done())
	expectError(t, lock.Err(), ErrTransactionTimeout)
	released := release(lock) // the server may hold the lock for a moment
	p.confirm(17)
	_, err := released()
	expectError(t, err, ErrTransactionTimeout)
}

func TestErrReadsTheClock(t *testing.T) {
	_, _, client, lock := hold(t, Config{})
	client.mu.Lock()
	lock.expiresAt = time.Now() // the timer is set for later
	client.mu.Unlock()
	expectError(t, lock.Err(), ErrTransactionTimeout)
}

// age makes everything that the client has sent older.
func age(client *Client, d time.Duration) {
	client.mu.Lock()
	defer client.mu.Unlock()
	client.conn.helloAt = client.conn.helloAt.Add(-d)
	for _, r := range client.calls {
		r.sentAt = r.sentAt.Add(-d)
	}
}

func expiry(lock *Lock) time.Time {
	lock.client.mu.Lock()
	defer lock.client.mu.Unlock()
	return lock.expiresAt
}

func TestTheTimeoutCountsFromACommandOfTheClient(t *testing.T) {
	f, p, client := connected(t, Config{})
	wait := func(d time.Duration) (string, func() (*Lock, error)) {
		acquired := acquire(client, "a", TransactionTimeout(time.Hour))
		ref := p.expect("request").text("ref")
		age(client, d)
		return ref, acquired
	}
	expect := func(acquired func() (*Lock, error), latest time.Time, left time.Duration) {
		t.Helper()
		lock, err := acquired() // without an extend
		if err != nil || expiry(lock).After(latest) || time.Until(expiry(lock)) < left-limit {
			t.Fatal(err, lock)
		}
	}
	ref, acquired := wait(14 * time.Minute)
	p.send(locked1(17, ref))
	expect(acquired, time.Now().Add(46*time.Minute), 46*time.Minute)
	ref, acquired = wait(14 * time.Minute)
	p.Close()
	p = f.handshake(true)
	hello := time.Now()
	time.Sleep(time.Millisecond) // the timeout does not count from the repeated request
	p.send(fmt.Sprintf(`{"command":"locked","payload":{"id":18,"fence":118,"expiresIn":3000000,"ref":%q}}`, p.expect("request").text("ref")))
	expect(acquired, hello.Add(50*time.Minute), 50*time.Minute)
}

func TestALongWaitIsExtended(t *testing.T) {
	type scene struct {
		f      *fake
		p      *peer
		client *Client
		cancel context.CancelFunc
		ref    string // of the request
		extend string // the ref of the extend
	}
	extended := func(s *scene) {
		s.p.send(fmt.Sprintf(`{"command":"extended","payload":{"id":17,"transactionTimeout":3600000,"ref":%q}}`, s.extend))
	}
	report := `{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":60000,"ref":"1"}}`
	for name, c := range map[string]struct {
		target error // of Acquire; nil: it returns the lock
		answer func(*scene)
	}{
		"extended": {nil, extended},
		"the answer is late, too": {ErrTransactionTimeout, func(s *scene) {
			age(s.client, time.Hour)
			extended(s)
			s.p.confirm(17)
		}},
		"rejected": {&RejectedError{"too-many", "as scripted", ""}, func(s *scene) {
			s.p.send(error1("too-many", s.extend))
			s.p.confirm(17)
		}},
		"unknown": {ErrLockLost, func(s *scene) { s.p.send(error1("unknown-id", s.extend)) }},
		"timed out": {ErrTransactionTimeout, func(s *scene) {
			s.p.send(released1(17, "transaction-timeout", s.ref), error1("unknown-id", s.extend))
		}},
		"unavailable": {nil, func(s *scene) {
			s.p.send(error1("unavailable", s.extend))
			s.p.expect("extend")
			extended(s)
		}},
		"cancelled": {context.Canceled, func(s *scene) {
			s.cancel()
			s.p.confirm(17)
		}},
		"closed": {ErrClosed, func(s *scene) {
			s.p.Close()
			s.f.listener.Close()
			s.client.Close()
		}},
		"resumed": {nil, func(s *scene) {
			s.p.Close()
			s.p = s.f.handshake(true, report)
			s.extend = s.p.expect("extend").text("ref")
			extended(s)
		}},
		"not resumed": {ErrLockLost, func(s *scene) {
			s.p.Close()
			s.p = s.f.handshake(false)
			s.p.confirm(17)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			f, p, client := connected(t, Config{})
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			acquired := start(func() (*Lock, error) {
				return client.Acquire(ctx, []string{"a"}, TransactionTimeout(time.Hour), Watchdog())
			})
			ref := p.expect("request").text("ref")
			age(client, time.Hour)
			p.send(locked1(17, ref))
			extend := p.expect("extend")
			latest := time.Now().Add(time.Hour)
			if extend.text("id") != "17" || extend["transactionTimeout"].(float64) != 3600000 {
				t.Fatal(extend)
			}
			time.Sleep(time.Millisecond) // the timeout does not count from the answer
			s := &scene{f, p, client, cancel, ref, extend.text("ref")}
			c.answer(s)
			lock, err := acquired()
			switch rejected, _ := c.target.(*RejectedError); {
			case rejected != nil:
				if err == nil || err.Error() != rejected.Error() {
					t.Fatal(err)
				}
			case c.target != nil:
				expectError(t, err, c.target)
			case err != nil || lock.Err() != nil || time.Until(expiry(lock)) < time.Hour-limit:
				t.Fatal(err, lock)
			case name == "extended" && expiry(lock).After(latest):
				t.Fatal(expiry(lock), latest)
			}
		})
	}
}

func TestAGrantReportedByAResumptionIsExtended(t *testing.T) {
	f, p, client := connected(t, Config{})
	acquired := acquire(client, "a", TransactionTimeout(time.Hour))
	ref := p.expect("request").text("ref")
	p.Close()
	p = f.handshake(true, fmt.Sprintf(`{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":60000,"ref":%q}}`, ref))
	p.send(fmt.Sprintf(`{"command":"extended","payload":{"id":17,"transactionTimeout":3600000,"ref":%q}}`, p.expect("extend").text("ref")))
	if lock, err := acquired(); err != nil || time.Until(expiry(lock)) < time.Hour-limit {
		t.Fatal(err)
	}
}

func TestCrossingReleases(t *testing.T) {
	_, p, _, lock := hold(t, Config{})
	released := release(lock)
	ref := p.expect("release").text("ref")
	p.send(released1(17, "transaction-timeout", "1"))
	_, err := released()
	expectError(t, err, ErrTransactionTimeout)
	p.send(released1(17, "transaction-timeout", ref))
}

func TestReleaseErrors(t *testing.T) {
	_, p, _, lock := hold(t, Config{})
	released := release(lock)
	p.send(error1("unauthorized", p.expect("release").text("ref")))
	var rejected *RejectedError
	if _, err := released(); !errors.As(err, &rejected) {
		t.Fatal(err)
	}
	expectError(t, lock.Err(), ErrReleased) // its holder has ended its work; the server may still hold the lock
	released = release(lock)
	p.send(error1("unknown-id", p.expect("release").text("ref")))
	_, err := released()
	expectError(t, err, ErrLockLost)
}

func TestExtend(t *testing.T) {
	_, p, _, lock := hold(t, Config{}, TransactionTimeout(2*time.Second))
	extended := start(func() (bool, error) { return true, lock.Extend(background, time.Hour) })
	extend := p.expect("extend")
	p.send(fmt.Sprintf(`{"command":"extended","payload":{"id":17,"transactionTimeout":3600000,"ref":%q}}`, extend.text("ref")))
	if _, err := extended(); err != nil || time.Until(lock.expiresAt) < 59*time.Minute {
		t.Fatal(err, lock.expiresAt)
	}
	extended = start(func() (bool, error) { return true, lock.Extend(background, time.Hour) })
	p.send(released1(17, "transaction-timeout", p.expect("extend").text("ref")))
	_, err := extended()
	expectError(t, err, ErrTransactionTimeout)
	expectError(t, lock.Err(), ErrTransactionTimeout)
}

func TestWatchdog(t *testing.T) {
	_, p, _, lock := hold(t, Config{}, TransactionTimeout(300*time.Millisecond), Watchdog())
	for i := 0; i < 5; i++ {
		p.send(fmt.Sprintf(`{"command":"extended","payload":{"id":17,"transactionTimeout":300,"ref":%q}}`, p.expect("extend").text("ref")))
	}
	if lock.Err() != nil {
		t.Fatal(lock.Err())
	}
	expectDone(t, lock.Done()) // without answers
}

func TestCancelWhileWaiting(t *testing.T) {
	_, p, client := connected(t, Config{})
	ctx, cancel := context.WithCancel(background)
	acquired := start(func() (*Lock, error) { return client.Acquire(ctx, []string{"a"}) })
	ref := p.expect("request").text("ref")
	cancel()
	if release := p.expect("release"); release.text("ref") != ref || release["id"] != nil {
		t.Fatal(release)
	}
	_, err := acquired()
	expectError(t, err, context.Canceled)
	p.send(locked1(17, ref), released1(17, "success", ref)) // they cross
	acquired = acquire(client, "b")
	p.grant(18)
	if _, err := acquired(); err != nil {
		t.Fatal(err)
	}
	client.mu.Lock()
	defer client.mu.Unlock()
	if len(client.locks) != 1 || len(client.calls) != 0 {
		t.Fatal(client.locks, client.calls)
	}
}

func TestUnavailableIsRepeatedOnTheSameConnection(t *testing.T) {
	_, p, client := connected(t, Config{})
	client.mu.Lock()
	client.failedRounds = 7
	client.mu.Unlock()
	acquired := acquire(client, "a")
	ref := p.expect("request").text("ref")
	for i := 0; i < 3; i++ {
		p.send(error1("unavailable", ref))
		if again := p.expect("request").text("ref"); again != ref {
			t.Fatal("another ref:", again)
		}
	}
	if failedRounds(client) != 7 {
		t.Fatal("an unavailable server resets the backoff of reconnects")
	}
	p.send(locked1(17, ref))
	lock, err := acquired()
	if err != nil {
		t.Fatal(err)
	}
	released := release(lock)
	p.send(error1("unavailable", p.expect("release").text("ref")))
	p.confirm(17)
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
	if failedRounds(client) != 0 {
		t.Fatal("an executed command does not reset the backoff of reconnects")
	}
}

// The server may have executed a request although it rejects its repetition.
func TestTheTimeOfALockDoesNotCountFromARetry(t *testing.T) {
	_, p, client := connected(t, Config{})
	acquired := acquire(client, "a")
	ref := p.expect("request").text("ref")
	sent := time.Now()
	p.send(error1("unavailable", ref))
	p.expect("request")
	p.send(locked1(17, ref))
	lock, err := acquired()
	if err != nil {
		t.Fatal(err)
	}
	if late := lock.ExpiresAt().Sub(sent.Add(defaultTimeout)); late > 0 {
		t.Fatal("the lock counts as held for too long:", late)
	}
}

func failedRounds(client *Client) int {
	client.mu.Lock()
	defer client.mu.Unlock()
	return client.failedRounds
}

func TestRedirect(t *testing.T) {
	follower, leader, next := newFake(t), newFake(t), newFake(t)
	dialled := dial(t, Config{}, follower)
	p := follower.accept()
	p.expect("hello")
	p.send(fmt.Sprintf(`{"command":"error","payload":{"code":"unavailable","message":"follower","leader":%q,"ref":"hello"}}`, leader.address()))
	p = leader.handshake(false)
	client := dialled()
	t.Cleanup(leader.close)
	t.Cleanup(next.close)
	acquired := acquire(client, "a")
	p.send(fmt.Sprintf(`{"command":"error","payload":{"code":"unavailable","message":"x","leader":%q,"ref":%q}}`,
		next.address(), p.expect("request").text("ref")))
	p = next.handshake(false)
	p.grant(17)
	if _, err := acquired(); err != nil {
		t.Fatal(err)
	}
}

func TestResume(t *testing.T) {
	f, p, client, lock := hold(t, Config{}, TransactionTimeout(time.Hour))
	kept, gone := acquire(client, "kept"), (*Lock)(nil)
	p.grant(18)
	keptLock, err := kept()
	if err != nil {
		t.Fatal(err)
	}
	acquired := acquire(client, "gone")
	p.grant(19)
	if gone, err = acquired(); err != nil {
		t.Fatal(err)
	}
	waits := acquire(client, "waits")
	ref := p.expect("request").text("ref")
	releases := release(lock)
	releaseRef := p.expect("release").text("ref")
	extends := start(func() (bool, error) { return true, keptLock.Extend(background, 2*time.Hour) })
	extendRef := p.expect("extend").text("ref")
	inspects := start(func() (*Inspection, error) { return client.Inspect(background, Query{}) })
	inspectRef := p.expect("inspect").text("ref")
	p.Close()
	p = f.handshake(true, `{"command":"locked","payload":{"id":18,"fence":118,"expiresIn":60000,"ref":"2"}}`)
	for _, expected := range []struct{ command, ref string }{
		{"request", ref}, {"release", releaseRef}, {"extend", extendRef}, {"inspect", inspectRef},
	} {
		if got := p.expect(expected.command).text("ref"); got != expected.ref {
			t.Fatalf("%s: %s instead of %s", expected.command, got, expected.ref)
		}
	}
	probe := p.expect("release")
	if probe.text("id") != "19" {
		t.Fatal(probe)
	}
	expectDone(t, gone.Done()) // lost before it is released: the server may have held it without a session
	expectError(t, gone.Err(), ErrLockLost)
	p.send(locked1(20, ref), error1("unknown-id", releaseRef), released1(19, "transaction-timeout", probe.text("ref")),
		fmt.Sprintf(`{"command":"extended","payload":{"id":18,"transactionTimeout":7200000,"ref":%q}}`, extendRef),
		fmt.Sprintf(`{"command":"inspected","payload":{"holders":[],"holdersTotal":3,"queue":[],"queueTotal":0,"ref":%q}}`, inspectRef))
	if lock, err := waits(); err != nil || lock.ID() != 20 {
		t.Fatal(err)
	}
	if _, err := releases(); err != nil { // unknown-id: the first release was executed
		t.Fatal(err)
	}
	if _, err := extends(); err != nil || keptLock.Err() != nil {
		t.Fatal(err, keptLock.Err())
	}
	if inspection, err := inspects(); err != nil || inspection.HoldersTotal != 3 {
		t.Fatal(err)
	}
}

func TestAServerWithoutState(t *testing.T) {
	f, p, client, lock := hold(t, Config{}, TransactionTimeout(time.Hour))
	waits := acquire(client, "waits", QueueTimeout(time.Minute))
	ref := p.expect("request").text("ref")
	ctx, cancel := context.WithCancel(background)
	cancelled := start(func() (*Lock, error) { return client.Acquire(ctx, []string{"cancelled"}) })
	p.expect("request")
	cancel()
	_, _ = cancelled()
	p.expect("release")
	extends := start(func() (bool, error) { return true, lock.Extend(background, time.Hour) })
	p.expect("extend")
	p.Close()
	p = f.handshake(false)
	if request := p.expect("request"); request.text("ref") != ref || request["queueTimeout"].(float64) >= 60000 {
		t.Fatal(request)
	}
	p.confirm(17)
	expectDone(t, lock.Done())
	expectError(t, lock.Err(), ErrLockLost)
	_, err := extends()
	expectError(t, err, ErrLockLost)
	p.send(locked1(3, ref))
	if _, err := waits(); err != nil {
		t.Fatal(err)
	}
}

func TestACancelledRequestThatWasGrantedIsReleasedInANewSession(t *testing.T) {
	f, p, client := connected(t, Config{})
	ctx, cancel := context.WithCancel(background)
	acquired := start(func() (*Lock, error) { return client.Acquire(ctx, []string{"a"}) })
	ref := p.expect("request").text("ref")
	cancel()
	if _, err := acquired(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	p.expect("release")
	p.send(locked1(17, ref))
	p.Close()
	p = f.handshake(false)
	release := p.expect("release")
	if release.text("id") != "17" || release.text("ref") == ref {
		t.Fatal(release)
	}
}

func TestALockThatExpiredDuringAnOutageIsReleased(t *testing.T) {
	f, p, client, lock := hold(t, Config{})
	p.Close()
	p = f.accept()
	p.expect("hello")
	client.mu.Lock()
	lock.expiresAt = time.Now()
	client.mu.Unlock()
	expectError(t, lock.Err(), ErrTransactionTimeout)
	p.send(`{"command":"welcome","payload":{"protocol":1,"pingInterval":2000,"namespace":"genie","resumed":true,"ref":"hello"}}`,
		`{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":1000,"ref":"1"}}`)
	p.pings = true
	p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, p.expect("ping").text("ref")))
	p.confirm(17)
}

func TestASessionBoundLockEndsWithTheSession(t *testing.T) {
	f, p, _, lock := hold(t, Config{SessionTimeout: 100 * time.Millisecond}, TransactionTimeout(time.Hour), ReleaseOnDisconnect())
	f.listener.Close()
	p.Close()
	expectDone(t, lock.Done())
	var lost *LostError
	if !errors.As(lock.Err(), &lost) || lost.Reason != "disconnected" {
		t.Fatal(lock.Err())
	}
}

func TestCallsEndWithoutAServer(t *testing.T) {
	f, p, client, lock := hold(t, Config{ResponseTimeout: 300 * time.Millisecond})
	f.listener.Close()
	p.Close()
	_, err := client.Acquire(background, []string{"a"}, QueueTimeout(10*time.Millisecond))
	expectError(t, err, ErrUnavailable)
	_, err = client.Inspect(background, Query{})
	expectError(t, err, ErrUnavailable)
	expectError(t, lock.Extend(background, time.Second), ErrUnavailable)
	expectError(t, lock.Release(background), ErrUnavailable)
	ctx, cancel := context.WithTimeout(background, time.Millisecond)
	defer cancel()
	_, err = client.Acquire(ctx, []string{"a"}, QueueTimeout(NoTimeout))
	expectError(t, err, context.DeadlineExceeded)
}

func TestCallsThatAreGivenUpWithoutAServerAreForgotten(t *testing.T) {
	f := newFake(t)
	f.listener.Close()
	client, err := Dial(background, Config{Addresses: []string{f.address()}, ResponseTimeout: time.Millisecond, Lazy: true})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	count := func() int {
		client.mu.Lock()
		defer client.mu.Unlock()
		return len(client.calls)
	}
	before := count()
	expectError(t, client.Ping(background), ErrUnavailable)
	watch, err := client.Watch("a")
	if err != nil {
		t.Fatal(err)
	}
	watch.Close()
	if after := count(); after != before {
		t.Fatal(before, after)
	}
}

func TestDialErrors(t *testing.T) {
	f := newFake(t)
	f.listener.Close()
	_, err := Dial(background, Config{Addresses: []string{f.address()}, ConnectTimeout: 300 * time.Millisecond})
	expectError(t, err, ErrUnavailable)
	f = newFake(t)
	dialled := start(func() (*Client, error) { return Dial(background, Config{Addresses: []string{f.address()}}) })
	p := f.accept()
	p.expect("hello")
	p.send(error1("unauthorized", "hello"))
	var rejected *RejectedError
	if _, err := dialled(); !errors.As(err, &rejected) || rejected.Code != "unauthorized" {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(background)
	dialled = start(func() (*Client, error) { return Dial(ctx, Config{Addresses: []string{f.address()}}) })
	f.accept().expect("hello")
	cancel()
	_, err = dialled()
	expectError(t, err, context.Canceled)
	f.close()
	checkNoGoroutines(t)
}

func TestDialTriesAgain(t *testing.T) {
	f := newFake(t)
	dialled := dial(t, Config{}, f)
	f.accept().Close()
	f.handshake(false)
	dialled()
}

// While tokens are exchanged, all servers may reject a client for a moment.
func TestARejectionAtAReconnectDoesNotEndTheClient(t *testing.T) {
	f, p, client, lock := hold(t, Config{ResponseTimeout: 200 * time.Millisecond}, TransactionTimeout(time.Hour))
	waits := acquire(client, "waits", QueueTimeout(time.Hour))
	ref := p.expect("request").text("ref")
	p.Close()
	p = f.accept()
	p.expect("hello")
	p.send(error1("unauthorized", "hello"))
	var rejected *RejectedError
	if _, err := waits(); !errors.As(err, &rejected) || rejected.Code != "unauthorized" {
		t.Fatal(err)
	}
	p = f.accept()
	p.expect("hello")
	if err := client.Ping(background); !errors.Is(err, ErrUnavailable) || !errors.As(err, &rejected) || rejected.Code != "unauthorized" {
		t.Fatal("the error does not tell why:", err)
	}
	p.Close()
	p = f.handshake(true, `{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":3000000,"ref":"1"}}`)
	if release := p.expect("release"); release.text("ref") != ref {
		t.Fatal(release)
	}
	acquired := acquire(client, "b")
	p.grant(18)
	if _, err := acquired(); err != nil || lock.Err() != nil {
		t.Fatal(err, lock.Err())
	}
}

func TestTheTokenIsReadForEachConnection(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	calls := 0
	source := func(context.Context) (string, error) { calls++; return fmt.Sprint("token-", calls), nil }
	for name, config := range map[string]Config{"file": {}, "function": {TokenSource: source}} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("GENIE_TOKEN_FILE", file)
			write("token-1")
			f := newFake(t)
			dialled := dial(t, config, f)
			for i := 1; i < 4; i++ {
				p := f.accept()
				if token := p.expect("hello").text("token"); token != fmt.Sprint("token-", i) {
					t.Fatal(token)
				}
				write(fmt.Sprint("token-", i+1))
				p.Close()
			}
			f.handshake(false)
			dialled()
		})
	}
}

func TestEventsOfTheConnection(t *testing.T) {
	events := make(chan Event, 10)
	first, second := newFake(t), newFake(t)
	dialled := dial(t, Config{OnEvent: func(e Event) { events <- e }}, first, second)
	expect := func(state string, f *fake) {
		t.Helper()
		if e := <-events; e.State != state || e.Address != f.address() || (e.Err != nil) != (state == "down") {
			t.Fatal(e)
		}
	}
	p := first.handshake(false)
	dialled()
	expect("up", first)
	p.Close()
	expect("down", first)
	p = second.handshake(false)
	expect("leader", second)
	p.Close()
	expect("down", second)
	first.listener.Close()
	second.handshake(false)
	expect("up", second)
}

func TestServiceLinks(t *testing.T) {
	var log strings.Builder
	config := forTests(Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	t.Setenv("GENIE_PORT", "not a port") // is not needed
	config.Addresses = []string{"a:1"}
	if _, err := config.resolve(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GENIE_PORT", "tcp://10.96.3.4:7077")
	warnOfServiceLink = sync.Once{}
	config.Addresses = []string{"a:1", "b", "c"}
	addresses, err := config.resolve()
	if err != nil || addresses[1].String() != "b:7077" {
		t.Fatal(addresses, err)
	}
	if strings.Count(log.String(), "service link") != 1 {
		t.Fatal(log.String())
	}
}

func TestDefaults(t *testing.T) {
	host, _ := os.Hostname()
	note := fmt.Sprintf("%s %d@%s", filepath.Base(os.Args[0]), os.Getpid(), host)
	for name, c := range map[string]struct {
		defaults, opts  []Option
		hello, expected received
	}{
		"none": {nil, nil, received{"note": note}, received{"queueTimeout": 10000.0, "transactionTimeout": 10000.0, "note": nil}},
		"of the client": {[]Option{QueueTimeout(time.Minute), Priority(3), Note("the client's")}, nil,
			received{"note": "the client's"}, received{"queueTimeout": 60000.0, "priority": 3.0, "note": nil}},
		"overridden":     {[]Option{Priority(3)}, []Option{Priority(4), Note("mine")}, nil, received{"priority": 4.0, "note": "mine"}},
		"without a note": {[]Option{Note("")}, nil, received{"note": nil}, received{"note": nil}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			dialled := dial(t, Config{Defaults: c.defaults}, f)
			p := f.accept()
			hello := p.expect("hello")
			p.Close()
			p = f.handshake(false)
			acquire(dialled(), "a", c.opts...)
			request := p.expect("request")
			for field, value := range c.hello {
				if hello[field] != value {
					t.Error(field, hello[field])
				}
			}
			for field, value := range c.expected {
				if request[field] != value {
					t.Error(field, request[field])
				}
			}
		})
	}
}

func TestContextsOfALock(t *testing.T) {
	_, p, _, lock := hold(t, Config{})
	ctx, cancel := lock.Context(background)
	forgotten, forget := lock.Context(background)
	forget()
	expectDone(t, forgotten.Done())
	if !errors.Is(forgotten.Err(), context.Canceled) || lock.Err() != nil {
		t.Fatal(forgotten.Err(), lock.Err())
	}
	done := lock.Done()
	p.send(released1(17, "transaction-timeout", "1"))
	expectDone(t, done)
	if expectDone(t, ctx.Done()); !errors.Is(context.Cause(ctx), ErrTransactionTimeout) {
		t.Fatal(context.Cause(ctx))
	}
	cancel()
	expectDone(t, lock.Done())
	late, cancel := lock.Context(background)
	defer cancel()
	expectDone(t, late.Done())
}

func TestDetach(t *testing.T) {
	f, p, client, lock := hold(t, Config{}, Watchdog(), TransactionTimeout(200*time.Millisecond))
	ctx, cancel := lock.Context(background)
	defer cancel()
	for i := 0; i < 2; i++ {
		if id, err := lock.Detach(); id != 17 || err != nil {
			t.Fatal(id, err)
		}
	}
	expectError(t, lock.Err(), ErrDetached)
	expectError(t, lock.Release(background), ErrDetached)
	expectError(t, lock.Extend(background, time.Minute), ErrDetached)
	p.Close()
	p = f.handshake(true, `{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":3000,"ref":"1"}}`)
	p.send(released1(17, "transaction-timeout", "1"))
	bound := acquire(client, "a", ReleaseOnDisconnect())
	p.grant(18) // without a release of 17 before it
	if lock, err := bound(); err != nil {
		t.Fatal(err)
	} else if _, err := lock.Detach(); err == nil {
		t.Fatal("a lock that ends with the session was detached")
	}
	if ctx.Err() != nil {
		t.Fatal("the work was cancelled")
	}
}

func TestReleaseAndExtendByID(t *testing.T) {
	_, p, client := connected(t, Config{})
	call := func(function func() error, command, answer string) error {
		t.Helper()
		done := start(func() (bool, error) { return true, function() })
		sent := p.expect(command)
		if sent.text("id") != "17" {
			t.Fatal(sent)
		}
		p.send(strings.Replace(answer, "REF", sent.text("ref"), 1))
		_, err := done()
		return err
	}
	release := func() error { return client.ReleaseID(background, 17) }
	extend := func() error { return client.ExtendID(background, 17, time.Minute) }
	if err := call(release, "release", released1(17, "success", "REF")); err != nil {
		t.Fatal(err)
	}
	expectError(t, call(release, "release", released1(17, "transaction-timeout", "REF")), ErrTransactionTimeout)
	var rejected *RejectedError
	if err := call(release, "release", error1("unknown-id", "REF")); !errors.As(err, &rejected) || rejected.Code != "unknown-id" {
		t.Fatal(err)
	}
	if err := call(extend, "extend", `{"command":"extended","payload":{"id":17,"transactionTimeout":60000,"ref":"REF"}}`); err != nil {
		t.Fatal(err)
	}
	expectError(t, call(extend, "extend", released1(17, "success", "REF")), ErrLockLost)
}

// The server sends no notification to a client that releases its own lock by id.
func TestReleaseAndExtendOfTheClientsOwnLockByID(t *testing.T) {
	_, p, client, lock := hold(t, Config{})
	extended := start(func() (bool, error) { return true, client.ExtendID(background, 17, time.Second) })
	p.send(fmt.Sprintf(`{"command":"extended","payload":{"id":17,"transactionTimeout":1000,"ref":%q}}`, p.expect("extend").text("ref")))
	if _, err := extended(); err != nil || time.Until(lock.ExpiresAt()) > time.Second {
		t.Fatal(err, lock.ExpiresAt())
	}
	released := start(func() (bool, error) { return true, client.ReleaseID(background, 17) })
	p.confirm(17)
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
	expectLost(t, lock, reasonSuccess)

	acquired := acquire(client, "b")
	p.grant(18)
	lock, err := acquired()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = lock.Detach()
	released = start(func() (bool, error) { return true, client.ReleaseID(background, 18) })
	p.confirm(18)
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
	client.mu.Lock()
	defer client.mu.Unlock()
	if len(client.locks) != 0 {
		t.Fatal("a detached lock that was released is kept")
	}
}

// The server may execute the release, and grant the lock to another client, although no answer arrives.
func TestTheClientsOwnLockIsNotHeldOnceItIsReleasedByID(t *testing.T) {
	f, p, client, lock := hold(t, Config{})
	released := start(func() (bool, error) { return true, client.ReleaseID(background, 17) })
	ref := p.expect("release").text("ref")
	expectLost(t, lock, reasonSuccess)
	_ = p.Close()
	next := f.handshake(true)
	if sent := next.expect("release"); sent.text("id") != "17" || sent.text("ref") != ref {
		t.Fatal(sent)
	}
	next.send(released1(17, "success", ref))
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
}

func TestAReleaseByIDOfTheClientsOwnLockReportsAnEarlierEnd(t *testing.T) {
	_, p, client, lock := hold(t, Config{})
	released := start(func() (bool, error) { return true, client.ReleaseID(background, 17) })
	p.send(released1(17, "transaction-timeout", p.expect("release").text("ref")))
	_, err := released()
	expectError(t, err, ErrTransactionTimeout)
	expectLost(t, lock, reasonTransactionTimeout)
}

func TestAReleaseByIDThatCrossesTheGrantEndsTheLock(t *testing.T) {
	_, p, client := connected(t, Config{})
	acquired := acquire(client, "a")
	request := p.expect("request")
	released := start(func() (bool, error) { return true, client.ReleaseID(background, 17) })
	inspect, release := p.expect("inspect"), p.expect("release")
	p.send(
		locked1(17, request.text("ref")),
		fmt.Sprintf(`{"command":"inspected","payload":{"holders":[],"holdersTotal":1,"queue":[],"queueTotal":0,"ref":%q}}`, inspect.text("ref")),
		released1(17, "success", release.text("ref")),
	)
	lock, err := acquired()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
	expectLost(t, lock, reasonSuccess)
}

// The server sends no notification to a client that releases its own waiting request by id.
func TestAReleaseByIDOfAWaitingRequestRepeatsTheRequests(t *testing.T) {
	_, p, client := connected(t, Config{})
	acquired := acquire(client, "a", QueueTimeout(NoTimeout))
	request := p.expect("request")
	for _, answer := range []string{ // the second release is of a request that may wait, the first one is not
		`{"command":"inspected","payload":{"holders":[],"holdersTotal":1,"queue":[],"queueTotal":0,"ref":%q}}`,
		`{"command":"error","payload":{"code":"unauthorized","message":"no","ref":%q}}`,
		`{"command":"inspected","payload":{"holders":[],"holdersTotal":0,"queue":[],"queueTotal":1,"ref":%q}}`,
	} {
		released := start(func() (bool, error) { return true, client.ReleaseID(background, 17) })
		inspect, release := p.expect("inspect"), p.expect("release")
		if inspect.text("id") != "17" || inspect.text("only") != "queue" {
			t.Fatal(inspect)
		}
		p.send(fmt.Sprintf(answer, inspect.text("ref")), released1(17, "success", release.text("ref")))
		if _, err := released(); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(answer, `"holdersTotal":1`) {
			if again := p.expect("request"); again.text("ref") != request.text("ref") {
				t.Fatal(again)
			}
		}
	}
	p.send(released1(17, "success", request.text("ref")))
	var ended *EndedError
	if _, err := acquired(); !errors.As(err, &ended) || ended.Reason != reasonSuccess {
		t.Fatal(err)
	}
}

// A request that is sent again follows all releases that were sent before.
func TestReleasesByIDThatAreSentTogetherRepeatTheRequestsOnce(t *testing.T) {
	_, p, client := connected(t, Config{})
	_ = acquire(client, "a", QueueTimeout(NoTimeout))
	p.expect("request")
	var answers []string
	for _, id := range []int{17, 18, 19} {
		_ = start(func() (bool, error) { return true, client.ReleaseID(background, int64(id)) })
		inspect, release := p.expect("inspect"), p.expect("release")
		answers = append(answers, error1("unauthorized", inspect.text("ref")), released1(id, "success", release.text("ref")))
	}
	p.send(answers...)
	p.expect("request")
	_ = start(func() (bool, error) { return true, client.Ping(background) })
	p.pings = true
	p.expect("ping")
}

// A repetition may cross the grant. The time in its answer counts from the repetition, and not from `hello`.
func TestTheAnswerToARepetitionDoesNotShortenAHeldLock(t *testing.T) {
	_, p, client, lock := hold(t, Config{})
	p.send(`{"command":"locked","payload":{"id":17,"fence":18,"expiresIn":0,"ref":"1"}}`)
	pinged := start(func() (bool, error) { return true, client.Ping(background) })
	p.pings = true
	p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, p.expect("ping").text("ref")))
	if _, err := pinged(); err != nil {
		t.Fatal(err)
	}
	if err := lock.Err(); err != nil {
		t.Fatal(err)
	}
}

func TestTraceparent(t *testing.T) {
	type span struct{}
	_, p, client := connected(t, Config{Defaults: []Option{Traceparent(func(ctx context.Context) string {
		value, _ := ctx.Value(span{}).(string)
		return value
	})}})
	_ = start(func() (*Lock, error) {
		return client.Acquire(context.WithValue(background, span{}, "00-1-2-01"), []string{"a"})
	})
	if r := p.expect("request"); r.text("traceparent") != "00-1-2-01" {
		t.Fatal(r)
	}
	acquire(client, "a")
	if r := p.expect("request"); r["traceparent"] != nil {
		t.Fatal(r)
	}
}

func TestAnInspectionThroughJSON(t *testing.T) {
	text := `{"holders":[{"id":101,"resources":["exclusive:a"],"resourcesTotal":1,"priority":2,"since":1790000000000.5,` +
		`"expiresIn":10000,"transactionName":"t","note":"n","traceparent":"00","fence":201}],"holdersTotal":1,` +
		`"queue":[{"id":102,"resources":["shared:a"],"resourcesTotal":1,"priority":0,"since":1790000000000,"blockers":[` +
		`{"id":101,"resource":"a","mode":"exclusive","state":"held","since":1790000000000,"note":"n"}],"blockersTotal":1}],"queueTotal":1}`
	var first, second Inspection
	if err := json.Unmarshal([]byte(text), &first); err != nil {
		t.Fatal(err)
	}
	encoded, err := json.Marshal(first)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(encoded, &second); err != nil || !reflect.DeepEqual(first, second) ||
		first.Queue[0].ExpiresIn != NoTimeout || first.Holders[0].ExpiresIn != 10*time.Second {
		t.Fatal(err, first, second)
	}
	var wire, again any
	_ = json.Unmarshal([]byte(text), &wire)
	_ = json.Unmarshal(encoded, &again)
	if !reflect.DeepEqual(wire, again) {
		t.Fatalf("%s\n%s", text, encoded)
	}
}

// Two processes that start together must not wait for the same times.
func TestTheBackoffIsRandomInEachProcess(t *testing.T) {
	if os.Getenv("GENIE_TEST_BACKOFF") != "" {
		fmt.Println("backoff:", backoff(10), backoff(10))
		return
	}
	outputs := map[string]bool{}
	for i := 0; i < 3; i++ {
		command := exec.Command(os.Args[0], "-test.run=TestTheBackoffIsRandomInEachProcess")
		command.Env = append(os.Environ(), "GENIE_TEST_BACKOFF=1", "GORACE=atexit_sleep_ms=0")
		output, err := command.Output()
		if err != nil {
			t.Fatal(err)
		}
		outputs[strings.SplitN(string(output), "\n", 2)[0]] = true
	}
	if len(outputs) < 3 {
		t.Fatal(outputs)
	}
}

func TestATakenOverSession(t *testing.T) {
	f, p, client, lock := hold(t, Config{})
	for i := 0; i < 3; i++ {
		p.send(`{"command":"error","payload":{"code":"session-taken-over","message":"as scripted"}}`)
		if p.expectClosed(); i < 2 {
			p = f.handshake(true, `{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":60000,"ref":"1"}}`)
		}
	}
	expectDone(t, lock.Done())
	var rejected *RejectedError
	if err := client.Ping(background); !errors.As(err, &rejected) || rejected.Code != "session-taken-over" {
		t.Fatal(err)
	}
}

// The server ends the connection with an error and resets it, and a write fails before the client has read the error.
func TestAFailedWriteDoesNotHideTheLastError(t *testing.T) {
	for writer, length := range map[string]int{"caller": 0, "goroutine": maxInline} {
		t.Run(writer, func(t *testing.T) {
			mayRead, events := make(chan bool), make(chan Event, 10)
			_, p, client := connected(t, Config{OnEvent: func(event Event) { // called by the reader
				<-mayRead
				events <- event
			}})
			client.mu.Lock()
			conn := client.conn
			client.mu.Unlock()
			p.send(`{"command":"error","payload":{"code":"session-taken-over","message":"as scripted"}}`)
			_ = p.Conn.(*net.TCPConn).SetLinger(0)
			p.Close()
			for conn.send([]byte("\n")) == nil { // the reset has not arrived
			}
			client.mu.Lock()
			client.sendBackground("ping", &fields{Note: strings.Repeat("x", length)}, nil)
			client.mu.Unlock()
			for length > 0 && strings.Contains(goroutines(), "writeOutput") { // its write has not failed
				time.Sleep(time.Millisecond)
			}
			close(mayRead)
			<-events // up
			var rejected *RejectedError
			if down := <-events; !errors.As(down.Err, &rejected) || rejected.Code != codeTakenOver {
				t.Fatal(down)
			}
		})
	}
}

// A log that a test reads.
type log1 struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *log1) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

func (l *log1) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func newLog() (*log1, *slog.Logger) {
	l := &log1{}
	return l, slog.New(slog.NewTextHandler(l, nil))
}

// The work is done, so its result counts, although the server has not confirmed the release.
func TestDoWithoutAnAnswerToTheRelease(t *testing.T) {
	log, logger := newLog()
	f, p, client := connected(t, Config{ResponseTimeout: 100 * time.Millisecond, Logger: logger})
	done := start(func() (bool, error) {
		return true, client.Do(background, []string{"a"}, func(context.Context, *Lock) error { return nil })
	})
	p.grant(17)
	p.expect("release")
	if _, err := done(); err != nil || !strings.Contains(log.String(), "not confirmed") {
		t.Fatal(err, log)
	}
	p.Close()
	p = f.handshake(true)
	p.confirm(17) // in the background
	done = start(func() (bool, error) {
		return true, client.Do(background, []string{"a"}, func(context.Context, *Lock) error { return nil })
	})
	p.grant(18)
	p.send(released1(18, "transaction-timeout", p.expect("release").text("ref")))
	_, err := done()
	expectError(t, err, ErrTransactionTimeout) // lost during the work
}

func TestCloseWarnsOfLocksThatStayHeld(t *testing.T) {
	log, logger := newLog()
	_, p, client, _ := hold(t, Config{Logger: logger})
	closed := start(func() (bool, error) { return true, client.Close() })
	p.send(fmt.Sprintf(`{"command":"bye","payload":{"ref":%q}}`, p.expect("bye").text("ref")))
	if _, err := closed(); err != nil || !strings.Contains(log.String(), "17 [exclusive:a]") {
		t.Fatal(err, log)
	}
}

func TestCloseEndsABoundLockBeforeTheServerDoes(t *testing.T) {
	_, p, client, lock := hold(t, Config{}, ReleaseOnDisconnect())
	closed := start(func() (bool, error) { return true, client.Close() })
	bye := p.expect("bye").text("ref")
	expectError(t, lock.Err(), ErrLockLost)
	p.send(released1(17, "disconnected", ""))
	p.send(fmt.Sprintf(`{"command":"bye","payload":{"ref":%q}}`, bye))
	if _, err := closed(); err != nil {
		t.Fatal(err)
	}
}

func TestShutdownWaitsForTheHolders(t *testing.T) {
	log, logger := newLog()
	_, p, client, lock := hold(t, Config{Logger: logger})
	waits := acquire(client, "waits")
	waiting := p.expect("request").text("ref")
	shut := start(func() (bool, error) { return true, client.Shutdown(background) })
	if _, err := waits(); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	p.expect("release")
	p.send(released1(18, "success", waiting))
	expectError(t, client.Ping(background), ErrClosed)
	if err := lock.Err(); err != nil {
		t.Fatal(err)
	}
	released := release(lock)
	p.confirm(17)
	if _, err := released(); err != nil {
		t.Fatal(err)
	}
	p.send(fmt.Sprintf(`{"command":"bye","payload":{"ref":%q}}`, p.expect("bye").text("ref")))
	if _, err := shut(); err != nil || strings.Contains(log.String(), "held") {
		t.Fatal(err, log)
	}
}

func TestShutdownReleasesWhatIsLeft(t *testing.T) {
	f, p, client, lock := hold(t, Config{})
	ctx, cancel := context.WithCancel(background)
	shut := start(func() (bool, error) { return true, client.Shutdown(ctx) })
	cancel()
	if expectDone(t, lock.Done()); !errors.Is(lock.Err(), ErrLockLost) || !errors.Is(lock.Err(), ErrClosed) {
		t.Fatal(lock.Err())
	}
	p.Close() // it waits for the answer on the next connection
	p = f.handshake(true, `{"command":"locked","payload":{"id":17,"fence":117,"expiresIn":60000,"ref":"1"}}`)
	p.confirm(17)
	p.send(fmt.Sprintf(`{"command":"bye","payload":{"ref":%q}}`, p.expect("bye").text("ref")))
	_, err := shut()
	expectError(t, err, context.Canceled)
}

func TestShutdownWithoutAServer(t *testing.T) {
	_, p, client, _ := hold(t, Config{ResponseTimeout: 100 * time.Millisecond})
	ctx, cancel := context.WithCancel(background)
	cancel()
	expectError(t, client.Shutdown(ctx), ErrUnavailable)
	p.expect("release")
}

func TestClose(t *testing.T) {
	_, p, client, lock := hold(t, Config{})
	waits := acquire(client, "waits")
	p.expect("request")
	watch, err := client.Watch("")
	p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"","held":[],"truncated":false,"ref":%q}}`, p.expect("watch").text("ref")))
	if err != nil {
		t.Fatal(err)
	}
	closed := start(func() (bool, error) { return true, client.Close() })
	p.expect("release")
	p.send(fmt.Sprintf(`{"command":"bye","payload":{"ref":%q}}`, p.expect("bye").text("ref")))
	if _, err := closed(); err != nil {
		t.Fatal(err)
	}
	_, err = waits()
	expectError(t, err, ErrClosed)
	_, err = watch.Next(background)
	expectError(t, err, ErrClosed)
	expectDone(t, lock.Done())
	expectError(t, lock.Err(), ErrClosed)
	_, err = client.TryAcquire(background, []string{"a"})
	expectError(t, err, ErrClosed)
}

func TestDo(t *testing.T) {
	_, p, client := connected(t, Config{})
	do := func(ctx context.Context, function func(context.Context, *Lock) error) func() (bool, error) {
		done := start(func() (bool, error) { return true, client.Do(ctx, []string{"a"}, function) })
		p.grant(17)
		return done
	}
	failure := errors.New("failure")
	done := do(background, func(context.Context, *Lock) error { return failure })
	p.confirm(17)
	_, err := done()
	expectError(t, err, failure)

	done = do(background, func(ctx context.Context, lock *Lock) error {
		client.mu.Lock()
		ref := lock.request.Ref
		client.mu.Unlock()
		p.send(released1(17, "transaction-timeout", ref))
		<-ctx.Done()
		return ctx.Err()
	})
	_, err = done()
	if expectError(t, err, ErrTransactionTimeout); errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(background)
	done = do(ctx, func(ctx context.Context, lock *Lock) error { cancel(); <-ctx.Done(); return failure })
	_, err = done() // without the answer to the release
	expectError(t, err, failure)
	p.confirm(17)

	panics := start(func() (recovered any, _ error) {
		defer func() { recovered = recover() }()
		return nil, client.Do(background, []string{"a"}, func(context.Context, *Lock) error { panic("x") })
	})
	p.grant(18)
	p.confirm(18)
	if recovered, _ := panics(); recovered != "x" {
		t.Fatal(recovered)
	}
}

func TestWatchResynchronizes(t *testing.T) {
	f, p, client := connected(t, Config{})
	watching := func(p *peer, rows string) {
		t.Helper()
		p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"t/","held":[%s],"truncated":false,"ref":%q}}`,
			rows, p.expect("watch").text("ref")))
	}
	watch, err := client.Watch("t/")
	watching(p, `{"resource":"t/1","mode":"exclusive","id":1,"transactionName":"x"}`)
	if err != nil {
		t.Fatal(err)
	}
	next := func(expected Change) {
		t.Helper()
		change, err := start(func() (Change, error) { return watch.Next(background) })()
		if err != nil || change != expected {
			t.Fatal(change, err)
		}
	}
	next(Change{State: "resync"})
	next(Change{State: "locked", Resource: "t/1", Mode: "exclusive", ID: 1, Transaction: "x"})
	p.send(`{"command":"event","payload":{"state":"locked","resource":"t/2","mode":"shared","id":2}}`,
		`{"command":"event","payload":{"state":"locked","resource":"u/2","mode":"shared","id":2}}`,
		`{"command":"event","payload":{"state":"unlocked","resource":"t/1","mode":"exclusive","id":1}}`)
	next(Change{State: "locked", Resource: "t/2", Mode: "shared", ID: 2, Transaction: ""})
	next(Change{State: "unlocked", Resource: "t/1", Mode: "exclusive", ID: 1, Transaction: "x"})
	p.send(`{"command":"event","payload":{"state":"lagged"}}`)
	watching(p, `{"resource":"t/2","mode":"exclusive","id":3}`)
	next(Change{State: "resync"})
	next(Change{State: "unlocked", Resource: "t/2", Mode: "shared", ID: 2, Transaction: ""})
	next(Change{State: "locked", Resource: "t/2", Mode: "exclusive", ID: 3, Transaction: ""})
	p.Close()
	p = f.handshake(true)
	watching(p, "")
	next(Change{State: "resync"})
	next(Change{State: "unlocked", Resource: "t/2", Mode: "exclusive", ID: 3, Transaction: ""})
	waits := start(func() (Change, error) { return watch.Next(background) })
	watch.Close()
	_, err = waits()
	expectError(t, err, ErrClosed)
	p.expect("unwatch")
}

// A lock that a truncated snapshot lacks may be held; a lock that conflicts shows that it has ended.
func TestATruncatedWatch(t *testing.T) {
	_, p, client := connected(t, Config{})
	watch, err := client.Watch("")
	if err != nil {
		t.Fatal(err)
	}
	watching := func(truncated bool, rows string) {
		t.Helper()
		p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"","held":[%s],"truncated":%v,"ref":%q}}`,
			rows, truncated, p.expect("watch").text("ref")))
	}
	next := func(expected Change) {
		t.Helper()
		change, err := start(func() (Change, error) { return watch.Next(background) })()
		if err != nil || change != expected {
			t.Fatal(change, err)
		}
	}
	watching(false, `{"resource":"a","mode":"shared","id":1},{"resource":"b","mode":"shared","id":2,"transactionName":"x"}`)
	next(Change{State: "resync"})
	for i := 0; i < 2; i++ { // in any order
		if change, err := watch.Next(background); err != nil || change.State != "locked" {
			t.Fatal(change, err)
		}
	}
	p.send(`{"command":"event","payload":{"state":"lagged"}}`)
	watching(true, "")
	next(Change{State: "resync", Truncated: true})
	p.send(`{"command":"event","payload":{"state":"locked","resource":"b","mode":"exclusive","id":3,"transactionName":"x"}}`,
		`{"command":"event","payload":{"state":"locked","resource":"a","mode":"exclusive","id":4}}`)
	next(Change{State: "locked", Resource: "b", Mode: "exclusive", ID: 3, Transaction: "x"})
	next(Change{State: "unlocked", Resource: "a", Mode: "shared", ID: 1, Transaction: ""})
	next(Change{State: "locked", Resource: "a", Mode: "exclusive", ID: 4, Transaction: ""})
}

func TestAnInvalidSnapshotEndsTheConnection(t *testing.T) {
	events := make(chan Event, 10)
	f, p, client := connected(t, Config{OnEvent: func(event Event) { events <- event }})
	watch, err := client.Watch("")
	if err != nil {
		t.Fatal(err)
	}
	p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"","held":[5],"truncated":false,"ref":%q}}`, p.expect("watch").text("ref")))
	p.expectClosed()
	if up, down := <-events, <-events; up.State != "up" || !strings.Contains(fmt.Sprint(down.Err), "invalid snapshot") {
		t.Fatal(up, down)
	}
	p = f.handshake(true)
	p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"","held":[],"truncated":false,"ref":%q}}`, p.expect("watch").text("ref")))
	if change, err := watch.Next(background); err != nil || change.State != "resync" {
		t.Fatal(change, err)
	}
}

func TestTheLocksThatTruncatedSnapshotsDoNotListAreBounded(t *testing.T) {
	watch := &Watch{client: &Client{}, held: map[string]*heldLocks{}}
	snapshot := func(truncated bool, rows []Change) {
		t.Helper()
		held, err := json.Marshal(rows)
		if err != nil {
			t.Fatal(err)
		}
		watch.call = &call{answer: &payload{Held: held, Change: Change{Truncated: truncated}}}
		watch.onSnapshot(watch.call)
	}
	var rows []Change
	for i := range maxUnlistedLocks + 2 {
		rows = append(rows, Change{Resource: fmt.Sprint("a/", i), Mode: "exclusive", ID: int64(i + 1)})
	}
	snapshot(false, rows)
	watch.changes = nil
	snapshot(true, nil)
	if len(watch.changes) != 3 || watch.changes[1].ID != 1 || watch.changes[2].ID != 2 || watch.changes[2].State != "unlocked" {
		t.Fatal(len(watch.changes), watch.changes[:min(3, len(watch.changes))])
	}
}

func TestAWatchThatIsNotConsumedIsBounded(t *testing.T) {
	_, p, client := connected(t, Config{})
	watch, err := client.Watch("")
	p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"","held":[],"truncated":false,"ref":%q}}`, p.expect("watch").text("ref")))
	if err != nil {
		t.Fatal(err)
	}
	var events strings.Builder
	for id := 1; id <= maxBufferedChanges+5; id++ {
		fmt.Fprintf(&events, `{"command":"event","payload":{"state":"locked","resource":"%d","mode":"shared","id":%d}}`+"\n", id, id)
	}
	p.send(events.String())
	pinged := start(func() (bool, error) { return true, client.Ping(background) })
	p.pings = true
	p.send(fmt.Sprintf(`{"command":"pong","payload":{"ref":%q}}`, p.expect("ping").text("ref")))
	p.pings = false
	if _, err := pinged(); err != nil { // the events before the answer have arrived
		t.Fatal(err)
	}
	for i := 0; i < maxBufferedChanges; i++ {
		if _, err := watch.Next(background); err != nil {
			t.Fatal(err)
		}
	}
	next := start(func() (Change, error) { return watch.Next(background) })
	p.send(fmt.Sprintf(`{"command":"watching","payload":{"prefix":"","held":[],"truncated":false,"ref":%q}}`, p.expect("watch").text("ref")))
	if change, err := next(); err != nil || change.State != "resync" {
		t.Fatal(change, err)
	}
}

func TestARejectedWatch(t *testing.T) {
	_, p, client := connected(t, Config{})
	watch, err := client.Watch("")
	if err != nil {
		t.Fatal(err)
	}
	p.send(error1("too-many", p.expect("watch").text("ref")))
	var rejected *RejectedError
	if _, err := watch.Next(background); !errors.As(err, &rejected) {
		t.Fatal(err)
	}
}

// A server that does not read stops new calls, and they can still be cancelled.
func TestBackPressure(t *testing.T) {
	_, p, client := connected(t, Config{})
	resources := make([]string, 1000)
	for i := range resources {
		resources[i] = fmt.Sprintf("exclusive:%d%s", i, strings.Repeat("x", 200))
	}
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	const calls = 200 // 42 MB
	results := make(chan error, calls)
	for i := 0; i < calls; i++ {
		go func() {
			_, err := client.Acquire(ctx, resources)
			results <- err
		}()
	}
	unsent := func() int {
		client.mu.Lock()
		defer client.mu.Unlock()
		return len(client.conn.output)
	}
	for end := time.Now().Add(limit); unsent() <= maxUnsent; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("unsent bytes:", unsent())
		}
	}
	pinged := start(func() (bool, error) { return true, client.Ping(ctx) })
	cancel()
	_, err := pinged()
	expectError(t, err, context.Canceled)
	for i := 0; i < calls; i++ {
		expectError(t, <-results, context.Canceled)
	}
	if bytes := unsent(); bytes > 2*maxUnsent {
		t.Error("unsent bytes:", bytes)
	}
	p.Close()
}

func TestCallsEndInTimeAlthoughTheServerReadsNothing(t *testing.T) {
	_, p, client := connected(t, Config{ResponseTimeout: 100 * time.Millisecond})
	resources := make([]string, 1000)
	for i := range resources {
		resources[i] = fmt.Sprintf("exclusive:%d%s", i, strings.Repeat("x", 200))
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for { // otherwise the keepalive would end the connection
			if _, err := p.Write([]byte(`{"command":"news","payload":{}}` + "\n")); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	const calls = 200 // 42 MB
	results := make(chan error, calls)
	for i := 0; i < calls; i++ {
		go func() {
			_, err := client.TryAcquire(background, resources)
			results <- err
		}()
	}
	for i := 0; i < calls; i++ {
		select {
		case err := <-results:
			expectError(t, err, ErrUnavailable)
		case <-time.After(limit):
			t.Fatal("a call waits for ever")
		}
	}
	p.Close()
	<-stopped
}

func TestConcurrentCallsAreWrittenTogether(t *testing.T) {
	_, p, client := connected(t, Config{})
	blocked := acquire(client, "first")
	p.expect("request") // from now on another call waits, so that the writer goroutine writes
	const calls = 50
	for i := 0; i < calls; i++ {
		go func() { _, _ = client.Acquire(background, []string{"a"}) }()
	}
	for i := 0; i < calls; i++ {
		p.grant(20 + i)
	}
	p.send(locked1(17, "1"))
	if _, err := blocked(); err != nil {
		t.Fatal(err)
	}
}

func text1(a address) string {
	if a.isSecure {
		return tlsPrefix + a.String()
	}
	return a.String()
}

func TestAddresses(t *testing.T) {
	t.Setenv("GENIE_PORT", "7100")
	for text, expected := range map[string]string{
		"a": "a:7100", "a:1": "a:1", "[::1]:2": "[::1]:2", "[::1]": "[::1]:7100", "": "127.0.0.1:7100",
		"genies://a:1": "genies://a:1", "genie://a/": "a:7100",
	} {
		config := Config{Addresses: []string{text}}
		addresses, err := config.resolve()
		if err != nil || text1(addresses[0]) != expected {
			t.Errorf("%s: %v %v", text, addresses, err)
		}
	}
	for _, text := range []string{"a:0", "a:x", "a:70000", "a/b", "[::1]x:1", "::1", ":", "a:"} {
		config := Config{Addresses: []string{text}}
		if addresses, err := config.resolve(); err == nil {
			t.Errorf("%s: %v", text, addresses)
		}
	}
	t.Setenv("GENIE_HOST", " a:1, genies://b ,")
	config := Config{}
	addresses, err := config.resolve()
	if err != nil || len(addresses) != 2 || text1(addresses[0]) != "genies://a:1" || text1(addresses[1]) != "genies://b:7100" {
		t.Error(addresses, err)
	}
}

func TestServerOfAnotherNamespace(t *testing.T) {
	f := newFake(t)
	defer f.close()
	dialed := start(func() (*Client, error) {
		return Dial(background, Config{Addresses: []string{f.address()}, Namespace: "other", ConnectTimeout: time.Second})
	})
	f.handshake(false) // of the namespace "genie"
	if _, err := dialed(); err == nil {
		t.Fatal("a server of another namespace was accepted")
	}
}

func TestALeaderDoesNotTurnTLSOff(t *testing.T) {
	c := &Client{}
	follower := address{"a", "7077", true}
	if leader := c.leaderOf(follower, &RejectedError{leader: "b:7077"}); leader != (address{"b", "7077", true}) {
		t.Errorf("the leader is %v", leader)
	}
	if leader := c.leaderOf(follower, &RejectedError{leader: "genie://b:7077"}); leader != (address{}) {
		t.Errorf("an address without TLS was accepted: %v", leader)
	}
}
